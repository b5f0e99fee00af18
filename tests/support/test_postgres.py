"""The servers that tests rely on: they come back, they ask for passwords, they follow, and none outlives its test."""

from __future__ import annotations

import fcntl
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.support import servers
from tests.support.postgres import INSTALLS, PASSWORD, USER, Postgres, shared
from tests.support.redis import Redis

ROOT = Path(__file__).parents[2]
ENDINGS = {"fast": lambda s: s.stop(), "immediate": lambda s: s.stop(signal.SIGQUIT), "killed": lambda s: s.kill()}


@pytest.mark.parametrize("major", INSTALLS)
def test_server_restarts_on_its_port_with_acknowledged_data(major: int) -> None:
    with Postgres(major) as server:
        url = server.url(server.create_database())
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (how text)")
        for how, end in ENDINGS.items():
            with psycopg.connect(url) as connection:
                connection.execute("INSERT INTO kept VALUES (%s)", [how])
            end(server)
            assert not server.alive()
            server.start()
            with psycopg.connect(url) as connection:
                assert connection.execute("SELECT count(*) FROM kept WHERE how = %s", [how]).fetchone() == (1,)
        assert server.execute("SHOW server_version_num")[0][0].startswith(str(major))
        assert server.execute("SHOW fsync") == [("on",)]


def test_an_authenticated_server_asks_for_the_password() -> None:
    with Postgres(authenticated=True) as server:
        assert server.execute("SELECT current_user", user=USER) == [(USER,)]
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(host="127.0.0.1", port=server.port, user=USER, dbname="app", password=PASSWORD[1:])


def test_a_promoted_standby_has_every_acknowledged_row() -> None:
    with Postgres() as first, first.standby() as second:
        first.execute("CREATE TABLE kept AS SELECT 7 AS n")
        first.kill()
        second.promote()
        assert second.execute("SELECT n FROM kept") == [(7,)]
        first.follow(second)
        second.execute("INSERT INTO kept VALUES (8)")
        second.kill()
        first.promote()
        assert first.execute("SELECT n FROM kept ORDER BY n") == [(7,), (8,)]


def test_settings_change_while_the_server_runs() -> None:
    with Postgres(durable=False) as server:
        server.change(work_mem="7MB")
        assert server.execute("SHOW work_mem") == [("7MB",)]
        server.stop()
        server.start()
        assert server.execute("SHOW work_mem") == [("7MB",)]


def test_no_server_outlives_its_test_process() -> None:
    program = """
import time
from tests.support.postgres import Postgres
with Postgres(durable=False) as server:
    print(server._postmaster.pid, server._folder, flush=True)
    time.sleep(600)
"""
    test = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    with test.stdout as given:
        pid, folder = given.readline().split()
        postmaster = psutil.Process(int(pid))
        assert Path(folder).exists()
        test.kill()
    test.wait()
    servers.await_end([postmaster])
    servers.until(lambda: not Path(folder).exists(), "the server's folder to be removed")


def test_schema_belongs_to_the_test_and_is_dropped() -> None:
    with shared().fresh_schema() as name:
        shared().execute(f"CREATE SCHEMA {name} CREATE TABLE rows (n int)", user=USER)
    assert shared().execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", name) == []


def test_shared_folder_is_made_once_and_again_if_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "base", lambda: tmp_path)
    makings = []

    def make(folder: Path) -> None:
        makings.append(folder)
        (folder / "one").touch()
        (folder / "two").touch()

    threads = [threading.Thread(target=servers.made_once, args=("thing", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makings) == 1

    (tmp_path / "thing" / "two").unlink()
    assert (servers.made_once("thing", make) / "two").exists()
    assert len(makings) == 2


def test_port_stays_reserved_until_released() -> None:
    ports = [servers.Port() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.release()


def test_port_is_released_with_its_last_reference() -> None:
    port = servers.Port()
    file = servers.base() / "ports" / str(port.number)
    with file.open("ab") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        del port
        gc.collect()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("make", [Postgres, Redis])
def test_server_that_cannot_start_leaves_nothing(make: Callable[..., Postgres | Redis]) -> None:
    server = make(settings={"no-such-setting": "1"})
    with pytest.raises(RuntimeError, match="no-such-setting"), server:
        pass
    assert not server._folder.exists()
    with (servers.base() / "ports" / str(server.port)).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
