"""Console: how fast its pages are, and the cost of ten open ones. A store of fewer jobs unless the run is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import uvloop

from benchmarks import console
from benchmarks.application import Application
from benchmarks.console import Filled
from benchmarks.content import QUEUES, TASKS, add_rest, fail_job
from benchmarks.harness import Line, Plan
from benchmarks.redis import server
from holdfast.core.ids import new_id
from holdfast.core.models import Job, JobState, NewJob, Settlement
from holdfast.stores.base import ClaimRequest, Store

TITLE = "console: 100,000 jobs, 200 queues, 1,000 dead jobs of 300 errors (full: ten times that)"
_BATCH = 1000


def run(plan: Plan) -> list[Line]:
    """Fills a new namespace."""
    return console.lines(plan, _filled, plan.size(100_000, 2000, 1_000_000))


@contextmanager
def _filled(_: Plan, jobs: int) -> Iterator[Filled]:
    with server.namespace() as url:
        middle = uvloop.run(_fill(url, jobs))
        story = uvloop.run(add_rest(url))
        yield Filled(url, story, middle, server.cpu_seconds)


async def _fill(url: str, jobs: int) -> str:
    """Submits jobs, and ends all but the last; returns a cursor."""
    async with Application(url) as app:
        store = await app.open_store()
        for first in range(0, jobs, _BATCH):
            numbers = range(first, first + _BATCH)
            await store.queueing.submit([_new_job(number) for number in numbers])
            if first + _BATCH < jobs:
                await _end_jobs(store, first)
        cursor = None
        for _ in range(10):
            cursor = (await app.find(cursor=cursor)).cursor
        return cursor or ""


def _new_job(number: int) -> NewJob:
    payload = f'{{"customer":{number}}}'
    return NewJob(
        id=new_id(), task=f"task-{number // 3 % TASKS}", queue=f"queue-{number // 7 % QUEUES}", payload=payload
    )


async def _end_jobs(store: Store, first: int) -> None:
    request = ClaimRequest("worker-1", {"*": _BATCH}, limit=_BATCH, lease_for=timedelta(minutes=5))
    claimed = (await store.queueing.claim(request)).jobs
    await store.queueing.settle([_settlement(job, first + place) for place, job in enumerate(claimed)])


def _settlement(job: Job, number: int) -> Settlement:
    if number % 100 == 7:
        return fail_job(job, number // 100)
    return Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED, result='{"sent":true}')
