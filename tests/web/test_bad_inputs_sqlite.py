"""Bad requests: the rows B01 to B59 and B89 to B95 of the table of bad inputs that come over HTTP.

A row's id begins with its number there. What is refused changes nothing, is told as a problem document with a stable
code, and is never an error of ours. Unparsable JSON answers 422, as every value that is not as it should be.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from tests.web.client import JSON, UNKNOWN_ID, Api


class Bad(NamedTuple):
    """A body and what comes of it."""

    id: str
    body: bytes
    status: int
    code: str
    headers: dict[str, str] = JSON


def _job(**said: Any) -> bytes:
    return json.dumps({"type": "work", "payload": {}, **said}).encode()


def _payload(text: str) -> bytes:
    return b'{"type": "work", "payload": {"x": %s}}' % text.encode()


MEBIBYTE = 1024 * 1024
DEEP = "[" * 80 + "]" * 80

BAD = [
    Bad("B01-empty", b"", 422, "body_required"),
    Bad("B02-cut", b"{", 422, "invalid_json"),
    Bad("B02-comma", b'{"a":1,}', 422, "invalid_json"),
    Bad("B02-trailing", _job() + b"x", 422, "invalid_json"),
    Bad("B02-no-object", b"[]", 422, "invalid"),
    Bad("B02-null", b"null", 422, "invalid"),
    Bad("B04-text", _job(), 415, "unsupported_media_type", {"content-type": "text/plain"}),
    Bad("B04-form", _job(), 415, "unsupported_media_type", {"content-type": "multipart/form-data; boundary=x"}),
    Bad("B04-none", _job(), 415, "unsupported_media_type", {}),
    Bad("B04-charset", _job(), 415, "unsupported_media_type", {"content-type": "application/json; charset=latin-1"}),
    Bad("B05-utf-16", _job().decode().encode("utf-16-le"), 422, "invalid_json"),
    Bad("B05-utf-16-with-mark", _job().decode().encode("utf-16"), 422, "invalid_unicode"),
    Bad("B05-latin-1", '{"type": "é"}'.encode("latin-1"), 422, "invalid_unicode"),
    Bad("B06-mark", b"\xef\xbb\xbf" + _job(), 422, "invalid_unicode"),
    Bad("B08-twice", b'{"type":"work","payload":{},"queue":"a","queue":"b"}', 422, "duplicate_key"),
    Bad("B08-twice-inside", b'{"type":"work","payload":{"a":{"b":1,"b":1}}}', 422, "duplicate_key"),
    Bad("B09-unknown", _job(prioritty=1), 422, "unknown_field"),
    *(Bad(f"B10-id-{text!r}", _job(id=text), 422, "invalid") for text in ("", " ", "\t", "x", 5)),
    *(Bad(f"B10-type-{text!r}", _job(type=text), 422, "invalid") for text in ("", " ", "\t", "a\nb", "x" * 129, 5)),
    *(
        Bad(f"B12-key-{text!r}", _job(key=text), 422, "invalid")
        for text in ("", " ", "a\n", "a\r\n", "\x1b[2J", "a\u202eb", "a\u200db", "\u0301")
    ),
    *(
        Bad(f"B13-queue-{text}", _job(queue=text), 422, "invalid")
        for text in ("../../etc/passwd", "%2e%2e%2f", "a/b", "{tag}", "*", "?", ":", "a:b")
    ),
    *(Bad(f"B14-queue-{text}", _job(queue=text), 422, "invalid") for text in ("é", "e\u0301", "İ", "ａ", "A")),
    Bad("B16-digits", _payload("9" * 5000), 422, "number_too_long"),
    Bad("B17-high", _payload("1e999"), 422, "number_out_of_range"),
    Bad("B17-low", _payload("-1e999"), 422, "number_out_of_range"),
    *(Bad(f"B18-{word}", _payload(word), 422, "invalid_json") for word in ("NaN", "Infinity", "-Infinity")),
    Bad("B20-long", b" " * (MEBIBYTE + 1), 413, "too_large"),
    *(
        Bad(f"B21-{coding}", _job(), 415, "unsupported_encoding", {**JSON, "content-encoding": coding})
        for coding in ("gzip", "br", "zstd", "identity")
    ),
    Bad("B26-options", _job(), 415, "unsupported_media_type", {"content-type": 'application/json; a="' + "\\" * 9000}),
    Bad("B34-surrogate", _payload('"\\ud800"'), 422, "invalid_unicode"),
    Bad("B34-surrogate-in-key", b'{"type":"work","payload":{"\\udc00":1}}', 422, "invalid_unicode"),
    Bad("B34-surrogate-in-tag", b'{"type":"work","payload":{},"tags":["\\ud800"]}', 422, "invalid_unicode"),
    Bad("B35-deep", _payload(DEEP), 422, "too_deep"),
    Bad("B35-very-deep", _payload("[" * 200_000), 422, "too_deep"),
    Bad("B36-payload", _payload('"' + "x" * 256 * 1024 + '"'), 413, "too_large"),
    Bad("B37-long-name", json.dumps({"type": "work", "payload": {"k" * 65536: 1}}).encode(), 422, "invalid"),
    *(
        Bad(f"B48-{value}", _job(run_at=value), 422, "invalid")
        for value in ("9999-12-31T23:59:59-01:00", "1969-12-31T23:59:59Z", "infinity", "now", 1_924_992_000_000, True)
    ),
    *(
        Bad(f"B49-{value}", _job(run_at=value), 422, "invalid")
        for value in (
            "2030-01-01T00:00:00",
            "2030-01-01T00:00:00+25:00",
            "2030-12-31T23:59:60Z",
            "2024-02-30T00:00:00Z",
        )
    ),
    *(Bad(f"B50-{value!r}", _job(delay=value), 422, "invalid") for value in (-1, 1e18, "5", True, [], {})),
    Bad("B50-both", _job(delay=1, run_at="2030-01-01T00:00:00Z"), 422, "invalid"),
    *(
        Bad(f"B52-{value}", _job(retry=value), 422, "invalid")
        for value in ("", "sometimes", "exponential:base=-1", "exponential:factor=1e309", {"kind": "x"}, [], 5)
    ),
    *(Bad(f"B53-{value!r}", _job(timeout=value), 422, "invalid") for value in (0, -1, 31 * 86_400, "5", [])),
    *(Bad(f"B54-{value!r}", _job(priority=value), 422, "invalid") for value in (2**31, -(2**31), 1.5, "5", True, [])),
    Bad("B57-key", _job(key="k" * 100_000), 422, "invalid"),
    Bad("B58-many", _job(tags=[f"t{number}" for number in range(1001)]), 422, "invalid"),
    *(
        Bad(f"B58-{str(value)[:20]}", _job(tags=value), 422, "invalid")
        for value in ([""], ["t" * 10_240], "abc", 5, [5])
    ),
    *(
        Bad(f"attempts-{value!r}", _job(max_attempts=value), 422, "invalid")
        for value in (0, 26, 100, "x", "5", 2.5, True, [])
    ),
    Bad("type-missing", b'{"payload":{}}', 422, "missing"),
    Bad("payload-missing", b'{"type":"work"}', 422, "missing"),
    *(Bad(f"payload-{value!r}", _job(payload=value), 422, "invalid") for value in ([], "x", 5, None, True)),
    *(Bad(f"metadata-{str(value)[:9]}", _job(metadata=value), 422, "invalid") for value in ([], "x", 5, None)),
    Bad("metadata-large", _job(metadata={"x": "y" * 17_000}), 413, "too_large"),
    Bad("command", _job(type="command", payload={"argv": ["true"]}), 422, "invalid"),
]

ELSEWHERE = {
    22: "slow bodies are sent to a server of its own in test_serving.py",
    24: "paths and methods are below",
    25: "no operation serves files, so none looks at Range",
    28: "cursors and ids are forged in test_looking.py",
    29: "limits are in test_looking.py",
    30: "queries are in test_looking.py",
    32: "numbers come back by value: test_submitting.py",
    33: "NUL comes back: test_submitting.py",
    38: "names such as __proto__ are data: test_submitting.py",
    40: "nothing is exported as CSV",
    41: "envelopes are data: test_submitting.py",
    56: "unique states do not exist",
    89: "a schema's name stands in the URL of the store, tested there",
    90: "there is no console yet; ids in paths are in test_looking.py",
    92: "there is no stream of events yet",
    93: "there are no metrics yet",
    94: "there are no keys yet",
    95: "there are no rate limits yet",
}
"""Rows of the HTTP kind that have no line above."""


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
    body = b'{"jobs": [%s, %s]}' % (_job(), bad.body)
    status = 422 if bad.code in ("body_required", "invalid_unicode") or bad.id.startswith("B20") else bad.status
    problem = api.refused("POST", "/v1/jobs/batch", status, content=body, headers=bad.headers)
    assert problem["remedy"]
    assert api.count() == 0


def test_b36_a_payload_at_the_limit_is_stored(api: Api) -> None:
    payload = {"x": "y" * (256 * 1024 - 8)}
    assert api.submit(payload=payload)["payload"] == payload
    api.refused("POST", "/v1/jobs", 413, json={"type": "work", "payload": {"x": payload["x"] + "y"}})


def test_b37_many_names_are_data(api: Api) -> None:
    payload = {f"k{number}": 0 for number in range(20_000)}
    assert api.submit(payload=payload)["payload"] == payload


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
        ("PATCH", f"/v1/jobs/{UNKNOWN_ID}", 405),
        ("DELETE", "/v1/jobs", 405),
        ("OPTIONS", "/v1/jobs", 405),
        ("TRACE", "/health", 405),
        ("BREW", "/health", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/jobs/cancel", 422),
        ("POST", "/v1/queues/a.b/dead", 405),
    ],
)
def test_b24_paths_and_methods(method: str, path: str, status: int, api: Api) -> None:
    answer = api.ask(method, path)
    assert answer.status_code == status
    assert ("allow" in answer.headers) == (status == 405)


def test_head_says_what_get_would(api: Api) -> None:
    answer = api.ask("HEAD", "/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == api.ask("GET", "/health").headers["content-length"]


def test_b20_an_endless_body_is_cut_at_the_limit(api: Api) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    async def ask() -> Any:
        return await asyncio.wait_for(api.send("POST", "/v1/jobs", content=endless(), headers=JSON), 20)

    answer = api.run(ask())
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert sent <= MEBIBYTE + 2 * 65_536


def test_headers_have_a_limit(api: Api) -> None:
    assert api.refused("GET", "/health", 431, headers={"x-long": "y" * 40_000})["code"] == "headers_too_large"


def test_a_key_is_said_once(api: Api) -> None:
    headers = [("content-type", "application/json"), ("idempotency-key", "a"), ("idempotency-key", "b")]
    assert api.refused("POST", "/v1/jobs", 422, content=_job(), headers=headers)["field"] == "Idempotency-Key"
    latin = [(b"content-type", b"application/json"), (b"idempotency-key", b"\xe9")]
    assert api.refused("POST", "/v1/jobs", 422, content=_job(), headers=latin)["code"] == "invalid_unicode"


def test_a_page_of_another_site_changes_nothing(api: Api) -> None:
    job_id = api.submit()["id"]
    for site in ("cross-site", "same-site"):
        headers = {"sec-fetch-site": site}
        assert api.refused("POST", f"/v1/jobs/{job_id}/cancel", 403, headers=headers)["code"] == "cross_site"
        assert api.ask("GET", f"/v1/jobs/{job_id}", headers=headers).json()["status"] == "queued"
    assert "access-control-allow-origin" not in api.ask("GET", "/health", headers={"origin": "https://evil"}).headers
    assert api.ask("POST", f"/v1/jobs/{job_id}/cancel", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_a_request_keeps_a_sensible_id_of_its_own(api: Api) -> None:
    assert api.ask("GET", "/health", headers={"x-request-id": "trace-1.a_b"}).headers["x-request-id"] == "trace-1.a_b"
    for odd in ("a b", "x" * 65, "\x1b[2J", ""):
        assert api.ask("GET", "/health", headers={"x-request-id": odd}).headers["x-request-id"] != odd


def test_an_error_of_ours_tells_nothing_but_its_id(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.events import Event, RequestFailed

    told: list[Event] = []
    api.app.events.subscribe(told.append, RequestFailed)

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("password=secret in /srv/holdfast")

    monkeypatch.setattr(api.app, "queues", broken)
    answer = api.run(api.raw("GET", "/v1/queues"))
    assert answer.status_code == 500
    assert (answer.json()["code"], "secret" in answer.text) == ("internal", False)
    (event,) = told
    assert isinstance(event, RequestFailed)
    assert (event.request_id, event.path) == (answer.headers["x-request-id"], "/v1/queues")
    assert "secret" in event.error


def test_bad_bodies_are_refused_quickly(api: Api) -> None:
    bodies = [_payload('"' + "\\" * 200_000), _payload("[" * 200_000), _payload('{"a":' * 40_000), b"{" * 500_000]
    begun = time.monotonic()
    for body in bodies:
        api.refused("POST", "/v1/jobs", 422, content=body, headers=JSON)
    assert time.monotonic() - begun < 20


def test_every_row_has_its_line_here_or_a_reason() -> None:
    http = {1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25, 26, 28, 29, 30, 32, 33, 34, 36, 37, 38}
    http |= {40, 41, 48, 49, 50, 52, 53, 54, 56, 57, 58, 89, 90, 92, 93, 94, 95}
    here = {int(bad.id[1:3]) for bad in BAD if bad.id[1:3].isdigit()} | {37}
    assert http - {35} <= here | set(ELSEWHERE)
    assert not here & set(ELSEWHERE)
    assert len({bad.id for bad in BAD}) == len(BAD)
