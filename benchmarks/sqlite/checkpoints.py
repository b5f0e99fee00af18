"""Checkpoints: ours, run alone in the writer's turn, against SQLite's own at every 1,000 pages.

SQLite's own are unsafe below 3.51.3 beside another writer (its WAL-reset fault); this row says what safety costs.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import Line, Plan, percentile
from holdfast.core.ids import new_id
from holdfast.core.models import JobState, NewJob, Settlement
from holdfast.stores.base import ClaimRequest
from holdfast.stores.sqlite.store import SQLiteStore

TITLE = "Our own checkpoints, against SQLite's automatic ones (unsafe here below 3.51.3)"


def run(plan: Plan) -> list[Line]:
    """Alternate on new files: whole lives of jobs by the hundred and by the five hundred, and lone submissions."""
    whole = [Line(f"submit, claim, settle by {size}", "jobs/s", other="automatic") for size in (100, 500)]
    lone = Line("submit one by one", "jobs/s", other="automatic")
    worst = Line("submit one by one, p99.9", "ms", other="automatic")
    for _ in range(plan.rounds):
        for line, size in zip(whole, (100, 500), strict=True):
            rates = [_measured(plan, _lives, size, automatic=automatic) for automatic in (False, True)]
            line.add(*rates)
        ours, theirs = (_measured(plan, _lone, plan.size(5000, 50), automatic=each) for each in (False, True))
        lone.add(ours[0], theirs[0])
        worst.add(ours[1], theirs[1])
    return [*whole, lone, worst]


def _measured(plan: Plan, way: Any, size: int, *, automatic: bool) -> Any:
    async def opened(path: Path) -> Any:
        store = SQLiteStore(str(path))
        await store.open()
        if automatic:
            writer = store._current().writer
            writer.connection.execute("pragma wal_autocheckpoint=1000").fetchall()
            writer._checkpoint_if_due = _none  # type: ignore[method-assign, assignment]  # of this one store only
        try:
            return await way(store, size, plan)
        finally:
            await store.close()

    with plan.place() as folder:
        return uvloop.run(opened(folder / "jobs.db"))


async def _lives(store: SQLiteStore, size: int, plan: Plan) -> float:
    rounds = plan.size(40_000, 500) // size
    started = time.perf_counter()
    for _ in range(rounds):
        await store.queueing.submit([_job() for _ in range(size)])
        claim = await store.queueing.claim(
            ClaimRequest("benchmark", {"default": size}, limit=size, lease_for=timedelta(seconds=30))
        )
        await store.queueing.settle(
            [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in claim.jobs]
        )
    return rounds * size / (time.perf_counter() - started)


async def _lone(store: SQLiteStore, jobs: int, _: Plan) -> tuple[float, float]:
    took = []
    for _index in range(jobs):
        started = time.perf_counter()
        await store.queueing.submit([_job()])
        took.append((time.perf_counter() - started) * 1000)
    return jobs / sum(took) * 1000, percentile(took, 99.9)


def _none() -> None:
    """In place of our own checkpoints."""


def _job() -> NewJob:
    return NewJob(id=new_id(), task="noop", payload='{"n":1}', queue="default", max_attempts=5)
