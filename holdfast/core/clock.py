"""Durations and sleeping. The current time of day comes from the store alone.

``Clock`` is the interface; ``SystemClock`` is the real one; ``ManualClock`` stands still until a test moves it.
A test hands the same ``ManualClock`` to the engine as its clock and to the store as its ``now``, so an hour of
retries passes in milliseconds through the same code as production.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import threading
import time
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
_SINCE_BOOT: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Interface to sleep and to measure spans, both in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...

    async def run_bounded(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """Run ``work``; after ``seconds`` cancel it and return without an error."""
        ...


async def wait_first(*waits: asyncio.Future[Any]) -> None:
    """Return when one awaitable is done; raise its error if it failed. The others go on."""
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        each.result()


async def run_first(*calls: Coroutine[Any, Any, object]) -> None:
    """Runs these until the first is done, and cancels the others; raises its error if it failed."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await wait_first(*tasks)
    finally:
        for each in tasks:
            each.cancel()


class SystemClock:
    """The clock of the machine. Where it can, it goes on while the machine is suspended, as leases do."""

    monotonic = staticmethod(functools.partial(time.clock_gettime, _SINCE_BOOT))
    sleep = staticmethod(asyncio.sleep)

    async def run_bounded(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """See ``Clock``."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await work
        except TimeoutError:
            if not limit.expired():
                raise


class ManualClock:
    """A clock that moves only by ``advance``. May be shared between threads and event loops.

    Calling it gives the current instant in microseconds since 1970 UTC, which is what a store takes as ``now``.
    """

    def __init__(self, start_us: int = 1_924_992_000_000_000) -> None:  # 2031-01-01
        self._now_us = start_us
        self._sleepers: list[_Sleeper] = []
        self._order = itertools.count()
        self._lock = threading.Lock()

    def __call__(self) -> int:
        return self._now_us

    def monotonic(self) -> float:
        return self._now_us / 1e6

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        with self._lock:
            due = self._now_us + round(seconds * 1e6)
            sleeper = _Sleeper(due, next(self._order), loop, woken, asyncio.current_task(), copy_context())
            heapq.heappush(self._sleepers, sleeper)
        await woken

    async def run_bounded(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        task = asyncio.ensure_future(work)
        # Not in the context of the caller, which does not sleep: its work may wait for something else.
        limit = asyncio.get_running_loop().create_task(self.sleep(seconds), context=Context())
        try:
            await asyncio.wait([task, limit], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            limit.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper that falls due, earliest first."""
        with self._lock:
            self._now_us += round(seconds * 1e6)
            due = []
            while self._sleepers and self._sleepers[0].due_us <= self._now_us:
                due.append(heapq.heappop(self._sleepers))
        for sleeper in due:
            if not sleeper.loop.is_closed():
                sleeper.loop.call_soon_threadsafe(_wake, sleeper.woken)

    def next_wake(self) -> float | None:
        """Seconds until the earliest sleeper falls due; None without sleepers."""
        with self._lock:
            asleep = [sleeper for sleeper in self._sleepers if not sleeper.woken.done()]
            heapq.heapify(asleep)
            self._sleepers = asleep
            return max(0.0, (asleep[0].due_us - self._now_us) / 1e6) if asleep else None

    def is_sleeping(self, task: asyncio.Task[Any], variable: ContextVar[T], value: T | None) -> bool:
        """Returns True if this task waits for this clock, or others do where the variable has this value."""
        with self._lock:
            asleep = [sleeper for sleeper in self._sleepers if not sleeper.woken.done()]
            return any(each.task is task or each.context.get(variable) is value is not None for each in asleep)


class _Sleeper(NamedTuple):
    """A call of ``sleep``, ordered by when it is to be woken."""

    due_us: int
    order: int
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Future[None]
    task: asyncio.Task[Any] | None
    context: Context


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
