"""Waiters, and the notifications that wake them.

Waiters of this process are called directly; other processes receive a NOTIFY. While no process waits, none is sent
about ready jobs or ends of jobs (``listener_lock``). A NOTIFY inside a transaction takes a lock that all notifying
transactions hold until they commit. So of the store's own transactions only that of a single job notifies, and only if
this process has not notified just before; callers' transactions notify as they commit. All others are sent after the
commit, on a connection of their own: one at a time, ``INTERVAL`` seconds apart, and
further apart if the server is slow. Topics that arrive meanwhile share the next one. A lost NOTIFY costs one poll. One
channel carries what workers wait for, the other the ends of jobs: a process listens to that one once it has awaited a
job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from uuid import uuid4

import asyncpg

from holdfast.core.errors import HoldfastError
from holdfast.stores.common.waiters import KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, IsDone, Listener
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.listener_lock import ListenerLock
from holdfast.stores.postgres.pool import Connection, PostgresPool

INTERVAL = 0.002  # seconds between two notifications of a process on a channel, at least
SLOWDOWN = 3.0  # the interval is at least so many times the duration of a notification: the server is busy
MAX_INTERVAL = 0.25  # seconds between two notifications, however slow they are
_PAYLOAD = 7900  # bytes; PostgreSQL takes 7,999


class PostgresNotifications(Listener):
    """LISTEN/NOTIFY for one event loop: waiters, senders, listeners."""

    trouble = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, HoldfastError)

    def __init__(self, pool: PostgresPool, statements: Mapping[str, NumberedStatement]) -> None:
        super().__init__()
        self.cannot_listen = pool.address.pooled
        self._pool = pool
        self._name = uuid4().hex[:12]  # to recognise our own notifications
        self._notifiers = {
            kind: _Notifier(pool, statements, kind, self._name, catch_all)
            for kind, catch_all in (("ready", "queue:*\ndue:*\nworker:*"), ("ended", "job:*"))
        }
        self._locks = {kind: ListenerLock(statements, kind) for kind in self._notifiers}
        self.on_queue: Callable[[str], None] = lambda queue: None
        """Called with each queue of a notification from another process."""

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────────────
    def notify_committed(self, topics: Iterable[str], ended: Sequence[str] = ()) -> None:
        """Notifies of these topics, and of jobs that have ended, after the commit."""
        ready = set(topics)
        end_topics = {f"job:{job_id}" for job_id in ended}
        self.waiters.wake_topics(ready | end_topics)
        self._notifiers["ready"].notify_soon(ready)
        self._notifiers["ended"].notify_soon(end_topics)

    def reserve_notification(self, topic: str) -> dict[str, str | None]:
        """Channel and payload of a NOTIFY inside a transaction; both None if it is to be sent after the commit."""
        return self._notifiers["ready"].reserve_notification(topic)

    def record_transaction(self) -> None:
        """Records that a transaction with such a NOTIFY was committed."""
        self._notifiers["ready"].record_sent()

    @property
    def ready_lock(self) -> ListenerLock:
        """The lock of the processes that wait for ready jobs."""
        return self._locks["ready"]

    async def flush(self) -> None:
        """Waits until pending notifications are sent."""
        for notifier in self._notifiers.values():
            await notifier.flush()

    async def close(self) -> None:
        with suppress(TimeoutError):  # then no notification is sent: the polls find it
            async with asyncio.timeout(1.0):
                await self.flush()
        for lock in self._locks.values():
            lock.close()
        await self.stop_listening()

    # ── listening ───────────────────────────────────────────────────────────────────────────────────────────────
    async def wait(self, topics: Sequence[str], timeout: float, is_done: IsDone) -> None:
        if self.cannot_listen or not any(topic.startswith("queue:") for topic in topics):
            await super().wait(topics, timeout, is_done)
            return
        with self.ready_lock.register_wait() as max_wait:
            await super().wait(topics, min(timeout, max_wait), is_done)

    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        connection, lock = await self._pool.connect(), self._locks[kind]
        try:
            await connection.add_listener(f"{self._pool.address.schema}_{kind}", self._on_notification)
            connection.add_termination_listener(lambda _: lock.changed.set())
            with lock.attach_to(connection):
                await lock.adjust_lock()
                began()
                await self._keep_alive(connection, lock)
        finally:
            connection.terminate()

    def connection_lost(self) -> None:
        """Nothing to do: calls on other connections meet their own errors."""

    async def _keep_alive(self, connection: Connection, lock: ListenerLock) -> None:
        """Never returns; raises when the connection fails."""
        while not connection.is_closed():
            try:
                async with asyncio.timeout(KEEPALIVE_INTERVAL):
                    await lock.changed.wait()
            except TimeoutError:
                await connection.execute("select 1", timeout=KEEPALIVE_TIMEOUT)
            else:
                await lock.adjust_lock()
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

    def __init__(
        self, pool: PostgresPool, statements: Mapping[str, NumberedStatement], kind: str, name: str, catch_all: str
    ) -> None:
        self._pool = pool
        self._notify = statements["notify"]
        self._notify_listeners = statements[f"notify_{kind}"]
        self._skippable_prefix = {"ready": "queue:", "ended": "job:"}[kind]  # sent only while a process listens
        self._channel = f"{pool.address.schema}_{kind}"
        self._name = name
        self._catch_all = catch_all  # sent if the topics do not fit into one payload
        self._pending: set[str] = set()
        self._sent_at = -MAX_INTERVAL
        self._took = self._took_before = 0.0
        self._sending: asyncio.Task[None] | None = None

    def reserve_notification(self, topic: str) -> dict[str, str | None]:
        """Channel and payload for the transaction of a lone job; both None if the NOTIFY follows the commit."""
        now = time.monotonic()
        if self._is_sending or now - self._sent_at < self._interval:
            return {"channel": None, "notification": None}
        self._sent_at = now
        return {"channel": self._channel, "notification": f"{self._name}\n{topic}"}

    def record_sent(self) -> None:
        """Records how long the latest notification took to be sent."""
        self._took_before, self._took = self._took, time.monotonic() - self._sent_at

    @property
    def _interval(self) -> float:
        """Seconds between two notifications. One that was slow by itself changes nothing."""
        return max(INTERVAL, min(MAX_INTERVAL, SLOWDOWN * min(self._took, self._took_before)))

    def notify_soon(self, topics: set[str]) -> None:
        """Notify of these topics soon."""
        if not topics:
            return
        self._pending |= topics
        if not self._is_sending:
            self._sending = asyncio.create_task(self._send_pending(), name=f"holdfast-notify-{self._channel}")

    @property
    def _is_sending(self) -> bool:
        return self._sending is not None and not self._sending.done()

    async def flush(self) -> None:
        """Waits until pending notifications are sent; sends those of a task that was cancelled with its event loop."""
        while (sending := self._sending) is not None and not sending.done():
            await asyncio.wait([sending])
        await self._send_pending()

    async def _send_pending(self) -> None:
        topics: set[str] = set()
        try:
            while self._pending:
                if (pause := self._sent_at + self._interval - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                topics, self._pending = self._pending, set()
                text = "\n".join(topics)
                if len(text) > _PAYLOAD or len(text.encode()) > _PAYLOAD:
                    text = self._catch_all
                only_if_listening = all(topic.startswith(self._skippable_prefix) for topic in topics)
                self._sent_at = time.monotonic()
                await self._pool.fetch(
                    self._notify_listeners if only_if_listening else self._notify,
                    channel=self._channel,
                    payload=f"{self._name}\n{text}",
                )
                self.record_sent()
        except HoldfastError:
            self._pending.clear()  # a lost notification costs one poll; the calls that matter say what is wrong
        except asyncio.CancelledError:  # perhaps unsent: ``flush`` sends them
            self._pending |= topics
            raise
