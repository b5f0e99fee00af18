"""Batches over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.client import UNKNOWN_ID, Api
from tests.web.keyed import Keys, ask, refused

JOB = {"task": "work", "payload": {}}


def create(api: Api, jobs: int, **given: Any) -> dict[str, Any]:
    batch: dict[str, Any] = api.post("/v1/batches", {"jobs": [JOB] * jobs, **given}, 201)
    return batch


def test_batch_is_stored_with_its_jobs_and_callbacks(api: Api) -> None:
    batch = create(api, 2, on_success=[{"task": "report", "payload": {}}], on_end=[JOB], tags=["spring"])
    assert (batch["created"], len(batch["jobs"])) == (True, 2)
    assert api.get(f"/v1/batches/{batch['id']}") == {
        "id": batch["id"],
        "state": "waiting",
        "members": 2,
        "ended": 0,
        "failed": 0,
    }
    shown = api.get(f"/v1/jobs/{batch['id']}")
    assert (shown["task"], shown["tags"], shown["reason"]) == ("holdfast.batch", ["spring"], "dependency")
    waits = api.get(f"/v1/jobs/{batch['id']}/waits")
    assert waits["batch"] == {"members": 2, "ended": 0, "failed": 0}
    assert sorted(each["job_id"] for each in waits["dependencies"]) == sorted(batch["jobs"])
    assert sorted(each["on"] for each in waits["dependents"]) == ["end", "success"]
    tree = api.get(f"/v1/jobs/{batch['id']}/tree")
    assert [each["child"] for each in tree["jobs"]] == [False, True, True, False, False]
    reasons = api.get(f"/v1/jobs/{batch['id']}/why")["reasons"]
    assert (reasons[0]["code"], reasons[0]["text"]) == (
        "batch",
        "it is a batch: 0 of its 2 jobs have ended, 0 have failed",
    )


def test_member_is_added_over_http(api: Api) -> None:
    batch = create(api, 1)["id"]
    api.post("/v1/jobs", {**JOB, "batch": batch}, 201)
    api.post("/v1/jobs/batch", {"jobs": [{**JOB, "batch": batch}, {**JOB, "batch": batch}]}, 201)
    assert api.get(f"/v1/batches/{batch}")["members"] == 4
    api.post(f"/v1/jobs/{batch}/cancel", {}, 200)
    assert batch in str(api.refused("POST", "/v1/jobs", 409, json={**JOB, "batch": batch}))


def test_batch_with_an_id_is_submitted_again_harmlessly(api: Api) -> None:
    asked = {"jobs": [JOB, JOB], "id": UNKNOWN_ID}
    first, again = api.post("/v1/batches", asked, 201), api.post("/v1/batches", asked, 200)
    assert (again["created"], again["jobs"]) == (False, first["jobs"])
    assert api.get(f"/v1/batches/{UNKNOWN_ID}")["members"] == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "jobs"),
        ({"jobs": []}, "jobs"),
        ({"jobs": [{"task": "work"}]}, "jobs[0].payload"),
        ({"jobs": [JOB], "on_end": [{"task": "", "payload": {}}]}, "on_end[0].task"),
        ({"jobs": [JOB], "id": "mine"}, "give a UUID"),
        ({"jobs": [JOB, {**JOB, "batch": UNKNOWN_ID}]}, f"jobs[1].batch: '{UNKNOWN_ID}' is not valid"),
        ({"jobs": [JOB], "on_sucess": [JOB]}, "on_sucess"),
    ],
)
def test_batch_that_cannot_be_is_refused_whole(api: Api, body: dict[str, Any], field: str) -> None:
    assert field in str(api.refused("POST", "/v1/batches", 422, json=body))
    assert api.get("/v1/jobs")["jobs"] == []


def test_member_of_what_is_no_batch_is_refused(api: Api) -> None:
    plain = api.post("/v1/jobs", JOB, 201)["id"]
    for no_batch in (plain, UNKNOWN_ID, "mine"):
        assert "batch" in str(api.refused("POST", "/v1/jobs", 422, json={**JOB, "batch": no_batch}))
    api.refused("GET", f"/v1/batches/{plain}", 404)
    api.refused("GET", f"/v1/batches/{UNKNOWN_ID}", 404)


@pytest.mark.parametrize("relation", ["batch", "after"])
def test_jobs_of_other_queues_are_as_if_not_there(home: str, tmp_path: Path, relation: str) -> None:
    keys = Keys(tmp_path)
    token = keys.make("submit", "read", queues=("mail",))
    with Api(home, keys_file=str(keys.path)) as api:
        made = ask(api, keys.spare, "POST", "/v1/batches", {"jobs": [{**JOB, "queue": "vault"}], "queue": "vault"})
        secret = made.json()["id"]
        answers = []
        for job_id in (secret, UNKNOWN_ID):
            related = {**JOB, "queue": "mail", relation: job_id if relation == "batch" else [job_id]}
            answers.append(ask(api, token, "POST", "/v1/jobs", related))
            refused(ask(api, token, "POST", "/v1/batches", {"jobs": [JOB], "on_end": [related]}), 403, "forbidden")
        assert [each.status_code for each in answers] == [422, 422]
        problems = [{name: text for name, text in each.json().items() if name != "request_id"} for each in answers]
        assert str(problems[0]).replace(secret, "ID") == str(problems[1]).replace(UNKNOWN_ID, "ID")
        refused(ask(api, token, "GET", f"/v1/batches/{secret}"), 404, "not_found")
        mail = ask(api, token, "POST", "/v1/batches", {"jobs": [{**JOB, "queue": "mail"}]})
        assert (
            ask(api, token, "POST", "/v1/jobs", {**JOB, "queue": "mail", "batch": mail.json()["id"]}).status_code == 201
        )
