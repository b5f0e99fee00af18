"""What a worker counts is exact, on every store."""

from __future__ import annotations

from typing import Any

from holdfast import Holdfast, JobHandle
from tests.worker.watching import Watched, ended, until


async def test_every_job_is_counted_once(app: Holdfast) -> None:
    """Requirements A83 to A92: of twenty jobs that succeed, and one that fails twice and is dead then."""

    @app.task("work")
    async def work() -> None: ...

    @app.task("broken", max_attempts=3, retry="0.001")
    async def broken() -> None:
        raise ValueError("it broke")

    async with Watched(app) as watched:
        handles: list[JobHandle[Any]] = await app.enqueue_many([work.new_job() for _ in range(20)])
        handles += [await broken.options(key="one").enqueue(), await broken.options(key="one").enqueue()]
        await until(lambda: ended(app, handles))
        await until(lambda: not watched.worker.shared.claimed)
        samples = await watched.samples()

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    assert value("jobs_submitted_total", task="work") == 20
    assert value("jobs_submitted_total", task="broken") == 1
    assert value("jobs_idempotent_total", task="broken") == 1
    assert value("jobs_succeeded_total", task="work") == 20
    assert value("jobs_failed_total", task="broken") == 2
    assert value("jobs_dead_total", task="broken") == 1
    assert value("jobs_retried_total") == 2
    assert value("lease_acquired_total") == 23
    assert value("lease_lost_total") == 0
    assert value("job_duration_seconds_count", task="work", outcome="succeeded") == 20
    assert value("job_duration_seconds_count", task="broken", outcome="failed") == 2
    assert value("job_duration_seconds_count", task="broken", outcome="dead") == 1
    assert value("job_lateness_seconds_count", queue="default") == 23
    assert 0 <= value("job_lateness_seconds_sum", queue="default") < 23 * 30
    assert value("settle_batch_jobs_sum") == 23
    assert value("store_latency_seconds_count", verb="settle") == value("settle_batch_jobs_count")
    assert value("worker_active_jobs") == value("worker_buffered_jobs") == 0
