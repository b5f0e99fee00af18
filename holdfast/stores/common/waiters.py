"""Waiters for topics in this process, and the listener that receives a server's notifications for them."""

from __future__ import annotations

import asyncio
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

_MAX_MISSED = 1000  # topics buffered for the next waiter; a process that only submits has many


class Waiter:
    """A call of ``wait``."""

    __slots__ = ("topics", "wake")

    def __init__(self, topics: frozenset[str], wake: Callable[[], object]) -> None:
        self.topics = topics
        self.wake = wake

    def matches_topics(self, notified: Iterable[str]) -> bool:
        """Returns True if one of these topics is for this waiter."""
        return any(
            topic in self.topics or (topic.endswith(":*") and self._wants_kind(topic[:-1])) or self._wants_any(topic)
            for topic in notified
        )

    def _wants_kind(self, kind: str) -> bool:
        return any(topic.startswith(kind) for topic in self.topics)

    def _wants_any(self, topic: str) -> bool:
        return topic[: topic.index(":") + 1] + "*" in self.topics


class PendingTopics:
    """Buffer of notifications of queues and workers that no waiter has received yet. The caller holds the lock."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def buffer_topics(self, topics: Iterable[str]) -> None:
        """Buffers topics that woke no waiter, except ends of jobs: a poll of the store finds those."""
        self._topics.update([topic for topic in topics if not topic.startswith("job:")])
        if len(self._topics) > _MAX_MISSED:
            self._topics = {"queue:*", "worker:*", "due:*"}

    def take(self, waiter: Waiter) -> bool:
        """Returns True if there was a notification for this waiter, and removes it."""
        missed = {topic for topic in self._topics if waiter.matches_topics((topic,))}
        self._topics -= missed
        return bool(missed)


class Waiters:
    """The waiters of this process. Notifications without a waiter are buffered for the next one."""

    def __init__(self) -> None:
        self._registered: set[Waiter] = set()
        self._missed_topics = PendingTopics()
        self._lock = threading.Lock()

    def wake_topics(self, topics: Iterable[str]) -> None:
        """Wakes the waiters for one of these. From any thread, if their ``wake`` may be called from there."""
        named = [topic for topic in topics if ":" in topic]
        if not named:
            return
        with self._lock:
            matching = [waiter for waiter in self._registered if waiter.matches_topics(named)]
            if not matching:
                self._missed_topics.buffer_topics(named)
        for waiter in matching:
            waiter.wake()

    @contextmanager
    def register_waiter(self, waiter: Waiter) -> Iterator[None]:
        """Registers the waiter while entered; it gets missed notifications at once."""
        with self._lock:
            self._registered.add(waiter)
            missed = self._missed_topics.take(waiter)
        if missed:
            waiter.wake()
        try:
            yield
        finally:
            with self._lock:
                self._registered.discard(waiter)


T = TypeVar("T")
IsDone = Callable[[], Awaitable[bool]]

KEEPALIVE_INTERVAL = 15.0
"""Seconds between checks that a listening connection is alive."""
KEEPALIVE_TIMEOUT = 5.0
"""Seconds a listening connection has to answer such a check."""
RETRY = 0.1
"""Seconds before the first try to listen again."""
_POLL_INTERVAL = 1.0  # seconds between polls of an awaited job, whatever was notified
_MAX_RETRY = 5.0  # seconds between tries to listen again


class Listener(ABC):
    """Waiters of one event loop, and one listening task for each kind of notification that is awaited.

    Kinds: ``ended`` for ends of jobs, ``ready`` for all else, unless a store has more of them.
    """

    trouble: tuple[type[BaseException], ...]
    """Exceptions of a failing connection."""
    kinds: Mapping[str, str] = {"job": "ended"}
    """Kind of notification by the prefix of its topic; ``ready`` for all others."""
    cannot_listen = False
    """True if the server sends no notifications here, so that waiting is polling."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._listening: dict[str, asyncio.Event] = {}

    @abstractmethod
    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        """Listen for one kind of notification on a connection of its own; call ``began`` once that is established.

        Never returns; raises when the connection fails.
        """

    @abstractmethod
    def connection_lost(self) -> None:
        """A listening connection failed."""

    def is_listening(self, kind: str) -> bool:
        """Returns True if notifications of this kind reach this process."""
        return kind in self._listening and self._listening[kind].is_set()

    async def wait(self, topics: Sequence[str], timeout: float, is_done: IsDone) -> None:
        """Returns at a notification of a topic, when ``is_done`` returns True, or after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        notifications = asyncio.Event()
        awaits_jobs = any(topic.startswith("job:") for topic in topics)
        waiter = Waiter(frozenset(topics), notifications.set)
        with self.waiters.register_waiter(waiter):
            await self._begin(waiter, deadline)
            while not notifications.is_set():
                if awaits_jobs and await is_done():
                    return
                left = deadline - loop.time()
                if left <= 0:
                    return
                with suppress(TimeoutError):
                    await run_within(min(left, _POLL_INTERVAL) if awaits_jobs else left, notifications.wait())

    async def _begin(self, waiter: Waiter, deadline: float) -> None:
        """Starts the listening tasks that this waiter needs, and waits a bounded time until they listen."""
        if self.cannot_listen:
            return
        for kind in {self.kinds.get(topic.partition(":")[0], "ready") for topic in waiter.topics}:
            if kind not in self._listeners:
                self._listening[kind] = asyncio.Event()
                self._listeners[kind] = asyncio.create_task(
                    self._listen_forever(kind), name=f"holdfast-listener-{kind}"
                )
            if not self.is_listening(kind):
                left = deadline - asyncio.get_running_loop().time()
                began = asyncio.ensure_future(self._listening[kind].wait())
                await asyncio.wait([began], timeout=max(0.0, min(_POLL_INTERVAL, left)))
                began.cancel()

    async def _listen_forever(self, kind: str) -> None:
        """Listens for ever: a connection that fails, or does not answer a check, is replaced."""
        pause = RETRY

        def mark_began() -> None:
            nonlocal pause
            pause = RETRY
            self._listening[kind].set()
            self.waiters.wake_topics(
                ("queue:*", "due:*", "worker:*", "job:*")
            )  # notifications missed between listeners

        while True:
            try:
                await self.listen(kind, mark_began)
            except self.trouble:
                # Not logged: the polls go on, and the store's own calls say what is wrong with the server.
                self._listening[kind].clear()
                self.connection_lost()
                pause = await backoff_sleep(pause)

    async def stop_listening(self, others: Sequence[asyncio.Task[None]] = ()) -> None:
        """Stops the listening tasks, and these tasks too."""
        left = {*self._listeners.values(), *others}
        while left:  # a driver may lose a cancellation that comes together with an answer
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=RETRY)
        self._listeners.clear()


async def backoff_sleep(pause: float) -> float:
    """Sleeps for about ``pause`` seconds; returns the next pause."""
    await asyncio.sleep(pause * random.uniform(0.5, 1.5))
    return min(2 * pause, _MAX_RETRY)


async def run_within(seconds: float, awaited: Awaitable[T]) -> T:
    """Raises `TimeoutError` if it takes longer."""
    async with asyncio.timeout(seconds):  # wait_for() of Python 3.11 can lose a cancellation
        return await awaited
