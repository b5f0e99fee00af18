"""What no client should send, put into every place of every operation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from holdfast.web.fields import BodySchema
from holdfast.web.openapi import example_body, refusals_of
from holdfast.web.routing import Operation
from tests.web.client import JSON, UNKNOWN_ID, Api, check_form

BRIEF: dict[str, Any] = {"claim_wait": "0s", "event_stream_for": "0s"}
"""Settings with which every answer has an end, and soon."""
TEXTS = (
    "",
    " ",
    "\t\r\n",
    "\0",
    "a\0b",
    "%",
    "%zz",
    "../../etc/passwd",
    "..%2f",
    "{tag}",
    "*",
    "?",
    "a:b",
    "key:",
    "key:\0",
    "key: ",
    "key:" + "k" * 600,
    "'; drop table holdfast_job; --",
    '"',
    "\\",
    "-1",
    "0",
    "1.5",
    "1e308",
    "1e309",
    "-1e308",
    "NaN",
    "Infinity",
    "9" * 400,
    "0x10",
    "true",
    "null",
    "[]",
    "{}",
    "9999-12-31T23:59:59Z",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00+23:59",
    "2030-01-01T00:00:00",
    "99999999999999d",
    "1" * 30 + "h",
    "-5m",
    "5m5m",
    "1/0s",
    "0/s",
    "1e400/s",
    "\u202eevil",
    "e\u0301",
    "\u0130",
    "\uff41",
    "\U0001f389",
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    UNKNOWN_ID + UNKNOWN_ID,
    "7" + "Z" * 25,
    "8" + "0" * 25,
    "x" * 5000,
    "eyJhIjoxfQ==",
    "AAAA" * 200,
)
"""Of a path, a query or a header."""
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    -1e308,
    2**31,
    2**63,
    -(2**63) - 1,
    2**200,
    *TEXTS,
    [],
    [None],
    [[]],
    [{}],
    ["x"] * 1001,
    ["a", "a"],
    [UNKNOWN_ID, UNKNOWN_ID],
    {},
    {"": ""},
    {"a": {"b": [{"c": None}]}},
    {"kind": "exponential", "base": -1},
    {"kind": "exponential", "base": 1e308, "factor": 1e308, "cap": 1e308},
    {"queue": "a\0b"},
    {"k" * 5000: 1},
)
"""Of a body: numbers, texts and shapes."""
BODIES = (
    b"",
    b"null",
    b"[]",
    b"0",
    b'""',
    b"{",
    b"{}",
    b"{}{}",
    b'{"a":1,"a":2}',
    b'{"\\ud800":1}',
    b'{"a":"\\ud800"}',
    b'{"a":NaN}',
    b'{"a":1e999}',
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b"[" * 100_000,
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"a":"\xc3\x28"}',
    b'{"a":"\x00"}',
)
"""Whole."""
HEADERS = (
    {"idempotency-key": "a\tb"},
    {"idempotency-key": "k" * 10_000},
    {"if-match": '"x"'},
    {"range": "bytes=" + "0-1," * 1000},
    {"last-event-id": "-1"},
    {"last-event-id": "9" * 400},
    {"last-event-id": "x" * 3000},
    {"accept": "*/*;q=" + "9" * 400},
    {"accept": "application/openmetrics-text; version=,;;;=" * 50},
    {"authorization": "Bearer"},
    {"authorization": "Bearer " + "x" * 3000},
    {"authorization": "Basic Og=="},
    {"authorization": "\x7f"},
    {"x-api-key": "hf_" + "x" * 500},
    {"traceparent": "00-" + "0" * 32 + "-" + "f" * 16 + "-zz"},
    {"traceparent": "x" * 3000, "tracestate": "," * 3000},
    {"x-forwarded-for": "," * 2000},
    {"x-forwarded-for": "::ffff:1.2.3.4, 999.999.999.999, \x7f"},
    {"forwarded": "for=" + '"' * 999},
    {"host": ""},
    {"host": "a" * 3000},
    {"host": "[::1"},
    {"origin": "null"},
    {"origin": "http://[::1"},
    {"cookie": ";" * 3000},
    {"content-type": "application/json;" * 200},
    {"content-length": "-1"},
    {"expect": "100-continue"},
    {"upgrade": "websocket", "connection": "upgrade"},
)


class Asked(NamedTuple):
    """One request."""

    method: str
    target: str
    body: bytes | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - a default of a tuple, that is never changed


def requests(operation: Operation) -> Iterator[Asked]:
    """Garbage in every place of one operation."""
    method, plain = operation.method, _path(operation)
    body = None if operation.body is None else json.dumps(example_body(operation.body)).encode()
    for place in _places(operation):
        for text in TEXTS:
            yield Asked(method, _path(operation, {place: text}), body, JSON if body else {})
    for field in operation.query:
        for text in TEXTS:
            yield Asked(method, f"{plain}?{field.name}={quote(text, safe='')}", body, JSON if body else {})
        yield Asked(method, f"{plain}?{field.name}=%ff&{field.name}=%c3%28", body, JSON if body else {})
        yield Asked(method, f"{plain}?{'&'.join([f'{field.name}=a'] * 500)}", body, JSON if body else {})
    for headers in HEADERS:
        yield Asked(method, plain, body, {**(JSON if body else {}), **headers})
    for whole in BODIES:
        yield Asked(method, plain, whole, JSON)
    if operation.body is not None:
        for given in _spoiled(operation.body):
            yield Asked(method, plain, json.dumps(given).encode(), JSON)


def usual(operation: Operation) -> Asked:
    """What is asked as it should be."""
    if operation.body is None:
        return Asked(operation.method, _path(operation))
    return Asked(operation.method, _path(operation), json.dumps(example_body(operation.body)).encode(), JSON)


def _spoiled(body: BodySchema) -> Iterator[dict[str, Any]]:
    """The body's example with one field spoiled, and what is inside its fields likewise."""
    good = example_body(body)
    for field in body.fields:
        for value in VALUES:
            yield {**good, field.name: value}
    for inner in body.inner:
        for holder in body.fields:
            if f"/{inner.name}" in json.dumps(holder.value.schema):
                for given in _spoiled(inner):
                    many = holder.value.schema.get("type") == "array"
                    yield {**good, holder.name: [given] if many else given}
    yield {**good, "unknown": 1}


