"""The `streams` example's retries: schedule, budget, classification, storms, duplicates."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest

from tests.examples.common import until
from tests.examples.streams_support import EXAMPLE, Streams

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]
SECOND = 1_000_000
QUICK = {"HOLDFAST_RETRY": "0.1", "HOLDFAST_CONCURRENCY": "50"}
"""For hundreds of jobs that fail."""


@pytest.mark.rows("S20", "S23", "S24", "S25", "S27", "S35")
def test_transient_error_is_retried_on_schedule_then_dead(streams: Streams) -> None:
    """The delays are read from the schedule, not waited for. The worker is replaced between attempts."""
    service, scheduled = streams.notifications, []
    job_id = service.submit(queue="schedule", fail=9)
    for attempt in (1, 2, 3, 4):
        with streams.worker("notifications", "schedule"):
            job = service.wait_for(job_id, "failed", attempt)
        ended = service.app.sync.attempts(job_id)[-1].ended_at_us
        scheduled.append((job.run_at_us - ended) / SECOND)
        assert (streams.status(job_id), streams.client.get(f"/jobs/{job_id}").json()["attempt_count"]) == (
            "pending",
            attempt,
        )
        service.make_due(job_id)
    assert scheduled == pytest.approx([1, 5, 25, 125], abs=0.2)
    with streams.worker("notifications", "schedule"):
        job = service.wait_for(job_id, "dead")
        assert (job.attempts, service.executions(job_id)) == (5, {job_id: 5})
        dead_key = f"{service.dead_key}:schedule"
        until(lambda: job_id in [fields["id"] for _, fields in service.redis.xrange(dead_key)], "the dead letter")
    assert streams.wait_for_status(job_id, "failed")["error"] == "TimeoutError: as the test wants it"


@pytest.mark.rows("S20", "S26", "S36")
@pytest.mark.parametrize("error", ["value", "key"])
def test_logic_error_is_dead_after_one_execution(streams: Streams, error: str) -> None:
    service = streams.notifications
    job_id = service.submit(fail=9, error=error)
    assert service.wait_for(job_id, "dead").attempts == 1
    assert service.executions(job_id) == {job_id: 1}
    until(lambda: job_id in service.dead_letters(), "the dead letter")


@pytest.mark.rows("S26")
def test_invalid_user_is_dead_after_one_execution(streams: Streams) -> None:
    job = streams.wait_for_status(streams.create_user("no address"), "failed")
    assert job["attempt_count"] == 1
    assert job["error"] == "ValueError: email: 'no address' is not an address; give one like ada@example.com"
    assert job["job_id"] in [each["job_id"] for each in streams.client.get("/dlq/users").json()["jobs"]]


@pytest.mark.rows("S16")
def test_job_over_its_budget_is_not_run_again(streams: Streams) -> None:
    service = streams.notifications
    job_id = str(service.app.sync.enqueue("test.job", {"fail": 9}, key=str(uuid4()), max_attempts=2).id)
    service.wait_for(job_id, "failed")
    service.make_due(job_id)
    assert service.wait_for(job_id, "dead").reason == "max_attempts"
    entry = service.redis.xadd(service.key, {"id": job_id})
    until(lambda: not service.redis.xrange(service.key, entry, entry), "the end of the injected entry")
    assert service.job(job_id).state == "dead"
    assert service.executions(job_id) == {job_id: 2}


@pytest.mark.rows("S22")
def test_outage_causes_no_calls_beyond_the_schedule(streams: Streams) -> None:
    """On a machine that stalls, an attempt can end by a timeout of its own before it calls the provider."""
    service = streams.notifications
    with streams.provider(mode="down"):
        payloads = [{"email": f"{uuid4()}@example.com", "template": "news"} for _ in range(10)]
        jobs = [service.submit("notification.send", **payload) for payload in payloads]
        for job_id in jobs:
            service.wait_for(job_id, "failed", 3)
        calls = {job_id: streams.calls(job_id) for job_id in jobs}
    for job_id in jobs:
        answered = ["answered 503" in str(each.error) for each in service.app.sync.attempts(job_id)]
        times = [call["at"] for call in calls[job_id]]
        assert 1 <= answered.count(True) <= len(times) <= len(answered) == 3
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert all(gap >= 1 for gap in gaps)
        assert len(times) < 3 or gaps[1] >= 5
        service.make_due(job_id)
    service.all_ended(jobs)


@pytest.mark.rows("S2", "S32")
def test_retry_storm_has_each_effect_once(streams: Streams) -> None:
    service = streams.notifications
    with streams.workers("notifications", 2, "storm", **QUICK):
        jobs = service.submit_many(200, "storm", fail=2)
        service.all_ended(jobs)
    assert service.executions(*jobs) == dict.fromkeys(jobs, 3)
    assert service.effects(*jobs) == dict.fromkeys(jobs, 1)


@pytest.mark.rows("S40", "S70")
def test_failing_and_succeeding_jobs_all_end_with_exact_counts(streams: Streams) -> None:
    service = streams.notifications
    with streams.workers("notifications", 2, "mixed", **QUICK):
        failing = service.submit_many(500, "mixed", fail=9)
        succeeding = service.submit_many(500, "mixed")
        service.all_ended(succeeding)
        service.all_ended(failing, "dead")
    assert service.executions(*failing, *succeeding) == {**dict.fromkeys(failing, 5), **dict.fromkeys(succeeding, 1)}
    assert service.effects(*failing, *succeeding) == dict.fromkeys(succeeding, 1)
    rows = service.sql("select state, count(*)::int from holdfast.jobs where queue = 'mixed' group by 1")
    assert dict(rows) == {"succeeded": 500, "dead": 500}


@pytest.mark.rows("S2", "S21", "S33", "S69")
def test_entries_delivered_three_times_have_one_effect(streams: Streams) -> None:
    service = streams.notifications
    jobs = service.submit_many(30, "repeated", seconds=0.05)
    for job_id in jobs * 2:
        service.redis.xadd(service.stream("repeated"), {"id": job_id})
    assert Counter(service.entries("repeated")) == dict.fromkeys(jobs, 3)
    with streams.workers("notifications", 2, "repeated"):
        service.all_ended(jobs)
        until(lambda: not service.entries("repeated"), "the end of all entries")
    assert service.effects(*jobs) == dict.fromkeys(jobs, 1)
    assert service.executions(*jobs) == dict.fromkeys(jobs, 1)


@pytest.mark.rows("S71")
def test_jobs_may_end_in_any_order(streams: Streams, tmp_path: Path) -> None:
    """The first job ends after the second one, and both have their effect. The README promises no order."""
    service, door = streams.notifications, tmp_path / "open"
    first = service.submit(until=str(door))
    second = service.submit()
    service.wait_for(second, "succeeded")
    assert service.job(first).state in ("queued", "running")
    door.touch()
    service.wait_for(first, "succeeded")
    assert service.effects(first, second) == {first: 1, second: 1}
    assert "There is no order between jobs" in (EXAMPLE / "README.md").read_text(encoding="utf-8")
