"""The proxy itself, before a server that answers each line with the line, and remembers it."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import Port, until

SILENCE = 0.2
"""Seconds in which nothing must come."""


class Echo(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        self._port = Port()
        super().__init__(("127.0.0.1", self._port.number), EchoLines)
        self.heard: list[bytes] = []

    def server_close(self) -> None:
        super().server_close()
        self._port.release()


class EchoLines(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        try:
            for line in self.rfile:
                self.server.heard.append(line.strip())
                self.wfile.write(b"echo " + line)
        except ConnectionError:
            pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.server_address[1]) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connected(proxy) as client:
        assert given(client, b"hello") == b"echo hello\n"
        yield client


def connected(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=30)


def given(client: socket.socket, line: bytes) -> bytes:
    """Say a line; the answer."""
    client.sendall(line + b"\n")
    return client.recv(1000)


def silent(client: socket.socket) -> bool:
    client.settimeout(SILENCE)
    try:
        client.recv(1000)
    except TimeoutError:
        return True
    else:
        return False
    finally:
        client.settimeout(30)


def reset(client: socket.socket, line: bytes = b"anyone?") -> bool:
    """Whether the connection ends with a reset, here and now."""
    try:
        given(client, line)
    except ConnectionError:
        return True
    else:
        return False


@pytest.mark.parametrize(
    ("directions", "arrives"), [({}, False), ({"to_server": False}, True), ({"to_client": False}, False)]
)
def test_what_is_held_arrives_late(
    proxy: FaultProxy, client: socket.socket, echo: Echo, directions: dict[str, bool], arrives: bool
) -> None:
    proxy.hold(**directions)
    client.sendall(b"held\n")
    if arrives:
        until(lambda: b"held" in echo.heard, "the server to hear it")
    assert silent(client)
    assert (b"held" in echo.heard) == arrives
    proxy.heal()
    assert client.recv(1000) == b"echo held\n"


def test_connection_during_hold_is_accepted_and_silent(proxy: FaultProxy, echo: Echo) -> None:
    proxy.hold()
    with connected(proxy) as late:
        late.sendall(b"late\n")
        assert silent(late)
        proxy.heal()
        assert late.recv(1000) == b"echo late\n"


def test_tls_connection_both_ends_left_can_be_cut(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusted = ssl.create_default_context(cafile=authority.file)
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        FaultProxy(target.getsockname()[1], tls=authority.server()) as proxy,
    ):
        client = trusted.wrap_socket(connected(proxy), server_hostname="127.0.0.1")
        server, _ = target.accept()
        proxy.hold(to_client=False)  # keeps the connection: the server does not hear that the client has left
        client.close()
        time.sleep(SILENCE)
        server.close()
        time.sleep(SILENCE)
        proxy.cut()


def test_one_kind_of_connection_is_held_alone(proxy: FaultProxy, client: socket.socket) -> None:
    with connected(proxy) as listener:
        assert given(listener, b"LISTEN") == b"echo LISTEN\n"
        proxy.hold(of=b"LISTEN")
        listener.sendall(b"more\n")
        assert given(client, b"still here") == b"echo still here\n"
        assert silent(listener)


def test_client_closed_during_hold_is_noticed_after_healing(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.hold()
    client.sendall(b"last words\n")
    client.close()
    assert b"last words" not in echo.heard
    proxy.heal()
    until(lambda: b"last words" in echo.heard, "the last words to arrive")


def test_a_cut_resets_and_new_connections_work(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.cut()
    assert reset(client)
    with connected(proxy) as other:
        assert given(other, b"again") == b"echo again\n"
    assert proxy.cuts == 1


def test_what_is_held_when_it_is_cut_never_arrives(proxy: FaultProxy, client: socket.socket, echo: Echo) -> None:
    proxy.hold()
    client.sendall(b"gone\n")
    assert silent(client)
    proxy.cut()
    assert reset(client)
    proxy.heal()
    with connected(proxy) as other:
        assert given(other, b"after") == b"echo after\n"
    assert echo.heard == [b"hello", b"after"]


def test_refusal_spares_existing_connections(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)
    assert given(client, b"inside") == b"echo inside\n"
    proxy.accept()
    with connected(proxy) as other:
        assert given(other, b"again") == b"echo again\n"


def test_cut_after_the_server_has_done_it(proxy: FaultProxy, client: socket.socket, echo: Echo) -> None:
    assert given(client, b"COMMIT 0") == b"echo COMMIT 0\n"
    proxy.cut_after(b"COMMIT", answer=b"echo COMMIT")
    assert given(client, b"before") == b"echo before\n"
    client.sendall(b"COM")
    assert silent(client)
    assert reset(client, b"MIT 1")
    assert echo.heard == [b"hello", b"COMMIT 0", b"before", b"COMMIT 1"]
    with connected(proxy) as other:
        assert given(other, b"COMMIT 2") == b"echo COMMIT 2\n"


def test_cut_before_request_hides_it_from_the_server(proxy: FaultProxy, client: socket.socket, echo: Echo) -> None:
    proxy.cut_before(b"COMMIT", times=2)
    assert reset(client, b"COMMIT 1")
    with connected(proxy) as other:
        assert reset(other, b"COMMIT 2")
    with connected(proxy) as other:
        assert given(other, b"COMMIT 3") == b"echo COMMIT 3\n"
    assert echo.heard == [b"hello", b"COMMIT 3"]


def test_everything_takes_longer(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.delay(0.1)
    began = time.monotonic()
    assert given(client, b"slow") == b"echo slow\n"
    assert time.monotonic() - began >= 0.2


def test_a_target_that_is_gone_is_a_reset(proxy: FaultProxy, echo: Echo) -> None:
    echo.shutdown()
    echo.server_close()
    with connected(proxy) as client:
        assert client.recv(1000) == b""


def test_a_client_that_goes_takes_its_connection_along(proxy: FaultProxy, client: socket.socket) -> None:
    client.close()
    until(lambda: not proxy._connections, "the connection to end")
