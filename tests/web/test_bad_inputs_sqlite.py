"""Bad requests on one store, row by row; see ``bad_inputs.py``. On the others the table goes as a whole."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.web.messages import MAX_DRAINED
from tests.support.load import slowness
from tests.web.bad_inputs import BAD, MEBIBYTE, Bad, in_payload, job
from tests.web.client import JSON, UNKNOWN_ID, Api


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id[:50])
def test_a_bad_body_is_refused_whole(bad: Bad, api: Api) -> None:
    problem = api.refused("POST", "/v1/jobs", bad.status, content=bad.body, headers=bad.headers)
    assert problem["code"] == bad.code
    assert problem["remedy"]
    assert len(problem["detail"]) < 600
    assert problem["detail"].isprintable()
    assert api.count() == 0


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id[:50])
def test_a_bad_job_spoils_its_whole_batch(bad: Bad, api: Api) -> None:
    body = b'{"jobs": [%s, %s]}' % (job(), bad.body)
    status = 422 if bad.code in ("body_required", "invalid_unicode") or bad.id.startswith("B20") else bad.status
    problem = api.refused("POST", "/v1/jobs/batch", status, content=body, headers=bad.headers)
    assert problem["remedy"]
    assert api.count() == 0


@pytest.mark.rows("B36")
def test_payload_at_the_limit_is_stored(api: Api) -> None:
    payload = {"x": "y" * (256 * 1024 - 8)}
    assert api.submit(payload=payload)["payload"] == payload
    api.refused("POST", "/v1/jobs", 413, json={"task": "work", "payload": {"x": payload["x"] + "y"}})


@pytest.mark.rows("B37")
def test_payload_with_many_names_is_stored(api: Api) -> None:
    payload = {f"k{number}": 0 for number in range(20_000)}
    assert api.submit(payload=payload)["payload"] == payload


@pytest.mark.rows("B24")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v2/jobs", 404),
        ("GET", "/v1//jobs", 404),
        ("GET", "//v1/jobs", 404),
        ("GET", "/v1/jobs/", 404),
        ("GET", "/v1/jobs/%00", 422),
        ("GET", "/v1/%6aobs", 200),
        ("GET", "/health/", 404),
        ("GET", "/v1/jobs/../../etc/passwd", 404),
        ("GET", "/v1/jobs/..%2f..%2fetc", 422),
        ("GET", "/" + "a" * 9000, 414),
        ("PUT", "/v1/jobs", 405),
        ("PUT", f"/v1/jobs/{UNKNOWN_ID}", 405),
        ("DELETE", "/v1/jobs", 405),
        ("OPTIONS", "/v1/jobs", 405),
        ("TRACE", "/health", 405),
        ("BREW", "/health", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/jobs/batch", 405),
        ("GET", "/v1/jobs/cancel", 405),
        ("GET", "/v1/jobs/delete", 405),
        ("GET", "/v1/jobs/replay", 405),
        ("GET", "/v1/jobs%0A", 404),
        ("POST", "/v1/queues/a.b/dead", 405),
    ],
)
def test_unknown_paths_and_methods_are_refused(method: str, path: str, status: int, api: Api) -> None:
    answer = api.ask(method, path)
    assert answer.status_code == status
    assert ("allow" in answer.headers) == (status == 405)


def test_head_says_what_get_would(api: Api) -> None:
    answer = api.ask("HEAD", "/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == api.ask("GET", "/health").headers["content-length"]


@pytest.mark.rows("B20")
def test_endless_body_is_cut_at_the_limit(api: Api) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    async def ask() -> Any:
        return await asyncio.wait_for(api.send("POST", "/v1/jobs", content=endless(), headers=JSON), 60)

    answer = api.run(ask())
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert sent <= MEBIBYTE + MAX_DRAINED + 2 * 65_536


def test_several_host_headers_are_refused(api: Api) -> None:
    hosts = [("host", "api"), ("host", "other")]
    assert api.refused("GET", "/health", 400, headers=hosts)["code"] == "several_hosts"


def test_allow_names_every_method_of_the_path(api: Api) -> None:
    for word in ("batch", "cancel", "delete", "replay"):
        assert api.ask("GET", f"/v1/jobs/{word}").headers["allow"] == "POST"
    assert api.ask("DELETE", "/v1/jobs").headers["allow"] == "GET, HEAD, POST"


def test_headers_have_a_limit(api: Api) -> None:
    assert api.refused("GET", "/health", 431, headers={"x-long": "y" * 40_000})["code"] == "headers_too_large"


def test_a_key_is_given_once(api: Api) -> None:
    headers = [("content-type", "application/json"), ("idempotency-key", "a"), ("idempotency-key", "b")]
    assert api.refused("POST", "/v1/jobs", 422, content=job(), headers=headers)["field"] == "Idempotency-Key"
    latin = [(b"content-type", b"application/json"), (b"idempotency-key", b"\xe9")]
    assert api.refused("POST", "/v1/jobs", 422, content=job(), headers=latin)["code"] == "invalid_unicode"


def test_a_page_of_another_site_changes_nothing(api: Api) -> None:
    job_id = api.submit()["id"]
    for site in ("cross-site", "same-site"):
        headers = {"sec-fetch-site": site}
        assert api.refused("POST", f"/v1/jobs/{job_id}/cancel", 403, headers=headers)["code"] == "cross_site"
        assert api.ask("GET", f"/v1/jobs/{job_id}", headers=headers).json()["state"] == "queued"
    assert "access-control-allow-origin" not in api.ask("GET", "/health", headers={"origin": "https://evil"}).headers
    assert api.ask("POST", f"/v1/jobs/{job_id}/cancel", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_a_request_keeps_a_sensible_id_of_its_own(api: Api) -> None:
    assert api.ask("GET", "/health", headers={"x-request-id": "trace-1.a_b"}).headers["x-request-id"] == "trace-1.a_b"
    for odd in ("a b", "x" * 65, "\x1b[2J", ""):
        assert api.ask("GET", "/health", headers={"x-request-id": odd}).headers["x-request-id"] != odd


def test_internal_error_reveals_only_its_id(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.core.events import Event, RequestFailed

    reported: list[Event] = []
    api.app.events.subscribe(reported.append, RequestFailed)

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("password=secret in /srv/holdfast")

    monkeypatch.setattr(api.app, "queues", broken)
    answer = api.run(api.raw("GET", "/v1/queues"))
    assert answer.status_code == 500
    assert (answer.json()["code"], "secret" in answer.text) == ("internal", False)
    (event,) = reported
    assert isinstance(event, RequestFailed)
    assert (event.request_id, event.path) == (answer.headers["x-request-id"], "/v1/queues")
    assert "secret" in event.error


def test_bad_bodies_are_refused_quickly(api: Api) -> None:
    bodies = [in_payload('"' + "\\" * 200_000), in_payload("[" * 200_000), in_payload('{"a":' * 40_000), b"{" * 500_000]
    begun = time.monotonic()
    for body in bodies:
        api.refused("POST", "/v1/jobs", 422, content=body, headers=JSON)
    assert time.monotonic() - begun < 20 * slowness()


@pytest.mark.parametrize(("way", "most"), [("id", 1), ("key", 6)])
def test_jobs_that_are_named_are_never_held_with_their_payloads(api: Api, way: str, most: int) -> None:
    large = {"task": "work", "payload": {"x": "y" * 200_000}}
    keys = [f"k{number}" for number in range(48)]
    batches = [[large | {"key": key} for key in some] for some in (keys[:24], keys[24:])]
    ids = [job["id"] for batch in batches for job in api.post("/v1/jobs/batch", {"jobs": batch}, 201)["jobs"]]
    named = ids if way == "id" else [f"key:{key}" for key in keys]
    tracemalloc.start()
    try:
        assert api.post("/v1/jobs/cancel", {"ids": named, "dry_run": True})["count"] == 48
        assert api.post("/v1/jobs/cancel", {"ids": named})["count"] == 48
        assert tracemalloc.get_traced_memory()[1] < most * MEBIBYTE  # of 9 in their payloads
    finally:
        tracemalloc.stop()
