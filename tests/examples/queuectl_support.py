"""A queue of the queuectl example in a directory of its own, with real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from click.testing import CliRunner, Result

from holdfast import NotFound
from tests.support.plain_http import PLAIN

if TYPE_CHECKING:
    from holdfast import Holdfast
    from holdfast.core.alerts import Alert

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "queuectl"
QUICK = {"check_interval": 0.2, "stop_timeout": 20}


def wait_until(holds: Callable[[], Any], seconds: float = 90.0, what: str = "it") -> Any:
    """Look again and again until ``holds`` says something true; fail when it takes too long."""
    until = time.monotonic() + seconds
    while not (answer := holds()):
        assert time.monotonic() < until, f"{what} has not come about within {seconds} s"
        time.sleep(0.02)
    return answer


def call(queue: Queue, *words: str, given: str | None = None) -> Result:
    """The command in this process, on the queue handed over as click's context object."""
    from queuectl.cli import main

    return CliRunner().invoke(main, words, obj=queue.place, input=given)


def answer(queue: Queue, *words: str) -> Any:
    """Returns the JSON output of a command, which must succeed."""
    called = call(queue, *words)
    assert called.exit_code == 0, called.output
    return json.loads(called.output)


class Queue:
    """One queue. The application is used for looking; commands are real processes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from queuectl.app import open_app
        from queuectl.config import Place

        self.folder = folder
        self.example = EXAMPLE
        folder.mkdir(parents=True, exist_ok=True)
        self.place = Place(folder / "queuectl.db", folder / "queuectl.json")
        self.place.config.write_text(json.dumps(QUICK | settings), encoding="utf-8")
        self.app: Holdfast = open_app(self.place)

    # ── the command line ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.example}"}

    def start(self, *words: str, **pipes: Any) -> subprocess.Popen[str]:
        """Start the command as a process."""
        command = [sys.executable, "-m", "queuectl", *words]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **pipes)

    def run(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command as a process."""
        command = [sys.executable, "-m", "queuectl", *words]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @contextmanager
    def workers(self, count: int = 1, *, supervised: bool = True) -> Iterator[Workers]:
        """Worker processes under their supervisor, or one without; stopped at the end, and they must end well."""
        words = ("start", "--count", str(count)) if supervised else ("run",)
        with (self.folder / "log").open("a", encoding="utf-8") as log:
            process = self.start("worker", *words, stdout=log, stderr=log)
        workers = Workers(self, process)
        try:
            yield workers
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(90)
        assert code == 0, (code, workers.log())

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def enqueue(self, *jobs: dict[str, Any]) -> None:
        """Submit jobs as the command does."""
        from queuectl.models import drafted, parse

        handles = self.app.sync.enqueue_many([drafted(self.app, parse(json.dumps(job))) for job in jobs])
        assert all(handle.created for handle in handles)

    def job(self, job_id: str) -> dict[str, Any]:
        """A job in QueueCTL's columns."""
        from queuectl.models import document

        try:
            return document(self.app.sync.get(f"key:{job_id}"))
        except NotFound:
            return document(self.app.sync.get(job_id))

    def until(self, job_id: str, *states: str, seconds: float = 90.0) -> dict[str, Any]:
        """Wait for a job to be in one of these states."""

        def reached() -> dict[str, Any] | None:
            found = self.job(job_id)
            return found if found["state"] in states else None

        answer: dict[str, Any] = wait_until(reached, seconds, f"{job_id} in {states}")
        return answer

    def states(self) -> dict[str, int]:
        """How many jobs in each state."""
        from queuectl.models import counts

        return counts(queue.states for queue in self.app.sync.queues())

    def edit(self, statement: str, *parameters: object) -> None:
        """Change the database directly: no worker is woken by it."""
        with closing(sqlite3.connect(self.place.database, timeout=30, isolation_level=None)) as connection:
            connection.execute(statement, parameters)

    # ── what workers do now and then ──────────────────────────────────────────────────────────────────────────
    def count_history(self) -> None:
        """Counts ended jobs, as a worker does once a minute."""

        async def count(app: Holdfast) -> bool:
            return await (await app.open_store()).maintenance.count_ended(limit=5000)

        self._with_app(count)

    def look_for_alerts(self) -> list[Alert]:
        """Evaluates the rules, as each worker does; the alerts that this has sent."""

        async def look(app: Holdfast) -> list[Alert]:
            return await app.alerts.evaluate_rules()

        return self._with_app(look)

    def active_alerts(self) -> list[Alert]:
        """The alerts that have not cleared."""

        async def read(app: Holdfast) -> list[Alert]:
            return await app.alerts.find_active()

        return self._with_app(read)

    def _with_app(self, call: Callable[[Holdfast], Coroutine[Any, Any, T]]) -> T:
        """Runs a call with the settings that are in force now."""
        from queuectl.app import open_app

        async def run() -> T:
            async with open_app(self.place) as app:
                return await call(app)

        return asyncio.run(run())

    def lines(self, name: str) -> list[str]:
        """The lines that commands have appended to a file."""
        path = self.folder / name
        return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


class Workers:
    """The running worker processes of a queue."""

    def __init__(self, queue: Queue, process: subprocess.Popen[str]) -> None:
        self.queue = queue
        self.process = process

    def ready(self, count: int = 1) -> list[int]:
        """Wait until that many work; their pids."""
        found: list[int] = wait_until(lambda: pids if len(pids := self.pids()) == count else None, 90, "workers")
        return found

    def pids(self) -> list[int]:
        """The pids of the living workers."""
        return [
            each.heartbeat.pid
            for each in self.queue.app.sync.workers()
            if each.alive and is_running(each.heartbeat.pid)
        ]

    def log(self) -> str:
        """What they have written."""
        return (self.queue.folder / "log").read_text(encoding="utf-8")


class Dashboard:
    """`queuectl dashboard` as a process."""

    def __init__(self, queue: Queue) -> None:
        self.log = queue.folder / "dashboard.log"
        with self.log.open("w") as file:
            self._process = queue.start("dashboard", "--port", "0", stdout=file, stderr=file)
        line = wait_until(self._line, what="the dashboard")
        self.address = line.removeprefix("dashboard: ").removesuffix("/console")
        self.client = httpx.Client(base_url=self.address, timeout=60, verify=PLAIN)

    def _line(self) -> str | None:
        return next((line for line in self.log.read_text().splitlines() if line.startswith("dashboard: ")), None)

    def close(self) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 0, self.log.read_text()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


def gaps(times: Sequence[float]) -> list[float]:
    """The spans between instants."""
    return [later - earlier for earlier, later in pairwise(times)]
