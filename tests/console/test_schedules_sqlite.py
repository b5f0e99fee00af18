"""Pages of schedules: the list, one schedule, its definition, and the runs of a past range."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api
from tests.web.keyed import Keys

FIELDS = {
    "name": "hourly",
    "task": "work",
    "queue": "mail",
    "priority": "-5",
    "tags": "red, blue",
    "cron": "0 * * * *",
    "zone": "Europe/Zurich",
    "every": "",
    "at": "",
    "overlap": "skip",
    "catch_up": "0",
    "jitter": "30s",
    "max_runs": "9",
    "payload": '{"to": "a"}',
}


def _values(page: str) -> dict[str, str]:
    """The fields of the form that edits a schedule."""
    form = page.partition(">Edit…</summary>")[2]
    values = dict(re.findall(r'<input id="(?:\w+)" name="(\w+)"[^>]* value="([^"]*)"', form))
    values |= dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form))
    chosen = re.search(r"<option selected>(\w+)", form)
    payload = re.search(r'name="payload"[^>]*>([^<]*)<', form)
    assert chosen is not None
    assert payload is not None
    return values | {"overlap": chosen[1], "payload": payload[1].replace("&#34;", '"')}


def test_schedule_is_paused_resumed_and_run(open_api: Api, visitor: Visitor, world: World) -> None:
    visitor.act("/schedules/nightly/pause")
    assert open_api.get("/v1/schedules/nightly")["state"] == "paused"
    visitor.act("/schedules/nightly/resume")
    assert open_api.get("/v1/schedules/nightly")["state"] == "active"
    place = visitor.act("/schedules/nightly/run")
    job_id = place.removeprefix("/jobs/").partition("?")[0]
    assert open_api.get(f"/v1/jobs/{job_id}")["task"] == "report"
    assert "The schedule has submitted this job." in visitor.open_page(visitor.landed)


def test_run_that_submits_nothing_says_so(open_api: Api, visitor: Visitor) -> None:
    job = {"task": "work", "payload": {}, "unique": {"during": "active"}}
    open_api.post("/v1/schedules", {**job, "name": "only", "cron": "0 3 * * *"}, 201)
    first = visitor.act("/schedules/only/run")
    again = visitor.act("/schedules/only/run")
    assert (first, again) == (f"{first.partition('?')[0]}?notice=submitted", first.replace("=sub", "=unsub"))
    page = visitor.open_page(visitor.landed)
    assert ("Nothing was submitted" in page, "has submitted this job" in page) == (True, False)


def test_next_runs_are_in_the_zone_of_the_schedule(visitor: Visitor, world: World) -> None:
    page = visitor.open_page("/schedules")
    assert len(re.findall(r"\d{4}-\d\d-\d\d 03:00", page)) == 3
    assert "Europe/Zurich" in page


def test_schedule_is_added_with_every_field(open_api: Api, visitor: Visitor) -> None:
    assert visitor.act("/schedules", FIELDS) == "/schedules/hourly?notice=schedule_added"
    added = open_api.get("/v1/schedules/hourly")
    wanted = {"task": "work", "queue": "mail", "cron": "0 * * * *", "zone": "Europe/Zurich", "overlap": "skip"}
    wanted |= {"catch_up": 0, "jitter": 30.0, "max_runs": 9, "payload": {"to": "a"}}  # type: ignore[dict-item]
    assert {name: added[name] for name in wanted} == wanted
    job = open_api.post("/v1/schedules/hourly/run", status=201)
    assert (job["priority"], job["tags"]) == (-5, ["red", "blue", "schedule:hourly"])
    assert visitor.send("/schedules", FIELDS).status_code == 409


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"cron": "", "zone": "", "every": "10m"}, {"every": 600.0, "cron": None}),
        ({"cron": "", "zone": "", "at": "2099-01-31T08:00:00Z"}, {"at": "2099-01-31T08:00:00.000000Z"}),
    ],
)
def test_schedule_is_added_by_interval_or_instant(
    open_api: Api, visitor: Visitor, given: dict[str, str], shown: dict[str, Any]
) -> None:
    visitor.act("/schedules", {**FIELDS, **given})
    added = open_api.get("/v1/schedules/hourly")
    assert {name: added[name] for name in shown} == shown


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("name", ""),
        ("name", "No Name"),
        ("task", ""),
        ("cron", "soon"),
        ("zone", "Mars/Base"),
        ("every", "10m"),
        ("at", "tomorrow"),
        ("priority", "101"),
        ("catch_up", "-1"),
        ("jitter", "2d"),
        ("max_runs", "0"),
        ("payload", "[1]"),
        ("overlap", "maybe"),
    ],
)
def test_schedule_that_cannot_be_is_refused(open_api: Api, visitor: Visitor, field: str, text: str) -> None:
    answer = visitor.send("/schedules", {**FIELDS, field: text})
    assert (answer.status_code, field in answer.text.partition("<h1>")[2]) == (422, True), answer.text
    assert open_api.get("/v1/schedules")["schedules"] == []


def test_form_of_a_schedule_undoes_no_change_that_another_operator_made(open_api: Api, visitor: Visitor) -> None:
    visitor.act("/schedules", FIELDS)
    values = _values(visitor.open_page("/schedules/hourly"))
    visitor.act("/schedules", {**values, "cron": "30 4 * * *"})
    answer = visitor.send("/schedules", {**values, "queue": "crm"})
    assert (answer.status_code, "cron changed after this form was opened" in answer.text) == (409, True)
    assert open_api.get("/v1/schedules/hourly")["queue"] == "mail"
    visitor.act("/schedules/hourly/delete")
    assert visitor.send("/schedules", {**values, "queue": "crm"}).status_code == 404
    assert open_api.get("/v1/schedules")["schedules"] == []


def test_form_of_a_schedule_keeps_what_is_not_changed(open_api: Api, visitor: Visitor) -> None:
    visitor.act("/schedules", FIELDS)
    open_api.post("/v1/schedules/hourly/pause")
    before = open_api.get("/v1/schedules/hourly")
    values = _values(visitor.open_page("/schedules/hourly"))
    assert visitor.act("/schedules", values) == "/schedules/hourly?notice=schedule_changed"
    after = open_api.get("/v1/schedules/hourly")
    assert {**after, "revision": 0} == {**before, "revision": 0}
    assert open_api.post("/v1/schedules/hourly/run", status=201)["priority"] == -5
    visitor.act("/schedules", {**values, "cron": "30 4 * * *"})
    assert open_api.get("/v1/schedules/hourly")["cron"] == "30 4 * * *"


def test_schedule_with_further_options_is_not_edited_here(open_api: Api, visitor: Visitor) -> None:
    body = {"name": "hourly", "task": "work", "payload": {}, "cron": "0 * * * *"}
    open_api.post("/v1/schedules", {**body, "timeout": 30}, 201)
    page = visitor.open_page("/schedules/hourly")
    assert (">Edit…<" in page, "schedule add --replace" in page) == (False, True)


def test_schedule_is_deleted_and_its_jobs_stay(open_api: Api, visitor: Visitor, world: World) -> None:
    job = open_api.post("/v1/schedules/nightly/run", status=201)
    assert visitor.act("/schedules/nightly/delete") == "/schedules?notice=schedule_removed"
    assert open_api.get("/v1/schedules")["schedules"] == []
    assert open_api.get(f"/v1/jobs/{job['id']}")["state"] == "queued"


def test_page_shows_twenty_runs_in_the_zone(visitor: Visitor, world: World) -> None:
    page = visitor.open_page("/schedules/nightly")
    assert len(re.findall(r">\d{4}-\d\d-\d\d 03:00</time>", page)) == 20
    assert "In Europe/Zurich" in page


def test_backfill_counts_first_and_then_submits(open_api: Api, visitor: Visitor, world: World) -> None:
    days = {"start": "2020-01-01T03:00", "end": "2020-01-04T03:00"}
    preview = visitor.open_page(f"/schedules/nightly/backfill?{urlencode(days)}")
    assert "<strong>3 runs</strong> will be submitted." in preview
    assert open_api.get("/v1/jobs", tag="schedule:nightly")["jobs"] == []
    fields = dict(re.findall(r'name="(start|end)" value="([^"]*)"', preview))
    assert fields == {"start": "2020-01-01T03:00:00+01:00", "end": "2020-01-04T03:00:00+01:00"}
    assert visitor.act("/schedules/nightly/backfill/run", fields) == "/schedules/nightly?notice=backfilled"
    jobs = open_api.get("/v1/jobs", tag="schedule:nightly")["jobs"]
    ticks = {f"2020-01-0{day}T02:00:00Z" for day in (1, 2, 3)}
    assert {each["metadata"]["scheduled_for"] for each in jobs} == ticks
    wider = visitor.open_page("/schedules/nightly/backfill?start=2020-01-01T03:00&end=2020-01-05T03:00")
    assert ("<strong>1 run</strong>" in wider, "3 have a job already" in wider) == (True, True)
    assert "All 3 runs have a job already." in visitor.open_page(f"/schedules/nightly/backfill?{urlencode(days)}")


@pytest.mark.parametrize(
    ("start", "end", "field"),
    [
        ("", "2020-01-02T00:00", "start"),
        ("2020-01-02T00:00", "2020-01-01T00:00", "end"),
        ("2020-01-02T00:00", "2099-01-01T00:00", "end"),
        ("soon", "2020-01-02T00:00", "start"),
        ("1990-01-01T00:00", "2020-01-01T00:00", "start"),
    ],
)
def test_backfill_of_no_past_range_is_refused(visitor: Visitor, world: World, start: str, end: str, field: str) -> None:
    answer = visitor.ask("GET", "/schedules/nightly/backfill", params={"start": start, "end": end})
    assert (answer.status_code, f"<p>{field}: " in answer.text) == (422, True), answer.text


def test_backfill_is_bounded(open_api: Api, visitor: Visitor) -> None:
    visitor.act("/schedules", {**FIELDS, "cron": "* * * * *", "max_runs": ""})
    range_ = {"start": "2020-01-01T00:00", "end": "2020-01-08T00:00"}
    answer = visitor.ask("GET", "/schedules/hourly/backfill", params=range_)
    assert (answer.status_code, "at most 10,000 runs" in answer.text) == (422, True)


def test_schedules_behind_foreign_ones_are_shown(open_api: Api, keys: Keys) -> None:
    body = {"task": "work", "payload": {}, "cron": "0 * * * *"}
    for number in range(120):
        open_api.post("/v1/schedules", {**body, "name": f"a-{number:03}", "queue": "vault"}, 201)
    for number in range(103):
        open_api.post("/v1/schedules", {**body, "name": f"b-{number:03}", "queue": "own"}, 201)
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", queues=("own",)))
    first = visitor.open_page("/schedules")
    [following] = re.findall(r'rel="next" href="/console(/schedules[^"]*)"', first)
    second = visitor.open_page(following)
    shown = [re.findall('id="schedule-([ab])', page) for page in (first, second)]
    assert shown == [["b"] * 100, ["b"] * 3]
    assert 'rel="next"' not in second


@pytest.mark.parametrize("kind", ["schedules", "limits"])
def test_foreign_definition_looks_like_a_missing_one(open_api: Api, keys: Keys, world: World, kind: str) -> None:
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "operate", "submit", queues=("own",)))
    foreign, missing = ("nightly", "nothing") if kind == "schedules" else ("crm", "api")
    shapes = set()
    for name in (foreign, missing):
        page = visitor.open_page(f"/{kind}/{name}", 404)
        request = page.partition("Request <code>")[2].partition("<")[0]
        shapes.add(page.replace(name, "NAME").replace(request, "ID"))
    assert len(shapes) == 1


def test_key_without_submit_adds_no_schedule(open_api: Api, keys: Keys, world: World) -> None:
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "operate"))
    assert "Add a schedule" not in visitor.open_page("/schedules")
    assert visitor.send("/schedules", FIELDS).status_code == 403
    days = {"start": "2020-01-01", "end": "2020-01-03"}
    assert visitor.send("/schedules/nightly/backfill/run", days).status_code == 403
    visitor.open_page(f"/schedules/nightly/backfill?{urlencode(days)}", 403)
    visitor.act("/schedules/nightly/delete")
