"""Handlers in killable processes: ``worker/executors/process.py`` and its child. Real processes, a second at most."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.events import ChildEnded, Event, Events
from holdfast.core.lifecycle import Failed, Outcome, Released, Snoozed, Succeeded
from holdfast.core.models import Reason
from holdfast.tasks import JobLog, LogEntry, LogLimits, Task
from holdfast.worker.executors.child import Logged, _Inbox, _Outbox
from holdfast.worker.executors.process import ProcessExecutor
from tests.support.load import TEST_SECONDS
from tests.unit import executor_tasks as tasks
from tests.unit.executor_support import alive, job, on_both_loops, until

TASKS = "tests.unit.executor_tasks"


@asynccontextmanager
async def pool(size: int = 1, **options: Any) -> AsyncIterator[ProcessExecutor]:
    executor = ProcessExecutor(size, **{"app": None, "events": Events(), **options})
    await executor.start()
    try:
        yield executor
    finally:
        await executor.close()


async def run(executor: ProcessExecutor, task: Task[..., Any], **payload: Any) -> Outcome:
    return await executor.run(task, job(task.name, json.dumps(payload)))


async def failure(executor: ProcessExecutor, task: Task[..., Any], **payload: Any) -> Failed:
    outcome = await run(executor, task, **payload)
    assert isinstance(outcome, Failed)
    return outcome


async def pid(executor: ProcessExecutor) -> int:
    outcome = await run(executor, tasks.process_id)
    assert isinstance(outcome, Succeeded)
    return int(outcome.result or "")


def children() -> set[int]:
    """The pids of this process's children."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(text) for each in lists for text in each.read_text().split()}


@on_both_loops
async def test_sync_and_async_handlers_with_and_without_context(tmp_path: Path) -> None:
    async with pool() as executor:
        assert await run(executor, tasks.add, a=1, b=2) == Succeeded("3")
        outcome = await run(executor, tasks.add_slowly, a=1, b=2)
        assert outcome == Succeeded('{"sum":3,"id":"job-1","current":"job-1","attempt":1}')
        assert isinstance(await run(executor, tasks.leave_a_task, path=str(tmp_path / "left")), Succeeded)
        assert (tmp_path / "left").read_text() == "cancelled"
        assert await pid(executor) != os.getpid()


@on_both_loops
async def test_every_outcome_comes_back() -> None:
    async with pool() as executor:
        value = await failure(executor, tasks.fail, how="value")
        assert (value.error, value.reason, value.retryable) == ("ValueError: no good", Reason.ERROR, True)
        assert value.traceback is not None
        assert "holdfast/worker/executors" not in value.traceback
        key = await failure(executor, tasks.fail, how="key")
        assert (key.reason, key.retryable) == (Reason.NON_RETRYABLE, False)
        assert (await failure(executor, tasks.fail, how="dead")).error == "Dead: for good"
        assert (await failure(executor, tasks.fail, how="later")).delay == timedelta(seconds=9)
        assert await run(executor, tasks.snooze) == Snoozed(timedelta(seconds=5))
        assert (await failure(executor, tasks.unstorable)).reason is Reason.RESULT
        assert (await failure(executor, tasks.add, a="one", b=2)).reason is Reason.PAYLOAD
        assert (await failure(executor, tasks.end_the_process, how="exit")).error == "SystemExit: 3"


@on_both_loops
async def test_large_payloads_and_results_pass() -> None:
    text = "é" * 400_000
    echo = tasks.app.registry.get("by.registry")
    assert echo is not None
    async with pool(app=f"{TASKS}:app") as executor:
        outcome = await run(executor, echo, text=text)
        assert isinstance(outcome, Succeeded)
        assert outcome.result == json.dumps(text, ensure_ascii=False)


@on_both_loops
async def test_result_limit_is_the_one_given_to_children() -> None:
    echo = tasks.app.registry.get("by.registry")
    assert echo is not None
    async with pool(app=f"{TASKS}:app", result_limit=3 << 20) as executor:
        assert isinstance(await run(executor, echo, text="a" * (2 << 20)), Succeeded)
        assert (await failure(executor, echo, text="a" * (4 << 20))).reason is Reason.RESULT


