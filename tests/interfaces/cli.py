"""The command line as a test uses it: in this process, in a directory of its own."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast import Holdfast
from holdfast.cli import main
from holdfast.core.errors import Unavailable
from holdfast.core.lifecycle import Failed, Lost, Outcome, decide
from holdfast.core.models import Job, NewJob, Submitted
from holdfast.core.retry import Retry
from holdfast.stores.base import ClaimRequest
from holdfast.stores.common.unconfirmed import perhaps_stored
from holdfast.stores.sqlite.queueing import SqliteQueueing

ROOT = Path(__file__).resolve().parents[2]

JOBS = '''
from holdfast import Holdfast, Retry

app = Holdfast()
other = object()

@app.task("mail.send", queue="mail", retry=Retry.fixed(1), max_attempts=3)
async def send(to: str, copies: int = 1) -> str:
    """Pretend to send."""
    return f"sent to {to}"

@app.task("break")
def break_it() -> None:
    raise ValueError("it broke")
'''

_NUMBERS = itertools.count()


class Cli:
    """Runs commands; each test has its own store, and its own module with an application if it asks for one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target: str | None = None

    def invoke(self, *words: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, list(words), input=stdin)

    def run(self, *words: str, stdin: str | bytes | None = None, code: int = 0) -> str:
        """What the command prints; it must exit with ``code`` and never with a traceback of ours."""
        result = self.invoke(*words, stdin=stdin)
        assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (
            code,
            True,
        ), (result.output, result.exception)
        return result.stdout

    def json(self, *words: str, stdin: str | bytes | None = None, code: int = 0) -> Any:
        """The document the command prints with ``--json``."""
        return json.loads(self.run(*words, "--json", stdin=stdin, code=code))

    def fail(self, *words: str, code: int, stdin: str | bytes | None = None) -> str:
        """What the command says on stderr; nothing on stdout."""
        result = self.invoke(*words, stdin=stdin)
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        return result.stderr

    def write_jobs(self, source: str = JOBS) -> str:
        """A module of its own name in the working directory; its target."""
        name = f"jobs_{os.getpid()}_{next(_NUMBERS)}"
        (self.folder / f"{name}.py").write_text(source, encoding="utf-8")
        self.target = f"{name}:app"
        return self.target

    def process(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """The program as a process of its own."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words],
            cwd=self.folder,
            env=environment,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def complete(self, *words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """The same, run to its end."""
        process = self.process(*words, **options)
        stdout, stderr = process.communicate(timeout=30)
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    # ── what a worker would do ────────────────────────────────────────────────────────────────────────────────────
    def claim(self, job_id: str, lease_for: timedelta = timedelta(minutes=1)) -> Job:
        """Take this very job, as worker-1."""
        app = Holdfast()

        async def take() -> Job:
            store = await app.open_store()
            claim = await store.queueing.claim(
                ClaimRequest("worker-1", {"*": 1}, limit=1, lease_for=lease_for, ids=[job_id])
            )
            return claim.jobs[0]

        try:
            return app.run_blocking(take())
        finally:
            app.sync.close()

    def end(self, job_id: str, outcome: Outcome) -> None:
        """Take this very job and let it end so."""
        expired = timedelta(microseconds=1)
        job = self.claim(job_id, expired) if isinstance(outcome, Lost) else self.claim(job_id)
        app = Holdfast()

        async def settle() -> None:
            store = await app.open_store()
            await store.queueing.settle([decide(job, outcome, Retry.fixed(3600), random.Random(0))])

        app.run_blocking(settle())
        app.sync.close()

    def dead(self, *words: str, error: str = "it broke", traceback: str | None = None) -> str:
        """The id of a new dead letter of task work."""
        job_id = self.run("enqueue", "work", *words).strip()
        self.end(job_id, Failed(error=error, retryable=False, traceback=traceback))
        return job_id

    def state(self, job_id: str) -> str:
        state: str = self.json("show", job_id)["state"]
        return state


_submit = SqliteQueueing.submit


async def store_without_answer(family: SqliteQueueing, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Submits the jobs, and loses the store's answer."""
    await _submit(family, jobs)
    raise perhaps_stored(Unavailable("the store is away"))


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Commands in an empty directory, with no settings from outside."""
    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    known = set(sys.modules)
    yield Cli(tmp_path)
    for name in set(sys.modules) - known:
        if name.startswith("jobs_"):
            del sys.modules[name]
