"""Latency: from the return of a submission to the start of its handler, on an idle worker (target 6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from benchmarks.application import STARTS, Application
from benchmarks.harness import Line, Plan, at_most, percentile
from benchmarks.latency import late
from benchmarks.processes import child
from benchmarks.sqlite.peer import Peer
from holdfast.worker.worker import Worker

TITLE = "Submit returned → handler start, idle worker"
_GAP = 0.02  # seconds between two jobs


def run(plan: Plan) -> list[Line]:
    """Alternate: within one process, across two, the peer across two."""
    jobs = plan.size(300, 8)
    within = _pair("in one process", (1, 5))
    across = _pair("across processes", (2, 5))
    timer = Line("for comparison: how late a plain timer is here, p99", "ms")
    for _ in range(plan.rounds):
        with plan.place() as folder:
            inside = uvloop.run(_inside(folder / "jobs.db", jobs))
            outside = _outside(folder / "jobs.db", jobs)
            theirs = _peer(folder / "huey.db", jobs)
        timer.add(percentile([late() for _ in range(jobs)], 99))
        for line, percent in zip(within, (50, 99), strict=True):
            line.add(percentile(inside, percent))
        for line, percent in zip(across, (50, 99), strict=True):
            line.add(percentile(outside, percent), percentile(theirs, percent))
    return [*within, *across, timer]


def _pair(what: str, limits: tuple[float, float]) -> tuple[Line, Line]:
    middle, worst = limits
    return Line(f"{what}, p50", "ms", target=at_most(middle)), Line(f"{what}, p99", "ms", target=at_most(worst))


async def _inside(path: Path, jobs: int) -> list[float]:
    STARTS.clear()
    returned: dict[int, float] = {}
    async with Application(path) as app:
        worker = Worker(app)
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(0.3)
        for index in range(-3, jobs):
            await asyncio.sleep(_GAP)
            await app.stamp.enqueue(n=index)
            returned[index] = time.monotonic()
        await asyncio.sleep(0.2)
        worker.stop()
        await working
    return _took([(number, at) for number, at, _ in STARTS], returned)


def _outside(path: Path, jobs: int) -> list[float]:
    app = Application(path)
    with child("benchmarks.worker", path) as worker:
        worker.say("go")
        time.sleep(0.3)
        returned = _submitted(lambda number: app.stamp.sync.enqueue(n=number), jobs)
        time.sleep(0.2)
        starts = worker.ask("stop")["starts"]
    app.sync.close()
    return _took([(number, at) for number, at, _ in starts], returned)


def _peer(path: Path, jobs: int) -> list[float]:
    peer = Peer(path)
    with child("benchmarks.sqlite.peer_worker", path, jobs + 3) as consumer:
        consumer.say("go")
        time.sleep(0.3)
        returned = _submitted(peer.stamp, jobs)
        starts = consumer.heard()["starts"]
    peer.huey.storage.close()
    return _took([(number, at) for number, at in starts], returned)


def _submitted(submit: Callable[[int], object], jobs: int) -> dict[int, float]:
    returned: dict[int, float] = {}
    for index in range(-3, jobs):
        time.sleep(_GAP)
        submit(index)
        returned[index] = time.monotonic()
    return returned


def _took(starts: list[tuple[int, float]], returned: dict[int, float]) -> list[float]:
    """Milliseconds; the first few jobs only warm both sides up. A start before the return took no time at all."""
    return [max(0.0, at - returned[number]) * 1000 for number, at in starts if number >= 0]
