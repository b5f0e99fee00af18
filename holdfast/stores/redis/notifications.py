"""Waiters, and the notifications that wake them.

Waiters of this process are called directly. Scripts notify the others on one channel for each kind of topic. A process
that waits for queues also blocks on the ready list of priority 0 of the first few (for all queues: of ``default``) with
BLMOVE from head to head, which changes nothing but notices an id pushed by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from redis import exceptions as driver

from holdfast.core.errors import HoldfastError
from holdfast.stores.base import EVERY_QUEUE
from holdfast.stores.common.waiters import (
    KEEPALIVE_INTERVAL,
    KEEPALIVE_TIMEOUT,
    RETRY,
    IsDone,
    Listener,
    Waiters,
    backoff_sleep,
    run_within,
)
from holdfast.stores.connections.redis_protocol import RedisConnection
from holdfast.stores.redis.pool import NamespacePool

_MAX_WATCHED = 8  # ready lists a process blocks on; of other queues it hears by the channel alone
_PAUSE, _MAX_PAUSE = 0.05, 2.0  # seconds between looks at a list without consumers

_TROUBLE = (OSError, TimeoutError, EOFError, driver.RedisError, HoldfastError)

_GRACE = 0.1  # seconds an id may stand there before it counts as pushed by hand: the channel is quicker

_KINDS = {"job": "ended", "worker": "commands"}
_CHANNELS = {"ready": "ready_jobs", "commands": "commands", "ended": "ended"}


class RedisNotifications(Listener):
    """Notifications of one event loop: waiters, listeners, watches."""

    trouble = _TROUBLE
    kinds = _KINDS

    def __init__(self, pool: NamespacePool) -> None:
        super().__init__()
        self._pool = pool
        self._watches: dict[str, _Watch] = {}

    def wake_local_waiters(self, topics: Iterable[str], ended: Iterable[str] = ()) -> None:
        """Wakes waiters of this process for these topics and ended jobs; sends nothing."""
        self.waiters.wake_topics({*topics, *(f"job:{job_id}" for job_id in ended)})

    async def close(self) -> None:
        await self.stop_listening([watch.task for watch in self._watches.values()])
        self._watches.clear()

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def wait(self, topics: Sequence[str], timeout: float, is_done: IsDone) -> None:
        """Returns at a notification of a topic, when ``is_done`` returns True, or after ``timeout`` seconds."""
        watches = self._watching(topics)
        for watch in watches:
            watch.add_waiter()
        try:
            await super().wait(topics, timeout, is_done)
        finally:
            for watch in watches:
                watch.remove_waiter()

    def _watching(self, topics: Sequence[str]) -> list[_Watch]:
        """Of the queues waited for, the first few: their watches."""
        queues = [topic.removeprefix("queue:") for topic in topics if topic.startswith("queue:")]
        found = []
        for queue in queues:
            name = "default" if queue == EVERY_QUEUE else queue
            if name not in self._watches and len(self._watches) < _MAX_WATCHED:
                self._watches[name] = _Watch(self._pool, name, self.waiters)
            if name in self._watches:
                found.append(self._watches[name])
        return found

    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        connection = await self._pool.connect(
            lambda message: self._on_notification(kind, message[2].decode()), protocol=2
        )
        try:
            await run_within(
                KEEPALIVE_TIMEOUT, connection.send_command("SUBSCRIBE", self._pool.address.prefix + _CHANNELS[kind])
            )
            began()
            await self._keep_alive(connection)
        finally:
            connection.close()

    def connection_lost(self) -> None:
        self._pool.drop_connections()

    async def _keep_alive(self, connection: RedisConnection) -> None:
        """Return never; fail when the connection does."""
        while True:
            with suppress(TimeoutError):
                await run_within(KEEPALIVE_INTERVAL, connection.ended.wait())
            await run_within(KEEPALIVE_TIMEOUT, connection.send_command("PING"))

    def _on_notification(self, kind: str, text: str) -> None:
        sender, *named = text.split("\n")
        if sender != self._pool.name:
            self.waiters.wake_topics([f"job:{job_id}" for job_id in named] if kind == "ended" else named)


class _Watch:
    """Blocks on one queue's ready list while a caller waits for the queue."""

    def __init__(self, pool: NamespacePool, queue: str, waiters: Waiters) -> None:
        self._pool = pool
        self._topic = f"queue:{queue}"
        ready = pool.address.keys[2]
        self._list = ready if queue == "default" else f"{ready}:{queue}"
        self._waiters = waiters
        self._waiting = 0
        self._wanted = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"holdfast-watch-{queue}")

    def add_waiter(self) -> None:
        """Adds a waiter for the queue."""
        self._waiting += 1
        self._wanted.set()

    def remove_waiter(self) -> None:
        """They wait no more."""
        self._waiting -= 1
        if not self._waiting:
            self._wanted.clear()

    async def _run(self) -> None:
        pause = RETRY
        while True:
            await self._wanted.wait()
            try:
                connection = await self._pool.connect(protocol=2)
                try:
                    await self._block(connection)
                finally:
                    connection.close()
            except _TROUBLE:
                pause = await backoff_sleep(pause)

    async def _block(self, connection: RedisConnection) -> None:
        """Return never; fail when the connection does."""
        pause, known = _PAUSE, b""
        while True:
            await self._wanted.wait()
            head = await run_within(KEEPALIVE_TIMEOUT, connection.send_command("LINDEX", self._list, 0))
            if head is None:
                blocked = connection.send_command(
                    "BLMOVE", self._list, self._list, "LEFT", "LEFT", str(KEEPALIVE_INTERVAL)
                )
                head = await run_within(KEEPALIVE_INTERVAL + KEEPALIVE_TIMEOUT, blocked)
                if head is None:
                    continue
                await asyncio.sleep(_GRACE)
                if head != await run_within(KEEPALIVE_TIMEOUT, connection.send_command("LINDEX", self._list, 0)):
                    continue  # its submitter has notified, and a worker took it
            elif head == known:
                # It was there before, and is not taken: the queue is paused, or its workers are busy.
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)
                continue
            pause, known = _PAUSE, head
            self._waiters.wake_topics((self._topic,))