@on_both_loops
async def test_a_task_the_child_cannot_find_fails_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None: ...

    (tmp_path / "vanishing.py").write_text("def handler(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    vanishing = __import__("vanishing")
    vanishing.task = Task("vanishing", vanishing.handler, executor="process")
    async with pool() as executor:
        failed = await failure(executor, Task("local", local, executor="process"))
        assert failed.reason is Reason.NO_HANDLER
        assert "top level of a module" in failed.error
        (tmp_path / "vanishing.py").write_text("raise RuntimeError('not on this host')\n")
        failed = await failure(executor, vanishing.task)
        assert (failed.reason, failed.retryable) == (Reason.NO_HANDLER, True)
        assert "RuntimeError: not on this host" in failed.error
        assert await run(executor, tasks.add, a=1, b=1) == Succeeded("2")
    del sys.modules["vanishing"]


@pytest.mark.parametrize(
    ("how", "causes"),
    [
        ("_exit", ["exit code 0"]),
        ("kill", ["killed by SIGKILL"]),
        ("segfault", ["killed by SIGSEGV"]),
        ("close", ["exit code 1", "killed by SIGKILL"]),  # killed where it does not end soon, on a busy machine
    ],
)
def test_a_handler_that_ends_its_process_has_crashed(how: str, causes: list[str]) -> None:
    async def main() -> None:
        events = Events()
        heard: list[Event] = []
        events.subscribe(heard.append, ChildEnded)
        async with pool(events=events) as executor:
            failed = await failure(executor, tasks.end_the_process, how=how)
            assert failed.error in [f"its process died: {cause}" for cause in causes]
            assert (failed.reason, failed.retryable) == (Reason.CRASHED, True)
            assert await run(executor, tasks.add, a=1, b=1) == Succeeded("2")
        (ended,) = [event.cause for event in heard if isinstance(event, ChildEnded)]
        assert failed.error == f"its process died: {ended}"

    asyncio.run(main())


@on_both_loops
async def test_a_forked_copy_of_the_child_does_not_answer() -> None:
    async with pool() as executor:
        assert await run(executor, tasks.fork_and_return) == Succeeded('"parent"')
        assert await run(executor, tasks.add, a=1, b=1) == Succeeded("2")


@on_both_loops
async def test_cancelled_job_is_killed_with_children_and_spare_survives(tmp_path: Path) -> None:
    async with pool() as executor:
        warm = children()
        before = await pid(executor)
        running = asyncio.create_task(run(executor, tasks.sleep_with_children, path=str(tmp_path / "pids")))
        await until((tmp_path / "pids").exists)
        pids = [int(text) for text in (tmp_path / "pids").read_text().split()]
        assert pids[0] == before
        assert all(map(alive, pids))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await pid(executor) in warm - {before}, "the next job waited for a new interpreter"
        await until(lambda: not any(map(alive, pids)), 1)


@on_both_loops
async def test_a_cancelled_wait_for_a_free_child_starts_nothing(tmp_path: Path) -> None:
    async with pool() as executor:
        first = asyncio.create_task(run(executor, tasks.sleep_with_children, path=str(tmp_path / "first")))
        second = asyncio.create_task(run(executor, tasks.sleep_with_children, path=str(tmp_path / "second")))
        await until((tmp_path / "first").exists)
        for running in (second, first):
            running.cancel()
            await asyncio.wait([running])
        assert await run(executor, tasks.add, a=1, b=1) == Succeeded("2")
        assert not (tmp_path / "second").exists()


@on_both_loops
async def test_children_retire_after_their_jobs_or_when_they_have_grown() -> None:
    async with pool(recycle_jobs=2) as executor:
        pids = [await pid(executor) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
        await until(lambda: not alive(pids[0]))
    async with pool(recycle_memory=150 * 1024 * 1024) as executor:
        before = await pid(executor)
        assert await pid(executor) == before
        assert await run(executor, tasks.grow, megabytes=200) == Succeeded(str(before))
        assert await pid(executor) != before


@on_both_loops
async def test_an_idle_child_that_dies_is_replaced() -> None:
    events = Events()
    heard: list[Event] = []
    events.subscribe(heard.append, ChildEnded)
    async with pool(events=events) as executor:
        first = await pid(executor)
        os.kill(first, signal.SIGKILL)
        await until(lambda: heard)
        assert await pid(executor) != first
    assert heard == [ChildEnded(pid=first, cause="killed by SIGKILL", restart_in=0.0)]


@on_both_loops
async def test_no_child_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    executor = ProcessExecutor(1, app=None, events=Events())
    monkeypatch.setattr(subprocess, "Popen", no_more)
    outcome = await run(executor, tasks.add, a=1, b=1)
    assert isinstance(outcome, Released)
    assert "Too many open files" in str(outcome.error)
    with pytest.raises(OSError, match="Too many open files"):
        await executor.start()
    monkeypatch.undo()
    assert await run(executor, tasks.add, a=1, b=1) == Succeeded("2")
    await executor.close()


@on_both_loops
async def test_children_that_die_while_starting_charge_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    executor = ProcessExecutor(1, app="deadly:app", events=Events())
    for _ in range(2):
        outcome = await run(executor, tasks.add, a=1, b=1)
        assert isinstance(outcome, Released)
        assert "exit code 7" in str(outcome.error)
    await executor.close()


@on_both_loops
async def test_module_that_ends_its_process_ends_no_later_child(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deadly_once.py").write_text("def handler(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    deadly = Task("deadly", __import__("deadly_once").handler, executor="process")
    (tmp_path / "deadly_once.py").write_text("import os\nos._exit(7)\n")
    async with pool() as executor:
        for _ in range(2):
            assert (await failure(executor, deadly)).reason is Reason.CRASHED
            assert await run(executor, tasks.add, a=1, b=1) == Succeeded("2")
    del sys.modules["deadly_once"]


@on_both_loops
async def test_pool_refills_after_any_number_of_failed_starts() -> None:
    async with pool() as executor, asyncio.timeout(TEST_SECONDS):
        executor._failed_starts = 2000
        heard: list[Event] = []
        executor._events.subscribe(heard.append, ChildEnded)
        child = executor._spawn()
        os.kill(child.pid, signal.SIGSTOP)
        os.kill(child.pid, signal.SIGKILL)
        await child.reaped
        await until(lambda: heard, TEST_SECONDS)
    assert [event.restart_in for event in heard if isinstance(event, ChildEnded)] == [5.0]


@on_both_loops
async def test_a_crash_is_reported_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with pool() as executor, asyncio.timeout(TEST_SECONDS):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        crashed = await failure(executor, tasks.end_the_process, how="kill")
        monkeypatch.undo()
        assert crashed.reason is Reason.CRASHED


@on_both_loops
async def test_close_ends_busy_and_idle_children_and_what_they_left(tmp_path: Path) -> None:
    executor = ProcessExecutor(2, app=None, events=Events())
    await executor.start()
    await run(executor, tasks.leave_a_process, path=str(tmp_path / "left"))
    running = asyncio.create_task(run(executor, tasks.sleep_with_children, path=str(tmp_path / "busy")))
    await until((tmp_path / "busy").exists)
    await executor.close()
    assert isinstance(await running, Failed)
    pids = [int(text) for name in ("left", "busy") for text in (tmp_path / name).read_text().split()]
    await until(lambda: not any(map(alive, pids)), 1)


PARENT = """
import asyncio, sys
from holdfast.core.events import Events
from holdfast.worker.executors.child import _Outbox
from holdfast.worker.executors.process import ProcessExecutor
from holdfast.worker.executors.child import Logged
from tests.unit import executor_tasks as tasks
from tests.unit.executor_support import job

async def main():
    executor = ProcessExecutor(1, app=None, events=Events())
    await executor.start()
    await executor.run(tasks.sleep_with_children, job("sleep_with_children", sys.argv[1]))

asyncio.run(main())
"""


def test_children_die_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "pids"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        worker = subprocess.Popen([sys.executable, "-c", PARENT, json.dumps({"path": str(path)})], env=environment)
        await until(path.exists)
        pids = [int(text) for text in path.read_text().split()]
        assert all(map(alive, pids))
        worker.kill()
        worker.wait()
        await until(lambda: not any(map(alive, pids)), 2)

    asyncio.run(main())


# ── logging ───────────────────────────────────────────────────────────────────────────────────────────────────────
@on_both_loops
async def test_what_a_handler_logs_comes_before_its_reply() -> None:
    kept: list[tuple[int, LogEntry]] = []
    log = JobLog(LogLimits(2, 100), lambda number, line: kept.append((number, line)))
    async with pool(log=LogLimits(2, 100)) as executor:
        assert await executor.run(tasks.write_logs, job("write_logs", '{"lines":5}'), lambda: log) == Succeeded("5")
        assert await run(executor, tasks.write_logs, lines=5) == Succeeded("5")  # without a listener
    fields = '{{"number":{},"pid_differs":true}}'
    assert kept == [(n + 1, LogEntry("warning", "line", fields.format(n))) for n in range(2)]
    assert log.close_log() == 4


def test_a_handler_does_not_notice_that_its_worker_is_gone() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        _Outbox(theirs).send_log(Logged(LogEntry("info", "nobody hears this", None)))


def test_a_child_whose_worker_was_killed_ends_without_a_traceback() -> None:
    worker, child = socket.socketpair()
    with child:
        child.sendall(b"a reply")
        worker.close()  # with the reply unread, as when it is killed
        assert _Inbox(child).next() is None
