"""Latency, on any store: from the return of a submission to the start of its handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.processes import Child

_GAP = 0.025  # seconds between two jobs


async def measured(submit: Callable[[int], Awaitable[object]], worker: Child, jobs: int) -> list[float]:
    """Milliseconds; the first few jobs only warm both sides up. A start before the return took no time at all."""
    worker.say("go")
    await asyncio.sleep(0.5)
    returned: dict[int, float] = {}
    for number in range(jobs + 3):
        await asyncio.sleep(_GAP)
        await submit(number)
        returned[number] = time.monotonic()
    await asyncio.sleep(0.5)
    starts = worker.ask("stop")["starts"]
    if len(starts) != jobs + 3:
        raise RuntimeError(f"{len(starts)} of {jobs + 3} jobs were started in time to be counted")
    return [max(0.0, at - returned[number]) * 1000 for number, at, _ in starts if number >= 3]


def late() -> float:
    """Milliseconds: no latency can be trusted below what the machine does to a mere sleep."""
    started = time.monotonic()
    time.sleep(_GAP)
    return (time.monotonic() - started - _GAP) * 1000
