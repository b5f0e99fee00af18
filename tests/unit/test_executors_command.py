"""Command jobs: ``worker/executors/command.py`` and ``group.py``. Real commands, as nasty as they come."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.lifecycle import Failed, Outcome, Released, Succeeded
from holdfast.core.models import Reason
from holdfast.tasks.command_policy import CommandPolicy
from holdfast.worker.executors import command, process_group
from holdfast.worker.executors.command import CommandRunner
from tests.support.load import slowness
from tests.unit.executor_support import living_with, on_both_loops, until

POLICY = CommandPolicy(mode="shell")


async def run(policy: CommandPolicy = POLICY, *, text: str | None = None, **payload: Any) -> Outcome:
    """Run a command given by its fields; ``text`` is for a shell."""
    return await CommandRunner().run(payload if text is None else {"shell": text, **payload}, policy)


async def result(policy: CommandPolicy = POLICY, **payload: Any) -> dict[str, Any]:
    outcome = await run(policy, **payload)
    assert isinstance(outcome, Succeeded), outcome
    decoded: dict[str, Any] = msgspec.json.decode(outcome.result or "")
    return decoded


async def failure(policy: CommandPolicy = POLICY, **payload: Any) -> Failed:
    outcome = await run(policy, **payload)
    assert isinstance(outcome, Failed), outcome
    return outcome


@on_both_loops
async def test_output_and_exit_code_of_a_success() -> None:
    answer = await result(text="echo a && echo b; echo c >&2")
    assert 0 < answer.pop("seconds") < 5
    assert answer == {"exit_code": 0, "stdout": "a\nb\n", "stderr": "c\n", "truncated": 0}


@on_both_loops
async def test_arguments_are_never_read_by_a_shell(tmp_path: Path) -> None:
    answer = await result(argv=["echo", "a; touch x.marker", "$HOME", "*"], cwd=str(tmp_path))
    assert answer["stdout"] == "a; touch x.marker $HOME *\n"
    assert list(tmp_path.iterdir()) == []


@on_both_loops
async def test_input_directory_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET", "s")
    assert (await result(argv=["cat"], stdin="héllo" * 30_000))["truncated"] > 0
    assert (await result(argv=["cat"]))["stdout"] == ""
    assert (await result(argv=["pwd"], cwd=str(tmp_path)))["stdout"] == f"{tmp_path.resolve()}\n"
    lines = (await result(argv=["env"], env={"MINE": "1"}))["stdout"].splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert "MINE" in names
    assert names <= {"PATH", "HOME", "LANG", "TZ", "MINE", process_group.MARK}


def script(path: Path, text: str, mode: int = 0o755) -> list[str]:
    path.write_text(text)
    path.chmod(mode)
    return [str(path)]


@pytest.mark.parametrize(
    ("shell", "error", "reason"),
    [
        ("exit 7", "exit code 7", Reason.ERROR),
        ("echo one >&2; echo boom >&2; exit 3", "exit code 3: one\nboom", Reason.ERROR),
        ("echo said on stdout; exit 1", "exit code 1: said on stdout", Reason.ERROR),
        ("exit 126", "exit code 126 (not executable)", Reason.ERROR),
        ("exit 127", "exit code 127 (command not found)", Reason.ERROR),
        ("exit 137", "exit code 137 (SIGKILL)", Reason.ERROR),
        ("exit 193", "exit code 193", Reason.ERROR),
        ("exit 255", "exit code 255", Reason.ERROR),
        ("kill -SEGV $$", "killed by SIGSEGV", Reason.CRASHED),
        ("kill -TERM $$", "killed by SIGTERM", Reason.CRASHED),
        ("kill -40 $$", "killed by signal 40", Reason.CRASHED),
    ],
)
def test_every_way_to_end_is_described(shell: str, error: str, reason: Reason) -> None:
    failed = asyncio.run(failure(text=shell))
    assert (failed.error, failed.reason, failed.retryable) == (error, reason, True)


@on_both_loops
async def test_what_cannot_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await failure(argv=["no-such-cmd-xyz"])).error == "no-such-cmd-xyz: command not found"
    assert "command not found" in (await failure(text="no-such-cmd-xyz")).error
    locked = script(tmp_path / "locked", "#!/bin/sh\n", 0o644)
    assert (await failure(argv=locked)).error == f"{locked[0]}: not executable"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (await failure(argv=["locked"])).error == "locked: not executable"
    (tmp_path / "folder").mkdir()
    assert (await failure(argv=["folder"])).error == "folder: command not found"
    monkeypatch.undo()
    bare = script(tmp_path / "bare", "echo no shebang\n")
    assert (await failure(argv=bare)).error == f"{bare[0]}: Exec format error"
    for_none = script(tmp_path / "for_none", "#!/no/such/interpreter\n")
    assert (await failure(argv=for_none)).error == f"{for_none[0]}: its interpreter is not found"
    assert (await failure(argv=["./for_none"], cwd=str(tmp_path))).error == "./for_none: its interpreter is not found"
    assert (await failure(argv=["./nothing"], cwd=str(tmp_path))).error == "./nothing: command not found"
    missing = await failure(argv=["ls"], cwd=str(tmp_path / "missing"))
    assert missing.error == f"cwd {tmp_path / 'missing'}: No such file or directory"
    assert missing.retryable


@on_both_loops
async def test_exit_codes_can_be_final() -> None:
    assert not (await failure(text="exit 3", dead_codes=[3])).retryable
    assert (await failure(text="exit 3", dead_codes=[3])).reason is Reason.NON_RETRYABLE
    assert (await failure(text="exit 4", dead_codes=[3])).retryable
    assert (await failure(text="exit 75", retry_codes=[75])).retryable
    assert not (await failure(text="exit 1", retry_codes=[75])).retryable


@on_both_loops
async def test_the_policy_holds_where_the_command_runs(tmp_path: Path) -> None:
    failed = await failure(CommandPolicy(), argv=["touch", str(tmp_path / "x")])
    assert (failed.reason, failed.retryable) == (Reason.PAYLOAD, False)
    assert "command jobs are off" in failed.error
    failed = await failure(CommandPolicy(mode="argv", roots=(str(tmp_path),)), argv=["ls"], cwd="/")
    assert "must lie under" in failed.error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_worker_that_cannot_start_it_gives_the_job_back(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(subprocess, "Popen", no_more)
    outcome = asyncio.run(run(argv=["true"]))
    assert isinstance(outcome, Released)
    assert outcome.error is not None
    assert "cannot start true" in outcome.error
    assert outcome.delay
    monkeypatch.undo()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@on_both_loops
async def test_out_of_descriptors_for_real() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await run(argv=["true"])
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    for spare in range(1, 9):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            outcome = await run(argv=["true"])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert isinstance(outcome, Released | Succeeded)
    assert (await result(argv=["true"]))["exit_code"] == 0


def test_more_arguments_than_the_system_takes_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_big(*_: Any, **__: Any) -> None:
        raise OSError(errno.E2BIG, "Argument list too long", "true")

    monkeypatch.setattr(subprocess, "Popen", too_big)
    failed = asyncio.run(failure(argv=["true"]))
    assert (failed.reason, failed.retryable) == (Reason.PAYLOAD, False)


@on_both_loops
async def test_endless_output_is_dropped_and_counted_not_kept() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await result(text="head -c 50000000 /dev/zero; head -c 1000000 /dev/zero >&2; echo end")
    assert answer["stdout"] == "\0" * 65536
    assert answer["stderr"] == "\0" * 65536
    assert answer["truncated"] == 51_000_004 - 2 * 65536
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024
    failed = await failure(text="head -c 1000000 /dev/zero >&2; echo the end >&2; exit 1")
    assert failed.error.endswith("the end")


@on_both_loops
async def test_output_that_is_no_text_is_kept_readable() -> None:
    answer = await result(text=r"printf '\377\200ok\000'")
    assert answer["stdout"] == "��ok\0"


@on_both_loops
async def test_background_process_neither_holds_nor_outlives_its_job() -> None:
    mark = f"61.{uuid.uuid4().int % 10**9}"
    for output in ("", ">/dev/null 2>&1"):
        started = time.monotonic()
        answer = await result(text=f"sleep {mark} {output} & echo hi")
        assert answer["stdout"] == "hi\n"
        assert time.monotonic() - started < 30
        await until(lambda: not living_with(mark), 30)


@on_both_loops
async def test_a_command_that_has_run_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its success would be taken for a failure, and it would run again."""
    mark = f"63.{uuid.uuid4().int % 10**9}"

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:  # the loop's own end needs a thread
        patched.setattr(threading.Thread, "start", refuse)
        answer = await result(text=f"setsid -f sleep {mark}; echo hi")
    assert answer["stdout"] == "hi\n"
    await until(lambda: not living_with(mark), 30)


