"""The sidecar: a page for a path, in a thread of its own, whatever its clients do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.worker.metrics_server import MetricsPage, PageServer
from tests.support.load import slowness

DEADLINE = 60.0


def _echo(accept: str) -> MetricsPage:
    return MetricsPage(200, f"accept: {accept}\n".encode(), "text/plain")


def _missing(_accept: str) -> MetricsPage:
    raise ConfigError("something is not installed")


@pytest.fixture
def sidecar() -> Iterator[PageServer]:
    sidecar = PageServer("127.0.0.1", 0, {"/": _echo, "/metrics": _echo, "/missing": _missing})
    sidecar.start()
    yield sidecar
    sidecar.stop()


def port_of(sidecar: PageServer) -> int:
    return int(sidecar.address.rpartition(":")[2])


def ask(sidecar: PageServer, method: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(sidecar), timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_page_is_rendered_on_request(sidecar: PageServer) -> None:
    assert ask(sidecar, "GET", "/metrics", Accept="application/json") == (200, "accept: application/json\n")
    assert ask(sidecar, "GET", "/metrics?x=1") == (200, "accept: \n")
    assert ask(sidecar, "HEAD", "/") == (200, "")


def test_unknown_path_and_method_are_answered(sidecar: PageServer) -> None:
    assert ask(sidecar, "GET", "/nowhere") == (404, "there are /, /metrics, /missing\n")
    assert ask(sidecar, "POST", "/metrics")[0] == 405
    assert ask(sidecar, "GET", "/missing") == (501, "something is not installed\n")


def test_silent_or_malformed_clients_do_not_block_others(sidecar: PageServer) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(100):  # more than are held; probes of Kubernetes wait a second
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(sidecar))))
            silent.sendall(b"GET / HTTP/1.1\r\n" if number % 2 else b"")
        for nonsense in (b"\r\n\r\n", b"\x00\xff\r\n\r\n", b"x" * 20_000 + b"\r\n\r\n", b"GET /\r\n\r\n"):
            odd = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(sidecar)), timeout=DEADLINE))
            with contextlib.suppress(ConnectionError):
                odd.sendall(nonsense)
                while odd.recv(1000):
                    pass
        begun = time.monotonic()
        assert ask(sidecar, "GET", "/metrics")[0] == 200
        assert time.monotonic() - begun < 1 * slowness()


def test_occupied_port_is_reported(sidecar: PageServer) -> None:
    with pytest.raises(Unavailable, match=r"metrics_port: cannot listen on 127\.0\.0\.1:\d+: .*another metrics_port"):
        PageServer("127.0.0.1", port_of(sidecar), {})
    with pytest.raises(ConfigError, match=r"metrics_host, metrics_port: cannot listen on 192\.0\.2\.1:0: "):
        PageServer("192.0.2.1", 0, {})


def test_stopped_it_leaves_its_port() -> None:
    sidecar = PageServer("127.0.0.1", 0, {"/": _echo})
    sidecar.start()
    port = port_of(sidecar)
    sidecar.stop()

    PageServer("127.0.0.1", port, {}).stop()
