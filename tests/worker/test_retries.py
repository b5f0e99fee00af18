"""Failures, retries, budgets: hours of them."""

from __future__ import annotations

import asyncio
import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest

from holdfast import Dead, Holdfast, JobFailed, Retry, RetryAfter, Snooze
from holdfast.core.events import JobDead, JobFailedEvent, JobReleased, TaskUnknown
from holdfast.core.models import JobFilter, to_datetime
from holdfast.testing import NotIdle
from tests.worker.support import Recorder, gaps, harness

SCHEDULES = {
    "exponential:base=5,factor=2,offset=0,cap=none,jitter=add:2": [10, 20, 40, 80, 160, 320],
    "exponential:base=1,factor=2,offset=0,cap=none,jitter=none": [2, 4, 8, 16, 32, 64],
    "exponential:base=1,factor=5,cap=none,jitter=none": [1, 5, 25, 125, 625, 3125],
    "exponential:base=5,factor=3,cap=300,jitter=scale:0.7:1": [5, 15, 45, 135, 300, 300],
    "immediate": [0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("text", sorted(SCHEDULES))
async def test_retries_follow_the_policy(app: Holdfast, text: str) -> None:
    policy = Retry.parse(text)
    runs: list[datetime] = []

    @app.task("flaky", retry=policy, max_attempts=7)
    async def flaky() -> None:
        runs.append(harnessed.now)
        raise ValueError("no")

    async with harness(app) as harnessed:
        job = await flaky.enqueue()
        await harnessed.run_until_idle()
        dead = await job.job()
    assert len(runs) == 7
    for failures, (gap, nominal) in enumerate(zip(gaps(runs), SCHEDULES[text], strict=True), start=1):
        least, most = policy.delay_bounds(failures)
        assert least <= timedelta(seconds=gap) <= most
        assert least <= timedelta(seconds=nominal) <= most
        if policy.jitter == "none":
            assert gap == nominal
    assert (dead.state, dead.reason, dead.attempts, dead.error) == ("dead", "max_attempts", 7, "ValueError: no")


async def test_every_failed_attempt_is_recorded(app: Holdfast) -> None:
    @app.task("flaky", retry=Retry.fixed(60), max_attempts=4)
    async def flaky() -> str:
        attempt = len(attempts)
        attempts.append(attempt)
        if attempt < 3:
            raise ValueError(f"no {attempt}")
        return "done"

    attempts: list[int] = []
    async with harness(app) as harnessed:
        began = harnessed.now
        job = await flaky.enqueue()
        await harnessed.run_until_idle()
        assert await job.result(timeout=0) == "done"
        assert harnessed.now - began == timedelta(minutes=3)
        recorded = await app.attempts(job.id)
    assert [(each.attempt, each.state, each.reason, each.error) for each in recorded] == [
        (number + 1, "failed", "error", f"ValueError: no {number}") for number in range(3)
    ]
    assert all("test_retries.py" in (each.traceback or "") for each in recorded)
    assert gaps([to_datetime(each.ended_at_us) for each in recorded]) == [60, 60]


async def test_retry_after_goes_before_the_policy_and_counts(app: Holdfast) -> None:
    runs: list[datetime] = []

    @app.task("limited", retry=Retry.fixed(1), max_attempts=3)
    async def limited() -> None:
        runs.append(harnessed.now)
        raise RetryAfter(timedelta(hours=2))

    async with harness(app) as harnessed:
        job = await limited.enqueue()
        await harnessed.run_until_idle()
        dead = await job.job()
    assert gaps(runs) == [7200, 7200]
    assert (dead.state, dead.reason) == ("dead", "max_attempts")


async def test_a_snooze_gives_the_attempt_back(app: Holdfast) -> None:
    events = Recorder(app)
    runs: list[datetime] = []

    @app.task("patient", max_attempts=1)
    async def patient() -> str:
        runs.append(harnessed.now)
        if len(runs) < 4:
            raise Snooze(90)
        return "at last"

    async with harness(app) as harnessed:
        job = await patient.enqueue()
        await harnessed.run_until_idle()
        done = await job.job()
        assert await app.attempts(job.id) == []
    assert gaps(runs) == [90, 90, 90]
    assert (done.state, done.attempts, done.claims) == ("succeeded", 1, 4)
    assert [event.reason for event in events.of(JobReleased)] == ["snoozed"] * 3
    assert events.of(JobFailedEvent, JobDead) == []


async def test_dead_ends_it_at_once(app: Holdfast) -> None:
    @app.task("hopeless", max_attempts=5)
    async def hopeless() -> None:
        raise Dead("no such customer")

    async with harness(app) as harnessed:
        job = await hopeless.enqueue()
        await harnessed.run_until_idle()
        with pytest.raises(JobFailed, match="no such customer"):
            await job.result(timeout=0)
        dead = await job.job()
    assert (dead.state, dead.reason, dead.attempts) == ("dead", "non_retryable", 1)


async def test_the_task_says_which_errors_are_final(app: Holdfast) -> None:
    @app.task("picky", dead_on=KeyError, max_attempts=2, retry=Retry.immediate())
    async def picky(which: str) -> None:
        raise {"key": KeyError("k"), "value": ValueError("v")}[which]

    async with harness(app) as harnessed:
        final, other = await picky.enqueue("key"), await picky.enqueue("value")
        await harnessed.run_until_idle()
        assert (await final.job()).reason == "non_retryable"
        assert (await final.job()).attempts == 1
        assert ((await other.job()).reason, (await other.job()).attempts) == ("max_attempts", 2)


async def test_a_budget_of_one_is_one_execution(app: Holdfast) -> None:
    runs: list[int] = []

    @app.task("once", max_attempts=1)
    async def once() -> None:
        runs.append(1)
        raise ValueError

    async with harness(app) as harnessed:
        job = await once.enqueue()
        await harnessed.run_until_idle()
        assert await job.state() == "dead"
    assert runs == [1]


async def test_no_budget_goes_on_for_days(app: Holdfast) -> None:
    runs: list[datetime] = []

    @app.task("stubborn", max_attempts=None, retry=Retry.fixed(3600))
    async def stubborn() -> None:
        runs.append(harnessed.now)
        raise ValueError("still not")

    async with harness(app) as harnessed:
        job = await stubborn.enqueue()
        with pytest.raises(NotIdle, match=r"stubborn .* failed, attempt 73"):
            await harnessed.run_until_idle(limit=timedelta(days=3))
        assert set(gaps(runs)) == {3600}
        assert await job.state() == "failed"


async def test_a_job_s_own_policy_goes_before_its_task_s(app: Holdfast) -> None:
    runs: list[datetime] = []

    @app.task("flaky", retry=Retry.fixed(1), max_attempts=2)
    async def flaky() -> None:
        runs.append(harnessed.now)
        raise ValueError

    async with harness(app) as harnessed:
        await flaky.options(retry=Retry.from_delays([7, 70]), max_attempts=3).enqueue()
        await harnessed.run_until_idle()
    assert gaps(runs) == [7, 70]


async def test_error_texts_are_bounded_and_storable(app: Holdfast) -> None:
    @app.task("noisy", max_attempts=1)
    async def noisy(how: str) -> None:
        raise ValueError({"long": "x" * 10_000, "nul": "a\0b", "surrogate": "\ud800!"}[how])

    async with harness(app) as harnessed:
        jobs = {how: await noisy.enqueue(how) for how in ("long", "nul", "surrogate")}
        await harnessed.run_until_idle()
        errors = {how: (await job.job()).error or "" for how, job in jobs.items()}
    assert len(errors["long"]) == 4096
    assert errors["nul"] == "ValueError: a\\x00b"
    assert errors["surrogate"] == "ValueError: \\ud800!"


async def test_unknown_task_is_warned_of_once_with_a_suggestion(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("mail.send")
    async def send() -> None: ...

    async with harness(app, defer_for="0s") as harnessed:
        first, _, other = [await app.enqueue(name) for name in ("mail.sent", "mail.sent", "elsewhere.only")]
        await harnessed.run_until_idle()
        assert ((await first.job()).error or "").endswith("(registered: mail.send); did you mean mail.send?")
        assert ((await other.job()).error or "").endswith("(registered: mail.send)")
    events_by_task = {event.task: event for event in events.of(TaskUnknown)}
    assert len(events.of(TaskUnknown)) == 2
    assert events_by_task["mail.sent"].remedy.endswith("; did you mean mail.send?")
    assert "a queue of its own" in events_by_task["elsewhere.only"].remedy
    assert (events_by_task["elsewhere.only"].job_id, events_by_task["elsewhere.only"].queue) == (other.id, "default")


async def test_payload_that_does_not_fit_is_dead_until_replayed(app: Holdfast) -> None:
    async with harness(app, defer_for="0s") as harnessed:
        job = await app.enqueue("late", {"count": "many"})  # the task was unknown when it was enqueued
        seen: list[Any] = []

        @app.task("late")
        async def late(count: int) -> int:
            seen.append(count)
            return count

        await harnessed.run_until_idle()
        dead = await job.job()
        assert (dead.state, dead.reason, dead.attempts) == ("dead", "payload", 1)
        assert "count" in (dead.error or "")
        await app.replay(job.id, payload={"count": 3})
        await harnessed.run_until_idle()
        assert await job.result(timeout=0) == 3
    assert seen == [3]


async def test_a_result_that_cannot_be_kept(app: Holdfast) -> None:
    @app.task("odd", max_attempts=5)
    async def odd() -> object:
        return object()

    async with harness(app) as harnessed:
        job = await odd.enqueue()
        await harnessed.run_until_idle()
        dead = await job.job()
    assert (dead.state, dead.reason, dead.attempts) == ("dead", "result", 1)


async def test_retries_keep_time_when_a_worker_wakes_meanwhile(app: Holdfast) -> None:
    runs: list[datetime] = []
    count, counts = app.count, itertools.count()

    @app.task("flaky", retry=Retry.exponential(base=16, jitter="none"), max_attempts=7)
    async def flaky() -> None:
        runs.append(harnessed.now)
        raise ValueError("no")

    async def count_and_wake(filters: JobFilter) -> int:
        if next(counts) % 3 < 2:
            harnessed._activity.notifications.notify_kinds(frozenset({"queue"}))
            await asyncio.sleep(0)
        return await count(filters)

    async with harness(app) as harnessed:
        vars(app)["count"] = count_and_wake  # as long as the harness is open
        await flaky.enqueue()
        await harnessed.run_until_idle()
    assert gaps(runs) == [16, 32, 64, 128, 256, 512]
