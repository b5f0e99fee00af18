"""The sandbox of commands, by each mechanism: what tries to get out, what works inside, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import Holdfast, JobState
from holdfast.core.lifecycle import Failed, Outcome, Succeeded
from holdfast.core.models import Reason
from holdfast.core.resources import ResourceLimits
from holdfast.tasks.command_policy import CommandPolicy
from holdfast.worker import Worker
from holdfast.worker.executors.command import CommandRunner
from holdfast.worker.sandbox import LANDLOCK, NAMESPACES, CommandHost, Mechanism, plan
from tests.unit.executor_support import living_with, until
from tests.worker import escapes

SCRIPT = Path(escapes.__file__)
SECONDS = 90.0
MECHANISMS = pytest.mark.parametrize("mechanism", [NAMESPACES, LANDLOCK], ids=lambda each: each.name)
IS_ROOT = os.geteuid() == 0
ONLY_FOR_ROOT = {"mount", "change_of_root", "device", "kernel_setting", "set_user_id_program"}
"""Ways that lead out for root alone, where there is no sandbox."""
CLOSED_ANYWAY = {"inherited_descriptor", "io_uring"}
"""Ways that may be closed without a sandbox too: by ``subprocess``, by a setting of the kernel."""


class Outside(NamedTuple):
    """What stands around a sandbox."""

    folder: Path
    inside: Path
    aims: dict[str, Any]
    victims: list[subprocess.Popen[bytes]]

    def snapshot(self) -> dict[str, tuple[str, int, float]]:
        """Names, contents, modes and times of the files outside."""
        return {
            path.name: (path.read_text(), path.stat().st_mode, path.stat().st_mtime) for path in self.folder.iterdir()
        }


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    """Files, processes and sockets that a sandboxed command must not reach."""
    folder, inside = tmp_path / "outside", tmp_path / "inside"
    folder.mkdir()
    inside.mkdir()
    for name in escapes.ways:
        (folder / name).write_text("untouched")
    setuid = tmp_path / "id"
    shutil.copy(shutil.which("id") or "", setuid)
    if IS_ROOT:
        os.chown(setuid, 12345, 12345)
    setuid.chmod(0o4755)
    fifo, path, abstract = tmp_path / "fifo", f"/tmp/hf-{os.getpid()}-{time.monotonic_ns()}", f"hf-{tmp_path}"
    os.mkfifo(fifo)
    with contextlib.ExitStack() as stack:
        victims = [
            stack.enter_context(subprocess.Popen(["sleep", "500"], env={"SECRET": "1"}, start_new_session=True))
            for _ in range(4)
        ]
        stack.callback(lambda: [each.kill() for each in victims])
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=5))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        for name in (path, f"\0{abstract}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(name)
            listener.listen()
        stack.callback(Path(path).unlink)
        aims = {
            "outside": str(folder),
            "victims": [each.pid for each in victims],
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": path,
            "abstract": abstract,
            "fifo": str(fifo),
            "setuid": str(setuid),
        }
        yield Outside(folder, inside, aims, victims)


def run(mechanism: Mechanism | None, tmp_path: Path, *argv: str, **payload: Any) -> Outcome:
    """Run a command in the sandbox of that mechanism; None: without one."""
    policy = CommandPolicy(mode="argv", roots=(str(tmp_path),), network=True, limits=ResourceLimits(cpu=600))
    runner = CommandRunner(CommandHost([mechanism]) if mechanism else None)
    payload |= {"sandbox": "none" if mechanism is None else "strict"}

    async def bounded() -> Outcome:
        async with asyncio.timeout(SECONDS):
            return await runner.run({"argv": list(argv), **payload}, policy)

    return asyncio.run(bounded())


def output(outcome: Outcome) -> str:
    assert isinstance(outcome, Succeeded), outcome
    return str(json.loads(outcome.result or "")["stdout"])


def attempted(mechanism: Mechanism | None, outside: Outside, tmp_path: Path) -> dict[str, Any]:
    """The ways that worked, and the errors of the rest."""
    argv = [sys.executable, str(SCRIPT), json.dumps(outside.aims)]
    done: dict[str, Any] = json.loads(output(run(mechanism, tmp_path, *argv, cwd=str(outside.inside))))
    assert set(done["worked"]) | set(done["failed"]) == set(escapes.ways)
    return done


@pytest.mark.rows("Q69")
@MECHANISMS
def test_no_way_out_of_the_sandbox_works(mechanism: Mechanism, outside: Outside, tmp_path: Path) -> None:
    before = outside.snapshot()
    leak = os.open(outside.folder / "inherited_descriptor", os.O_WRONLY)
    os.set_inheritable(leak, True)
    try:
        done = attempted(mechanism, outside, tmp_path)
    finally:
        os.close(leak)
    assert done["worked"] == [], done["failed"]
    assert outside.snapshot() == before
    assert [each.poll() for each in outside.victims] == [None] * 4
    assert all("Error" in error and "NameError" not in error for error in done["failed"].values()), done["failed"]


def test_namespaces_alone_leave_named_pipes(outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "landlock_version", lambda: 0)
    before = outside.snapshot()
    assert attempted(NAMESPACES, outside, tmp_path)["worked"] == ["pipe_with_a_name"]
    assert outside.snapshot() == before


def test_every_way_works_without_a_sandbox(outside: Outside, tmp_path: Path) -> None:
    done = attempted(None, outside, tmp_path)
    closed = CLOSED_ANYWAY | (set() if IS_ROOT else ONLY_FOR_ROOT)
    assert set(done["failed"]) <= closed, done["failed"]
    assert outside.victims[1].wait(timeout=SECONDS) == -9


@pytest.mark.rows("Q69")
@MECHANISMS
def test_ordinary_work_goes_on_inside(mechanism: Mechanism, tmp_path: Path) -> None:
    text = (
        "echo one > made; mkdir deep; mv made deep/; cat deep/made; sort /etc/passwd > sorted; test -s sorted;"
        'echo gone > /dev/null; (sleep 0.1; echo later) & wait; test -w "$TMPDIR" && pwd'
    )
    lines = output(run(mechanism, tmp_path, "sh", "-ec", text, cwd=str(tmp_path))).splitlines()
    assert lines == ["one", "later", str(tmp_path.resolve())]
    assert (tmp_path / "deep" / "made").read_text() == "one\n"


@MECHANISMS
def test_command_without_a_directory_gets_a_new_one(mechanism: Mechanism, tmp_path: Path) -> None:
    text = "mkdir locked; touch locked/file 2>/dev/null; chmod 0 locked 2>/dev/null; pwd"
    folder = Path(output(run(mechanism, tmp_path, "sh", "-c", text)).strip())
    assert folder.name.startswith("holdfast-")
    assert not folder.exists()


DEEP = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\n"


@MECHANISMS
def test_deep_directory_is_removed_and_changes_no_outcome(mechanism: Mechanism, tmp_path: Path) -> None:
    program = "import os; print(os.getcwd())\n" + DEEP
    folder = Path(output(run(mechanism, tmp_path, sys.executable, "-c", program)).strip())
    assert not folder.exists()
    failed = run(mechanism, tmp_path, sys.executable, "-c", f"{DEEP}os._exit(3)", dead_codes=[3])
    assert isinstance(failed, Failed)
    assert (failed.error, failed.reason) == ("exit code 3", Reason.NON_RETRYABLE)


UNPRIVILEGED = """
from pathlib import Path
from holdfast.worker.executors import command
from holdfast.worker.sandbox.launcher import drop_privileges
from tests.worker.test_sandbox import NAMESPACES, output, run

