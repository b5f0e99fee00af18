"""The Redis servers that tests rely on: they come back with what they acknowledged, and none outlives its test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis import Redis as Client
from redis.exceptions import AuthenticationError

from tests.support import servers
from tests.support.redis import FLOORS, MAIN, PASSWORD, Redis, shared

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
def test_server_restarts_on_its_port_with_acknowledged_data(kind: str) -> None:
    with Redis(kind, settings={"appendfsync": "always"}) as server:
        for end in (server.stop, server.kill):
            server.execute("INCR", "kept")
            end()
            assert not server.alive()
            server.start()
        assert server.execute("GET", "kept") == b"2"


def test_a_server_with_a_password_asks_for_it() -> None:
    with Redis(password=PASSWORD) as server:
        assert server.execute("PING")
        with Client(port=server.port, password="wrong") as client, pytest.raises(AuthenticationError):
            client.ping()


def test_namespace_belongs_to_the_test_and_is_deleted() -> None:
    with shared().fresh_namespace() as name:
        shared().execute("SET", f"{{{name}}}:key", "value")
    assert shared().execute("EXISTS", f"{{{name}}}:key") == 0


def test_no_server_outlives_its_test_process() -> None:
    program = """
import time
from tests.support.redis import Redis
with Redis() as server:
    print(server._process.pid, server.folder, flush=True)
    time.sleep(600)
"""
    test = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    with test.stdout as given:
        pid, folder = given.readline().split()
        process = psutil.Process(int(pid))
        test.kill()
    test.wait()
    servers.await_end([process])
    servers.until(lambda: not Path(folder).exists(), "the server's folder to be removed")