def _places(operation: Operation) -> list[str]:
    return [part[1:-1] for part in operation.path[1:].split("/") if part.startswith("{")]


def _path(operation: Operation, places: dict[str, str] | None = None) -> str:
    usual = {"queue": "default", "job_id": UNKNOWN_ID, "group": "batch", **(places or {})}
    parts = [usual.get(part[1:-1], "x") if part.startswith("{") else part for part in operation.path[1:].split("/")]
    return "/" + "/".join(quote(part, safe="") for part in parts)


ANYWHERE = frozenset({400, 401, 403, 404, 405, 406, 408, 413, 414, 415, 421, 422, 429, 431})
"""What garbage may meet before any operation sees it."""


async def complaint(api: Api, operation: Operation, asked: Asked) -> str | None:
    """What is wrong with the answer: an error of ours, no problem document, or a status that is not described."""
    try:
        answer = await api.raw(asked.method, asked.target, content=asked.body, headers=asked.headers)
        check_form(answer)
        expected = ANYWHERE | {*operation.answers, *refusals_of(operation)} - {503}
        assert answer.status_code in expected, answer.text
    except httpx.InvalidURL:
        return None  # the client itself refuses to send it
    except Exception as error:
        return f"{operation.name}: {asked.method} {asked.target[:200]} {(asked.body or b'')[:200]!r}: {error!r:.500}"
    return None


async def complaints(api: Api, operation: Operation, *, step: int = 1) -> tuple[list[str], int]:
    """What is wrong with any answer of one operation, and how many there were; of all requests each ``step``-th."""
    chosen = list(requests(operation))[len(operation.name) % step :: step]
    found = [await complaint(api, operation, asked) for asked in chosen]
    return [each for each in found if each is not None], len(chosen)
