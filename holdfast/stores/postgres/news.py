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
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from uuid import uuid4

import asyncpg

from holdfast.errors import HoldfastError
from holdfast.stores.postgres.links import Connection, Links
from holdfast.stores.postgres.statements import Query
from holdfast.stores.waiters import Waiter, Waiters

RATE = 20.0  # notifications a second and channel that a busy process sends
SPARSE = 0.02  # seconds without news, after which the next goes at once
_BURST = 10.0  # and how many it may send at once before that
_PAYLOAD = 7900  # bytes; PostgreSQL takes 7,999
_NAMED_MOST = 150  # endings told by name; more do not fit, and are told as some
_LOOK = 1.0  # seconds between looks at an awaited job, whatever is heard
_PROOF = 15.0  # seconds between proofs that the listening connection lives
_PROVEN_IN = 5.0  # seconds it has for one
_RETRY, _RETRY_MOST = 0.1, 5.0  # seconds between tries to listen again

_NOTIFY = Query("notify", "select pg_notify($1, $2)", ("channel", "payload"))

Settled = Callable[[], Awaitable[bool]]


class News:
    """The waiters of one event loop, its voice and its ear."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._name = uuid4().hex[:12]  # so that we know what we said ourselves
        self._waiters = Waiters()
        schema = links.address.schema
        self._voices = {
            kind: _Voice(links, f"{schema}_{kind}", self._name, coarse)
            for kind, coarse in (("ready", "queue:*\nworker:*"), ("ended", "job:*"))
        }
        self._ears: dict[str, asyncio.Task[None]] = {}
        self._hearing: dict[str, asyncio.Event] = {}
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
        self._waiters.tell(topics)

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
            self._waiters.tell(())  # nobody is told more: the polls find it
        for ear in self._ears.values():
            ear.cancel()
        await asyncio.gather(*self._ears.values(), return_exceptions=True)
        self._ears.clear()

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def wait(self, topics: Sequence[str], timeout: float, settled: Settled) -> None:
        """Return at news of a topic, when ``settled`` says so, or after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        news = loop.create_future()
        awaits_jobs = any(topic.startswith("job:") for topic in topics)
        waiter = Waiter(frozenset(topics), lambda: _resolve(news))
        with self._waiters.listed(waiter):
            await self._listening(waiter, deadline)
            while not news.done():
                if awaits_jobs and await settled():
                    return
                left = deadline - loop.time()
                if left <= 0:
                    return
                await asyncio.wait([news], timeout=min(left, _LOOK) if awaits_jobs else left)

    async def _listening(self, waiter: Waiter, deadline: float) -> None:
        """Begin to hear what this waiter waits for; not for long, where there is nothing to hear with."""
        if self._links.address.pooled:
            return
        kinds = {"ended" if topic.startswith("job:") else "ready" for topic in waiter.topics}
        for kind in kinds:
            if kind not in self._ears:
                self._hearing[kind] = asyncio.Event()
                self._ears[kind] = asyncio.create_task(self._hear(kind), name=f"holdfast-listener-{kind}")
            if not self._hearing[kind].is_set():
                left = deadline - asyncio.get_running_loop().time()
                hearing = asyncio.ensure_future(self._hearing[kind].wait())
                await asyncio.wait([hearing], timeout=max(0.0, min(_LOOK, left)))
                hearing.cancel()

    async def _hear(self, kind: str) -> None:
        """Listen on a channel for ever: a connection that fails, or proves dead, is replaced."""
        pause = _RETRY
        while True:
            try:
                link = await self._links.connect()
                try:
                    await link.add_listener(f"{self._links.address.schema}_{kind}", self._heard)
                    self._hearing[kind].set()
                    self._waiters.tell(("queue:*", "worker:*", "job:*"))  # whatever came while nobody listened
                    pause = _RETRY
                    await self._prove(link)
                finally:
                    link.terminate()
            except (
                OSError,
                TimeoutError,
                asyncpg.PostgresError,
                asyncpg.InterfaceError,
                asyncpg.InternalClientError,
                HoldfastError,
            ):
                # Not told: the polls go on, and the store's own calls say what is wrong with the server.
                self._hearing[kind].clear()
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _RETRY_MOST)

    async def _prove(self, link: Connection) -> None:
        """Return never; fail when the connection does."""
        closed = asyncio.Event()
        link.add_termination_listener(lambda _: closed.set())
        while True:
            try:
                async with asyncio.timeout(_PROOF):
                    await closed.wait()
            except TimeoutError:
                await link.execute("select 1", timeout=_PROVEN_IN)
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
        self._waiters.tell(topics)


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


def _resolve(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
