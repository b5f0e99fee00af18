"""Schedules over HTTP: added, shown, paused, run and removed; what is refused, and to which keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import JobHandle
from holdfast.core.alerts import encode_alerts
from holdfast.core.errors import NotFound, QueueFull, Unavailable
from holdfast.core.models import NewJob
from holdfast.core.schedule import ALERTS_SCHEDULE, ScheduleChange
from tests.web.client import Api
from tests.web.keyed import Keys, ask, refused

NIGHTLY = {"name": "nightly", "task": "work", "payload": {"team": "all"}, "cron": "0 3 * * *", "zone": "Europe/Zurich"}


def test_schedule_is_added_shown_listed_and_removed(api: Api) -> None:
    added = api.post("/v1/schedules", {**NIGHTLY, "queue": "mail", "overlap": "skip", "jitter": "30s"}, 201)
    shown = api.get("/v1/schedules/nightly")
    assert shown == added
    assert (shown["state"], shown["queue"], shown["payload"], shown["overlap"], shown["jitter"], shown["owner"]) == (
        "active",
        "mail",
        {"team": "all"},
        "skip",
        30.0,
        None,
    )
    assert len(shown["next_runs"]) == 5
    assert all("T03:00:00+0" in each for each in shown["next_runs"])
    assert api.get("/v1/schedules")["schedules"] == [shown]
    assert api.get("/v1/schedules/nightly/next", count=2)["runs"] == shown["next_runs"][:2]
    assert api.ask("DELETE", "/v1/schedules/nightly").status_code == 204
    assert api.get("/v1/schedules") == {"schedules": []}
    assert "schedule" in api.refused("GET", "/v1/schedules/nightly", 404)["detail"]


def test_schedules_are_listed_in_pages(api: Api) -> None:
    for n in range(3):
        api.post("/v1/schedules", {**NIGHTLY, "name": f"s-{n}"}, 201)
    names = [each["name"] for each in api.get("/v1/schedules", limit=2)["schedules"]]
    assert names == ["s-0", "s-1"]
    assert [each["name"] for each in api.get("/v1/schedules", after="s-1")["schedules"]] == ["s-2"]


def test_name_that_exists_is_a_conflict_unless_it_is_replaced(api: Api) -> None:
    api.post("/v1/schedules", NIGHTLY, 201)
    assert api.refused("POST", "/v1/schedules", 409, json=NIGHTLY)["code"] == "conflict"
    changed = api.post("/v1/schedules", {**NIGHTLY, "cron": "0 4 * * *", "replace": True})
    assert changed["cron"] == "0 4 * * *"
    assert "T04:00" in changed["next_run"]


def test_paused_schedule_has_no_next_run_until_it_is_resumed(api: Api) -> None:
    added = api.post("/v1/schedules", NIGHTLY, 201)
    paused = api.post("/v1/schedules/nightly/pause")
    assert (paused["state"], paused["next_run"], paused["next_runs"]) == ("paused", None, [])
    resumed = api.post("/v1/schedules/nightly/resume", {})
    assert (resumed["state"], resumed["next_run"]) == ("active", added["next_run"])


def test_record_of_alerts_is_no_schedule(api: Api) -> None:
    async def read_record() -> object:
        return await (await api.app.open_store()).schedules.read_schedules(ALERTS_SCHEDULE)

    async def write_record() -> None:
        await (await api.app.open_store()).schedules.write_schedule(ScheduleChange(encode_alerts({}), 0))

    async def refuse_changes() -> None:
        for change in (api.app.schedules.pause, api.app.schedules.resume, api.app.schedules.run):
            with pytest.raises(NotFound):
                await change(ALERTS_SCHEDULE)

    api.run(write_record())
    kept = api.run(read_record())
    path = f"/v1/schedules/{ALERTS_SCHEDULE}"
    for method, place in [("GET", ""), ("GET", "/next"), ("DELETE", "")]:
        api.refused(method, path + place, 404)
    for place in ("run", "pause", "resume"):
        api.refused("POST", f"{path}/{place}", 404)
    days = {"start": "2020-01-01T00:00:00Z", "end": "2020-01-04T00:00:00Z"}
    api.refused("POST", f"{path}/backfill", 404, json=days)
    api.run(refuse_changes())
    added = api.refused("POST", "/v1/schedules", 422, json={**NIGHTLY, "name": ALERTS_SCHEDULE, "replace": True})
    assert "give it another name" in str(added)
    assert (api.run(read_record()), api.count()) == (kept, 0)


def test_run_submits_a_job_now(api: Api) -> None:
    api.post("/v1/schedules", {**NIGHTLY, "tags": ["a"]}, 201)
    job = api.post("/v1/schedules/nightly/run", status=201)
    assert (job["state"], job["task"], job["tags"]) == ("queued", "work", ["a", "schedule:nightly"])
    assert job["metadata"]["schedule"] == "nightly"
    assert api.get("/v1/jobs", tag="schedule:nightly")["jobs"][0]["id"] == job["id"]


def test_run_that_a_unique_key_holds_back_answers_with_the_job_that_has_it(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    mail = keys.make("read", "operate", "submit", queues=("mail",))
    unique = {"unique": {"during": "active", "by": ["args"]}}
    with Api(home, keys_file=str(keys.path)) as api:
        for name, queue in (("nightly", "vault"), ("mailing", "mail")):
            body = {**NIGHTLY, **unique, "name": name, "queue": queue}
            assert ask(api, keys.spare, "POST", "/v1/schedules", body).status_code == 201
        first, again = (ask(api, keys.spare, "POST", "/v1/schedules/nightly/run") for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json()["id"] == first.json()["id"]
        problem = refused(ask(api, mail, "POST", "/v1/schedules/mailing/run"), 409, "conflict")
        assert first.json()["id"] not in str(problem)
        assert api.count() == 1


def test_backfill_submits_each_run_of_a_range_once(api: Api) -> None:
    api.post("/v1/schedules", {**NIGHTLY, "zone": "UTC"}, 201)
    days = {"start": "2020-01-01T00:00:00Z", "end": "2020-01-04T00:00:00Z"}
    planned = api.post("/v1/schedules/nightly/backfill", {**days, "dry_run": True})
    assert api.count() == 0
    first = api.post("/v1/schedules/nightly/backfill", days)
    assert (len(first["created"]), first["existing"]) == (3, [])
    assert planned == first
    again = api.post("/v1/schedules/nightly/backfill", {**days, "end": "2020-01-05T00:00:00Z"})
    assert (len(again["created"]), again["existing"]) == (1, first["created"])


@pytest.mark.parametrize("error", [Unavailable("the store has just gone"), QueueFull("it is full")])
def test_backfill_that_stops_halfway_says_what_is_stored(
    api: Api, monkeypatch: pytest.MonkeyPatch, error: Unavailable | QueueFull
) -> None:
    api.post("/v1/schedules", {**NIGHTLY, "zone": "UTC"}, 201)
    days = {"start": "2020-01-01T00:00:00Z", "end": "2020-01-04T00:00:00Z"}
    submit, submitted = api.app.submit, list[str]()

    async def submit_two(job: NewJob, *, connection: Any = None) -> JobHandle[Any]:
        if len(submitted) == 2:
            raise error
        submitted.append(job.id)
        return await submit(job, connection=connection)

    with monkeypatch.context() as patch:
        patch.setattr(api.app, "submit", submit_two)
        problem = api.refused("POST", "/v1/schedules/nightly/backfill", error.http_status, json=days)
    assert problem["detail"].endswith("; 2 of 3 jobs are stored; repeat the backfill to submit the others")
    again = api.post("/v1/schedules/nightly/backfill", days)
    assert (len(again["created"]), again["existing"]) == (1, submitted)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("schedule", {"cron": None}),
        ("schedule", {"every": 60}),
        ("cron", {"cron": "* * * *"}),
        ("cron", {"cron": "61 * * * *"}),
        ("cron", {"cron": "0 0 31 2 *"}),
        ("cron", {"cron": "x" * 201}),
        ("zone", {"zone": "Mars/Olympus"}),
        ("every", {"cron": None, "zone": None, "every": 0}),
        ("every", {"cron": None, "zone": None, "every": "often"}),
        ("at", {"cron": None, "zone": None, "at": "2001-01-01T00:00:00Z"}),
        ("catch_up", {"catch_up": 101}),
        ("overlap", {"overlap": "never"}),
        ("jitter", {"jitter": "3d"}),
        ("max_runs", {"max_runs": 0}),
        ("name", {"name": "No Name"}),
        ("task", {"task": ""}),
        ("key", {"key": "k"}),
        ("priority", {"priority": 1000}),
        ("delay", {"delay": 5}),
    ],
)
def test_bad_schedule_is_refused_with_its_field(api: Api, field: str, given: dict[str, Any]) -> None:
    body = {name: value for name, value in {**NIGHTLY, **given}.items() if value is not None}
    problem = api.refused("POST", "/v1/schedules", 422, json=body)
    assert problem["field"] == field
    assert problem["remedy"]
    assert api.get("/v1/schedules") == {"schedules": []}


@pytest.mark.parametrize(
    "given",
    [
        {"start": "2030-01-02T00:00:00Z", "end": "2030-01-01T00:00:00Z"},
        {"start": "yesterday", "end": "2030-01-01T00:00:00Z"},
        {"start": "1990-01-01T00:00:00Z", "end": "2020-01-01T00:00:00Z"},
        {"start": "2035-01-01T00:00:00Z", "end": "2035-01-04T00:00:00Z"},
    ],
)
def test_bad_backfill_is_refused_and_submits_nothing(api: Api, given: dict[str, str]) -> None:
    api.post("/v1/schedules", NIGHTLY, 201)
    api.refused("POST", "/v1/schedules/nightly/backfill", 422, json=given)
    assert api.count() == 0


def test_key_needs_its_scopes_and_its_queue(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    reader, operator = keys.make("read"), keys.make("operate")
    both, other = keys.make("operate", "submit"), keys.make("operate", "submit", "read", queues=("other",))
    with Api(home, keys_file=str(keys.path)) as api:
        refused(ask(api, reader, "POST", "/v1/schedules", NIGHTLY), 403, "forbidden")
        refused(ask(api, operator, "POST", "/v1/schedules", NIGHTLY), 403, "forbidden")
        refused(ask(api, other, "POST", "/v1/schedules", NIGHTLY), 403, "forbidden")
        refused(ask(api, both, "POST", "/v1/schedules", {**NIGHTLY, "task": "command"}), 422, "invalid")
        added = ask(api, both, "POST", "/v1/schedules", NIGHTLY)
        assert (added.status_code, added.json()["payload"]) == (201, {})  # who may not read sees no payload
        assert ask(api, reader, "GET", "/v1/schedules/nightly").json()["payload"] == {"team": "all"}
        assert ask(api, other, "GET", "/v1/schedules").json() == {"schedules": []}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/run")):
            refused(ask(api, other, method, f"/v1/schedules/nightly{path}"), 404, "not_found")
        mine = {**NIGHTLY, "queue": "other", "replace": True}
        refused(ask(api, other, "POST", "/v1/schedules", mine), 409, "conflict")
        refused(ask(api, operator, "POST", "/v1/schedules/nightly/run"), 403, "forbidden")
        refused(ask(api, reader, "POST", "/v1/schedules/nightly/pause"), 403, "forbidden")
        assert ask(api, operator, "POST", "/v1/schedules/nightly/pause").status_code == 200


def test_hidden_fields_of_the_payload_stay_hidden(home: str) -> None:
    with Api(home, redacted="payload.team") as api:
        assert "all" not in str(api.post("/v1/schedules", NIGHTLY, 201)["payload"])


def test_schedule_at_an_instant_in_the_future_runs_once(api: Api) -> None:
    at = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    body = {"name": "once", "task": "work", "payload": {}, "at": at}
    added = api.post("/v1/schedules", body, 201)
    assert len(added["next_runs"]) == 1