def remove(path, remove=command._remove_folder):
    drop_privileges()  # of this thread: root may read every directory
    remove(path)

command._remove_folder = remove
print(output(run(NAMESPACES, Path("/"), "sh", "-c", "pwd; mkdir -p a/b; touch a/b/c; chmod 0 a/b a .")))
"""


def test_directory_that_its_owner_may_not_read_is_removed() -> None:
    """In Landlock alone nothing can change the mode of a file."""
    words = [sys.executable, "-c", UNPRIVILEGED]
    folder = Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
    assert folder.name.startswith("holdfast-")
    assert not folder.exists()


@MECHANISMS
def test_directory_that_becomes_a_link_is_not_entered(
    mechanism: Mechanism, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(outside.folder)
    monkeypatch.setattr(CommandPolicy, "resolve_directory", lambda *_: str(link))  # as it was before it was a link
    outcome = run(mechanism, tmp_path, "touch", "made", cwd=str(link))
    assert isinstance(outcome, Failed)
    assert "symbolic links" in outcome.error
    assert not (outside.folder / "made").exists()


@MECHANISMS
def test_network_is_reached_where_it_is_allowed(mechanism: Mechanism, outside: Outside, tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), json.dumps(outside.aims), "tcp_socket", "udp_socket", "unix_socket"]
    done = json.loads(output(run(mechanism, tmp_path, *argv, cwd=str(outside.inside), network=True)))
    assert done["worked"] == ["tcp_socket", "udp_socket"]


@MECHANISMS
def test_ends_are_described_as_without_a_sandbox(mechanism: Mechanism, tmp_path: Path) -> None:
    for argv, error, reason in (
        (["sh", "-c", "echo why >&2; exit 7"], "exit code 7: why", Reason.ERROR),
        (["sh", "-c", "kill -SEGV $$"], "killed by SIGSEGV", Reason.CRASHED),
        (["sh", "-c", "kill -KILL $$"], "killed by SIGKILL", Reason.CRASHED),
        (["no-such-cmd-xyz"], "no-such-cmd-xyz: command not found", Reason.ERROR),
    ):
        outcome = run(mechanism, tmp_path, *argv)
        assert isinstance(outcome, Failed)
        assert (outcome.error, outcome.reason) == (error, reason)


DAEMON = """
import os, sys, time
if os.fork():
    sys.exit()
