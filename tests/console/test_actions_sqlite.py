"""Each action of the console, its effect in the store, and its audit record."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from holdfast.core.lifecycle import Failed
from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api
from tests.web.keyed import Keys, id_of


def _job(api: Api, job_id: str) -> Any:
    return api.get(f"/v1/jobs/{job_id}")


def test_cancel_ends_a_waiting_job(open_api: Api, visitor: Visitor, world: World) -> None:
    assert visitor.act(f"/jobs/{world.queued}/cancel") == f"/jobs/{world.queued}?notice=cancelled"
    assert _job(open_api, world.queued)["state"] == "cancelled"
    assert "The job is cancelled" in visitor.open_page(visitor.landed)


def test_cancel_asks_a_running_job_to_stop(open_api: Api, visitor: Visitor, world: World) -> None:
    visitor.act(f"/jobs/{world.running}/cancel")
    assert _job(open_api, world.running)["cancelling"]
    assert "It was asked to stop." in visitor.open_page(f"/jobs/{world.running}")


def test_replay_queues_a_dead_job_again(open_api: Api, visitor: Visitor, world: World) -> None:
    assert visitor.act(f"/jobs/{world.dead}/replay") == f"/jobs/{world.dead}?notice=replayed"
    assert _job(open_api, world.dead)["state"] == "queued"


def test_replay_of_a_succeeded_job_is_forced(open_api: Api, visitor: Visitor, world: World) -> None:
    open_api.succeed(world.queued, "1")
    assert "It has succeeded. Run it again?" in visitor.open_page(f"/jobs/{world.queued}")
    assert visitor.send(f"/jobs/{world.queued}/replay").status_code == 409
    visitor.act(f"/jobs/{world.queued}/replay", {"force": "1"})
    assert _job(open_api, world.queued)["state"] == "queued"


def test_replay_takes_a_changed_payload(open_api: Api, visitor: Visitor, world: World) -> None:
    assert "&#34;list&#34;" in visitor.open_page(f"/jobs/{world.dead}").partition("<textarea")[2]
    visitor.act(f"/jobs/{world.dead}/replay", {"payload": '{"to": "ä", "number": 12345678901234567890123}'})
    job = _job(open_api, world.dead)
    assert (job["state"], job["payload"]) == ("queued", {"to": "ä", "number": 12345678901234567890123})


@pytest.mark.parametrize("payload", ["[1]", "{", '{"a": 1, "a": 2}', "nothing"])
def test_payload_that_is_no_object_is_refused(open_api: Api, visitor: Visitor, world: World, payload: str) -> None:
    answer = visitor.send(f"/jobs/{world.dead}/replay", {"payload": payload})
    assert (answer.status_code, "payload" in answer.text) == (422, True)
    assert _job(open_api, world.dead)["state"] == "dead"


def test_copy_is_a_new_job(open_api: Api, visitor: Visitor, world: World) -> None:
    place = visitor.act(f"/jobs/{world.dead}/copy", {"payload": '{"to": "b"}'})
    copy = _job(open_api, place.removeprefix("/jobs/").partition("?")[0])
    assert (copy["state"], copy["payload"], copy["forks"]) == ("queued", {"to": "b"}, world.dead)
    assert _job(open_api, world.dead)["state"] == "dead"
    assert "a copy of the other one" in visitor.open_page(visitor.landed)


def test_delete_removes_a_job_but_no_running_one(open_api: Api, visitor: Visitor, world: World) -> None:
    assert visitor.act(f"/jobs/{world.dead}/delete") == "/jobs?notice=deleted"
    assert open_api.ask("GET", f"/v1/jobs/{world.dead}").status_code == 404
    answer = visitor.send(f"/jobs/{world.running}/delete")
    assert (answer.status_code, "cancel it first" in answer.text) == (409, True)


def test_job_that_was_replayed_while_the_question_was_open_is_not_deleted(
    open_api: Api, visitor: Visitor, world: World
) -> None:
    form = visitor.open_page(f"/jobs/{world.dead}").partition(f'/jobs/{world.dead}/delete"')[2].partition("</form>")[0]
    shown = dict(re.findall(r'name="(state)" value="(\w+)"', form))
    open_api.post(f"/v1/jobs/{world.dead}/replay")
    answer = visitor.send(f"/jobs/{world.dead}/delete", shown)
    assert (answer.status_code, "it is queued now" in answer.text) == (409, True)
    assert _job(open_api, world.dead)["state"] == "queued"


def test_errors_lead_to_a_replay_of_their_jobs(open_api: Api, visitor: Visitor) -> None:
    ids = [open_api.dead(f"ValueError: card {number} declined") for number in range(3)]
    other = open_api.dead("KeyError: 'city'")
    page = visitor.open_page("/errors")
    assert "4 dead and 0 failed jobs in 2 errors." in page
    group = _job(open_api, ids[0])["error_group"]
    assert f"/errors/{group}" in page
    page = visitor.open_page(f"/errors/{group}")
    assert ("card 2 declined" in page, "3 jobs</a>" in page, "Retry failed jobs" in page) == (True, True, False)
    chosen = {"error_group": group, "state": "dead", "action": "replay"}
    assert "<strong>3 jobs</strong> will be queued again" in visitor.preview(chosen)
    assert "<strong>3</strong> jobs are queued again" in visitor.change_many(chosen)
    assert 'href="/console/errors">Errors' in visitor.open_page(visitor.landed)
    assert [_job(open_api, each)["state"] for each in (*ids, other)] == ["queued"] * 3 + ["dead"]
    assert "No failed job has this error any more." in visitor.open_page(f"/errors/{group}")
    assert visitor.ask("GET", "/errors/x").status_code == 404


def test_errors_are_paged_and_ordered_by_their_jobs(open_api: Api, visitor: Visitor) -> None:
    often = [open_api.dead("OftenError: often") for _ in range(3)]
    rare = [open_api.dead(f"RareError: {first}{second}") for first in "abcde" for second in "abcdefghijk"]
    groups = [_job(open_api, each)["error_group"] for each in (*rare[::-1], often[0])]
    page = visitor.open_page("/errors")
    assert "58 dead and 0 failed jobs in 56 errors." in page
    assert re.findall(r'id="error-(\w+)"', page) == groups[:50]
    [more] = re.findall(r'href="/console(/errors\?[^"]*)" rel="next"', page)
    second = visitor.open_page(more)
    assert re.findall(r'id="error-(\w+)"', second) == groups[50:]
    assert ('rel="next"' in second, 'href="/console/errors">First errors' in second) == (False, True)
    [most] = re.findall(r'href="/console(/errors\?[^"]*)">Most jobs first', page)
    page = visitor.open_page(most)
    assert re.findall(r'id="error-(\w+)"', page) == [groups[-1], *groups[:49]]
    [more] = re.findall(r'href="/console(/errors\?[^"]*)" rel="next"', page)
    assert re.findall(r'id="error-(\w+)"', visitor.open_page(more.replace("&amp;", "&"))) == groups[49:55]


def test_unstarted_jobs_of_an_error_are_retried_at_once(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit()["id"]
    open_api.run(open_api.end(job_id, Failed(error="ConnectionError: smtp-1 refused")))
    group = _job(open_api, job_id)["error_group"]
    page = visitor.open_page(f"/errors/{group}")
    assert ("1 job waits for its next attempt" in page, "Replay dead jobs" in page) == (True, False)
    chosen = {"error_group": group, "state": "failed", "action": "replay"}
    assert "<strong>1</strong> job is queued again" in visitor.change_many(chosen)
    assert _job(open_api, job_id)["state"] == "queued"


def test_rate_that_cannot_be_is_asked_for_again(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.dead("ValueError: card 1 declined")
    chosen = {"state": "dead", "action": "replay", "rate": "100 per second"}
    answer = visitor.send("/bulk/run", chosen)
    page = visitor.open_page(answer.headers["location"].removeprefix("/console"), 422)
    for text in ('value="100 per second"', "rate: &#39;100 per second&#39; is not valid", "1 job</strong>"):
        assert text in page
    assert _job(open_api, job_id)["state"] == "dead"
    assert visitor.send("/bulk/run", {**chosen, "rate": "100/s"}).status_code == 303
    assert _job(open_api, job_id)["state"] in ("queued", "scheduled")


def test_queue_is_paused_and_resumed(open_api: Api, visitor: Visitor, world: World) -> None:
    for action, paused in (("pause", True), ("resume", False)):
        visitor.act(f"/queues/mail/{action}")
        assert open_api.get("/v1/queues/mail")["paused"] is paused


def test_pause_is_ended_where_the_overview_reports_it(
    open_api: Api, visitor: Visitor, keys: Keys, world: World
) -> None:
    visitor.act("/queues/mail/pause")
    visitor.act("/limits/crm/pause", {"for": "10m"})
    reader = Visitor(open_api)
    reader.sign_in(keys.make("read"))
    page = reader.open_page()
    assert ("queue mail is paused" in page, "limit crm is paused" in page, "/resume" in page) == (True, True, False)
    page = visitor.open_page()
    assert set(re.findall(r'action="/console(/[a-z]+/[a-z]+/resume)"', page)) == {
        "/queues/mail/resume",
        "/limits/crm/resume",
    }
    back = dict(re.findall(r'name="(back)" value="([^"]*)"', page))
    assert visitor.act("/queues/mail/resume", back) == "?notice=queue_resumed"
    assert "The queue is resumed." in visitor.open_page(visitor.landed)
    assert visitor.act("/limits/crm/resume", back) == "?notice=limit_resumed"
    assert "paused until" not in visitor.open_page()
    assert open_api.get("/v1/queues/mail")["paused"] is False


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example/", "/sign-out", "..", "jobs", "overview/x"])
def test_form_leads_to_no_address_that_it_names(visitor: Visitor, back: str) -> None:
    assert visitor.act("/queues/mail/resume", {"back": back}) == "/queues?notice=queue_resumed"


@pytest.mark.parametrize(("drain", "state"), [("", "stopping"), ("1", "draining")])
def test_worker_is_asked_to_stop(open_api: Api, visitor: Visitor, world: World, drain: str, state: str) -> None:
    visitor.act(f"/workers/{world.worker}/stop", {"drain": drain})
    assert [each["state"] for each in open_api.get("/v1/workers")["workers"]] == [state]
    assert state in visitor.open_page("/workers")


def test_limit_is_changed_paused_and_resumed(open_api: Api, visitor: Visitor, world: World) -> None:
    visitor.act("/limits/crm/change", {"concurrency": "7", "rate": "", "burst": "", "depth": "100"})
    limit = open_api.get("/v1/limits/crm")
    assert (limit["concurrency"], limit["rate"], limit["depth"]) == (7, None, 100)
    visitor.act("/limits/crm/pause", {"for": "10m"})
    assert open_api.get("/v1/limits/crm")["buckets"][0]["paused"]
    assert "limit crm is paused until" in visitor.open_page()
    visitor.act("/limits/crm/resume")
    assert "limit crm is paused until" not in visitor.open_page()
    assert not open_api.get("/v1/limits/crm")["buckets"][0]["paused"]
    answer = visitor.send("/limits/crm/change", {"concurrency": "many"})
    assert (answer.status_code, "concurrency" in answer.text) == (422, True)


def test_limit_is_added_and_deleted(open_api: Api, visitor: Visitor) -> None:
    fields = {"name": "api", "queue": "", "task": "api.call", "by": "args.team", "concurrency": "3", "rate": "10/s"}
    assert visitor.act("/limits", fields) == "/limits/api?notice=limit_added"
    limit = open_api.get("/v1/limits/api")
    assert (limit["queue"], limit["task"], limit["by"]) == (None, "api.call", "args.team")
    assert (limit["concurrency"], limit["rate"], limit["depth"]) == (3, "10/s", None)
    assert visitor.send("/limits", fields).status_code == 409
    assert visitor.act("/limits/api/delete") == "/limits?notice=limit_removed"
    assert open_api.get("/v1/limits")["limits"] == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "", "queue": "mail", "concurrency": "1"}, "name"),
        ({"name": "x", "queue": "mail", "task": "a", "concurrency": "1"}, "task"),
        ({"name": "x", "queue": "mail", "concurrency": "0"}, "concurrency"),
        ({"name": "x", "queue": "mail", "rate": "often"}, "rate"),
        ({"name": "x", "concurrency": "1"}, "rate"),
    ],
)
def test_limit_that_cannot_be_is_refused(open_api: Api, visitor: Visitor, fields: dict[str, str], named: str) -> None:
    answer = visitor.send("/limits", fields)
    assert (answer.status_code, named in answer.text.partition("<h1>")[2]) == (422, True)
    assert open_api.get("/v1/limits")["limits"] == []


def test_bulk_counts_first_and_then_replays(open_api: Api, visitor: Visitor, world: World) -> None:
    others = [open_api.dead(queue="mail") for _ in range(3)]
    filters = {"state": "dead", "queue": "mail", "action": "replay"}
    assert "<strong>4 jobs</strong> will be queued again." in visitor.preview(filters)
    assert _job(open_api, world.dead)["state"] == "dead"
    assert "<strong>4</strong> jobs are queued again." in visitor.change_many(filters)
    assert {_job(open_api, each)["state"] for each in (world.dead, *others)} == {"queued"}


@pytest.mark.parametrize(
    ("action", "filters", "changed"),
    [
        ("replay", "state=dead&queue=mail&error=plain", "/jobs?state=queued&queue=mail"),
        ("replay&rate=1/h", "state=dead&queue=mail", "/jobs?state=queued&state=scheduled&queue=mail"),
        ("cancel", "queue=mail&state=queued", "/jobs?state=cancelled&queue=mail"),
        ("delete", "state=dead&state=cancelled", None),
    ],
)
def test_result_of_a_bulk_change_leads_on(
    visitor: Visitor, world: World, action: str, filters: str, changed: str | None
) -> None:
    page = visitor.change_many(parse_qs(f"action={action}&{filters}"))
    linked = {unescape(each) for each in re.findall(r'href="/console([^"]*)"', page.partition("<main")[2])}
    assert linked == {"", f"/jobs?{filters}", *([changed] if changed else [])}
    for path in linked:
        visitor.open_page(path)


@pytest.mark.parametrize(("action", "state"), [("delete", "queued"), ("cancel", "cancelled")])
def test_bulk_change_leaves_jobs_alone_that_come_after_the_count(
    open_api: Api, visitor: Visitor, action: str, state: str
) -> None:
    counted = open_api.submit(queue="bulky")["id"]
    page = visitor.preview({"action": action, "queue": "bulky", "since": "10m", "until": "2099-01-31T08:00:00Z"})
    form = dict(re.findall(r'name="(\w+)" value="([^"]*)"', page.partition('/bulk/run"')[2].partition("</form>")[0]))
    assert form["until"] < "2099"
    assert re.match(r"\d{4}-", form["since"])
    later = open_api.submit(queue="bulky")["id"]
    assert "<strong>1</strong> job is" in visitor.change_many(form)
    assert _job(open_api, later)["state"] == "queued"
    if action == "cancel":
        assert _job(open_api, counted)["state"] == state


def test_bulk_replay_has_a_rate(open_api: Api, visitor: Visitor) -> None:
    ids = [open_api.dead() for _ in range(3)]
    visitor.send("/bulk/run", {"action": "replay", "state": "dead", "rate": "1/h"})
    assert sorted(_job(open_api, each)["state"] for each in ids) == ["queued", "scheduled", "scheduled"]


def test_bulk_goes_on_until_nothing_is_left(open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.web.bulk.MAX_JOBS", 2)
    for _ in range(3):
        open_api.dead()
    filters: dict[str, str] = {"action": "delete", "state": "dead"}
    first = visitor.change_many(filters)
    assert ("<strong>2</strong> jobs are deleted. More are left." in first, 'id="go-on"' in first) == (True, True)
    assert "<strong>3</strong> jobs are deleted." in visitor.change_many({**filters, "changed": "2"})


def test_bulk_replays_each_job_once_though_some_die_again(
    open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.web.bulk.MAX_JOBS", 2)
    ids = [open_api.dead() for _ in range(3)]
    page = visitor.send("/bulk/run", {"action": "replay", "state": "dead"}).text
    for each in ids[:2]:
        open_api.run(open_api.end(each, Failed(error="it broke", retryable=False)))
    assert [_job(open_api, each)["state"] for each in ids] == ["dead"] * 3
    going_on = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.partition('id="go-on"')[2]))
    assert visitor.send("/bulk/run", going_on).status_code == 303
    assert [_job(open_api, each)["state"] for each in ids] == ["dead", "dead", "queued"]


def test_filters_show_all_that_a_stopped_change_leads_to(open_api: Api, visitor: Visitor) -> None:
    for task in ("charge", "refund", "other"):
        open_api.dead(task=task)
    at = "2030-01-31T08:00:00Z"
    page = visitor.open_page(f"/jobs?task=charge&task=refund&queue=default&not_started_after={at}")
    form = re.findall(r' name="(\w+)"(?: list="queues")? value="([^"]+)"', page.partition('aria-label="Filters"')[2])
    wanted = [("queue", "default"), ("task", "charge"), ("task", "refund"), ("not_started_after", at)]
    assert [each for each in form if each[0] != "state"] == wanted
    assert f"Only jobs not started after {at}." in page
    [without] = re.findall(r'href="/console(/jobs[^"]*)">Also those started later', page)
    assert unescape(without) == "/jobs?task=charge&task=refund&queue=default"
    page = visitor.open_page(unescape(without))
    assert ("not started after" in page, page.count('id="job-')) == (False, 2)


def test_bulk_without_a_match_offers_nothing(visitor: Visitor) -> None:
    page = visitor.preview({"action": "cancel", "queue": "none"})
    assert ("No matching job" in page, "bulk/run" in page) == (True, False)


def test_unknown_bulk_action_is_refused(visitor: Visitor) -> None:
    assert visitor.send("/bulk/run", {"action": "explode"}).status_code == 422


def test_faults_are_shown_and_stopped(home: str, keys: Keys) -> None:
    with Api(home, keys_file=str(keys.path), allow_faults=True) as api:
        api._client.headers["x-api-key"] = keys.spare
        api.post("/v1/faults", {"faults": [{"kind": "error", "task": "mail.send", "probability": 0.3}], "span": "10m"})
        visitor = Visitor(api)
        visitor.sign_in(keys.spare)
        assert "mail.send" in visitor.open_page("/faults")
        assert "faults are injected" in visitor.open_page()
        limited = Visitor(api)
        limited.sign_in(keys.make("read", queues=("mail",)))
        assert "faults are injected" not in limited.open_page()
        visitor.act("/faults/stop")
        assert api.get("/v1/faults")["faults"] == []


def test_action_is_recorded_with_its_key(home: str, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with Api(home, keys_file=str(keys.path), audit_file=str(file)) as api:
        api._client.headers["x-api-key"] = keys.spare
        job_id = api.submit()["id"]
        visitor = Visitor(api)
        visitor.sign_in(keys.spare)
        visitor.act(f"/jobs/{job_id}/cancel")
    entries = [json.loads(line)["entry"] for line in file.read_text().splitlines()]
    found = [each for each in entries if each.get("operation") == "cancel_job"]
    assert [each["step"] for each in found] == ["asked", "done"]
    assert {each["who"] for each in found} == {id_of(keys.spare)}
    assert found[1]["ids"] == [job_id]


@pytest.mark.parametrize("path", ["/queues/mail/pause", "/jobs/key:x/edit"])
def test_action_without_the_scope_is_recorded_as_refused(home: str, keys: Keys, tmp_path: Path, path: str) -> None:
    file = tmp_path / "audit.jsonl"
    reader = keys.make("read")
    with Api(home, keys_file=str(keys.path), audit_file=str(file)) as api:
        visitor, operator = Visitor(api), Visitor(api)
        visitor.sign_in(reader)
        operator.sign_in(keys.spare)
        assert visitor.send(path, {}, token=visitor.token_of_sign_out()).status_code == 403
        assert operator.send("/queues/mail/resume").status_code == 303  # what waits for no file is in it by now
    entries = [json.loads(line)["entry"] for line in file.read_text().splitlines()]
    assert [(each["step"], each["who"]) for each in entries[:-2]] == [("refused", id_of(reader))]


def test_paused_value_of_a_limit_is_resumed_where_its_use_refreshes(open_api: Api, visitor: Visitor) -> None:
    open_api.post("/v1/limits", {"name": "tenants", "queue": "mail", "by": "args.to", "concurrency": 1}, 201)
    open_api.post("/v1/limits/tenants/pause", {"for": "10m", "values": ["acme", "other"]})
    page = visitor.open_page("/limits/tenants?value=acme")
    live = page[page.index('id="live"') : page.index('class="lookup"')]
    assert "/limits/tenants/resume" in live
    assert 'name="value" value="acme"' in live
    landed = visitor.act("/limits/tenants/resume", {"value": "acme"})
    assert landed == "/limits/tenants?value=acme&notice=limit_resumed"
    assert "paused</span>" not in visitor.open_page("/limits/tenants?value=acme")
    assert "paused</span>" in visitor.open_page("/limits/tenants?value=other")
