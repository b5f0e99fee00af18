"""Workers in other languages: what they claim, keep and settle over HTTP comes to what it does in a worker of ours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.events import (
    JobCancelledEvent,
    JobDead,
    JobFailedEvent,
    JobReleased,
    JobSucceeded,
    LeaseAcquired,
    LeaseLostEvent,
)
from holdfast.core.lifecycle import Lost, decide
from holdfast.core.models import JobState
from holdfast.core.retry import Retry
from tests.web.client import JSON, Api
from tests.web.working import ERROR, Worker


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def api(home: str, clock: ManualClock) -> Iterator[Api]:
    """The API on a store whose time the test moves."""
    with Api(home, now=clock) as api:
        yield api


@pytest.fixture
def worker(api: Api) -> Worker:
    return Worker(api)


def stored(api: Api, job: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = api.get(f"/v1/jobs/{job['id']}")
    return document


# ── claiming ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_claim_hands_over_all_that_a_handler_needs(api: Api, worker: Worker) -> None:
    given = {"task": "mail.send", "payload": {"to": "ä", "n": [1.5, None]}, "timeout": 7, "metadata": {"m": 1}}
    job = api.submit(**given, tags=["t"], priority=3, max_attempts=4)

    answer = worker.answer(lease=45)

    (claimed,) = answer.pop("jobs")
    assert 0 <= answer.pop("waited") < 20
    assert answer == {"lease": 45.0, "command": "none", "quarantined": False}
    assert claimed.pop("token")
    assert claimed == {
        **{name: job[name] for name in ("id", "task", "queue", "payload", "max_attempts", "priority", "run_at")},
        **{name: job[name] for name in ("created_at", "tags", "metadata", "timeout")},
        "attempt": 1,
        "claims": 1,
        "alone": False,
        "traceparent": None,
        "tracestate": None,
    }
    now = stored(api, job)
    assert (now["state"], now["worker"], now["attempts"]) == ("running", "js-1", 1)
    assert worker.claim() == []


def test_each_queue_gives_no_more_than_its_slots(api: Api, worker: Worker) -> None:
    for queue in ("a", "b", "c"):
        for _ in range(4):
            api.submit(queue=queue)

    assert sorted(job["queue"] for job in worker.claim(queues={"a": 2, "b": 1}, limit=10)) == ["a", "a", "b"]
    others = [job["queue"] for job in worker.claim(queues={"a": 0, "*": 2}, limit=10)]
    assert (len(others), "a" in others) == (2, False)
    assert [job["queue"] for job in worker.claim(queues=["a"], limit=1)] == ["a"]
    assert [job["queue"] for job in worker.claim(queues={"a": 5})] == ["a"]


def test_job_whose_task_the_worker_does_not_know_is_deferred(api: Api, worker: Worker) -> None:
    job, known = api.submit(task="unknown", queue="a"), api.submit(task="known", queue="b")

    assert [each["id"] for each in worker.claim(tasks=["known", "other"])] == [known["id"]]

    job_now = stored(api, job)
    assert (job_now["state"], job_now["reason"], job_now["attempts"]) == ("scheduled", "no_handler", 0)
    assert "deferred since" in job_now["error"]


def test_a_claim_waits_until_there_is_something(api: Api, worker: Worker) -> None:
    async def submit_later() -> Any:
        claiming = asyncio.create_task(
            api.send("POST", "/v1/claims", json={"worker": "js-1", "queues": ["late"], "wait": 40}, headers=JSON)
        )
        await api.until(api.app.workers)
        await api.send("POST", "/v1/jobs", json={"task": "work", "payload": {}, "queue": "late"}, headers=JSON)
        return (await claiming).json()

    assert len(api.run(submit_later())["jobs"]) == 1


async def enough(api: Api, workers: int) -> bool:
    return len(await api.app.workers()) >= workers


def test_of_many_that_wait_each_job_wakes_one(api: Api) -> None:
    async def use() -> list[list[str]]:
        waits = [
            asyncio.create_task(
                api.send("POST", "/v1/claims", json={"worker": f"js-{n}", "wait": 40, "queues": [f"q{n % 2}"]})
            )
            for n in range(6)
        ]
        await api.until(lambda: enough(api, 6))
        for n in range(6):
            await api.send("POST", "/v1/jobs", json={"task": "work", "payload": {}, "queue": f"q{n % 2}"})
        return [[job["id"] for job in (await each).json()["jobs"]] for each in waits]

    claimed = api.run(use())

    assert [len(ids) for ids in claimed] == [1] * 6
    assert len({job_id for (job_id,) in claimed}) == 6


def test_a_claim_waits_no_longer_than_the_settings_allow(home: str) -> None:
    with Api(home, claim_wait="0s") as api:
        assert Worker(api).claim(wait=60) == []


def test_claim_looks_behind_jobs_whose_tasks_the_worker_lacks(api: Api, worker: Worker) -> None:
    for task in ("other", "mine"):
        for _ in range(3):
            api.submit(task=task)
    assert [job["task"] for job in worker.claim(limit=1, tasks=["mine"])] == ["mine"]


def test_stop_command_ends_a_wait_and_lasts_until_deregistration(api: Api, worker: Worker) -> None:
    async def stop_later() -> Any:
        claiming = asyncio.create_task(api.send("POST", "/v1/claims", json={"worker": "js-1", "wait": 40}))
        await api.until(api.app.workers)
        await api.app.stop_workers(["js-1"])
        return (await claiming).json()

    assert api.run(stop_later())["command"] == "stop"
    api.submit()
    assert worker.answer() == {"jobs": [], "lease": 30.0, "waited": 0, "command": "stop", "quarantined": False}
    assert worker.extend()["command"] == "stop"

    assert worker.leave() == 0
    assert worker.answer()["command"] == "none"


def test_a_worker_is_listed_with_what_it_says_of_itself(api: Api, worker: Worker) -> None:
    worker.answer(queues={"a": 1, "b": 2}, host="app-1", pid=42, concurrency=3)
    (listed,) = api.get("/v1/workers")["workers"]
    assert listed["id"] == "js-1"
    assert (listed["host"], listed["pid"], listed["concurrency"]) == ("app-1", 42, 3)
    assert (listed["queues"], listed["state"]) == ("a,b", "working")

    api.submit()
    worker.settle(worker.one(), "succeeded")
    worker.extend(running=2, host="app-1", version="2.4.1", memory=1 << 20)
    (listed,) = api.get("/v1/workers")["workers"]
    assert (listed["version"], listed["memory"]) == ("2.4.1", 1 << 20)
    assert (listed["running"], listed["succeeded"], listed["failed"]) == (2, 1, 0)

    worker.leave()
    assert api.get("/v1/workers")["workers"] == []


# ── settling ──────────────────────────────────────────────────────────────────────────────────────────────────────
OUTCOMES: list[tuple[str, dict[str, Any], tuple[str, str | None, int]]] = [
    ("succeeded", {}, ("succeeded", None, 1)),
    ("failed", {"error": ERROR}, ("failed", "error", 1)),
    ("failed", {"error": ERROR, "reason": "timeout"}, ("failed", "timeout", 1)),
    ("failed", {"error": ERROR, "reason": "resource"}, ("failed", "resource", 1)),
    ("dead", {"error": ERROR}, ("dead", "non_retryable", 1)),
    ("dead", {"error": {"message": "no"}, "reason": "payload"}, ("scheduled", "payload", 0)),
    ("dead", {"error": {"message": "no"}, "reason": "no_handler"}, ("scheduled", "no_handler", 0)),
    ("snoozed", {"delay": 60}, ("scheduled", "snoozed", 0)),
    ("cancelled", {}, ("cancelled", "cancelled", 1)),
    ("released", {}, ("queued", "released", 0)),
]


def test_outcome_leaves_the_job_as_a_python_worker_would(api: Api, worker: Worker) -> None:
    for outcome, given, now in OUTCOMES:
        api.submit()
        job = worker.one()
        assert worker.settle(job, outcome, **given) == ("accepted", now[0])
        job_now = stored(api, job)
        assert (job_now["state"], job_now["reason"], job_now["attempts"]) == now, outcome


def test_a_failure_is_kept_with_its_words_and_its_traceback(api: Api, worker: Worker) -> None:
    api.submit()
    job = worker.one()
    worker.settle(job, "failed", error={**ERROR, "traceback": "at mail\0.js\ud83d\ude00" + "x" * 20_000})

    (attempt,) = stored(api, job)["history"]
    assert attempt["error"] == "ConnectionError: refused"
    assert len(attempt["traceback"].encode()) <= 16 * 1024
    assert attempt["traceback"].endswith("x")


def test_a_result_is_kept_as_it_was_given(api: Api, worker: Worker) -> None:
    for result in (None, {"sent": True, "n": [1, 2.5, "ü"]}, [], "text", 0, False):
        api.submit()
        job = worker.one()
        worker.settle(job, "succeeded", result=result)
        assert stored(api, job)["result"] == result


def test_result_that_is_too_large_ends_the_job_dead(home: str) -> None:
    with Api(home, result_limit="1KiB") as api:
        worker = Worker(api)
        api.submit()
        job = worker.one()
        assert worker.settle(job, "succeeded", result="x" * 2000) == ("accepted", "dead")
        assert stored(api, job)["reason"] == "result"


def test_failure_follows_its_retry_policy_until_dead(api: Api, worker: Worker, clock: ManualClock) -> None:
    api.submit(retry="fixed:100", max_attempts=2)
    assert worker.settle(worker.one(), "failed", error=ERROR) == ("accepted", "failed")
    clock.advance(99)
    assert worker.claim() == []
    clock.advance(2)
    job = worker.one()
    assert job["attempt"] == 2
    assert worker.settle(job, "failed", error=ERROR) == ("accepted", "dead")
    assert stored(api, job)["reason"] == "max_attempts"


def test_a_worker_may_say_when_to_try_again(api: Api, worker: Worker, clock: ManualClock) -> None:
    api.submit(retry="fixed:100")
    worker.settle(worker.one(), "failed", error=ERROR, delay=10)
    clock.advance(11)
    job = worker.one()
    worker.settle(job, "snoozed", delay="1h")
    clock.advance(3599)
    assert worker.claim() == []
    clock.advance(2)
    assert worker.one()["attempt"] == 2


def test_a_batch_is_answered_in_its_order(api: Api, worker: Worker, clock: ManualClock) -> None:
    for queue in ("a", "b", "c"):
        api.submit(queue=queue)
    jobs = sorted(worker.claim(), key=lambda job: job["queue"])
    clock.advance(29)
    worker.extend(jobs[0], jobs[2])
    clock.advance(2)

    job_now = worker.settle_all(
        [
            {"token": jobs[2]["token"], "outcome": "succeeded"},
            {"token": jobs[1]["token"], "outcome": "succeeded"},
            {"token": jobs[0]["token"], "outcome": "failed", "error": ERROR},
        ]
    )

    assert [each["id"] for each in job_now] == [jobs[2]["id"], jobs[1]["id"], jobs[0]["id"]]
    assert [(each["verdict"], each["state"]) for each in job_now] == [
        ("accepted", "succeeded"),
        ("lost", "running"),
        ("accepted", "failed"),
    ]
    assert [each["run_at"] is not None for each in job_now] == [False, False, True]


def test_to_settle_twice_is_harmless_and_says_so(api: Api, worker: Worker) -> None:
    unfit = {"error": ERROR, "reason": "payload"}
    for outcome, given in (
        ("succeeded", {}),
        ("failed", {"error": ERROR}),
        ("dead", {"error": ERROR}),
        ("dead", unfit),
    ):
        api.submit()
        job = worker.one()
        assert worker.settle(job, outcome, **given)[0] == "accepted"
        before = stored(api, job)
        assert worker.settle(job, outcome, **given) == ("repeated", before["state"])
        assert worker.settle(job, "released") == ("lost", before["state"])
        assert stored(api, job) == before


def test_a_lease_that_ran_out_is_lost(api: Api, worker: Worker, clock: ManualClock) -> None:
    lost: list[LeaseLostEvent] = []
    api.app.events.subscribe(lost.append, LeaseLostEvent)
    api.submit()
    job = worker.one()
    clock.advance(31)
    assert worker.verdicts(job) == ["lost"]
    assert worker.settle(job, "succeeded") == ("lost", "running")
    assert api.run(recovered(api)) == 1
    again = worker.one()
    assert again["id"] == job["id"]
    assert worker.settle(job, "succeeded") == ("lost", "running")
    assert [(each.job_id, each.worker_id) for each in lost] == [(job["id"], worker.name)] * 2
    assert worker.settle(again, "succeeded") == ("accepted", "succeeded")
    assert stored(api, job)["attempts"] == 2


async def recovered(api: Api) -> int:
    """Settle what has expired, as a sweep does."""
    store = await api.app.open_store()
    expired = await store.maintenance.find_expired_leases(limit=10)
    await store.queueing.settle([decide(job, Lost(), Retry.fixed(1), random.Random(0)) for job in expired])
    return len(expired)


# ── keeping ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_extended_is_kept(api: Api, worker: Worker, clock: ManualClock) -> None:
    api.submit()
    job = worker.one(lease=10)
    for _ in range(3):
        clock.advance(9)
        assert worker.extend(job, lease=10) == {
            "leases": [{"id": job["id"], "verdict": "held"}],
            "lease": 10.0,
            "command": "none",
        }
    assert worker.settle(job, "succeeded") == ("accepted", "succeeded")


def test_cancellation_is_reported_at_the_next_heartbeat(api: Api, worker: Worker) -> None:
    api.submit()
    job = worker.one()
    api.post(f"/v1/jobs/{job['id']}/cancel")
    assert worker.verdicts(job) == ["cancel"]
    assert worker.settle(job, "cancelled") == ("accepted", "cancelled")


def test_a_job_that_was_to_stop_and_failed_is_cancelled(api: Api, worker: Worker) -> None:
    api.submit()
    job = worker.one()
    api.post(f"/v1/jobs/{job['id']}/cancel")
    assert worker.settle(job, "failed", error=ERROR) == ("accepted", "cancelled")


def test_a_lease_is_its_worker_s_alone(api: Api, worker: Worker) -> None:
    api.submit()
    job = worker.one()
    other = Worker(api, "js-2")
    assert other.verdicts(job) == ["lost"]
    assert other.settle(job, "dead", error=ERROR) == ("lost", "running")
    assert other.leave(job) == 0
    assert worker.verdicts(job) == ["held"]


def test_leaving_worker_returns_the_jobs_it_names(api: Api, worker: Worker) -> None:
    for _ in range(3):
        api.submit()
    jobs = worker.claim()
    assert worker.leave(*jobs[:2]) == 2
    assert {job["id"] for job in Worker(api, "js-2").claim()} == {job["id"] for job in jobs[:2]}
    assert stored(api, jobs[0])["attempts"] == 1
    assert worker.settle(jobs[2], "succeeded") == ("accepted", "succeeded")


def test_a_job_that_lost_two_workers_is_run_alone(api: Api, worker: Worker, clock: ManualClock) -> None:
    api.submit(max_attempts=9)
    for _ in range(2):
        assert worker.one()["alone"] is False
        clock.advance(31)
        assert api.run(recovered(api)) == 1
    for _ in range(2):
        api.submit()

    first = worker.answer(running=1, limit=1)
    assert (first["quarantined"], [job["alone"] for job in first["jobs"]]) == (True, [False])
    second = worker.answer(running=2)
    assert (second["quarantined"], [job["alone"] for job in second["jobs"]]) == (True, [False])
    assert worker.answer(running=2)["jobs"] == []
    (poison,) = worker.claim(running=0)
    assert (poison["alone"], poison["attempt"]) == (True, 3)


def test_log_lines_are_kept_with_the_job(api: Api, worker: Worker) -> None:
    api.submit()
    job = worker.one()
    given = [
        {"number": 2, "text": "then\0that", "level": "warning"},
        {"number": 1, "text": "first this", "fields": {"rows": 3}, "ago": 1.5},
    ]
    assert worker.say(job, *given) == {"kept": True, "dropped": 0}
    assert worker.say(job, *given, {"number": 1_000_000, "text": "too many"}) == {"kept": True, "dropped": 1}
    assert Worker(api, "js-2").say(job, *given) == {"kept": False, "dropped": 0}
    worker.settle(job, "failed", error=ERROR)
    assert worker.say(job, {"number": 3, "text": "late"}) == {"kept": False, "dropped": 0}

    lines = api.get(f"/v1/jobs/{job['id']}/lines")["lines"]
    assert [(line["level"], line["text"], line["fields"]) for line in lines] == [
        ("info", "first this", {"rows": 3}),
        ("warning", "then\\x00that", None),
    ]


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_events_equal_those_of_a_python_worker(api: Api, worker: Worker) -> None:
    job_now: list[tuple[str, str]] = []
    kinds = (LeaseAcquired, JobSucceeded, JobFailedEvent, JobDead, JobCancelledEvent, JobReleased, LeaseLostEvent)
    api.app.events.subscribe(lambda event: job_now.append((event.name, event.job_id)), *kinds)
    settled = (
        ("succeeded", {}, "job_succeeded"),
        ("failed", {"error": ERROR}, "job_failed"),
        ("dead", {"error": ERROR}, "job_dead"),
        ("cancelled", {}, "job_cancelled"),
        ("snoozed", {"delay": 60}, "job_released"),
    )
    expected = []
    for outcome, given, name in settled:
        api.submit()
        job = worker.one()
        worker.settle(job, outcome, **given)
        expected += [("lease_acquired", job["id"]), (name, job["id"])]
    assert job_now == expected


def test_client_disconnected_while_claiming_keeps_no_job(api: Api, worker: Worker) -> None:
    """The client goes at the very moment its claim takes a job."""
    job = api.submit()
    body = [{"type": "http.request", "body": b'{"worker": "gone", "wait": 40}'}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/claims",
        "headers": [(b"content-type", b"application/json")],
    }

    async def hang_up() -> None:
        await api.served(scope, receive, send)

    api.run(hang_up())

    again = worker.one()
    assert (again["id"], again["attempt"]) == (job["id"], 1)


# ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_workers_of_other_languages_alone_keep_the_promises(home: str) -> None:
    """Only the API sweeps: what kills its workers ends dead, and the rest goes on."""
    with Api(home, sweep="50ms", poll="100ms") as api:
        poison = api.submit(max_attempts=2)
        for number in (1, 2):
            job = Worker(api, f"js-{number}", lease=1).one(wait=40)
            assert (job["id"], job["attempt"]) == (poison["id"], number)

        async def dead() -> bool:
            return (await api.app.get(poison["id"])).state is JobState.DEAD

        api.run(api.until(dead))
        assert stored(api, poison)["reason"] == "crashed"
