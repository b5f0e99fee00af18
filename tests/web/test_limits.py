"""Limits over HTTP: added, shown, changed, paused and removed; what is refused, and to which keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.web.client import Api
from tests.web.keyed import Keys, ask, refused

CRM = {"name": "crm", "queue": "crm", "by": "args.tenant", "concurrency": 2, "rate": "10/s", "shares": {"acme": 3}}
MAIL = {"name": "mail", "task": "mail.send", "concurrency": 5}


def patch(api: Api, name: str, body: Any, status: int = 200) -> Any:
    answer = api.ask("PATCH", f"/v1/limits/{name}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_limit_is_added_shown_listed_and_removed(api: Api) -> None:
    added = api.post("/v1/limits", CRM, 201)
    assert {**added, **CRM} == added
    assert (added["task"], added["burst"], added["weight"], added["owner"]) == (None, 1, 1, None)
    assert (added["changed"], added["declared"], added["buckets"]) == (False, None, [])
    assert api.get("/v1/limits/crm") == added
    mail = api.post("/v1/limits", MAIL, 201)
    used = [{"value": None, "used": 0, "free_at": None, "paused": False}]
    assert api.get("/v1/limits")["limits"] == [added, mail | {"buckets": used}]
    assert api.get("/v1/limits/mail")["buckets"] == used
    shown = api.get("/v1/limits/crm", value=["acme", "7", '["x"]'])
    assert [each["value"] for each in shown["buckets"]] == ["acme", "7", '["x"]']
    assert api.ask("DELETE", "/v1/limits/crm").status_code == 204
    assert "limit" in api.refused("GET", "/v1/limits/crm", 404)["detail"]


def test_limits_are_listed_in_pages(api: Api) -> None:
    for n in range(3):
        api.post("/v1/limits", {**MAIL, "name": f"l-{n}"}, 201)
    assert [each["name"] for each in api.get("/v1/limits", limit=2)["limits"]] == ["l-0", "l-1"]
    assert [each["name"] for each in api.get("/v1/limits", after="l-1")["limits"]] == ["l-2"]


def test_name_that_exists_is_a_conflict_unless_replaced(api: Api) -> None:
    api.post("/v1/limits", MAIL, 201)
    assert api.refused("POST", "/v1/limits", 409, json=MAIL)["code"] == "conflict"
    assert api.post("/v1/limits", {**MAIL, "concurrency": 6, "replace": True})["concurrency"] == 6


def test_change_replaces_named_values_and_null_takes_one_away(api: Api) -> None:
    api.post("/v1/limits", CRM, 201)
    changed = patch(api, "crm", {"concurrency": 7, "rate": None, "shares": {"globex": 2}})
    assert (changed["concurrency"], changed["rate"], changed["burst"], changed["shares"]) == (
        7,
        None,
        None,
        {"globex": 2},
    )
    assert patch(api, "crm", {"concurrency": None})["concurrency"] is None
    assert patch(api, "crm", {}, 422)["field"] == "body"
    assert patch(api, "crm", {"burst": 3}, 422)["field"] == "burst"
    assert patch(api, "other", {"concurrency": 3}, 404)["code"] == "not_found"


def test_reset_of_an_operators_limit_is_a_conflict(api: Api) -> None:
    api.post("/v1/limits", MAIL, 201)
    assert "an operator made" in api.refused("POST", "/v1/limits/mail/reset", 409)["detail"]


def test_pause_holds_a_limit_or_values_of_its_key(api: Api) -> None:
    api.post("/v1/limits", MAIL, 201)
    api.post("/v1/limits", CRM, 201)
    assert api.post("/v1/limits/mail/pause", {"for": "10m"}) == {"limit": "mail", "buckets": 1, "paused_for": 600}
    assert api.get("/v1/limits/mail")["buckets"][0]["free_at"] is not None
    assert api.post("/v1/limits/crm/pause", {"for": 60, "values": ["acme", 7]})["buckets"] == 2
    acme, seven, other = api.get("/v1/limits/crm", value=["acme", "7", "x"])["buckets"]
    assert (acme["free_at"] is None, seven["free_at"] is None, other["free_at"]) == (False, False, None)
    assert (acme["paused"], seven["paused"], other["paused"]) == (True, True, False)
    (resumed,) = api.post("/v1/limits/crm/resume", {"values": ["acme"]})["buckets"]
    assert resumed == {"value": "acme", "used": 0, "free_at": None, "paused": False}
    assert api.get("/v1/limits/crm", value=["7"])["buckets"][0]["paused"]
    assert not api.post("/v1/limits/mail/resume")["buckets"][0]["paused"]
    assert api.refused("POST", "/v1/limits/crm/resume", 422)["field"] == "values"
    assert api.refused("POST", "/v1/limits/mail/resume", 422, json={"values": ["acme"]})["field"] == "values"
    assert api.refused("POST", "/v1/limits/other/resume", 404)["code"] == "not_found"
    for name, body, field in (
        ("crm", {"for": 60}, "values"),
        ("crm", {"for": 60, "values": []}, "values"),
        ("mail", {"for": 60, "values": ["acme"]}, "values"),
        ("mail", {"for": "soon"}, "for"),
        ("mail", {"for": -1}, "for"),
        ("mail", {}, "for"),
    ):
        assert api.refused("POST", f"/v1/limits/{name}/pause", 422, json=body)["field"] == field


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("queue", {"queue": None, "concurrency": None, "by": None, "shares": None, "rate": None}),
        ("queue", {"queue": "No Queue"}),
        ("task", {"task": "crm.sync"}),
        ("concurrency", {"concurrency": 0}),
        ("concurrency", {"concurrency": -1}),
        ("concurrency", {"concurrency": "5"}),
        ("concurrency", {"concurrency": 1.5}),
        ("rate", {"rate": "-1/s"}),
        ("rate", {"rate": "10"}),
        ("rate", {"rate": "999999999/s"}),
        ("burst", {"rate": None, "burst": 3}),
        ("burst", {"burst": 0}),
        ("weight", {"weight": 0}),
        ("weight", {"weight": "pages"}),
        ("weight", {"weight": [1]}),
        ("by", {"by": "tenant"}),
        ("shares", {"shares": {"acme": 0}}),
        ("shares", {"shares": ["acme"]}),
        ("shares", {"by": None}),
        ("depth", {"depth": 0}),
        ("depth", {"depth": 1_000_001}),
        ("depth", {"depth": "5"}),
        ("depth", {"depth": 5, "queue": None, "by": None, "concurrency": None, "shares": None}),
        ("name", {"name": "No Name"}),
        ("concurency", {"concurency": 5}),
    ],
)
def test_bad_limit_is_refused_with_its_field(api: Api, field: str, given: dict[str, Any]) -> None:
    body = {name: value for name, value in {**CRM, **given}.items() if value is not None}
    problem = api.refused("POST", "/v1/limits", 422, json=body)
    assert problem["field"] == field
    assert problem["remedy"]
    assert api.get("/v1/limits") == {"limits": []}


def test_unknown_field_is_refused_with_a_suggestion(api: Api) -> None:
    problem = api.refused("POST", "/v1/limits", 422, json={**CRM, "concurency": 5})
    assert "did you mean concurrency" in problem["remedy"]


@pytest.mark.parametrize("query", [{"value": "x"}, {"nonsense": "1"}])
def test_values_of_a_limit_without_a_key_are_refused(api: Api, query: dict[str, str]) -> None:
    api.post("/v1/limits", MAIL, 201)
    answer = api.ask("GET", "/v1/limits/mail", params=query)
    assert (answer.status_code, answer.json()["field"]) == (422, next(iter(query)))


def test_submission_beyond_the_depth_is_refused(api: Api) -> None:
    added = api.post("/v1/limits", {"name": "mail", "queue": "mail", "depth": 1}, 201)
    assert (added["depth"], added["concurrency"]) == (1, None)
    api.submit(queue="mail")
    answer = api.ask("POST", "/v1/jobs", json={"task": "work", "payload": {}, "queue": "mail"})
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) > 0
    assert patch(api, "mail", {"depth": 2})["depth"] == 2
    api.submit(queue="mail")


def test_submission_beyond_the_depth_of_its_key_is_refused(api: Api) -> None:
    api.post("/v1/limits", {"name": "quota", "queue": "mail", "by": "args.tenant", "depth": 1}, 201)
    job = {"task": "work", "queue": "mail", "payload": {"tenant": "acme"}}
    api.post("/v1/jobs", job, 201)
    answer = api.ask("POST", "/v1/jobs", json=job)
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
    assert answer.json()["detail"].startswith("limit quota is full for acme: 1 of 1 jobs wait")
    assert int(answer.headers["retry-after"]) > 0
    api.post("/v1/jobs", job | {"payload": {"tenant": "globex"}}, 201)


def test_workers_over_http_obey_limits(api: Api) -> None:
    api.post("/v1/limits", {"name": "mail", "queue": "mail", "by": "args.to", "concurrency": 1}, 201)
    for to in ("a", "a", "b"):
        api.submit(queue="mail", payload={"to": to})
    request = {"worker": "js-1", "queues": ["mail"], "limit": 5}
    first = api.post("/v1/claims", request)["jobs"]
    assert sorted(job["payload"]["to"] for job in first) == ["a", "b"]
    assert api.post("/v1/claims", request)["jobs"] == []
    (held,) = api.get("/v1/jobs", state="queued")["jobs"]
    (reason,) = api.get(f"/v1/jobs/{held['id']}/why")["reasons"]
    running = next(job["id"] for job in first if job["payload"]["to"] == "a")
    assert reason["code"] == "limit"
    assert f"1 of 1 in use, held by {running}" in reason["text"]


def test_key_needs_its_scopes_and_its_queue(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    reader, operator = keys.make("read"), keys.make("operate")
    of_crm, of_other = (keys.make("operate", "read", queues=(queue,)) for queue in ("crm", "other"))
    with Api(home, keys_file=str(keys.path)) as api:
        refused(ask(api, reader, "POST", "/v1/limits", CRM), 403, "forbidden")
        refused(ask(api, of_other, "POST", "/v1/limits", CRM), 403, "forbidden")
        refused(ask(api, of_crm, "POST", "/v1/limits", MAIL), 403, "forbidden")
        refused(ask(api, of_crm, "POST", "/v1/limits", {"name": "api", "rate": "10/s"}), 403, "forbidden")
        assert ask(api, of_crm, "POST", "/v1/limits", CRM).status_code == 201
        assert ask(api, operator, "POST", "/v1/limits", MAIL).status_code == 201
        names = [each["name"] for each in ask(api, of_crm, "GET", "/v1/limits").json()["limits"]]
        assert names == ["crm"]
        assert ask(api, of_other, "GET", "/v1/limits").json() == {"limits": []}
        for method, path, body in (
            ("GET", "", None),
            ("PATCH", "", {"concurrency": 1}),
            ("POST", "/pause", {"for": 1}),
            ("POST", "/resume", None),
            ("POST", "/reset", None),
            ("DELETE", "", None),
        ):
            refused(ask(api, of_other, method, f"/v1/limits/crm{path}", body), 404, "not_found")
            refused(ask(api, of_crm, method, f"/v1/limits/mail{path}", body), 404, "not_found")
            if method != "GET":
                refused(ask(api, reader, method, f"/v1/limits/crm{path}", body), 403, "forbidden")
        taken = {**CRM, "queue": "other", "replace": True}
        refused(ask(api, of_other, "POST", "/v1/limits", taken), 409, "conflict")
        assert ask(api, of_crm, "PATCH", "/v1/limits/crm", {"concurrency": 3}).json()["concurrency"] == 3


def test_audit_names_changes_without_values_of_keys(home: str, tmp_path: Path) -> None:
    keys, file = Keys(tmp_path), tmp_path / "audit.jsonl"
    operator = keys.make("operate")
    with Api(home, keys_file=str(keys.path), audit_file=str(file)) as api:
        ask(api, operator, "POST", "/v1/limits", CRM)
        ask(api, operator, "PATCH", "/v1/limits/crm", {"concurrency": 9})
        ask(api, operator, "POST", "/v1/limits/crm/pause", {"for": 60, "values": ["secret-tenant"]})
    written = file.read_text(encoding="utf-8")
    entries = [json.loads(line)["entry"] for line in written.splitlines()]
    asked = {each["operation"]: each["asked"] for each in entries if each.get("step") == "asked"}
    assert asked["add_limit"]["name"] == "crm"
    assert asked["add_limit"]["shares_count"] == 1
    assert asked["change_limit"] == {"concurrency": 9}
    assert asked["pause_limit"]["values_count"] == 1
    assert "secret-tenant" not in written
    assert "acme" not in written
