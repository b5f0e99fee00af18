"""Due: many jobs due in the same second, on any store (target 10)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvloop

from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_least, at_most
from benchmarks.processes import child

TITLE = "10,000 jobs due at the same instant"


def lines(plan: Plan, homes: list[AbstractContextManager[Path | str]]) -> list[Line]:
    """In each of these stores, submit them for a moment ahead, and see when each of them starts."""
    last = Line("the last one starts after its instant", "s", target=at_most(1))
    first = Line("the first one starts after its instant", "ms", target=at_least(0))
    jobs = plan.size(10_000, 100)
    for home in homes:
        with home as store, child("benchmarks.worker", store) as worker:
            worker.say("go")
            instant = datetime.now(UTC) + timedelta(seconds=plan.size(3.0, 1.0))
            uvloop.run(_submit(store, jobs, instant))
            time.sleep(max(0.0, instant.timestamp() - time.time()) + plan.size(2.0, 1.0))
            starts = [at for _, _, at in worker.ask("stop")["starts"]]
        if len(starts) != jobs:
            raise RuntimeError(f"{len(starts)} of {jobs} jobs were started in time to be counted")
        last.add(max(starts) - instant.timestamp())
        first.add((min(starts) - instant.timestamp()) * 1000)
    return [last, first]


async def _submit(store: Path | str, jobs: int, instant: datetime) -> None:
    async with Application(store) as app:
        task = app.stamp.options(run_at=instant)
        await app.enqueue_many(task.new_job(n=index) for index in range(jobs))
