"""Connections of ``holdfast api``: so many at once, and none that takes for ever."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.web.connection_limits import ConnectionLimits, ConnectionRegistry
from holdfast.web.rate_limit import Proxies
from tests.web.serving import Served

JOB = {"task": "work", "payload": {}}
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"


class Slow(NamedTuple):
    """What a client sends before it falls silent, and the answer it gets in the end."""

    id: str
    sent: bytes
    status: int | None
    code: str = ""


SLOW = [
    Slow("nothing", b"", None),
    Slow("half-a-head", HEAD[:40], 408, "headers_too_slow"),
    Slow("half-a-body", HEAD, 408, "body_too_slow"),
    Slow("empty-lines", b"\r\n\r\n", 408, "headers_too_slow"),
    Slow("endless-head", b"GET / HTTP/1.1\r\nX: " + b"x" * 80_000, 431, "headers_too_large"),
    Slow("endless-path", b"GET /" + b"x" * 80_000, 414, "path_too_long"),
    Slow("long-path", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "path_too_long"),
    Slow("large-head", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
    Slow("no-http", b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http"),
]


def served(folder: Path, **settings: str) -> Served:
    """A server that loses patience soon."""
    hasty = {"header_timeout": "1s", "body_timeout": "1s", "keep_alive": "1s", **settings}
    return Served(folder, f"sqlite:///{folder}/jobs.db", **hasty)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("hasty")) as server:
        yield server


def _all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            received += part
    return received


def _answer(received: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head.lower()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("slow", SLOW, ids=lambda slow: slow.id)
def test_silent_client_gets_an_answer_and_is_disconnected(hasty: Served, slow: Slow) -> None:
    with hasty.connect() as connection:
        connection.sendall(slow.sent)
        received = _all(connection)
        if slow.status is None:
            assert received == b""
        else:
            status, problem = _answer(received)
            assert (status, problem["code"]) == (slow.status, slow.code)


def test_an_idle_connection_is_closed_after_its_answer(hasty: Served) -> None:
    with hasty.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert _all(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_trickles_after_its_answer_ends_the_connection(hasty: Served) -> None:
    with hasty.connect() as connection:
        connection.sendall(HEAD.replace(b"POST /v1/jobs", b"GET /health"))
        received = b""
        with contextlib.suppress(OSError):  # until the server closes
            connection.settimeout(0.2)
            for _ in range(100):
                connection.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    part = connection.recv(65_536)
                    received += part
                    if not part:
                        break
            else:
                pytest.fail("it was held open")
        assert received.startswith(b"HTTP/1.1 200 ")


def test_client_that_does_not_read_its_answer_is_disconnected(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        job = client.post("/v1/jobs", json={"task": "work", "payload": {"text": "x" * 200_000}}).json()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(40)
            connection.connect(("127.0.0.1", server.port))
            ask = f"GET /v1/jobs/{job['id']} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            with pytest.raises(ConnectionError):  # noqa: PT012 - which of them meets the closed connection is open
                for _ in range(10_000):
                    connection.sendall(ask * 20)


def test_no_more_connections_are_held_than_the_settings_say(tmp_path: Path) -> None:
    patient = {"header_timeout": "60s", "body_timeout": "60s"}
    with served(tmp_path, connections_per_address="5", **patient) as server, contextlib.ExitStack() as slow:
        for _ in range(5):
            slow.enter_context(server.connect()).sendall(HEAD)
        with server.connect() as sixth:
            status, problem = _answer(_all(sixth))
        assert (status, problem["code"]) == (503, "too_many_connections")
        slow.close()
        with server.client() as client:
            assert client.post("/v1/jobs", json=JOB).status_code in (201, 503)  # the five may not have left yet


def test_a_trusted_proxy_is_not_bounded_as_one_client() -> None:
    bounds = ConnectionLimits(max_connections=4, max_per_address=1, head=1.0, body=1.0, proxies=Proxies(["10.0.0.0/8"]))
    registry = ConnectionRegistry(bounds)
    assert [registry.add_connection(each) for each in ("10.0.0.1", "10.0.0.1", "192.0.2.1")] == [True, True, True]
    assert not registry.add_connection("192.0.2.1")  # its second
    assert not registry.add_connection("10.0.0.1")  # one more than there may be in all


def test_silent_connections_give_way_to_active_ones(tmp_path: Path) -> None:
    with served(tmp_path, connections="4", header_timeout="60s") as server, contextlib.ExitStack() as held:
        silent = [held.enter_context(server.connect()) for _ in range(3)]
        silent[1].sendall(HEAD[:40])
        asked = held.enter_context(server.connect())
        asked.sendall(HEAD)
        for _ in range(3):
            with server.client() as probe:
                assert probe.get("/health/live").status_code == 200
        asked.sendall(b" " * 998 + b"}")
        assert asked.recv(1000).startswith(b"HTTP/1.1 4")  # what has begun to ask is answered
        assert _all(silent[0]) == b""


@pytest.fixture
def encrypted(tmp_path: Path) -> dict[str, str]:
    """Settings of TLS, with a certificate that signs for itself."""
    wanted = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = {"tls_certificate": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    made = ["-out", files["tls_certificate"], "-keyout", files["tls_key"]]
    subprocess.run(["openssl", *wanted.split(), *made], check=True, capture_output=True)
    return files


def test_a_tls_handshake_takes_no_longer_than_a_head(tmp_path: Path, encrypted: dict[str, str]) -> None:
    with served(tmp_path, **encrypted) as server, server.connect() as silent:
        silent.settimeout(40)  # asyncio's own limit of a handshake is a minute
        assert _all(silent) == b""


def test_tls_handshakes_count_as_connections(tmp_path: Path, encrypted: dict[str, str]) -> None:
    patient = {"connections_per_address": "3", "header_timeout": "60s", **encrypted}
    with served(tmp_path, **patient) as server, contextlib.ExitStack() as held:
        connections = [held.enter_context(server.connect()) for _ in range(4)]
        connections[3].settimeout(40)
        assert _all(connections[3]) == b""
        assert server.stop() == 0


def test_silent_tls_handshakes_give_way_to_requests(tmp_path: Path, encrypted: dict[str, str]) -> None:
    trusted = ssl.create_default_context(cafile=encrypted["tls_certificate"])
    with served(tmp_path, connections="4", header_timeout="60s", **encrypted) as server, contextlib.ExitStack() as held:
        silent = [held.enter_context(server.connect()) for _ in range(6)]
        silent[0].settimeout(40)
        assert _all(silent[0]) == b""
        for _ in range(3):
            with server.client(verify=trusted) as probe:
                assert probe.get("/health/live").status_code == 200
