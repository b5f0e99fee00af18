"""Expiry and edits, met by whole workers in virtual time."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Holdfast, Invalid, JobCancelled, JobFilter, JobState
from holdfast.core.events import JobExpired, LeaseAcquired, SweepComplete
from holdfast.core.models import Reason
from holdfast.views.explain import explain_job, job_facts
from tests.worker.support import Recorder, harness


async def reasons(app: Holdfast, job_id: str) -> list[str]:
    """The codes of ``why``."""
    job = await app.get(job_id)
    return [each.code for each in explain_job(job, await job_facts(app, job))]


async def test_busy_worker_never_starts_an_expired_job(app: Holdfast) -> None:
    started: list[str] = []
    recorder = Recorder(app)

    @app.task("report", expires="10m")
    async def report(name: str) -> None:
        started.append(name)
        await asyncio.sleep(0)

    @app.task("long")
    async def long() -> None:
        await harnessed.clock.sleep(1200)

    async with harness(app) as harnessed:
        await harnessed.start(concurrency=1)
        busy = await long.enqueue()
        await harnessed.advance(1)
        late = await report.enqueue("late")
        kept = await report.options(expires="1h").enqueue("kept")
        never = await report.options(expires="never").enqueue("never")
        assert "expires" in await reasons(app, late.id)
        await harnessed.advance(1300)

        assert (await app.get(busy.id)).state is JobState.SUCCEEDED
        job = await app.get(late.id)
        assert (job.state, job.reason, job.attempts) == (JobState.CANCELLED, Reason.EXPIRED, 0)
        assert await reasons(app, late.id) == ["expired"]
        assert {(await app.get(each.id)).state for each in (kept, never)} == {JobState.SUCCEEDED}
        with pytest.raises(JobCancelled):
            await late.result(0)
    assert sorted(started) == ["kept", "never"]
    assert [(each.job_id, each.task) for each in recorder.of(JobExpired)] == [(late.id, "report")]
    assert late.id not in [each.job_id for each in recorder.of(LeaseAcquired)]


async def test_sweep_of_any_worker_ends_jobs_of_unserved_queues(app: Holdfast) -> None:
    recorder = Recorder(app)
    async with harness(app) as harnessed:
        await harnessed.start(queues={"other": None})
        job = await app.enqueue("work", queue="nobodys", expires=60)
        await harnessed.advance(59)
        assert (await app.get(job.id)).state is JobState.QUEUED
        await harnessed.advance(10)
        ended = await app.get(job.id)
    assert (ended.state, ended.reason) == (JobState.CANCELLED, Reason.EXPIRED)
    assert [each.job_id for each in recorder.of(JobExpired)] == [job.id]
    assert sum(each.expired for each in recorder.of(SweepComplete)) == 1


async def test_worker_runs_a_job_as_it_was_edited(app: Holdfast) -> None:
    ran: list[int] = []

    @app.task("work")
    async def work(n: int) -> None:
        ran.append(n)

    async with harness(app) as harnessed:
        await harnessed.start(queues={"other": None})
        job = await work.options(delay="1h").enqueue(1)
        await harnessed.advance(5)
        edited = await app.edit(job.id, payload={"n": 2}, queue="other", delay="10m")
        assert (edited.queue, edited.state) == ("other", JobState.SCHEDULED)
        await harnessed.advance(599)
        assert ran == []
        await harnessed.advance(2)
        assert ran == [2]
        assert (await app.get(job.id)).state is JobState.SUCCEEDED


async def test_submission_that_expires_before_its_start_is_refused(app: Holdfast) -> None:
    @app.task("work", expires="10m")
    async def work() -> None: ...

    async with harness(app) as harnessed:
        hour, half = harnessed.now + timedelta(hours=1), harnessed.now + timedelta(minutes=30)
        wrong: list[dict[str, Any]] = [
            {"delay": "1h"},
            {"run_at": hour},
            {"run_at": hour, "expires": "30m"},
            {"run_at": hour, "expires": half},
            {"run_at": hour, "expires": hour},
            {"delay": "1h", "expires": half},
            {"delay": "1h", "expires": "1h"},
        ]
        for options in wrong:
            with pytest.raises(
                Invalid, match=r"^expires: '(in|at) .*; give a later expiry.* the job starts (in|at) .*"
            ):
                await work.options(**options).enqueue()
            with pytest.raises(Invalid, match=r"^expires: '(in|at) .*"):
                await app.enqueue_many([work.new_job(), work.options(**options).new_job()])
        with pytest.raises(Invalid, match=r"^expires: .*jitter"):
            await app.schedules.add("jittered", work.new_job(), every="1d", jitter="10m")
        assert await app.count(JobFilter()) == 0
        await work.options(run_at=half, expires="31m").enqueue()
        await work.options(delay="29m", expires=half).enqueue()
        await work.options(delay="1m", expires=harnessed.now - timedelta(hours=1)).enqueue()  # ends at once


async def test_edit_that_leaves_a_job_no_time_to_start_is_refused(app: Holdfast) -> None:
    async with harness(app) as harnessed:
        hour, half = harnessed.now + timedelta(hours=1), harnessed.now + timedelta(minutes=30)
        expiring = await app.enqueue("work", {}, expires="45m")
        delayed = await app.enqueue("work", {}, delay="45m")
        wrong: list[tuple[str, str, dict[str, Any]]] = [
            (expiring.id, "delay", {"delay": "1h"}),
            (expiring.id, "run_at", {"run_at": hour}),
            (delayed.id, "expires", {"expires": "30m"}),
            (delayed.id, "expires", {"expires": half}),
            (delayed.id, "expires", {"delay": "1h", "expires": half}),
            (delayed.id, "expires", {"run_at": hour, "expires": "30m"}),
        ]
        for job_id, field, changes in wrong:
            pattern = rf"^{field}: '(in|at) .*; give .* the job starts (in|at) .* would expire (in|at) .*"
            with pytest.raises(Invalid, match=pattern):
                await app.edit(job_id, **changes)
        await app.edit(expiring.id, delay="1h", expires="2h")
        await app.edit(delayed.id, run_at=half, expires="31m")
        await app.edit(delayed.id, delay="2h", expires="never")
