"""Cost of limits: drains of limited queues, claims with blocked jobs, and how long a flood delays another's job.

A drain is claims and settlements of a hundred jobs at a time, by one process and without handlers. For that of a
worker see ``limit_peers``.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.harness import Line, Plan, at_most, percentile, times_at_least, times_at_most
from holdfast import Holdfast
from holdfast.core.ids import new_id
from holdfast.core.models import JobState, NewJob, Settlement
from holdfast.stores.base import ClaimRequest, Store
from holdfast.worker import Worker

TITLE = "what limits cost"

Place = Callable[[], AbstractContextManager[Path | str]]
"""Gives the URL of an empty store, for as long as the context lasts."""

_BATCH, _KEYS = 100, 10_000
_DRAINS = 4
"""Of each kind, a round: one lasts less than a second, and two that follow each other differ by up to 15 %."""
_HOUR = "1/h"
_FLOOD = 100_000
_SLOTS, _JOB_SECONDS = 10, 0.005


def lines(plan: Plan, places: Sequence[Place]) -> list[Line]:
    """Every round beside the drain without limits."""
    of_plain = "without limits"
    other = Line("drain while another queue is limited", "jobs/s", other=of_plain, target=times_at_least(0.97))
    queue = Line("drain of a queue with a limit", "jobs/s", other=of_plain, target=times_at_least(0.7))
    keys = Line("drain of a queue with a limit for each of 10,000 keys", "jobs/s", other=of_plain)
    keys.target = times_at_least(0.5)
    one = Line("claim p99 beside 100,000 jobs of a blocked key", "ms", other="without them", target=times_at_most(1.5))
    many = Line("claim p99 beside 10,000 blocked keys", "ms", other="without them", target=times_at_most(1.5))
    fair = Line(f"delay of another's job, behind a flood of {_FLOOD:,}", "job times", target=at_most(5))
    jobs, claims = plan.size(20_000, 100), plan.size(1000, 20)
    drains: dict[str, dict[str, Any]] = {
        "plain": {},
        "other": {"limited": {"queue": "other", "concurrency": 1}},
        "queue": {"limited": {"queue": "default", "concurrency": 1000}},
        "keys": {"keys": _KEYS, "limited": {"queue": "default", "by": "args.key", "concurrency": 5}},
    }
    for place in places:
        for number in range(plan.size(_DRAINS, 1)):
            names = list(drains) if number % 2 else list(reversed(drains))
            took = {name: _measure(place, _drain, jobs, **drains[name]) for name in names}
            other.add(took["other"], took["plain"])
            queue.add(took["queue"], took["plain"])
            keys.add(took["keys"], took["plain"])
        free = _measure(place, _claims, claims, 0, keys=1)
        one.add(_measure(place, _claims, claims, plan.size(100_000, 100), keys=1), free)
        many.add(_measure(place, _claims, claims, plan.size(_KEYS, 100), keys=_KEYS), free)
        fair.add(_measure(place, _flood, plan.size(_FLOOD, 100)))
    return [other, queue, keys, one, many, fair]


def _measure(place: Place, what: Callable[..., Awaitable[float]], *args: Any, **named: Any) -> float:
    with place() as url:
        app = Holdfast(str(url), log_level="ERROR", concurrency=_SLOTS)
        return asyncio.run(_within(app, what, *args, **named))


async def _within(app: Holdfast, what: Callable[..., Awaitable[float]], *args: Any, **named: Any) -> float:
    async with app:
        return await what(app, *args, **named)


def _job(key: int, queue: str = "default") -> NewJob:
    return NewJob(id=new_id(), task="work", queue=queue, payload=f'{{"key":{key}}}')


async def _submit(store: Store, jobs: int, keys: int) -> None:
    for first in range(0, jobs, 1000):
        await store.queueing.submit([_job(number % keys) for number in range(first, min(first + 1000, jobs))])


async def _claim(store: Store, limit: int = _BATCH) -> list[Any]:
    request = ClaimRequest("worker", {"*": limit}, limit=limit, lease_for=timedelta(minutes=5))
    return (await store.queueing.claim(request)).jobs


async def _settle(store: Store, jobs: Sequence[Any]) -> None:
    done = JobState.SUCCEEDED
    await store.queueing.settle([Settlement(job_id=job.id, claims=job.claims, state=done) for job in jobs])


async def _drain(app: Holdfast, jobs: int, *, keys: int = 1, limited: dict[str, Any] | None = None) -> float:
    store = await app.open_store()
    if limited is not None:
        await app.limits.add("limit", **limited)
    await store.queueing.submit([_job(0, "other")])
    await _submit(store, jobs, keys)
    started, done = time.perf_counter(), 0
    while done < jobs + 1:
        claimed = await _claim(store)
        done += len(claimed)
        await _settle(store, claimed)
    return jobs / (time.perf_counter() - started)


async def _claims(app: Holdfast, claims: int, blocked: int, *, keys: int) -> float:
    """Milliseconds of a claim, p99, for keys with room beside keys whose tokens are spent."""
    store = await app.open_store()
    await app.limits.add("limit", queue="default", by="args.key", rate=_HOUR)
    await _submit(store, blocked + keys if blocked else 0, keys)  # each key starts one
    while claimed := await _claim(store):
        await _settle(store, claimed)
    seconds = []
    for number in range(claims):
        await store.queueing.submit([_job(keys + number)])
        started = time.perf_counter()
        claimed = await _claim(store)
        seconds.append(time.perf_counter() - started)
        if [job.payload for job in claimed] != [f'{{"key":{keys + number}}}']:
            raise RuntimeError(f"claimed {claimed} for key {keys + number}")
        await _settle(store, claimed)
    return percentile(seconds, 99) * 1000


async def _flood(app: Holdfast, jobs: int) -> float:
    """Job times from the submission of a single job of another key to its start, p50 of twenty."""
    begun: defaultdict[int, asyncio.Future[float]] = defaultdict(asyncio.get_running_loop().create_future)

    @app.task("work")
    async def work(key: int) -> None:
        if not begun[key].done():
            begun[key].set_result(time.perf_counter())
        await asyncio.sleep(_JOB_SECONDS)

    store = await app.open_store()
    await app.limits.add("limit", queue="default", by="args.key")
    await _submit(store, jobs, 1)
    worker = Worker(app)
    working = asyncio.ensure_future(worker.run())
    delays = []
    await begun[0]
    for key in range(1, 21):
        await asyncio.sleep(0.05)
        submitted = time.perf_counter()
        await store.queueing.submit([_job(key)])
        delays.append((await begun[key] - submitted) / _JOB_SECONDS)
    worker.stop()
    await working
    return percentile(delays, 50)
