"""Changes need a form of the session and of the same site; keys may do no more than over the API."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import msgspec
import pytest

from holdfast.core.lifecycle import Failed
from holdfast.web.console.site import ROUTES
from tests.console.visitor import FORM, Visitor
from tests.console.world import World, make_world
from tests.web.client import Api
from tests.web.keyed import Keys

ACTIONS: list[tuple[str, dict[str, str]]] = [
    ("/jobs/{running}/cancel", {}),
    ("/jobs/{dead}/replay", {}),
    ("/jobs/{dead}/copy", {}),
    ("/jobs/{queued}/edit", {"priority": "7"}),
    ("/jobs/{dead}/delete", {}),
    ("/queues/mail/pause", {}),
    ("/queues/mail/resume", {}),
    ("/workers/worker-1/stop", {}),
    ("/schedules", {"name": "hourly", "task": "work", "cron": "0 * * * *", "queue": "mail"}),
    ("/schedules/nightly/delete", {}),
    ("/schedules/nightly/backfill/run", {"start": "2020-01-01T00:00", "end": "2020-01-03T00:00"}),
    ("/schedules/nightly/run", {}),
    ("/schedules/nightly/pause", {}),
    ("/schedules/nightly/resume", {}),
    ("/limits", {"name": "api", "queue": "mail", "concurrency": "3"}),
    ("/limits/crm/delete", {}),
    ("/limits/crm/change", {"concurrency": "7", "rate": "10/s", "burst": "1"}),
    ("/limits/crm/pause", {"for": "10m"}),
    ("/limits/crm/reset", {}),
    ("/limits/crm/resume", {}),
    ("/batches/{batch}/cancel", {}),
    ("/batches/{batch}/cancel-jobs", {}),
    ("/batches/{batch}/replay-jobs", {}),
    ("/faults/stop", {}),
    ("/bulk/run", {"action": "delete", "state": "dead"}),
]


def _state(api: Api) -> Any:
    """Everything that an action changes."""
    lists = [api.get(f"/v1/{each}") for each in ("jobs", "queues", "workers", "schedules", "limits")]
    for queue in lists[1]["queues"]:
        del queue["oldest_ready_seconds"]
    return lists


def _path(action: str, world: World) -> str:
    return action.format(**msgspec.structs.asdict(world))


def test_every_action_is_tried_here() -> None:
    pattern = {re.sub(r"\{\w+\}", "{job}", path) for path, _ in ACTIONS}
    known = {route.path.removeprefix("/console") for route in ROUTES if route.method == "POST"} - {"/sign-out"}
    named = {"mail": "{queue}", "worker-1": "{worker}", "nightly": "{schedule}", "crm": "{limit}"}
    for word, name in named.items():
        pattern = {re.sub(f"/{word}(?=/|$)", f"/{name}", path) for path in pattern}
    assert pattern == known


@pytest.mark.rows("X09")
def test_action_is_refused_without_a_form_of_the_session(open_api: Api, visitor: Visitor, keys: Keys) -> None:
    world = make_world(open_api)
    other = Visitor(open_api)
    other.sign_in(keys.spare)
    before, foreign, own = _state(open_api), other.token(), visitor.token()
    for action, fields in ACTIONS:
        path = _path(action, world)
        answers = [
            visitor.send(path, fields, token=None),
            visitor.send(path, fields, token=foreign),
            visitor.send(path, fields, token="0" * 64),
            visitor.send(path, fields, token=own, sec_fetch_site="cross-site"),
            visitor.send(path, fields, token=own, sec_fetch_site="same-site"),
            visitor.send(path, fields, token=own, sec_fetch_site="none"),
            visitor.ask("POST", path, content=f"token={own}", headers=FORM),
            visitor.ask("POST", path, content=f"token={own}", headers={**FORM, "origin": "http://evil.example"}),
            visitor.ask("POST", path, content=f"token={own}", headers={**FORM, "origin": "null"}),
        ]
        assert [each.status_code for each in answers] == [403] * len(answers), path
        json = visitor.ask("POST", path, json={"token": own}, headers={"sec-fetch-site": "same-origin"})
        assert json.status_code == 415
    assert _state(open_api) == before


@pytest.mark.rows("X09")
def test_reading_changes_nothing(open_api: Api, visitor: Visitor) -> None:
    world = make_world(open_api)
    before = _state(open_api)
    for action, _ in ACTIONS:
        if action not in ("/schedules", "/limits"):  # pages, too
            assert visitor.ask("GET", _path(action, world)).status_code == 405
    for route in ROUTES:
        if route.method == "GET":
            job = world.batch if "batches" in route.path else world.dead
            path = route.path.removeprefix("/console").format(
                job=job, limit="crm", schedule="nightly", group=world.error
            )
            query = "?action=delete&state=dead" if "/bulk/" in path else "?start=2020-01-01&end=2020-01-03"
            assert visitor.ask("GET", path + query, follow_redirects=True).status_code == 200
    assert _state(open_api) == before


def test_notice_is_shown_to_the_session_that_made_the_change(open_api: Api, visitor: Visitor, keys: Keys) -> None:
    visitor.act("/queues/mail/pause")
    other = Visitor(open_api)
    other.sign_in(keys.spare)
    text = "The queue is paused."
    assert text in visitor.open_page(visitor.landed)
    assert text not in other.open_page(visitor.landed)
    refresh = {"hx-trigger": "live"}
    assert text in visitor.open_page(visitor.landed, **refresh)
    assert text not in other.open_page(visitor.landed, **refresh)
    for name in ("queue_paused", "queue_paused.", "queue_paused." + "0" * 16, "queue_resumed" + visitor.landed[-17:]):
        assert 'class="notice"' not in visitor.open_page(f"/queues?notice={name}")


def test_older_browser_shows_its_origin(open_api: Api, visitor: Visitor) -> None:
    content = f"token={visitor.token()}"
    headers = {**FORM, "origin": "http://console.example"}
    assert visitor.ask("POST", "/queues/mail/pause", content=content, headers=headers).status_code == 303


def test_form_without_headers_of_a_browser_is_told_so(open_api: Api, visitor: Visitor) -> None:
    content = f"token={visitor.token()}"
    for headers, reason in (
        (FORM, "neither Sec-Fetch-Site nor Origin"),
        ({**FORM, "origin": "http://evil.example"}, "a page of another site"),
        ({**FORM, "sec-fetch-site": "cross-site"}, "a page of another site"),
    ):
        refused = visitor.ask("POST", "/queues/mail/pause", content=content, headers=headers)
        assert (refused.status_code, reason in refused.text) == (403, True)


def test_key_for_reading_changes_nothing(open_api: Api, keys: Keys) -> None:
    world = make_world(open_api)
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "submit", "work"))
    before, token = _state(open_api), visitor.token_of_sign_out()
    for action, fields in ACTIONS:
        answer = visitor.send(_path(action, world), fields, token=token)
        assert (answer.status_code, "lacks the scope operate" in answer.text) == (403, True), action
    assert _state(open_api) == before
    for page in (
        "/queues",
        "/workers",
        "/schedules",
        f"/jobs/{world.dead}",
        "/jobs?state=dead",
        "/limits",
        "/limits/crm",
        "/schedules/nightly",
    ):
        assert visitor.open_page(page).count('<form method="post"') == 1  # the sign-out


def test_key_without_reading_sees_no_page(open_api: Api, keys: Keys) -> None:
    world = make_world(open_api)
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("operate"))
    for page in ("", "/jobs", f"/jobs/{world.dead}", "/queues", "/workers", "/schedules", "/limits", "/faults"):
        assert "lacks the scope read" in visitor.open_page(page, 403)


def test_key_of_other_queues_sees_and_changes_none_of_these(open_api: Api, keys: Keys) -> None:
    world = make_world(open_api)
    own = open_api.submit(queue="own")["id"]
    before = _state(open_api)
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "operate", "submit", queues=("own",)))
    overview = visitor.open_page()
    assert ("own" in overview, "mail" in overview, "worker-1" in overview) == (True, False, False)
    assert own in visitor.open_page("/jobs")
    assert "mail" not in visitor.open_page("/queues") + visitor.open_page("/schedules") + visitor.open_page("/limits")
    visitor.open_page("/workers", 403)
    token = visitor.token()
    for action, fields in ACTIONS:
        if action.startswith(("/bulk", "/faults")):
            continue
        answer = visitor.send(_path(action, world), fields, token=token)
        assert answer.status_code in (403, 404), action
    assert visitor.send("/bulk/run", {"action": "delete", "queue": "mail"}).status_code == 403
    assert visitor.preview({"action": "delete", "queue": "mail"}, 403)
    assert "No matching job" in visitor.preview({"action": "delete", "state": "dead"})
    assert "<strong>0</strong> jobs are deleted" in visitor.change_many({"action": "delete", "state": "dead"})
    assert _state(open_api) == before


@pytest.mark.rows("B90")
def test_missing_job_looks_like_one_of_another_queue(open_api: Api, keys: Keys) -> None:
    world = make_world(open_api)
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", queues=("own",)))
    missing = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"
    shapes = set()
    for reference in (world.dead, missing, "nothing", "%2e%2e%2fx", "key:none", "x" * 5000):
        page = visitor.open_page(f"/jobs/{reference}", 404)
        request = page.partition("Request <code>")[2].partition("<")[0]
        shapes.add(page.replace(reference, "REF").replace(request, "ID"))
    assert len(shapes) == 1
    assert ("check the id or name" in page, "/v1/" in page) == (True, False)
    assert visitor.ask("GET", "/jobs/" + "x" * 60_000).status_code == 414


def test_bulk_change_hits_the_listed_jobs_whatever_their_errors_hold(open_api: Api, visitor: Visitor) -> None:
    """A form repeats the filter as it is, though the page shows its characters escaped."""
    wanted, other = (open_api.submit(queue="mail")["id"] for _ in range(2))
    open_api.run(open_api.end(wanted, Failed(error="\x1b[31mboom", retryable=False)))
    open_api.run(open_api.end(other, Failed(error="\\x1b[31mboom", retryable=False)))
    page = visitor.open_page("/jobs?state=dead&error=%1B%5B31m")
    assert (wanted in page, other in page) == (True, False)
    [link] = re.findall(r'href="/console(/bulk/preview[^"]*action=delete)"', page)
    (value,) = set(re.findall(r'<input type="hidden" name="error" value="([^"]*)">', visitor.open_page(unescape(link))))
    visitor.send("/bulk/run", {"action": "delete", "state": "dead", "error": value})
    assert open_api.ask("GET", f"/v1/jobs/{wanted}").status_code == 404
    assert open_api.ask("GET", f"/v1/jobs/{other}").status_code == 200


def test_preview_of_a_bulk_change_needs_the_right_to_change(open_api: Api, keys: Keys) -> None:
    reader = Visitor(open_api)
    reader.sign_in(keys.make("read"))
    assert "lacks the scope operate" in reader.preview({"action": "delete", "state": "dead"}, 403)


@pytest.mark.parametrize(
    "query", ["", "action=delete", "action=explode&queue=mail", "action=delete&quue=mail", "action=delete&queue=%ff"]
)
def test_preview_that_is_not_understood_is_refused(visitor: Visitor, query: str) -> None:
    visitor.open_page(f"/bulk/preview?{query}", 422)


def test_result_of_a_bulk_change_is_shown_to_its_session(open_api: Api, visitor: Visitor, keys: Keys) -> None:
    """No link can make a page claim a change that was not made."""
    make_world(open_api)
    visitor.change_many({"action": "delete", "state": "dead"})
    other = Visitor(open_api)
    other.sign_in(keys.spare)
    forged = visitor.landed.replace("delete-1", "delete-7"), visitor.landed.replace("action=delete", "action=cancel")
    for own, path in ((other, visitor.landed), *((visitor, path) for path in forged)):
        answer = own.ask("GET", path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs?state=dead")


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "cancel"},
        {"action": "cancel", "queue": " "},
        {"action": "cancel", "quue": "mail"},
        {"action": "cancel", "queue": ["mail", "later"]},
        {"action": "cancel", "queue": "mail", "changed": "\u00b2"},
        {"action": "replay", "queue": "mail", "rate": "1/s", "after": "soon"},
    ],
)
def test_bulk_change_that_is_not_understood_changes_nothing(
    open_api: Api, visitor: Visitor, fields: dict[str, Any]
) -> None:
    make_world(open_api)
    before = _state(open_api)
    assert visitor.send("/bulk/run", fields).status_code == 422
    assert _state(open_api) == before


def test_faults_are_hidden_from_keys_for_some_queues(open_api: Api, keys: Keys) -> None:
    limited = Visitor(open_api)
    limited.sign_in(keys.make("read", "operate", queues=("mail",)))
    assert limited.ask("GET", "/faults").status_code == 403
