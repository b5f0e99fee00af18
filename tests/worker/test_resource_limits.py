"""Jobs over a limit end alone, with a reason of their own; real processes, as a worker runs them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Job, JobHandle, JobState, Resources
from holdfast.core.events import Events
from holdfast.core.lifecycle import Succeeded
from holdfast.core.resources import FIELDS, UNLIMITED, ResourceLimits
from holdfast.tasks import Task
from holdfast.worker import Worker
from holdfast.worker.executors import resource_limits
from holdfast.worker.executors.process import ProcessExecutor
from holdfast.worker.executors.process_group import kill_group
from tests.unit.executor_support import alive, job, living_with, until
from tests.worker import limited_tasks

SECONDS = 90.0
FORKS = """
import os, sys, time
for _ in range(60):
    if not os.fork():
        time.sleep(100)
        os._exit(0)
time.sleep(100)
"""
COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "memory": (
        [sys.executable, "-c", "x = bytearray(b'x') * (400 << 20)\nimport time; time.sleep(100)"],
        {"memory": "96M"},
    ),
    "cpu": (["sh", "-c", f"{sys.executable} -c 'while True: pass'; exit 0"], {"cpu": 1}),
    "processes": ([sys.executable, "-c", FORKS], {"processes": 10}),
    "file_size": (["sh", "-c", "yes > big"], {"file_size": "1M"}),
    "open_files": ([sys.executable, "-c", "while True: open('/dev/null')"], {"open_files": 32}),
}
COMMANDS["open_files"][0][2] = "import os\nwhile True: os.open('/dev/null', 0)"


@pytest.fixture
def app(tmp_path: Path) -> Holdfast:
    (tmp_path / "work").mkdir()
    return Holdfast(f"sqlite:///{tmp_path}/jobs.db", commands="argv", command_roots=str(tmp_path), max_attempts=1)


async def drain(app: Holdfast, **settings: Any) -> None:
    async with asyncio.timeout(SECONDS):
        await Worker(app, settings=app.settings.replace_values(**settings), drain=True).run()


async def jobs_of(*handles: JobHandle[Any]) -> list[Job]:
    return [await handle.job() for handle in handles]


def check_pair(hog: Job, neighbour: Job, limit: str) -> None:
    """The hog is dead by its limit; its neighbour has not noticed."""
    assert (hog.state, hog.reason) == (JobState.DEAD, "resource"), hog.error
    assert hog.error is not None
    assert hog.error.startswith(f"resource limit: {limit}: ")
    assert "allowed" in hog.error
    assert neighbour.state is JobState.SUCCEEDED, neighbour.error


@pytest.mark.rows("Q68")
@pytest.mark.parametrize("limit", FIELDS)
def test_command_over_its_limit_ends_alone(limit: str, app: Holdfast, tmp_path: Path) -> None:
    argv, resources = COMMANDS[limit]
    marker = f"hog-{tmp_path.name}"

    async def run() -> list[Job]:
        async with app:
            hog = await app.run_command(*argv, marker, cwd=str(tmp_path / "work"), resources=resources)
            near = await app.run_command("sh", "-c", "sleep 1; echo fine")
            await drain(app)
            return await jobs_of(hog, near)

    check_pair(*asyncio.run(run()), limit)
    assert living_with(marker) == []
    big = tmp_path / "work" / "big"
    assert not big.exists() or big.stat().st_size <= 1 << 20


@pytest.mark.rows("Q68")
@pytest.mark.parametrize("limit", FIELDS)
def test_process_task_over_its_limit_ends_alone(limit: str, app: Holdfast, tmp_path: Path) -> None:
    task = limited_tasks.HOGS[limit]
    for each in (task, limited_tasks.neighbour):
        app.registry.register(each)
    pid = tmp_path / "pid"

    async def run() -> list[Job]:
        async with app:
            hog = await app.enqueue(task.name, {"path": str(pid)})
            near = await app.enqueue("neighbour", {"word": "fine"})
            await drain(app, concurrency=2)
            return await jobs_of(hog, near)

    check_pair(*asyncio.run(run()), limit)
    assert not alive(int(pid.read_text()))
    big = tmp_path / "pid.big"
    assert not big.exists() or big.stat().st_size <= 1 << 20


def test_setting_limits_jobs_that_do_not_say(app: Holdfast) -> None:
    argv, _ = COMMANDS["cpu"]

    async def run() -> list[Job]:
        async with app:
            handle = await app.run_command(*argv)
            await drain(app, job_cpu="1s")
            return await jobs_of(handle)

    (job,) = asyncio.run(run())
    assert (job.reason, "1s allowed" in (job.error or "")) == ("resource", True)


def test_kernel_ends_a_burner_that_is_not_watched(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits.ResourceWatcher, "watch", lambda *_: None)
    app.registry.register(limited_tasks.burn_cpu)
    argv, resources = COMMANDS["cpu"]

    async def run() -> list[Job]:
        async with app:
            command = await app.run_command(
                *argv[:2], f"exec {sys.executable} -c 'while True: pass'", resources=resources
            )
            task = await app.enqueue("burn_cpu", {"path": "/dev/null"})
            await drain(app)
            return await jobs_of(command, task)

    for each in asyncio.run(run()):
        assert each.reason == "resource"
        assert "resource limit: cpu: 1s allowed" in (each.error or "")


LEAVERS = """
import os, sys, time
def leave():
    if not os.fork():
        os.setsid()
        os.execve("/bin/sleep", [sys.argv[1], "100"], {})
