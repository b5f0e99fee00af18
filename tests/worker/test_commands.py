"""Command jobs in a worker: what middlewares make of them, and which settings they obey."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast, Job, JobState
from holdfast.worker import Worker
from holdfast.worker.executors.process_group import kill_marked
from tests.unit.executor_support import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def app(tmp_path: Path) -> Holdfast:
    return Holdfast(f"sqlite:///{tmp_path}/jobs.db", commands="argv")


def drained(app: Holdfast, *argv: str) -> Job:
    """A command job of one attempt, after a worker has emptied the queue."""

    async def run() -> Job:
        async with app:
            handle = await app.run_command(*argv, max_attempts=1)
            async with asyncio.timeout(60):
                await Worker(app, drain=True).run()
            return await handle.job()

    return asyncio.run(run())


def test_middleware_that_raises_fails_only_the_command(app: Holdfast) -> None:
    @app.middleware
    async def broken(job: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        raise ValueError("no commands today")

    job = drained(app, "true")
    assert (job.state, job.error) == (JobState.DEAD, "ValueError: no commands today")


def test_middleware_sees_a_command_result_and_its_failure(app: Holdfast) -> None:
    seen: list[object] = []

    @app.middleware
    async def watching(job: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        try:
            result = await call_next(job)
        except Exception as error:
            seen.append(str(error))
            raise
        seen.append(result["stdout"])
        return result

    succeeded, failed = drained(app, "echo", "hello"), drained(app, "false")
    assert (succeeded.state, failed.state, failed.reason) == (JobState.SUCCEEDED, JobState.DEAD, "max_attempts")
    assert seen == ["hello\n", "exit code 1"]


def test_commands_that_a_workers_settings_switch_off_do_not_run(app: Holdfast, tmp_path: Path) -> None:
    other = Holdfast(app.settings.url, commands="off")

    async def run() -> Job:
        async with app:
            handle = await app.run_command("touch", str(tmp_path / "made"), max_attempts=1)
            await Worker(app, settings=other.settings, drain=True).run()
            return await handle.job()

    job = asyncio.run(run())
    assert (job.state, job.reason) == (JobState.DEAD, "payload")
    assert not (tmp_path / "made").exists()


def started_worker(app: Holdfast, stack: ExitStack) -> subprocess.Popen[bytes]:
    """A worker process of that application's store, killed when the stack is closed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    settings = {"URL": app.settings.url, "COMMANDS": "argv", "LEASE": "1s", "SWEEP": "100ms"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "worker", "start", "--app", "none"],
        env={**kept, **{f"HOLDFAST_{name}": value for name, value in settings.items()}, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(worker.wait)
    stack.callback(worker.kill)
    return worker


def test_what_a_killed_worker_left_running_ends_before_the_next_run(app: Holdfast, tmp_path: Path) -> None:
    """The next run prints the command line of the process that the first one left."""
    left = tmp_path / "left"
    detached = f"setsid sleep 300 </dev/null >/dev/null 2>&1 & echo $! > {left}.new; mv {left}.new {left}; sleep 300"
    text = f"if [ -e {left} ]; then cat /proc/$(cat {left})/cmdline 2>/dev/null; exit 0; fi; {detached}"

    async def run() -> Any:
        async with app:
            handle = await app.run_command("sh", "-c", text)
            with ExitStack() as stack:
                stack.callback(kill_marked, handle.id)
                killed = started_worker(app, stack)
                await until(left.exists, 60)
                killed.kill()
                started_worker(app, stack)
                return await handle.result(timeout=60)

    assert asyncio.run(run())["stdout"] == ""
