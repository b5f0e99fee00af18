"""Waiters, and the notifications that wake them.

In this process waiters are called directly. In others: by NOTIFY. In the submitting transaction it takes a lock that
all transactions with news share until they are committed. So only a lone job takes its news along, where its process
had none for ``SPARSE`` seconds, and is heard of as it is committed. All other notifications are sent after the commit,
on a connection of their own: one at a time, ``INTERVAL`` seconds apart, and further apart where the server is slow.
Topics that come meanwhile share the next one. A NOTIFY that is lost costs one poll. One channel carries what workers
wait for, the other the endings of jobs, heard only where they are awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

import asyncpg

from holdfast.core.errors import HoldfastError
from holdfast.stores.common.waiters import PROOF, PROVEN_IN, Listener
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.pool import Connection, PostgresPool

INTERVAL = 0.002  # seconds between two notifications of a process on a channel, at least,
SLOWDOWN = 3.0  # and so many times as long as a notification takes, which is long where the server is busy,
MAX_INTERVAL = 0.25  # but no longer than this: a server that was stuck has recovered
SPARSE = 0.02  # seconds without news, after which the next lone job takes its own along
_PAYLOAD = 7900  # bytes; PostgreSQL takes 7,999
_NAMED_MOST = 150  # ended jobs sent by id; more do not fit, and are sent as "some"

_NOTIFY = NumberedStatement("notify", "select pg_notify($1, $2)", ("channel", "payload"))


class PostgresNotifications(Listener):
    """LISTEN/NOTIFY for one event loop: waiters, senders, listeners."""

    trouble = (
        OSError,
        TimeoutError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
        HoldfastError,
    )

    def __init__(self, pool: PostgresPool) -> None:
        super().__init__()
        self.cannot_listen = pool.address.pooled
        self._pool = pool
        self._name = uuid4().hex[:12]  # so that we know what we said ourselves
        schema = pool.address.schema
        self._voices = {
            kind: _Notifier(pool, f"{schema}_{kind}", self._name, coarse)
            for kind, coarse in (("ready", "queue:*\ndue:*\nworker:*"), ("ended", "job:*"))
        }
        self.on_queue: Callable[[str], None] = lambda queue: None
        """Called with each queue of a notification from another process."""

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────────────
    def notify_committed(self, topics: Iterable[str], ended: Sequence[str] = ()) -> None:
        """Something was committed that these topics stand for, and these jobs have ended."""
        ready = set(topics)
        endings = {f"job:{job_id}" for job_id in ended} if len(ended) <= _NAMED_MOST else {"job:*"}
        self.waiters.wake_topics(ready | endings)
        self._voices["ready"].notify_soon(ready)
        self._voices["ended"].notify_soon(endings)

    def came_along(self, topics: Iterable[str]) -> None:
        """A transaction was committed that took these topics along."""
        self._voices["ready"].record_arrival()
        self.waiters.wake_topics(topics)

    def transaction_notice(self, topic: str) -> dict[str, str]:
        """Channel and text of a NOTIFY that a transaction is to take along; empty where its news go after it."""
        return self._voices["ready"].transaction_notice(topic)

    async def flush(self) -> None:
        """Waits until pending notifications are sent."""
        for voice in self._voices.values():
            await voice.flush()

    async def close(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self.flush()
        except TimeoutError:
            self.waiters.wake_topics(())  # no notification is sent: the polls find it
        await self.stop_listening()

    # ── hearing ───────────────────────────────────────────────────────────────────────────────────────────────
    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        connection = await self._pool.connect()
        try:
            await connection.add_listener(f"{self._pool.address.schema}_{kind}", self._heard)
            began()
            await self._prove(connection)
        finally:
            connection.terminate()

    def connection_lost(self) -> None:
        """The calls on the other connections find out for themselves."""

    async def _prove(self, connection: Connection) -> None:
        """Return never; fail when the connection does."""
        closed = asyncio.Event()
        connection.add_termination_listener(lambda _: closed.set())
        while True:
            try:
                async with asyncio.timeout(PROOF):
                    await closed.wait()
            except TimeoutError:
                await connection.execute("select 1", timeout=PROVEN_IN)
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
        self.waiters.wake_topics(topics)


class _Notifier:
    """Notifier of one channel: one notification in flight, at bounded intervals; topics that come meanwhile share the
    next."""

    def __init__(self, pool: PostgresPool, channel: str, name: str, coarse: str) -> None:
        self._pool = pool
        self._channel = channel
        self._name = name
        self._coarse = coarse  # said where there is more news than fits
        self._pending: set[str] = set()
        self._sent_at = self._news_at = -SPARSE
        self._took = self._took_before = 0.0
        self._saying: asyncio.Task[None] | None = None

    def transaction_notice(self, topic: str) -> dict[str, str]:
        """Channel and payload for the transaction of a lone job; empty if it should be notified of after the commit."""
        news_before, self._news_at = self._news_at, time.monotonic()
        if self._saying is not None or self._news_at - news_before < max(SPARSE, self._interval):
            return {}
        self._sent_at = self._news_at
        return {"channel": self._channel, "news": f"{self._name}\n{topic}"}

    def record_arrival(self) -> None:
        """Records how long the notification sent last took."""
        self._took_before, self._took = self._took, time.monotonic() - self._sent_at

    @property
    def _interval(self) -> float:
        """Seconds between two notifications. One that was slow by itself changes nothing."""
        return max(INTERVAL, min(MAX_INTERVAL, SLOWDOWN * min(self._took, self._took_before)))

    def notify_soon(self, topics: set[str]) -> None:
        """Notify of these topics soon."""
        if not topics:
            return
        self._news_at = time.monotonic()
        self._pending |= topics
        if self._saying is None:
            self._saying = asyncio.create_task(self._say(), name=f"holdfast-notify-{self._channel}")

    async def flush(self) -> None:
        while (saying := self._saying) is not None:
            await asyncio.shield(saying)

    async def _say(self) -> None:
        try:
            while self._pending:
                if (pause := self._sent_at + self._interval - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                topics, self._pending = self._pending, set()
                text = "\n".join(topics)
                if len(text) > _PAYLOAD or len(text.encode()) > _PAYLOAD:
                    text = self._coarse
                self._sent_at = time.monotonic()
                await self._pool.fetch(_NOTIFY, channel=self._channel, payload=f"{self._name}\n{text}")
                self.record_arrival()
        except HoldfastError:
            self._pending.clear()  # a hint that is lost costs one poll; the calls that matter say what is wrong
        finally:
            self._saying = None
