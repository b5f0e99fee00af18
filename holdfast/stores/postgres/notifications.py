"""Waiters, and the notifications that wake them.

Waiters of this process are called directly; other processes receive a NOTIFY. A NOTIFY inside the submitting
transaction takes a lock that all notifying transactions share until they commit. So only a single job notifies inside
its transaction, and only if its process sent nothing for ``SPARSE`` seconds. All other notifications are sent after the
commit, on a connection of their own: one at a time, ``INTERVAL`` seconds apart, and further apart if the server is
slow. Topics that arrive meanwhile share the next one. A lost NOTIFY costs one poll. One channel carries what workers
wait for, the other the ends of jobs; it is listened to only while a job is awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

import asyncpg

from holdfast.core.errors import HoldfastError
from holdfast.stores.common.waiters import KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, Listener
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.pool import Connection, PostgresPool

INTERVAL = 0.002  # seconds between two notifications of a process on a channel, at least,
SLOWDOWN = 3.0  # and so many times as long as a notification takes, which is long where the server is busy,
MAX_INTERVAL = 0.25  # but no longer than this: a server that was stuck has recovered
SPARSE = 0.02  # seconds without a notification, after which the next single job notifies inside its transaction
_PAYLOAD = 7900  # bytes; PostgreSQL takes 7,999
_MAX_NAMED = 150  # ended jobs sent by id; more do not fit, and are sent as "some"

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
        self._name = uuid4().hex[:12]  # to recognise our own notifications
        schema = pool.address.schema
        self._notifiers = {
            kind: _Notifier(pool, f"{schema}_{kind}", self._name, catch_all)
            for kind, catch_all in (("ready", "queue:*\ndue:*\nworker:*"), ("ended", "job:*"))
        }
        self.on_queue: Callable[[str], None] = lambda queue: None
        """Called with each queue of a notification from another process."""

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────────────
    def notify_committed(self, topics: Iterable[str], ended: Sequence[str] = ()) -> None:
        """Notifies of these topics, and of jobs that have ended, after the commit."""
        ready = set(topics)
        endings = {f"job:{job_id}" for job_id in ended} if len(ended) <= _MAX_NAMED else {"job:*"}
        self.waiters.wake_topics(ready | endings)
        self._notifiers["ready"].notify_soon(ready)
        self._notifiers["ended"].notify_soon(endings)

    def notify_in_transaction(self, topics: Iterable[str]) -> None:
        """Wakes local waiters: a transaction that notified of these topics was committed."""
        self._notifiers["ready"].record_arrival()
        self.waiters.wake_topics(topics)

    def transaction_notice(self, topic: str) -> dict[str, str]:
        """Channel and payload of a NOTIFY inside a transaction; empty if it is to be sent after the commit."""
        return self._notifiers["ready"].transaction_notice(topic)

    async def flush(self) -> None:
        """Waits until pending notifications are sent."""
        for notifier in self._notifiers.values():
            await notifier.flush()

    async def close(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self.flush()
        except TimeoutError:
            self.waiters.wake_topics(())  # no notification is sent: the polls find it
        await self.stop_listening()

    # ── listening ───────────────────────────────────────────────────────────────────────────────────────────────
    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        connection = await self._pool.connect()
        try:
            await connection.add_listener(f"{self._pool.address.schema}_{kind}", self._on_notification)
            began()
            await self._keep_alive(connection)
        finally:
            connection.terminate()

    def connection_lost(self) -> None:
        """Nothing to do: calls on other connections meet their own errors."""

    async def _keep_alive(self, connection: Connection) -> None:
        """Never returns; raises when the connection fails."""
        closed = asyncio.Event()
        connection.add_termination_listener(lambda _: closed.set())
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE_INTERVAL):
                    await closed.wait()
            except TimeoutError:
                await connection.execute("select 1", timeout=KEEPALIVE_TIMEOUT)
            else:
                raise ConnectionError("the listening connection was closed")

    def _on_notification(self, _link: object, _pid: int, _channel: str, payload: object) -> None:
        sender, *topics = str(payload).split("\n")
        if sender == self._name:
            return
        for topic in topics:
            kind, _, name = topic.partition(":")
            if kind == "queue":
                self.on_queue(name)
        self.waiters.wake_topics(topics)


class _Notifier:
    """Notifier of one channel: one notification in flight, at bounded intervals; later topics share the next one."""

    def __init__(self, pool: PostgresPool, channel: str, name: str, catch_all: str) -> None:
        self._pool = pool
        self._channel = channel
        self._name = name
        self._catch_all = catch_all  # sent if the topics do not fit into one payload
        self._pending: set[str] = set()
        self._sent_at = self._notified_at = -SPARSE
        self._took = self._took_before = 0.0
        self._sending: asyncio.Task[None] | None = None

    def transaction_notice(self, topic: str) -> dict[str, str]:
        """Channel and payload for the transaction of a lone job; empty if it should be notified of after the commit."""
        news_before, self._notified_at = self._notified_at, time.monotonic()
        if self._sending is not None or self._notified_at - news_before < max(SPARSE, self._interval):
            return {}
        self._sent_at = self._notified_at
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
        self._notified_at = time.monotonic()
        self._pending |= topics
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_pending(), name=f"holdfast-notify-{self._channel}")

    async def flush(self) -> None:
        while (sending := self._sending) is not None:
            await asyncio.shield(sending)

    async def _send_pending(self) -> None:
        try:
            while self._pending:
                if (pause := self._sent_at + self._interval - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                topics, self._pending = self._pending, set()
                text = "\n".join(topics)
                if len(text) > _PAYLOAD or len(text.encode()) > _PAYLOAD:
                    text = self._catch_all
                self._sent_at = time.monotonic()
                await self._pool.fetch(_NOTIFY, channel=self._channel, payload=f"{self._name}\n{text}")
                self.record_arrival()
        except HoldfastError:
            self._pending.clear()  # a hint that is lost costs one poll; the calls that matter say what is wrong
        finally:
            self._sending = None
