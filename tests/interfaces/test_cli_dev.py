"""``holdfast dev``: API and worker in one process that starts anew when code changes."""

from __future__ import annotations

import re
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from holdfast.cli.api import Watcher
from tests.interfaces.cli import JOBS, Cli
from tests.support.load import slowness
from tests.support.plain_http import PLAIN

_DEADLINE = 90.0
_ANSWERED, _LATE = 2.0, 1.0  # seconds the API has for an answer, and what a busy machine adds
_BROKEN_LIFE = """
from contextlib import asynccontextmanager

@app.lifespan
@asynccontextmanager
async def life(app):
    raise RuntimeError("no database")
    yield
"""
_WAITING = """
import asyncio, pathlib, sys

@app.task("waiting")
async def waiting():
    print("the handler is waiting", file=sys.stderr, flush=True)
    while not pathlib.Path("finish").exists():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
"""


class Dev:
    """``holdfast dev`` on a free port, and what it says. Use it with ``with``."""

    def __init__(self, cli: Cli, *words: str, port: str = "0") -> None:
        options = ["--port", port] if port else []
        self.process = cli.process("dev", *options, *words, stdout=subprocess.DEVNULL)
        self._heard = threading.Condition()
        self._lines: list[str] = []
        self._read = 0
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self._lines.append(line.decode())
                self._heard.notify_all()

    def says(self, pattern: str) -> re.Match[str]:
        """The next line that holds this, awaited; lines before it are done with."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            while self._read < len(self._lines) and not found:
                found.extend(filter(None, [re.search(pattern, self._lines[self._read])]))
                self._read += 1
            return bool(found)

        with self._heard:
            assert self._heard.wait_for(look, _DEADLINE), self._lines
        return found[0]

    def client(self) -> httpx.Client:
        """Of the API, once it says where it is."""
        return httpx.Client(
            base_url=self.says(r"the API is at (http://127\.0\.0\.1:\d+),")[1], timeout=_DEADLINE, verify=PLAIN
        )

    def ends(self, number: int = signal.SIGINT) -> int:
        """The exit code after this signal."""
        self.process.send_signal(number)
        return self.process.wait(_DEADLINE)

    def __enter__(self) -> Dev:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(_DEADLINE)
        assert self.process.stderr is not None
        self.process.stderr.close()


def _result(client: httpx.Client, task: str, **payload: Any) -> Any:
    """What a job submitted over HTTP returns."""
    job = client.post("/v1/jobs", json={"task": task, "payload": payload})
    assert job.status_code == 201, job.text
    ended = client.get(f"/v1/jobs/{job.json()['id']}", params={"wait": 30}).json()
    assert ended["state"] == "succeeded", ended
    return ended["result"]


def test_dev_runs_api_and_worker_and_ctrl_c_stops_both(cli: Cli) -> None:
    with Dev(cli, "--app", cli.write_jobs()) as dev, dev.client() as client:
        assert _result(client, "mail.send", to="a") == "sent to a"
        assert _result(client, "command", argv=["echo", "hello"])["stdout"] == "hello\n"
        assert client.get("/openapi.json").json()["openapi"] == "3.1.0"
        assert dev.ends() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(str(client.base_url))


def test_dev_shows_the_console_without_keys(cli: Cli) -> None:
    with Dev(cli, "--app", cli.write_jobs()) as dev, dev.client() as client:
        dev.says("the console is at http://127.0.0.1:")
        page = client.get("/console")
        assert (page.status_code, "Overview" in page.text, "Sign out" in page.text) == (200, True, False)
        assert client.get("/console", headers={"host": "evil.example"}).status_code == 421


def test_a_burst_of_stop_signals_keeps_the_grace_of_dev(cli: Cli) -> None:
    with Dev(cli, "--app", cli.write_jobs(JOBS + _WAITING)) as dev, dev.client() as client:
        job_id = client.post("/v1/jobs", json={"task": "waiting", "payload": {}}).json()["id"]
        dev.says("handler is waiting")
        dev.process.send_signal(signal.SIGTERM)
        dev.process.send_signal(signal.SIGINT)
        Path("finish").touch()
        assert dev.process.wait(_DEADLINE) == 0
    assert cli.state(job_id) == "succeeded"


def test_dev_without_an_application_stays_up(cli: Cli) -> None:
    with Dev(cli) as dev, dev.client() as client:
        assert client.get("/v1/queues").json() == {"queues": []}
        assert _result(client, "command", argv=["true"])["exit_code"] == 0
        assert dev.ends(signal.SIGTERM) == 0


def test_dev_answers_503_while_its_store_is_locked(cli: Cli) -> None:
    with Dev(cli, "--app", cli.write_jobs()) as dev, dev.client() as client:
        assert _result(client, "mail.send", to="a") == "sent to a"
        other = sqlite3.connect(cli.folder / "holdfast.db", isolation_level=None)
        other.execute("begin immediate")
        began = time.monotonic()
        answer = client.post("/v1/jobs", json={"task": "mail.send", "payload": {"to": "b"}})
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert time.monotonic() - began < _ANSWERED + _LATE * slowness()
        other.execute("rollback")
        other.close()
        assert _result(client, "mail.send", to="c") == "sent to c"


def test_dev_starts_anew_with_changed_code_and_survives_broken_code(cli: Cli) -> None:
    target = cli.write_jobs()
    module = Path(f"{target.split(':')[0]}.py")
    with Dev(cli, "--app", target) as dev:
        with dev.client() as client:
            assert _result(client, "mail.send", to="a") == "sent to a"
        module.write_text("1 / 0")
        dev.says("code changed, starting anew")
        dev.says("ZeroDivisionError")
        dev.says("waiting for a change of the code")
        module.write_text(JOBS.replace("sent to", "mailed to"))
        with dev.client() as client:
            assert _result(client, "mail.send", to="a") == "mailed to a"
        assert dev.ends() == 0


def test_dev_waits_for_a_fix_of_a_failing_application(cli: Cli) -> None:
    target = cli.write_jobs(JOBS + _BROKEN_LIFE)
    with Dev(cli, "--app", target) as dev:
        dev.says("RuntimeError: no database")
        dev.says("waiting for a change of the code")
        Path(f"{target.split(':')[0]}.py").write_text(JOBS)
        with dev.client() as client:
            assert _result(client, "mail.send", to="b") == "sent to b"
        assert dev.ends() == 0


def test_dev_reports_an_occupied_port_with_a_remedy(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Dev(cli, port=str(taken.getsockname()[1])) as dev:
        dev.says("cannot listen on 127.0.0.1.*say --port, or --no-api")
        assert dev.process.wait(_DEADLINE) == 78


def test_dev_may_go_without_the_api_and_without_reload(cli: Cli) -> None:
    target = cli.write_jobs(JOBS + _BROKEN_LIFE)
    done = cli.complete("dev", "--app", target, "--no-api", "--no-reload")
    assert done.returncode == 78
    assert b"RuntimeError: no database" in done.stderr
    assert b"the API is at" not in done.stderr


# ── what counts as a change ───────────────────────────────────────────────────────────────────────────────────────
def test_only_python_files_of_the_user_count_as_changes(tmp_path: Path) -> None:
    for folder in (".git", "__pycache__", "node_modules", "pkg"):
        (tmp_path / folder).mkdir()
    watcher = Watcher(tmp_path)
    for name in (".git/a.py", "__pycache__/a.py", "node_modules/a.py", "a.txt"):
        (tmp_path / name).write_text("x")
    assert not watcher.has_changed()
    (tmp_path / "pkg" / "a.py").write_text("x")
    assert watcher.has_changed()
