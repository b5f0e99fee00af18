"""Schedule: what it costs that many jobs wait for their time, against the same with 10,000 of them."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta

import uvloop

from benchmarks.harness import Line, Plan, percentile, times_at_most
from benchmarks.redis import server
from holdfast.core.ids import new_id
from holdfast.core.models import JobState, NewJob, Settlement
from holdfast.stores import open_store
from holdfast.stores.base import ClaimRequest, Store

TITLE = "Delayed jobs: p99 of an insert, a look and a promotion, and memory, against 10,000"
FEW = 10_000
_PAYLOAD = '"' + "x" * 98 + '"'
_BATCH = 5000
_FAR = timedelta(days=30)
_SOON = timedelta(milliseconds=2)
_SAMPLES = 2000
"""Of each work and side, a round: fewer say little of the slowest hundredth."""
_WARM = 50

Pair = tuple[list[float], list[float]]


def run(plan: Plan) -> list[Line]:
    """For each size of the schedule, in turns with the one of 10,000; the first shows what is chance."""
    sizes = [10_000, 100_000, 1_000_000, *([5_000_000] if plan.full else [])]
    return [line for size in sizes for line in _lines(plan, min(size, plan.size(size, 1000)), size)]


def _lines(plan: Plan, large: int, named: int) -> list[Line]:
    worked = ("insert one", "look, nothing due", "promote and claim 10")
    lines = [Line(f"{named:,}: {what}", "ms", other="10,000", target=times_at_most(1.2)) for what in worked]
    middles = [Line(f"{line.what}, p50", "ms", other="10,000") for line in lines]
    size = Line(f"{named:,}: a job of 100 bytes", "bytes")
    few = plan.size(FEW, 1000)
    with server.namespace() as url:
        empty = server.used_bytes()
        uvloop.run(_fill(url, large))
        size.add((server.used_bytes() - empty) / large)
        for _ in range(plan.rounds):
            with server.namespace() as small:
                uvloop.run(_fill(small, few))
                both = uvloop.run(_alternating(url, small, plan.size(_SAMPLES, 10)))
            for line, middle, (ours, theirs) in zip(lines, middles, both, strict=True):
                line.add(percentile(ours, 99), percentile(theirs, 99))
                middle.add(percentile(ours, 50), percentile(theirs, 50))
    return [*lines, *middles, size]


async def _fill(url: str, count: int) -> None:
    """So many jobs, due at moments of a month that begins in a month, in no order."""
    store = open_store(url)
    await store.open()
    step = _FAR / count
    for start in range(0, count, _BATCH):
        numbers = range(start, min(start + _BATCH, count))
        await store.queueing.submit([_job(_FAR + step * (number * 7919 % count)) for number in numbers])
    await store.close()


def _job(delay: timedelta) -> NewJob:
    return NewJob(id=new_id(), task="noop", payload=_PAYLOAD, delay=delay)


async def _alternating(large: str, small: str, times: int) -> list[Pair]:
    """Milliseconds of each work, on the large one and on the small one. Each work is done on both before the next, and
    chance says on which of them first: who comes second finds the server's and our own caches warm."""
    stores = open_store(large), open_store(small)
    took: list[Pair] = [([], []) for _ in _WORKS]
    chance = random.Random(times)
    for store in stores:
        await store.open()
    for index in range(-_WARM, times):
        for work, figures in zip(_WORKS, took, strict=True):
            for side in chance.sample((0, 1), 2):
                seconds = await work(stores[side])
                if index >= 0:
                    figures[side].append(seconds * 1000)
    for store in stores:
        await store.close()
    return took


async def _insert(store: Store) -> float:
    """Seconds of one insert."""
    began = time.perf_counter()
    await store.queueing.submit([_job(_FAR)])
    return time.perf_counter() - began


async def _look(store: Store) -> float:
    """Seconds of a look for due jobs where none is."""
    began = time.perf_counter()
    await store.maintenance.promote_due(limit=200)
    return time.perf_counter() - began


async def _claim(store: Store) -> float:
    """Seconds of a claim that makes ten jobs ready and takes them; they are settled afterwards."""
    await store.queueing.submit([_job(_SOON) for _ in range(10)])
    await asyncio.sleep(2 * _SOON.total_seconds())
    began = time.perf_counter()
    claim = await store.queueing.claim(
        ClaimRequest("benchmark", {"default": 10}, limit=10, lease_for=timedelta(minutes=1))
    )
    seconds = time.perf_counter() - began
    if len(claim.jobs) < 10:
        raise RuntimeError(f"a claim found {len(claim.jobs)} of 10 jobs")
    await store.queueing.settle(
        [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in claim.jobs]
    )
    return seconds


_WORKS = (_insert, _look, _claim)