@on_both_loops
async def test_process_that_left_the_session_is_killed_too() -> None:
    mark = f"62.{uuid.uuid4().int % 10**9}"
    started = time.monotonic()
    answer = await result(text=f"setsid -f sleep {mark}; echo hi")
    assert answer["stdout"] == "hi\n"
    assert time.monotonic() - started < 30
    await until(lambda: not living_with(mark), 30)


@pytest.mark.parametrize("seconds", [0, 1.1])
@on_both_loops
async def test_detached_process_that_holds_no_output_does_not_outlive_its_job(seconds: float) -> None:
    """A short command is followed only by processes that started after it; a long one by any."""
    mark = f"68.{uuid.uuid4().int % 10**9}"
    detached = f"setsid sleep {mark} </dev/null >/dev/null 2>&1 &"
    until_detached = 'until [ "$(cut -d" " -f6 /proc/$!/stat)" = $! ]; do sleep 0.01; done'
    for code in (0, 7):
        outcome = await run(text=f"{detached} {until_detached}; sleep {seconds}; exit {code}")
        assert isinstance(outcome, Failed if code else Succeeded), outcome
        await until(lambda: not living_with(mark), 30)


@pytest.mark.parametrize("after", [0, 100, 4000])
def test_killing_goes_on_until_no_marked_process_is_left(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of five processes starts the next when it is killed; 4000: the pids began anew."""

    def start(pid: int, mark: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(f"A=1\0{process_group.MARK}={mark}-1\0".encode())
        (tmp_path / "loadavg").write_text(f"0.00 0.00 0.00 1/99 {pid}\n")

    def kill(pid: int, number: int) -> None:
        shutil.rmtree(tmp_path / str(pid))
        killed.append((pid, number))
        if len(killed) < 5:
            start(pid + 1, "mine")

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", kill)
    start(201, "other")
    start(202, "mine")
    process_group.kill_marked("mine-", after, processes=tmp_path)
    assert killed == [(pid, signal.SIGKILL) for pid in range(202, 207)]
    assert (tmp_path / "201").exists()


@pytest.mark.parametrize("text", [None, "", "one"], ids=["hidden", "empty", "no number"])
def test_marked_processes_are_found_where_the_latest_pid_is_not_told(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "loadavg").write_text(text)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: (killed.append(pid), shutil.rmtree(tmp_path / str(pid))))
    for pid, number in {201: 1, 202: 20, 203: 3}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(f"{process_group.MARK}=job-{number}-a\0".encode())
    process_group.kill_marked("job-", after=100, below=20, processes=tmp_path)
    assert sorted(killed) == [201, 203]


@on_both_loops
async def test_outcome_does_not_wait_for_the_threads_of_handlers() -> None:
    may_end, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, may_end.wait)
    try:
        assert isinstance(await asyncio.wait_for(run(text="exit 0"), 30), Succeeded)
    finally:
        may_end.set()
        await busy


NASTY = {
    "forks": "sleep {0} & (sleep {0} & sleep {0}) & sleep {0}",
    "deaf": "trap '' TERM INT HUP; sleep {0}; sleep {0}; sleep {0}",
    "closes its input and output": "exec <&- >&- 2>&-; sleep {0}",
    "daemonises": "setsid -f sleep {0}; setsid sleep {0} & sleep {0}",
    "stops itself": "sleep {0} & kill -STOP $$",
    "talks without end": "sleep {0} & yes",
}


@pytest.mark.parametrize("how", NASTY)
@on_both_loops
async def test_cancelled_it_is_killed_with_everything_it_started(how: str) -> None:
    mark = f"63.{uuid.uuid4().int % 10**9}"
    running = asyncio.create_task(run(text=NASTY[how].format(mark)))
    await until(lambda: len(living_with(mark)) >= 2)  # the shell names it too
    started = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    took = time.monotonic() - started
    await until(lambda: not living_with(mark), 30)
    assert took < 1 * slowness(), took


@on_both_loops
async def test_second_cancellation_still_kills_all_processes() -> None:
    mark = f"64.{uuid.uuid4().int % 10**9}"
    running = asyncio.create_task(run(text=f"setsid sleep {mark} & sleep {mark}"))
    await until(lambda: len(living_with(mark)) >= 2)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not living_with(mark), 30)


@on_both_loops
async def test_unkillable_process_does_not_block_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"66.{uuid.uuid4().int % 10**9}"
    running = asyncio.create_task(run(argv=["sleep", mark]))
    await until(lambda: living_with(mark))
    monkeypatch.setattr(command, "_KILL_TIMEOUT", 0.01)
    monkeypatch.setattr(command, "kill_group", lambda _: None)
    monkeypatch.setattr(command, "kill_marked", lambda _: None)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (pid,) = living_with(mark)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{pid}").exists())  # reaped without a waiter


@on_both_loops
async def test_command_that_became_another_user_is_cancelled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"67.{uuid.uuid4().int % 10**9}"
    running = asyncio.create_task(run(argv=["sleep", mark]))
    await until(lambda: living_with(mark), 30)

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(command, "_KILL_TIMEOUT", 0.01)
        patch.setattr(os, "kill", refuse)
        patch.setattr(os, "killpg", refuse)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    (pid,) = living_with(mark)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{pid}").exists(), 30)


@on_both_loops
async def test_nothing_is_left_open() -> None:
    await result(argv=["cat"], stdin="x")
    before = sorted(entry.name for entry in Path("/proc/self/fd").iterdir())
    for _ in range(3):
        await result(argv=["cat"], stdin="x")
        await failure(argv=["no-such-cmd-xyz"])
        running = asyncio.create_task(run(argv=["sleep", "60"]))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
    assert sorted(entry.name for entry in Path("/proc/self/fd").iterdir()) == before


@on_both_loops
async def test_without_a_pidfd_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    mark = f"65.{uuid.uuid4().int % 10**9}"
    assert (await result(text=f"sleep {mark} & echo hi"))["stdout"] == "hi\n"
    assert (await failure(text="exit 7")).error == "exit code 7"
    await until(lambda: not living_with(mark), 30)


@on_both_loops
async def test_many_at_once() -> None:
    answers = await asyncio.gather(*[result(argv=["echo", str(n)]) for n in range(40)])
    assert [answer["stdout"] for answer in answers] == [f"{n}\n" for n in range(40)]


def test_a_group_that_is_gone_is_left_alone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    process_group.kill_group(process)
    assert process.returncode == 0
    process_group.kill_marked("no such mark")
    process_group.kill_marked("no such mark", processes=Path("/no/such/directory"))
