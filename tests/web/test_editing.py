"""Editing a job that waits, and expiry, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.core.models import JobState
from tests.web.client import UNKNOWN_ID, Api


def edit(api: Api, job_id: str, **changes: Any) -> dict[str, Any]:
    answer = api.ask("PATCH", f"/v1/jobs/{job_id}", json=changes)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def instant(**ahead: float) -> str:
    return (datetime.now(UTC) + timedelta(**ahead)).isoformat()


def test_waiting_job_is_edited_in_place(api: Api) -> None:
    job = api.submit(key="k", tags=["a"], payload={"n": 1})
    edited = edit(api, "key:k", payload={"n": 2}, priority=5, queue="other", delay="1h", tags=["b"], expires="2h")

    assert edited["id"] == job["id"]
    assert (edited["payload"], edited["priority"], edited["queue"]) == ({"n": 2}, 5, "other")
    assert (edited["state"], edited["tags"], edited["key"]) == ("scheduled", ["b"], "k")
    assert edited["expires_at"] > edited["run_at"]
    edit(api, job["id"], expires="never", run_at=instant(hours=-1), tags=[])
    story = api.get(f"/v1/jobs/{job['id']}")
    assert (story["state"], story["expires_at"], story["tags"]) == ("queued", None, [])


def test_running_and_ended_jobs_are_a_conflict_with_their_state(api: Api) -> None:
    running = api.submit()["id"]
    api.run(api.claim(running))
    done = api.submit()["id"]
    api.succeed(done)
    dead = api.dead()
    for job_id, word in ((running, "running"), (done, "succeeded"), (dead, "dead")):
        problem = api.refused("PATCH", f"/v1/jobs/{job_id}", 409, json={"priority": 3})
        assert problem["code"] == "conflict"
        assert word in problem["detail"]
    api.refused("PATCH", f"/v1/jobs/{UNKNOWN_ID}", 404, json={"priority": 3})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"prioritty": 1}, "prioritty"),
        ({"priority": 101}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": None}, "priority"),
        ({"queue": "No Queue"}, "queue"),
        ({"queue": 5}, "queue"),
        ({"payload": [1]}, "payload"),
        ({"delay": -1}, "delay"),
        ({"delay": "5"}, "delay"),
        ({"run_at": "tomorrow"}, "run_at"),
        ({"tags": "a"}, "tags"),
        ({"tags": ["a\n"]}, "tags[0]"),
        ({"expires": 0}, "expires"),
        ({"expires": "soon"}, "expires"),
        ({"expires": "2030-01-31T08:00:00"}, "expires"),
        ({"delay": 1, "run_at": "2030-01-31T08:00:00Z"}, "run_at"),
        ({"key": "k"}, "key"),
    ],
)
def test_wrong_edit_names_its_field(api: Api, body: dict[str, Any], field: str) -> None:
    job_id = api.submit()["id"]
    before = api.get(f"/v1/jobs/{job_id}")
    problem = api.refused("PATCH", f"/v1/jobs/{job_id}", 422, json=body)
    assert problem["field"] == field
    assert api.get(f"/v1/jobs/{job_id}") == before


def test_edited_arguments_must_fit_the_task(api: Api) -> None:
    @api.app.task("work")
    async def work(n: int = 1) -> None: ...

    job_id = api.submit()["id"]
    problem = api.refused("PATCH", f"/v1/jobs/{job_id}", 422, json={"payload": {"n": "two"}})
    assert problem["field"] == "payload.n"
    large = {"n": "x" * 300_000}
    assert api.ask("PATCH", f"/v1/jobs/{job_id}", json={"payload": large}).status_code in (413, 422)


def test_payload_and_queue_of_a_unique_job_stay(api: Api) -> None:
    job_id = api.submit(unique="active")["id"]
    for body in ({"payload": {"n": 9}}, {"queue": "other"}):
        assert "unique" in api.refused("PATCH", f"/v1/jobs/{job_id}", 409, json=body)["detail"]
    assert edit(api, job_id, priority=4)["priority"] == 4


# ── expiry ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_expiry_is_shown_and_explained(api: Api) -> None:
    job = api.submit(expires="10m")
    assert api.get(f"/v1/jobs/{job['id']}")["expires_at"] == job["expires_at"]
    codes = [each["code"] for each in api.get(f"/v1/jobs/{job['id']}/why")["reasons"]]
    assert "expires" in codes

    batch = api.post("/v1/jobs/batch", {"jobs": [{"task": "work", "payload": {}, "expires": 3600}]}, 201)
    assert api.get(f"/v1/jobs/{batch['jobs'][0]['id']}")["expires_at"] is not None


def test_job_submitted_after_its_instant_ends(api: Api) -> None:
    job_id = api.submit(expires=instant(hours=-1))["id"]

    async def sweep() -> list[str]:
        store = await api.app.open_store()
        return [each.job_id for each in await store.maintenance.expire_unstarted(limit=10)]

    assert api.run(sweep()) == [job_id]
    job = api.get(f"/v1/jobs/{job_id}")
    assert (job["state"], job["reason"]) == (JobState.CANCELLED, "expired")
    assert [each["code"] for each in api.get(f"/v1/jobs/{job_id}/why")["reasons"]] == ["expired"]
    assert [each["id"] for each in api.get("/v1/jobs?reason=expired")["jobs"]] == [job_id]


@pytest.mark.parametrize(
    "body", [{"expires": 0}, {"expires": -5}, {"expires": "5"}, {"expires": True}, {"expires": 60, "delay": 60}]
)
def test_wrong_expiry_is_refused(api: Api, body: dict[str, Any]) -> None:
    problem = api.refused("POST", "/v1/jobs", 422, json={"task": "work", "payload": {}, **body})
    assert problem["field"] == "expires"