for _ in range(5):
    leave()
time.sleep(3)
for _ in range(20):
    if not os.fork():
        break
time.sleep(100)
"""


def test_processes_that_leave_the_group_are_killed_too(app: Holdfast, tmp_path: Path) -> None:
    marker = f"left-{tmp_path.name}"

    async def run() -> list[Job]:
        async with app:
            handle = await app.run_command(sys.executable, "-c", LEAVERS, marker, resources={"processes": 15})
            await drain(app)
            return await jobs_of(handle)

    (job,) = asyncio.run(run())
    assert job.reason == "resource"
    asyncio.run(until(lambda: not living_with(marker), SECONDS))


@contextmanager
def watched_group(watcher: resource_limits.ResourceWatcher, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that may consist of one process, and is watched for that."""
    with subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True) as process:
        watch = watcher.watch(process, ResourceLimits(processes=1))
        assert watch is not None
        try:
            yield process
        finally:
            watch.close()
            kill_group(process)


def test_limits_hold_after_a_moment_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    list_processes, refused = os.listdir, threading.Event()

    def refuse_once(path: Any) -> list[str]:
        if refused.is_set():
            return list_processes(path)
        refused.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    watcher = resource_limits.ResourceWatcher()
    with watched_group(watcher, "exec sleep 100"):
        monkeypatch.setattr(os, "listdir", refuse_once)
        assert refused.wait(SECONDS)
        with watched_group(watcher, "sleep 100 & sleep 100") as process:
            assert process.wait(SECONDS) == -signal.SIGKILL


def test_limits_hold_beside_a_group_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that became another user, as with ``sudo``, cannot be killed by a worker that is not root."""
    first, refused = [0], threading.Event()

    def refusing(kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def kill_others(pid: int, number: int) -> None:
            if pid != first[0]:
                return kill(pid, number)
            refused.set()
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        return kill_others

    watcher = resource_limits.ResourceWatcher()
    with monkeypatch.context() as patch, subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        first[0] = process.pid
        for name in ("kill", "killpg"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        watch = watcher.watch(process, ResourceLimits(memory=1))
        assert refused.wait(SECONDS)
        with watched_group(watcher, "sleep 100 & sleep 100") as second:
            assert second.wait(SECONDS) == -signal.SIGKILL
        assert watch is not None
        assert watch.close() is not None
        patch.undo()
        process.kill()


def test_child_that_has_grown_is_recycled_between_jobs() -> None:
    async def run() -> None:
        executor = ProcessExecutor(1, app=None, events=Events())
        await executor.start()
        limits = limited_tasks.grow.resources.to_limits()

        async def pid_of(task: Task[..., Any], size: int, limits: ResourceLimits) -> int:
            outcome = await executor.run(task, job(task.name, json.dumps({"size": size})), limits=limits)
            assert isinstance(outcome, Succeeded), outcome
            return int(outcome.result or "")

        first = await pid_of(limited_tasks.grow, 1 << 20, limits)
        assert await pid_of(limited_tasks.grow, 130 << 20, limits) == first
        await until(lambda: not alive(first), SECONDS)
        full = await pid_of(limited_tasks.leave_memory, 170 << 20, UNLIMITED)
        assert await pid_of(limited_tasks.leave_memory, 1 << 20, UNLIMITED) == full
        assert await pid_of(limited_tasks.grow, 1 << 20, limits) != full
        await executor.close()

    asyncio.run(run())


def test_open_files_are_counted_by_the_kernel(app: Holdfast) -> None:
    code = "import os, sys\ntry:\n    while True: last = os.open('/dev/null', 0)\nexcept OSError: print(last)"

    async def run() -> str:
        async with app:
            handle = await app.run_command(sys.executable, "-c", code, resources={"open_files": 32})
            await drain(app)
            return str((await handle.result(timeout=0))["stdout"])

    assert asyncio.run(run()) == "31\n"


def test_worker_refuses_tasks_above_the_settings(app: Holdfast) -> None:
    app.registry.register(limited_tasks.hold_memory)
    with pytest.raises(Exception, match=r"hold_memory.*memory: '160MiB' is above.*at most 100MiB.*job_memory"):
        asyncio.run(drain(app, job_memory="100MiB"))


def test_command_above_a_workers_settings_is_refused_there(app: Holdfast) -> None:
    async def run() -> list[Job]:
        async with app:
            handle = await app.run_command("true", resources=Resources(memory="1G"))
            await drain(app, job_memory="100MiB", defer_for="0s")
            return await jobs_of(handle)

    (job,) = asyncio.run(run())
    assert (job.state, job.reason) == (JobState.DEAD, "payload")
    assert "resources.memory: '1GiB' is above what the settings allow; give at most 100MiB" in (job.error or "")


def test_memory_is_refused_where_there_is_no_proc(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits, "PROCESSES", Path("/no-proc"))

    async def run() -> list[Job]:
        async with app:
            refused = await app.run_command("true", resources={"memory": "64M"})
            kept = await app.run_command("true", resources={"file_size": "1M"})
            await drain(app)
            return await jobs_of(refused, kept)

    refused, kept = asyncio.run(run())
    assert (refused.state, refused.reason) == (JobState.DEAD, "resource")
    assert "run the worker on Linux" in (refused.error or "")
    assert kept.state is JobState.SUCCEEDED
