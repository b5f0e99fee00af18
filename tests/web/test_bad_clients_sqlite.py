"""Clients that are slow, rude or malicious on the wire: they delay no other client, and smuggle nothing in."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from holdfast.web import claims
from holdfast.web.openapi import example_body
from tests.support.load import slowness
from tests.support.plain_http import PLAIN
from tests.web.serving import Served, answer_on

JOB = {"task": "work", "payload": {}}
CROWD = 200
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(JOB).encode()


def whole(body: bytes = BODY, path: bytes = b"/v1/jobs") -> bytes:
    """A request as it should be."""
    return HEAD.replace(b"/v1/jobs", path) + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


CLAIM = json.dumps(example_body(claims.CLAIM) | {"queues": ["idle"], "wait": 30}).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One API for all of them: whatever one does, the next finds it at work."""
    folder = tmp_path_factory.mktemp("rude")
    with Served(folder, f"sqlite:///{folder}/jobs.db") as served:
        with served.client() as client:
            client.post("/v1/jobs", json=JOB | {"key": "waited", "queue": "nobody"})
        yield served
        assert served.process.poll() is None
        assert not [line for line in served.lines if line["event"] == "request_failed"]


def jobs(served: Served, key: str) -> int:
    """How many jobs of this key there are."""
    with served.client() as client:
        return int(client.get(f"/v1/jobs/key:{key}").status_code == 200)


# ── a stack of them ───────────────────────────────────────────────────────────────────────────────────────────────
RUDE = {
    "a head that does not end": HEAD[:40],
    "a body that does not come": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "a chunk that does not come": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n{",
    "nothing": b"",
    "an announcement of a gibibyte": HEAD + b"Content-Length: 1073741824\r\n\r\n" + b" " * 50_000,
    "garbage": bytes(range(256)) * 20,
    "requests without end, and no answer taken": whole() * 50,
    "a question that waits": b"GET /v1/jobs/key:waited?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a stream that is not read": b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a claim that waits": whole(CLAIM, b"/v1/claims"),
}


@pytest.mark.parametrize("words", RUDE.values(), ids=RUDE)
def test_many_idle_connections_delay_no_other_client(served: Served, words: bytes) -> None:
    with contextlib.ExitStack() as stack, served.client() as client:
        for _ in range(CROWD if len(words) < 2000 else CROWD // 10):
            with contextlib.suppress(OSError):
                stack.enter_context(served.connect()).sendall(words)
        took = []
        for _ in range(10):
            begun = time.monotonic()
            assert client.post("/v1/jobs", json=JOB).status_code == 201
            took.append(time.monotonic() - begun)
    assert sorted(took)[5] < 5 * slowness()  # milliseconds, on a machine that has nothing else to do


def test_slow_bodies_delay_no_other_client(served: Served) -> None:
    with contextlib.ExitStack() as stack, served.client() as client:
        slow = [stack.enter_context(served.connect()) for _ in range(CROWD)]
        for each in slow:
            each.sendall(HEAD + b"Content-Length: 500\r\n\r\n")
        for _ in range(10):
            for each in slow:
                each.sendall(b" ")
            assert client.post("/v1/jobs", json=JOB).status_code == 201


# ── one at a time ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_requests_one_behind_the_other_are_answered_in_their_order(served: Served) -> None:
    with served.connect() as connection:
        for number in range(30):
            connection.sendall(whole(json.dumps(JOB | {"key": f"pipeline-{number}"}).encode()))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reported = answer_on(connection)
    assert reported.count(b"HTTP/1.1 201 ") == 30
    places = [reported.index(b'"pipeline-%d"' % number) for number in range(30)]
    assert places == sorted(places)


@pytest.mark.parametrize("end", [b"", b"GET"])
def test_half_closed_client_is_answered_or_disconnected(served: Served, end: bytes) -> None:
    with served.connect() as connection:
        connection.sendall(whole(json.dumps(JOB | {"key": "half"}).encode()) + end)
        connection.shutdown(socket.SHUT_WR)
        answer_on(connection)
    with served.client() as client:
        assert client.post("/v1/jobs", json=JOB | {"key": "half"}).status_code in (200, 201)


def test_client_that_leaves_after_sending_can_ask_by_key(served: Served) -> None:
    for number in range(20):
        connection = served.connect()
        connection.sendall(whole(json.dumps(JOB | {"key": f"gone-{number}"}).encode()))
        connection.close()
    with served.client() as client:
        answers = [client.post("/v1/jobs", json=JOB | {"key": f"gone-{number}"}) for number in range(20)]
        assert {each.status_code for each in answers} <= {200, 201}
        assert len({each.json()["id"] for each in answers}) == 20


def test_garbage_is_refused_and_the_next_is_served(served: Served) -> None:
    rng = random.Random(7)
    for _ in range(40):
        with served.connect() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(rng.randbytes(rng.choice([1, 20, 300, 5000])) + b"\r\n\r\n")
            answer = answer_on(connection)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")), answer[:200]
    assert httpx.get(f"{served.address}/health", timeout=40, verify=PLAIN).status_code == 200


SMUGGLED = json.dumps(JOB | {"key": "smuggled"}).encode()
INNER = whole(SMUGGLED)
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLING = {
    "length and chunks": HEAD
    + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % (len(CHUNKED) + len(INNER))
    + CHUNKED
    + INNER,
    "chunks and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + INNER,
    "two lengths": HEAD + b"Content-Length: %d\r\nContent-Length: 0\r\n\r\n" % (len(BODY) + len(INNER)) + BODY + INNER,
    "a list of lengths": HEAD + b"Content-Length: 0, %d\r\n\r\n" % len(INNER) + INNER,
    "a length with a sign": HEAD + b"Content-Length: +0\r\n\r\n" + INNER,
    "a length below zero": HEAD + b"Content-Length: -1\r\n\r\n" + INNER,
    "an endless length": HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n" + INNER,
    "no coding that there is": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + INNER,
    "chunks twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + INNER,
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + INNER,
    "a folded line": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + INNER,
    "a bare line feed": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 0\n\n" + INNER,
    "a bare carriage return": HEAD + b"X: a\rContent-Length: 0\r\n\r\n" + INNER,
    "a NUL in a header": HEAD + b"X: a\0b\r\nContent-Length: 0\r\n\r\n" + INNER,
    "a chunk of any size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n" + INNER,
    "a chunk below zero": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + INNER,
    "an old version": b"POST /v1/jobs HTTP/0.9\r\n\r\n" + INNER,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER,
}


@pytest.mark.parametrize("words", SMUGGLING.values(), ids=SMUGGLING)
def test_nothing_is_smuggled_in(served: Served, words: bytes) -> None:
    with served.connect() as connection:
        connection.settimeout(3)  # some wait for more, and rightly
        with contextlib.suppress(OSError):
            connection.sendall(words)
        reported = answer_on(connection)
    assert b"HTTP/1.1 5" not in reported
    assert jobs(served, "smuggled") == 0, reported[:500]


def test_waiting_requests_wait(served: Served) -> None:
    with served.client() as client:
        assert client.get("/v1/jobs/key:waited", params={"wait": 1}).json()["state"] == "queued"
        claimed = client.post("/v1/claims", json=json.loads(CLAIM) | {"wait": 0})
        assert (claimed.status_code, claimed.json()["jobs"]) == (200, [])


def test_declared_content_is_stored(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(INNER.replace(b"smuggled", b"declared"))
        assert connection.recv(100).startswith(b"HTTP/1.1 201 ")
    assert jobs(served, "declared") == 1
