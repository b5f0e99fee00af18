"""POST /v1/jobs and /v1/jobs/batch: stored once, whole or not at all, and answered so."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.errors import NotFound, Unavailable
from holdfast.core.ids import as_ulid, new_id
from holdfast.stores.base import ClaimRequest
from tests.web.client import JSON, UNKNOWN_ID, Api
from tests.web.working import Worker

FIELDS = {"id", "task", "state", "attempts", "max_attempts", "payload", "run_at", "created_at"}


def test_a_new_job_answers_201_with_the_job(api: Api) -> None:
    answer = api.ask("POST", "/v1/jobs", json={"task": "noop", "payload": {"hello": "world"}})
    job = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/jobs/{job['id']}")
    assert set(job) >= FIELDS
    assert (job["task"], job["state"], job["attempts"], job["max_attempts"]) == ("noop", "queued", 0, 5)
    assert job["payload"] == {"hello": "world"}
    assert job["run_at"] == job["created_at"]
    assert job["created_at"].endswith("Z")
    shown = api.get(f"/v1/jobs/{job['id']}")
    assert {name: shown[name] for name in job} == job


def test_every_option_is_stored_as_submitted(api: Api) -> None:
    given: dict[str, Any] = {
        "queue": "mail",
        "priority": -7,
        "delay": "5m",
        "key": "welcome-42",
        "key_for": 60,
        "max_attempts": 25,
        "timeout": 1.5,
        "retry": "1,5,25",
        "tags": ["spring", "a b"],
        "metadata": {"asked_by": "ada"},
        "id": new_id(),
    }
    job = api.submit(**given)
    kept = ("id", "queue", "priority", "key", "max_attempts", "timeout", "tags", "metadata")
    assert {name: job[name] for name in kept} == {name: given[name] for name in kept}
    assert (job["state"], job["retry"]["delays"]) == ("scheduled", [1, 5, 25])
    assert job["run_at"] > job["created_at"]
    again = api.submit(retry=job["retry"], run_at="2030-01-31T09:00:00+01:00")
    assert (again["retry"], again["run_at"]) == (job["retry"], "2030-01-31T08:00:00.000000Z")


@pytest.mark.parametrize("digit", ["0", "f"])
def test_uuids_that_name_nothing_are_refused_as_ids(api: Api, digit: str) -> None:
    """A job with such an id would be in no list of PostgreSQL, or beside the marks of the event stream."""
    problem = api.refused("POST", "/v1/jobs", 422, json={"task": "work", "payload": {}, "id": digit * 32})
    assert (problem["field"], problem["value"]) == ("id", repr(digit * 32))
    assert "other than all zeros or all ones" in problem["detail"]
    assert api.count() == 0


@pytest.mark.rows("A110")
def test_unlimited_attempts_are_refused_below_a_limit(api: Api) -> None:
    problem = api.refused("POST", "/v1/jobs", 422, json={"task": "work", "payload": {}, "max_attempts": "unlimited"})
    assert (problem["field"], problem["value"]) == ("max_attempts", "'unlimited'")
    assert 'from 1 to 25, or set max_attempts_limit = "unlimited"' in problem["detail"]
    assert api.count() == 0


def test_unlimited_attempts_are_stored_without_a_limit(home: str) -> None:
    with Api(home, max_attempts_limit="unlimited") as api:
        assert api.submit(max_attempts="unlimited")["max_attempts"] is None
        assert api.submit(max_attempts=26)["max_attempts"] == 26


@pytest.mark.rows("A100")
@pytest.mark.parametrize("given", [{}, {"key": "k", "priority": 3, "tags": ["t"]}])
def test_201_shows_the_job_before_any_attempt(api: Api, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    submit = api.app.submit

    async def claimed_at_once(*args: Any, **kwargs: Any) -> Any:
        handle = await submit(*args, **kwargs)
        store = await api.app.open_store()
        await store.queueing.claim(ClaimRequest("w", {"default": 1}, limit=1, lease_for=timedelta(seconds=30)))
        return handle

    monkeypatch.setattr(api.app, "submit", claimed_at_once)
    job = api.submit(**given)
    now = api.get(f"/v1/jobs/{job['id']}")
    assert (now["state"], now["attempts"]) == ("running", 1)
    assert {name: job[name] for name in job if job[name] != now[name]} == {
        "state": "queued",
        "attempts": 0,
        "claims": 0,
        "worker": None,
        "started_at": None,
        "lease_until": None,
    }


def test_known_key_answers_200_with_the_first_job(api: Api) -> None:
    first = api.submit(key="k", payload={"n": 1})
    assert api.submit(200, key="k", payload={"n": 2}, queue="other") == first
    assert api.post("/v1/jobs", {"task": "work", "payload": {}}, 200, Idempotency_Key="k") == first
    assert api.count() == 1


def test_same_work_answers_200_with_the_job_that_is_there(api: Api) -> None:
    policy = {"during": "active", "by": ["task", "queue"], "on_conflict": "replace"}
    first = api.submit(unique=policy, payload={"n": 1}, delay=600)
    again = api.submit(200, unique=policy, payload={"n": 2})
    assert first["unique"] == {"during": "active", "on_conflict": "replace"}
    assert (again["id"], again["payload"], again["state"]) == (first["id"], {"n": 2}, "queued")
    assert api.submit(unique="10m", queue="other")["unique"] == {"during": 600.0, "on_conflict": "keep"}
    assert api.submit(200, unique="10m", queue="other")["queue"] == "other"
    assert api.count() == 2


def test_replay_that_a_unique_key_forbids_names_its_holder(api: Api) -> None:
    first = api.submit(unique="active")["id"]
    api.post(f"/v1/jobs/{first}/cancel", {})
    second = api.submit(unique="active")["id"]
    problem = api.refused("POST", f"/v1/jobs/{first}/replay", 409, json={})
    assert second in problem["detail"]
    reasons = api.get(f"/v1/jobs/{first}/why")["reasons"]
    assert [second in reason["text"] for reason in reasons if reason["code"] == "unique"] == [True]


@pytest.mark.parametrize("policy", ["activ", 0, {}, {"during": "active", "by": ["x"]}, {"during": "1m", "by": []}, []])
def test_bad_policy_of_uniqueness_is_refused(api: Api, policy: Any) -> None:
    problem = api.refused("POST", "/v1/jobs", 422, json={"task": "work", "payload": {}, "unique": policy})
    assert problem["field"].startswith("unique")
    assert api.count() == 0


def test_the_header_goes_before_the_body(api: Api) -> None:
    job = api.post("/v1/jobs", {"task": "work", "payload": {}, "key": "body"}, 201, Idempotency_Key="header")
    assert job["key"] == "header"
    assert api.submit(201, key="body")["id"] != job["id"]


@pytest.mark.parametrize(("length", "status"), [(0, 422), (1, 201), (512, 201), (513, 422)])
def test_a_key_has_1_to_512_characters(api: Api, length: int, status: int) -> None:
    api.post("/v1/jobs", {"task": "work", "payload": {}}, status, Idempotency_Key="k" * length)
    assert api.count() == (status == 201)


def test_a_key_may_be_any_visible_text_in_utf_8(api: Api) -> None:
    headers = [(b"content-type", b"application/json"), (b"idempotency-key", "schlüssel/ü".encode())]
    answer = api.ask("POST", "/v1/jobs", content=b'{"task": "work", "payload": {}}', headers=headers)
    assert (answer.status_code, answer.json()["key"]) == (201, "schlüssel/ü")
    assert api.get("/v1/jobs/key:schl%C3%BCssel%2F%C3%BC")["id"] == answer.json()["id"]


def test_the_same_id_again_is_the_same_job(api: Api) -> None:
    job = api.submit(id=new_id())
    assert api.submit(200, id=job["id"].upper()) == job
    assert api.submit(200, id=as_ulid(job["id"])) == job


def test_64_parallel_posts_of_one_key_make_one_job(api: Api) -> None:
    body = {"task": "work", "payload": {}}

    async def race() -> list[Any]:
        return await asyncio.gather(
            *[api.send("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": "one"}) for _ in range(64)]
        )

    answers = api.run(race())
    assert Counter(answer.status_code for answer in answers) == {201: 1, 200: 63}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert api.count() == 1


def test_a_payload_comes_back_as_it_went_in(api: Api) -> None:
    payload = {
        "unicode": "żółć 🎉 \u0000 \u202e",
        "deep": [[[{"a": []}]]],
        "big": 9007199254740993,
        "huge": 10**300,
        "float": 0.1,
        "tiny": 5e-324,
        "empty": {},
        "$enc": 1,
        "__proto__": None,
        "text": "x" * 100_000,
    }
    job = api.submit(payload=payload)
    assert api.get(f"/v1/jobs/{job['id']}")["payload"] == payload == job["payload"]


def test_a_task_that_is_registered_checks_its_payload(api: Api) -> None:
    @api.app.task("mail.send", queue="mail", max_attempts=3, tags=["mail"])
    async def send(to: str, copies: int = 1) -> None: ...

    problem = api.refused("POST", "/v1/jobs", 422, json={"task": "mail.send", "payload": {"to": "a", "copies": "many"}})
    assert "copies" in problem["detail"]
    job = api.submit(task="mail.send", payload={"to": "a"})
    assert (job["queue"], job["max_attempts"], job["tags"]) == ("mail", 3, ["mail"])


def test_problems_name_fields_as_the_client_named_them(api: Api) -> None:
    @api.app.task("mail.send")
    async def send(to: dict[str, int]) -> None: ...

    def problem(**given: Any) -> dict[str, Any]:
        return api.refused("POST", "/v1/jobs", 422, json={"payload": {}, **given})

    assert problem(task="mail.send", payload={"too": {}})["field"] == "payload.too"
    inside = problem(task="mail.send", payload={"to": {"a b": "x"}})
    assert inside["field"].startswith("payload.to")
    assert inside["detail"].startswith(inside["field"] + ": ")
    command = problem(task="command", payload={"argv": ["ls"]})
    assert (command["field"], 'commands = "argv"' in command["remedy"]) == ("task", True)
    assert problem(type="mail.send")["remedy"].endswith("did you mean task?")
    batch = {"jobs": [{"task": "mail.send", "payload": {"too": 1}}]}
    assert api.refused("POST", "/v1/jobs/batch", 422, json=batch)["field"] == "jobs[0].payload.too"


def test_whole_numbers_may_have_a_decimal_point(api: Api) -> None:
    job = api.submit(priority=2.0, max_attempts=3.0)
    assert (job["priority"], job["max_attempts"]) == (2, 3)
    assert api.post("/v1/jobs/cancel", {"all": True, "limit": 1.0})["count"] == 1
    assert api.refused("POST", "/v1/jobs", 422, json=_job(priority=2.5))["field"] == "priority"


def test_fields_of_command_jobs_stand_in_the_payload(home: str) -> None:
    with Api(home, commands="argv") as api:
        given = {"task": "command", "payload": {"shell": "ls"}}
        assert api.refused("POST", "/v1/jobs", 422, json=given)["field"] == "payload.shell"
        given = {"task": "command", "payload": {"argv": ["ls"], "resources": {"memory": "-1"}}}
        assert api.refused("POST", "/v1/jobs", 422, json=given)["field"] == "payload.resources.memory"
        given = {"task": "command", "payload": {"argv": ["ls"], "sandbox": "tight"}}
        assert api.refused("POST", "/v1/jobs", 422, json=given)["field"] == "payload.sandbox"


def test_worker_in_another_language_gets_the_timeout_of_commands(home: str) -> None:
    with Api(home, commands="argv", command_timeout="1m", timeout="2m") as api:
        api.submit(task="command", payload={"argv": ["ls"]})
        assert [job["timeout"] for job in Worker(api).claim()] == [60]


def test_what_a_job_shows_is_taken_as_it_is_shown(api: Api) -> None:
    assert api.submit()["tags"] == []
    assert api.submit(tags=[])["tags"] == []


def test_settings_may_require_a_key(home: str) -> None:
    with Api(home, key_required=True) as api:
        assert api.refused("POST", "/v1/jobs", 422, json={"task": "w", "payload": {}})["field"] == "Idempotency-Key"
        batch = {"jobs": [{"task": "w", "payload": {}, "key": "a"}, {"task": "w", "payload": {}}]}
        assert api.refused("POST", "/v1/jobs/batch", 422, json=batch)["field"] == "jobs[1].key"
        assert api.count() == 0
        api.submit(key="k")


def test_strict_idempotency_answers_409(home: str) -> None:
    with Api(home, strict_idempotency=True) as api:
        first = api.submit(key="k", payload={"n": 1})
        assert api.submit(200, key="k", payload={"n": 1}) == first
        body = {"task": "work", "payload": {"n": 2}, "key": "k"}
        assert api.refused("POST", "/v1/jobs", 409, json=body)["code"] == "conflict"
        batch = {"jobs": [{"task": "work", "payload": {"n": 3}}, body]}
        assert api.refused("POST", "/v1/jobs/batch", 409, json=batch)["code"] == "conflict"
        assert api.count() == 1


# ── jobs that are gone before the answer ────────────────────────────────────────────────────────────────────────
def _deleting(api: Api, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """So many submitted jobs are deleted as soon as they are stored."""
    submit, left = api.app.submit, [None] * times

    async def submitted(*args: Any, **kwargs: Any) -> Any:
        handle = await submit(*args, **kwargs)
        if left:
            left.pop()
            await api.app.delete(handle.id)
        return handle

    monkeypatch.setattr(api.app, "submit", submitted)


def test_job_deleted_before_the_answer_is_returned_as_stored(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"queue": "mail", "priority": 3, "tags": ["a"], "key": "k", "payload": {"n": 1}}
    there = {name: value for name, value in api.submit(**given).items() if name not in ("id", "run_at", "created_at")}
    api.post("/v1/jobs/delete", {"filter": {"queue": "mail"}})
    _deleting(api, monkeypatch, 1)
    gone = api.submit(**given)
    assert {name: gone[name] for name in there} == there
    assert api.count() == 0
    assert gone["run_at"] == gone["created_at"]


def test_delayed_job_deleted_before_the_answer_is_scheduled(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    _deleting(api, monkeypatch, 2)
    delayed = api.submit(delay=60)
    assert (delayed["state"], delayed["run_at"] > delayed["created_at"]) == ("scheduled", True)
    assert api.submit(run_at="2100-01-01T00:00:00Z")["run_at"] == "2100-01-01T00:00:00.000000Z"


def test_key_whose_job_is_deleted_meanwhile_makes_a_new_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    first = api.submit(key="k")
    _deleting(api, monkeypatch, 1)
    assert api.submit(201, key="k")["id"] != first["id"]
    assert api.count() == 1


def test_job_that_cannot_be_read_back_is_returned_as_stored(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise Unavailable("the store has just gone")

    with monkeypatch.context() as patch:
        patch.setattr(api.app, "get", away)
        job = api.submit(key="k", payload={"n": 1})
        again = api.refused("POST", "/v1/jobs", 503, json={"task": "work", "payload": {}, "key": "k"})
    assert f"; job {job['id']} was stored, but could not be read back" in again["detail"]
    assert (api.get(f"/v1/jobs/{job['id']}")["payload"], api.count()) == ({"n": 1}, 1)


@pytest.mark.parametrize("error", [Unavailable("the store has just gone"), NotFound("pruned")], ids=["away", "pruned"])
@pytest.mark.parametrize("kind", ["run", "fork"])
def test_unread_job_of_a_run_or_fork_is_named_as_stored(
    api: Api, monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception
) -> None:
    api.post("/v1/schedules", {"name": "nightly", "task": "work", "payload": {}, "cron": "0 3 * * *"}, 201)
    dead, get = api.dead(), api.app.get

    async def read_dead_alone(job_id: str) -> Any:
        if job_id == dead:
            return await get(job_id)
        raise error

    path = {"run": "/v1/schedules/nightly/run", "fork": f"/v1/jobs/{dead}/fork"}[kind]
    with monkeypatch.context() as patch:
        patch.setattr(api.app, "get", read_dead_alone)
        detail = api.refused("POST", path, 503, json={})["detail"]
    (stored,) = {each["id"] for each in api.get("/v1/jobs")["jobs"]} - {dead}
    assert f"job {stored} was stored, but could not be read back" in detail


# ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _job(**given: Any) -> dict[str, Any]:
    return {"task": "work", "payload": {}, **given}


def test_a_batch_is_answered_in_its_order(api: Api) -> None:
    first = api.submit(key="b")
    ids = [new_id() for _ in range(4)]
    jobs = [_job(id=ids[0]), _job(id=ids[1], key="b"), _job(id=ids[2], key="c"), _job(id=ids[3], key="c")]
    stored = api.post("/v1/jobs/batch", {"jobs": jobs}, 201)["jobs"]
    assert stored == [
        {"id": ids[0], "created": True},
        {"id": first["id"], "created": False},
        {"id": ids[2], "created": True},
        {"id": ids[2], "created": False},
    ]
    known = {"jobs": [_job(key="b"), _job(key="c")]}
    assert [each["created"] for each in api.post("/v1/jobs/batch", known, 200)["jobs"]] == [False, False]
    assert api.count() == 3


def test_batch_with_one_invalid_job_stores_nothing_and_names_it(api: Api) -> None:
    problem = api.refused("POST", "/v1/jobs/batch", 422, json={"jobs": [_job(), _job(), _job(priority=101)]})
    assert (problem["field"], problem["value"]) == ("jobs[2].priority", "101")
    assert problem["detail"].startswith("jobs[2].priority: 101 is not valid")
    problem = api.refused("POST", "/v1/jobs/batch", 422, json={"jobs": [_job(), {"payload": {}}]})
    assert (problem["field"], problem["code"]) == ("jobs[1].task", "missing")
    assert api.count() == 0


@pytest.mark.parametrize("related", [{"after": [UNKNOWN_ID]}, {"batch": UNKNOWN_ID}], ids=["after", "batch"])
def test_batch_names_the_job_that_is_related_to_none(api: Api, related: dict[str, Any]) -> None:
    jobs = [_job(id=(first := new_id())), _job(after=[first]), _job(**related), _job(**related)]
    problem = api.refused("POST", "/v1/jobs/batch", 422, json={"jobs": jobs})
    field = f"jobs[2].{next(iter(related))}"
    assert (problem["field"], problem["value"]) == (field, f"'{UNKNOWN_ID}'")
    assert problem["detail"].startswith(f"{field}: '{UNKNOWN_ID}' is ")
    assert api.count() == 0


def test_a_batch_holds_1_to_1000_jobs(api: Api) -> None:
    for jobs in ([], [_job()] * 1001):
        assert api.refused("POST", "/v1/jobs/batch", 422, json={"jobs": jobs})["field"] == "jobs"
    assert len(api.post("/v1/jobs/batch", {"jobs": [_job()] * 1000}, 201)["jobs"]) == 1000
    assert api.count() == 1000


def test_a_batch_takes_no_key_of_its_own(api: Api) -> None:
    headers = {**JSON, "Idempotency-Key": "k"}
    assert api.refused("POST", "/v1/jobs/batch", 422, json={"jobs": [_job()]}, headers=headers)
    assert api.count() == 0
