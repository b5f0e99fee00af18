"""Submit, on any store: ways to store jobs, timed in turn."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

Way = Callable[[int], Awaitable[object]]
"""Store so many jobs."""
One = Callable[[int], Awaitable[object]]
"""Store the job of this number."""

_WARM = 6  # blocks that do not count


async def timed(ways: Sequence[Way], jobs: int, blocks: int) -> list[float]:
    """Jobs a second of each way in its middle block, a block of each in turn."""
    took: list[list[float]] = [[] for _ in ways]
    warm = min(_WARM, blocks)
    for _ in range(warm + blocks):
        for each, times in zip(ways, took, strict=True):
            started = time.perf_counter()
            await each(jobs)
            times.append(time.perf_counter() - started)
    return [jobs / statistics.median(times[warm:]) for times in took]


def one_by_one(one: One) -> Way:
    """Each stored before the next is begun."""
    return lambda jobs: _each(jobs, one)


def at_once(one: One) -> Way:
    """A hundred callers, each one by one."""
    return lambda jobs: asyncio.gather(*[_each(jobs // 100, one) for _ in range(100)])


async def _each(jobs: int, one: One) -> None:
    for index in range(jobs):
        await one(index)
