"""Waiting for news that a server sends: common to the stores on a server."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from holdfast.stores.common.waiters import Waiter, Waiters

T = TypeVar("T")
Settled = Callable[[], Awaitable[bool]]

PROOF = 15.0
"""Seconds between proofs that a listening connection lives."""
PROVEN_IN = 5.0
"""Seconds it has for one."""
RETRY = 0.1
"""Seconds before the first try to listen again."""
_LOOK = 1.0  # seconds between looks at an awaited job, whatever is heard
_RETRY_MOST = 5.0  # seconds between tries to listen again


class Listener(ABC):
    """Waiters of one event loop, and a reader for each kind of notification while it is awaited: ``ended``, the
    endings of jobs, and ``ready``, all else, unless a store tells more kinds apart."""

    trouble: tuple[type[BaseException], ...]
    """What a connection may raise that fails."""
    kinds: Mapping[str, str] = {"job": "ended"}
    """The kinds of news, by what topics begin with; for others, ``ready``."""
    cannot_listen = False
    """Whether there is nothing to hear with, so that waiting is polling."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._hearing: dict[str, asyncio.Event] = {}

    @abstractmethod
    async def listen(self, kind: str, began: Callable[[], None]) -> None:
        """Hear a kind of news on a connection of its own; ``began`` is called once that is so. Return never; fail when
        the connection does."""

    @abstractmethod
    def connection_lost(self) -> None:
        """A listening connection failed."""

    async def wait(self, topics: Sequence[str], timeout: float, settled: Settled) -> None:
        """Return at news of a topic, when ``settled`` says so, or after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        news = asyncio.Event()
        awaits_jobs = any(topic.startswith("job:") for topic in topics)
        waiter = Waiter(frozenset(topics), news.set)
        with self.waiters.register_waiter(waiter):
            await self._begin(waiter, deadline)
            while not news.is_set():
                if awaits_jobs and await settled():
                    return
                left = deadline - loop.time()
                if left <= 0:
                    return
                with suppress(TimeoutError):
                    await run_within(min(left, _LOOK) if awaits_jobs else left, news.wait())

    async def _begin(self, waiter: Waiter, deadline: float) -> None:
        """Begin to hear what this waiter waits for; not for long, where there is nothing to hear with."""
        if self.cannot_listen:
            return
        for kind in {self.kinds.get(topic.partition(":")[0], "ready") for topic in waiter.topics}:
            if kind not in self._listeners:
                self._hearing[kind] = asyncio.Event()
                self._listeners[kind] = asyncio.create_task(self._hear(kind), name=f"holdfast-listener-{kind}")
            if not self._hearing[kind].is_set():
                left = deadline - asyncio.get_running_loop().time()
                hearing = asyncio.ensure_future(self._hearing[kind].wait())
                await asyncio.wait([hearing], timeout=max(0.0, min(_LOOK, left)))
                hearing.cancel()

    async def _hear(self, kind: str) -> None:
        """Listen for ever: a connection that fails, or proves dead, is replaced."""
        pause = RETRY

        def mark_began() -> None:
            nonlocal pause
            pause = RETRY
            self._hearing[kind].set()
            self.waiters.wake_topics(
                ("queue:*", "due:*", "worker:*", "job:*")
            )  # notifications missed between listeners

        while True:
            try:
                await self.listen(kind, mark_began)
            except self.trouble:
                # Not logged: the polls go on, and the store's own calls say what is wrong with the server.
                self._hearing[kind].clear()
                self.connection_lost()
                pause = await backoff_sleep(pause)

    async def stop_listening(self, others: Sequence[asyncio.Task[None]] = ()) -> None:
        """Hear no more; these tasks end too."""
        left = {*self._listeners.values(), *others}
        while left:  # a driver may lose a cancellation that comes together with an answer
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=RETRY)
        self._listeners.clear()


async def backoff_sleep(pause: float) -> float:
    """Sleep for about so many seconds; how many the next time."""
    await asyncio.sleep(pause * random.uniform(0.5, 1.5))
    return min(2 * pause, _RETRY_MOST)


async def run_within(seconds: float, awaited: Awaitable[T]) -> T:
    """TimeoutError where it takes longer."""
    async with asyncio.timeout(seconds):  # wait_for() of Python 3.11 can lose a cancellation
        return await awaited
