"""Edits of a job that has not started, from its page."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.core.lifecycle import Failed
from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api
from tests.web.keyed import Keys

AT = "2099-01-31T08:00:00Z"


@pytest.fixture
def job_id(open_api: Api) -> str:
    found: str = open_api.submit(queue="mail", payload={"to": "a", "count": 1}, priority=3)["id"]
    return found


def _job(api: Api, job_id: str) -> Any:
    return api.get(f"/v1/jobs/{job_id}")


async def _stored_payload(api: Api, job_id: str) -> str:
    return (await api.app.get(job_id)).payload


def test_form_holds_the_values_of_the_job(visitor: Visitor, job_id: str) -> None:
    form = visitor.open_page(f"/jobs/{job_id}").partition(f'/jobs/{job_id}/edit"')[2]
    for text in ('name="queue" value="mail"', 'name="priority" value="3"', "&#34;to&#34;: &#34;a&#34;"):
        assert text in form


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"queue": "later"}, {"queue": "later"}),
        ({"priority": "-100"}, {"priority": -100}),
        ({"payload": '{"to": "b"}'}, {"payload": {"to": "b"}}),
        ({"payload": '{"to": "a", "count": true}'}, {"payload": {"to": "a", "count": True}}),
        ({"run": AT}, {"state": "scheduled", "run_at": "2099-01-31T08:00:00.000000Z"}),
        ({"run": "10m"}, {"state": "scheduled"}),
        ({"queue": "later", "priority": "5", "run": "1h"}, {"queue": "later", "priority": 5, "state": "scheduled"}),
    ],
)
def test_edit_changes_what_differs(
    open_api: Api, visitor: Visitor, job_id: str, fields: dict[str, str], changed: dict[str, Any]
) -> None:
    before = _job(open_api, job_id)
    form = {"queue": "mail", "priority": "3", "payload": '{"to": "a",\n"count": 1}', **fields}
    assert visitor.act(f"/jobs/{job_id}/edit", form) == f"/jobs/{job_id}?notice=edited"
    job = _job(open_api, job_id)
    assert repr({name: job[name] for name in changed}) == repr(changed)
    kept = before.keys() - {*changed, "run_at"}
    assert {name: job[name] for name in kept} == {name: before[name] for name in kept}


def test_scheduled_job_runs_at_once(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit(delay="2h")["id"]
    visitor.act(f"/jobs/{job_id}/edit", {"run": "0"})
    assert _job(open_api, job_id)["state"] == "queued"


def test_form_without_a_change_changes_nothing(open_api: Api, visitor: Visitor, job_id: str) -> None:
    before = _job(open_api, job_id)
    form = {"queue": "mail", "priority": "3", "payload": '{"to": "a", "count": 1}', "run": ""}
    assert visitor.act(f"/jobs/{job_id}/edit", form) == f"/jobs/{job_id}?notice=unchanged"
    assert _job(open_api, job_id) == before


def _shown(page: str) -> dict[str, str]:
    found = re.search(r'name="shown" value="([^"]+)"', page)
    assert found is not None
    return {"shown": found[1]}


def test_form_undoes_no_change_that_another_operator_made(open_api: Api, visitor: Visitor, job_id: str) -> None:
    form = {"queue": "mail", "priority": "3", "payload": '{"to": "a", "count": 1}'}
    form |= _shown(visitor.open_page(f"/jobs/{job_id}"))
    open_api.ask("PATCH", f"/v1/jobs/{job_id}", json={"queue": "later", "payload": {"to": "b"}})
    visitor.act(f"/jobs/{job_id}/edit", {**form, "priority": "4"})
    job = _job(open_api, job_id)
    assert (job["queue"], job["priority"], job["payload"]) == ("later", 4, {"to": "b"})
    answer = visitor.send(f"/jobs/{job_id}/edit", {**form, "queue": "other", "priority": "5"})
    assert (answer.status_code, "queue and priority changed after this form was opened" in answer.text) == (409, True)
    assert _job(open_api, job_id) == job


def test_form_of_a_limit_undoes_no_change_that_another_operator_made(
    open_api: Api, visitor: Visitor, world: World
) -> None:
    form = {"concurrency": "5", "rate": "1000/s", "burst": "", "depth": ""} | _shown(visitor.open_page("/limits/crm"))
    open_api.ask("PATCH", "/v1/limits/crm", json={"concurrency": 2})
    visitor.act("/limits/crm/change", {**form, "depth": "100"})
    limit = open_api.get("/v1/limits/crm")
    assert (limit["concurrency"], limit["depth"]) == (2, 100)
    answer = visitor.send("/limits/crm/change", {**form, "concurrency": "9", "rate": ""})
    assert (answer.status_code, "concurrency changed after" in answer.text) == (409, True)
    assert open_api.get("/v1/limits/crm")["rate"] == limit["rate"]


@pytest.mark.parametrize(
    ("field", "text"),
    [("priority", "high"), ("priority", "101"), ("queue", "Mail Box"), ("run", "soon"), ("run", "2099-01-31 08:00")],
)
def test_value_that_is_not_understood_is_named(
    open_api: Api, visitor: Visitor, job_id: str, field: str, text: str
) -> None:
    before = _job(open_api, job_id)
    answer = visitor.send(f"/jobs/{job_id}/edit", {field: text})
    assert answer.status_code == 422
    assert field in answer.text.partition("<h1>")[2]
    assert _job(open_api, job_id) == before


def test_job_that_has_begun_is_not_edited(open_api: Api, visitor: Visitor, world: World) -> None:
    for job_id in (world.running, world.dead):
        assert "/edit" not in visitor.open_page(f"/jobs/{job_id}")
        answer = visitor.send(f"/jobs/{job_id}/edit", {"priority": "9"})
        assert (answer.status_code, "cannot be edited" in answer.text) == (409, True)


def test_failed_job_may_be_edited_until_its_next_attempt(open_api: Api, visitor: Visitor, job_id: str) -> None:
    open_api.run(open_api.end(job_id, Failed(error="it broke")))
    assert f"/jobs/{job_id}/edit" in visitor.open_page(f"/jobs/{job_id}")
    visitor.act(f"/jobs/{job_id}/edit", {"payload": '{"to": "b"}'})
    job = _job(open_api, job_id)
    assert (job["payload"], job["attempts"]) == ({"to": "b"}, 1)


def test_batch_has_no_form_of_edits(visitor: Visitor, world: World) -> None:
    assert "/edit" not in visitor.open_page(f"/jobs/{world.batch}")


def test_payload_with_hidden_fields_is_not_edited_here(home: str, keys: Keys) -> None:
    with Api(home, keys_file=str(keys.path), redacted=["payload.to"]) as api:
        api._client.headers["x-api-key"] = keys.spare
        job_id = api.submit(payload={"to": "ada@example.org"})["id"]
        visitor = Visitor(api)
        visitor.sign_in(keys.spare)
        page = visitor.open_page(f"/jobs/{job_id}")
        assert ("/edit" in page, "<textarea" in page) == (True, False)
        visitor.act(f"/jobs/{job_id}/edit", {"priority": "9"})
        assert api.run(_stored_payload(api, job_id)) == '{"to":"ada@example.org"}'


def test_limited_key_moves_no_job_to_a_foreign_queue(open_api: Api, keys: Keys, job_id: str) -> None:
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "operate", queues=("mail",)))
    assert visitor.send(f"/jobs/{job_id}/edit", {"queue": "vault"}).status_code == 403
    visitor.act(f"/jobs/{job_id}/edit", {"priority": "9"})
    job = _job(open_api, job_id)
    assert (job["queue"], job["priority"]) == ("mail", 9)