try:
    os.setsid()
except OSError:
    pass
if os.fork():
    os._exit(0)
os.execve("/bin/sh", ["sh", "-c", "sleep 300; : " + sys.argv[1]], {})
"""


@MECHANISMS
def test_nothing_outlives_a_sandboxed_command(mechanism: Mechanism, tmp_path: Path) -> None:
    marker = f"daemon-{tmp_path.name}-{mechanism.name}"
    run(mechanism, tmp_path, sys.executable, "-c", DAEMON, marker)
    deadline = time.monotonic() + SECONDS
    while living_with(marker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@MECHANISMS
def test_cancelled_sandbox_is_killed_as_a_whole(mechanism: Mechanism, tmp_path: Path) -> None:
    marker = f"stopped-{tmp_path.name}-{mechanism.name}"

    async def start_and_cancel() -> None:
        runner = CommandRunner(CommandHost([mechanism]))
        argv = ["sh", "-c", f"sleep 300; : {marker}"]
        running = asyncio.create_task(runner.run({"argv": argv, "sandbox": "strict"}, CommandPolicy(mode="argv")))
        await until(lambda: living_with(marker), SECONDS)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        await until(lambda: not living_with(marker), SECONDS)

    asyncio.run(start_and_cancel())


# ── settings and refusals ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("Q69")
def test_unavailable_sandbox_refuses_the_job_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe_mechanism", lambda mechanism: "forbidden here")
    app = Holdfast(
        f"sqlite:///{tmp_path}/jobs.db", commands="argv", sandbox="strict", command_roots=str(tmp_path), max_attempts=5
    )

    async def drained() -> Any:
        async with app, asyncio.timeout(SECONDS):
            handle = await app.run_command("touch", "made", cwd=str(tmp_path))
            await Worker(app, drain=True).run()
            return await handle.job()

    job = asyncio.run(drained())
    assert (job.state, job.reason, job.attempts) == (JobState.DEAD, "sandbox", 1)
    assert "namespaces: forbidden here; landlock: forbidden here" in job.error
    assert "user.max_user_namespaces" in job.error
    assert not (tmp_path / "made").exists()


@MECHANISMS
def test_sandbox_that_fails_to_start_refuses_the_job(
    mechanism: Mechanism, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = CommandHost([mechanism])
    assert host.find_mechanism() is mechanism
    broken = tmp_path / "launcher.py"
    text = Path(plan.__file__).with_name("launcher.py").read_text(encoding="utf-8")
    broken.write_text(text.replace("    if answer < 0:", "    if True:"), encoding="utf-8")
    monkeypatch.setattr(plan, "_LAUNCHER", str(broken))
    payload = {"argv": ["touch", str(tmp_path / "made")], "sandbox": "strict"}
    outcome = asyncio.run(CommandRunner(host).run(payload, CommandPolicy(mode="argv")))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (Reason.SANDBOX, False)
    assert "holdfast doctor" in outcome.error


@pytest.mark.rows("Q69")
def test_setting_sandboxes_every_command_of_a_worker(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", commands="argv", sandbox="strict", max_attempts=1)

    async def drained() -> Any:
        async with app, asyncio.timeout(SECONDS):
            handle = await app.run_command("sh", "-c", f"echo x > {tmp_path}/made")
            await Worker(app, drain=True).run()
            return await handle.job()

    job = asyncio.run(drained())
    assert job.state is JobState.DEAD
    assert not (tmp_path / "made").exists()
