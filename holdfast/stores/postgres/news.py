"""Who waits for news, and how it reaches them.

In this process waiters are called directly. In others: by NOTIFY. In the submitting transaction it takes a lock that
all transactions with news share until they are committed. So only a lone job takes its news along, where its process
had none for ``SPARSE`` seconds, and is heard of as it is committed. All others go after the commit, on a connection of
their own: a few at once and then, under load, no more than ``RATE`` a second; what happened meanwhile goes together. A
NOTIFY that is lost costs one poll. One channel carries what workers wait for, the other the endings of jobs, heard only
where they are awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

import asyncpg

from holdfast.errors import HoldfastError
from holdfast.stores.hearing import PROOF, PROVEN_IN, Hearing
from holdfast.stores.postgres.links import Connection, Links
from holdfast.stores.postgres.statements import Query

RATE = 20.0  # notifications a second and channel that a busy process sends
SPARSE = 0.02  # seconds without news, after which the next goes at once
_BURST = 10.0  # and how many it may send at once before that
_PAYLOAD = 7900  # bytes; PostgreSQL takes 7,999
_NAMED_MOST = 150  # endings told by name; more do not fit, and are told as some

_NOTIFY = Query("notify", "select pg_notify($1, $2)", ("channel", "payload"))


class News(Hearing):
    """The waiters of one event loop, its voices and its ears."""

    trouble = (
        OSError,
        TimeoutError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
        HoldfastError,
    )

    def __init__(self, links: Links) -> None:
        super().__init__()
        self.deaf = links.address.pooled
        self._links = links
        self._name = uuid4().hex[:12]  # so that we know what we said ourselves
        schema = links.address.schema
        self._voices = {
            kind: _Voice(links, f"{schema}_{kind}", self._name, coarse)
            for kind, coarse in (("ready", "queue:*\ndue:*\nworker:*"), ("ended", "job:*"))
        }
        self.on_queue: Callable[[str], None] = lambda queue: None
        """Told each queue that others have news of."""

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────────────
    def tell(self, topics: Iterable[str], ended: Sequence[str] = ()) -> None:
        """Something was committed that these topics stand for, and these jobs have ended."""
        ready = set(topics)
        endings = {f"job:{job_id}" for job_id in ended} if len(ended) <= _NAMED_MOST else {"job:*"}
        self.tell_here(ready | endings)
        self._voices["ready"].say(ready)
        self._voices["ended"].say(endings)

    def tell_here(self, topics: Iterable[str]) -> None:
        """The same to this process alone: the others have heard."""
        self.waiters.tell(topics)

    def along(self, topic: str) -> dict[str, str]:
        """Channel and text of a NOTIFY that a transaction is to take along; empty where its news go after it."""
        return self._voices["ready"].along(topic)

    async def flush(self) -> None:
        """Wait until what was told has been sent."""
        for voice in self._voices.values():
            await voice.flush()

    async def close(self) -> None:
        """Say the rest, then neither speak nor hear."""
        try:
            async with asyncio.timeout(1.0):
                await self.flush()
        except TimeoutError:
            self.waiters.tell(())  # nobody is told more: the polls find it
        await self.deafen()

    # ── hearing ───────────────────────────────────────────────────────────────────────────────────────────────
    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        link = await self._links.connect()
        try:
            await link.add_listener(f"{self._links.address.schema}_{kind}", self._heard)
            began()
            await self._prove(link)
        finally:
            link.terminate()

    def lost(self) -> None:
        """The calls on the other connections find out for themselves."""

    async def _prove(self, link: Connection) -> None:
        """Return never; fail when the connection does."""
        closed = asyncio.Event()
        link.add_termination_listener(lambda _: closed.set())
        while True:
            try:
                async with asyncio.timeout(PROOF):
                    await closed.wait()
            except TimeoutError:
                await link.execute("select 1", timeout=PROVEN_IN)
            else:
                raise ConnectionError("the listening connection was closed")

    def _heard(self, _link: object, _pid: int, _channel: str, payload: object) -> None:
        sender, *topics = str(payload).split("\n")
        if sender == self._name:
            return
        for topic in topics:
            kind, _, name = topic.partition(":")
            if kind == "queue":
                self.on_queue(name)
        self.waiters.tell(topics)


class _Voice:
    """Sends what one channel's listeners want to know, a few at once and then at a bounded rate."""

    def __init__(self, links: Links, channel: str, name: str, coarse: str) -> None:
        self._links = links
        self._channel = channel
        self._name = name
        self._coarse = coarse  # said where there is more news than fits
        self._pending: set[str] = set()
        self._allowance = _BURST
        self._allowed_at = time.monotonic()
        self._news_at = -SPARSE
        self._saying: asyncio.Task[None] | None = None

    def along(self, topic: str) -> dict[str, str]:
        if self._saying is not None or not self._is_sparse():
            return {}
        return {"channel": self._channel, "news": f"{self._name}\n{topic}"}

    def _is_sparse(self) -> bool:
        before, self._news_at = self._news_at, time.monotonic()
        return self._news_at - before >= SPARSE

    def say(self, topics: set[str]) -> None:
        if not topics:
            return
        self._pending |= topics
        if self._is_sparse():
            self._allowance = max(self._allowance, 1.0)
        if self._saying is None:
            self._saying = asyncio.create_task(self._say(), name=f"holdfast-notify-{self._channel}")

    async def flush(self) -> None:
        while (saying := self._saying) is not None:
            self._allowance = max(self._allowance, 1.0)
            await asyncio.shield(saying)

    async def _say(self) -> None:
        try:
            while self._pending:
                if (pause := self._pause()) > 0:
                    await asyncio.sleep(pause)
                topics, self._pending = self._pending, set()
                text = "\n".join(topics)
                if len(text) > _PAYLOAD or len(text.encode()) > _PAYLOAD:
                    text = self._coarse
                await self._links.fetch(_NOTIFY, channel=self._channel, payload=f"{self._name}\n{text}")
        except HoldfastError:
            self._pending.clear()  # a hint that is lost costs one poll; the calls that matter say what is wrong
        finally:
            self._saying = None

    def _pause(self) -> float:
        """Seconds until the next one may be sent."""
        now = time.monotonic()
        self._allowance = min(_BURST, self._allowance + (now - self._allowed_at) * RATE)
        self._allowed_at = now
        self._allowance -= 1.0
        return 0.0 if self._allowance >= 0 else -self._allowance / RATE
