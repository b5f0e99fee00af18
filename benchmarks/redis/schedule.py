"""Schedule: what it costs that many jobs wait for their time, against the same with 10,000 of them."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import uvloop

from benchmarks.harness import Line, Plan, percentile, times_at_most
from benchmarks.redis import server
from holdfast.job import JobState, NewJob, Settlement, new_id
from holdfast.store import Store
from holdfast.stores import open_store

TITLE = "Delayed jobs: p99 of an insert, a look and a promotion, and memory, against 10,000"
FEW = 10_000
_PAYLOAD = '"' + "x" * 98 + '"'
_BATCH = 5000
_FAR = timedelta(days=30)
_SOON = timedelta(milliseconds=5)


def run(plan: Plan) -> list[Line]:
    """For each size of the schedule, in turns with the one of 10,000."""
    sizes = [1000, 10_000, 100_000, 1_000_000, *([5_000_000] if plan.full else [])]
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
                both = uvloop.run(_alternating(url, small, plan.size(300, 10)))
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
        await store.submit([_job(_FAR + step * (number * 7919 % count)) for number in numbers])
    await store.close()


def _job(delay: timedelta) -> NewJob:
    return NewJob(id=new_id(), task="noop", payload=_PAYLOAD, delay=delay)


async def _alternating(large: str, small: str, times: int) -> list[tuple[list[float], list[float]]]:
    """Milliseconds of each work, on the large one and on the small one; what was promoted is settled in between."""
    stores = open_store(large), open_store(small)
    took: list[tuple[list[float], list[float]]] = [([], []), ([], []), ([], [])]
    for store in stores:
        await store.open()
    for index in range(-20, times):
        for side, store in enumerate(stores):
            figures = await _once(store)
            if index >= 0:
                for each, figure in zip(took, figures, strict=True):
                    each[side].append(figure * 1000)
    for store in stores:
        await store.close()
    return took


async def _once(store: Store) -> tuple[float, float, float]:
    """Seconds of one insert, of a look for due jobs where none is, of a claim that makes ten ready and takes them."""
    began = time.perf_counter()
    await store.submit([_job(_FAR)])
    inserted = time.perf_counter()
    await store.promote(limit=200)
    looked = time.perf_counter()
    await store.submit([_job(_SOON) for _ in range(10)])
    await asyncio.sleep(2 * _SOON.total_seconds())
    due = time.perf_counter()
    claim = await store.claim("benchmark", {"default": 10}, limit=10, lease_for=timedelta(minutes=1))
    claimed = time.perf_counter()
    if len(claim.jobs) < 10:
        raise RuntimeError(f"a claim found {len(claim.jobs)} of 10 jobs")
    await store.settle([Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in claim.jobs])
    return inserted - began, looked - inserted, claimed - due
