"""The program as a process: workers, signals, pipes."""

from __future__ import annotations

import functools
import json
import os
import pty
import select
import signal
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.context import Session
from holdfast.cli.worker import child_arguments
from holdfast.core.lifecycle import Succeeded
from tests.interfaces.cli import JOBS, Cli


@contextmanager
def _started(cli: Cli, *words: str, **options: Any) -> Iterator[Any]:
    process = cli.process(*words, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_drains_the_queues_and_ends(cli: Cli) -> None:
    target = cli.write_jobs()
    done = cli.run("enqueue", "mail.send", "--arg", "to=a", "--app", target).strip()
    ended = cli.complete("worker", "start", "--drain", "--app", target, "--queues", "mail:2")
    assert ended.returncode == 0, ended.stderr
    (started,) = [json.loads(line) for line in ended.stdout.splitlines() if b'"worker_started"' in line]
    assert started["store"] == f"sqlite:///{cli.folder}/holdfast.db"
    assert (cli.state(done), cli.json("show", done)["result"]) == ("succeeded", "sent to a")


def test_worker_processes_stop_on_a_command_through_the_store(cli: Cli) -> None:
    target = cli.write_jobs()
    cli.run("migrate")
    with _started(cli, "worker", "start", "--processes", "2", "--app", target) as process:
        _until(lambda: len(cli.json("worker", "list")["workers"]) == 2)
        assert len(cli.json("worker", "stop", "--wait-for", "20s")["asked"]) == 2
        assert process.wait(60) == 0


def test_a_worker_ends_well_on_sigterm(cli: Cli) -> None:
    cli.run("migrate")
    with _started(cli, "worker", "start", "--app", cli.write_jobs()) as process:
        _until(lambda: cli.json("worker", "list")["workers"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_supervised_workers_log_the_supervisor_as_stop_reason(cli: Cli) -> None:
    cli.run("migrate")
    with _started(cli, "worker", "start", "--processes", "2", "--app", cli.write_jobs()) as process:
        _until(lambda: len(cli.json("worker", "list")["workers"]) == 2)
        process.send_signal(signal.SIGINT)
        given, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    reasons = [(line["event"], line["reason"]) for line in map(json.loads, given.splitlines()) if "reason" in line]
    assert sorted(reasons) == [("supervisor_stopping", "SIGINT"), *[("worker_stopping", "supervisor")] * 2]


SLOW = """
import asyncio, pathlib
from holdfast import Holdfast

app = Holdfast()

@app.task("slow")
async def slow() -> None:
    pathlib.Path("begun").touch()
    await asyncio.sleep(600)
"""


def test_first_ctrl_c_explains_the_wait_and_second_ends_it(cli: Cli) -> None:
    target = cli.write_jobs(SLOW)
    job_id = cli.run("enqueue", "slow", "--app", target).strip()
    controller, terminal = pty.openpty()
    with _started(cli, "worker", "start", "--app", target, stderr=terminal) as process:
        os.close(terminal)
        _until(lambda: Path("begun").exists())
        process.send_signal(signal.SIGINT)
        given = b""
        while b"gives them back" not in given:
            given += os.read(controller, 1000)
        time.sleep(1.2)  # within a second it would belong to the first
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    os.close(controller)
    assert b"waiting up to 30s for 1 running job; Ctrl-C again gives them back to the queue" in given
    assert cli.state(job_id) == "queued"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_burst_of_stop_signals_keeps_the_grace(cli: Cli, processes: str) -> None:
    target = cli.write_jobs(SLOW)
    job_id = cli.run("enqueue", "slow", "--app", target).strip()
    with _started(cli, "worker", "start", "--app", target, "--processes", processes) as process:
        _until(lambda: Path("begun").exists())
        pids = {process.pid, *(each["pid"] for each in cli.json("worker", "list")["workers"])}
        for pid in sorted(pids):  # as a service manager that signals every process of the service does
            with suppress(ProcessLookupError):  # the idle one of two has ended already
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
        heard = [json.loads(process.stdout.readline())["event"]]
        while "worker_stopping" not in heard:
            heard.append(json.loads(process.stdout.readline())["event"])
        time.sleep(1.5)
        assert (process.poll(), cli.state(job_id)) == (None, "running")
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0  # less than the grace
    assert cli.state(job_id) == "queued"


GAPS = [0.0, 0.005, 0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2]
"""Seconds between two stop signals, from the first steps of the shutdown to the interpreter's finalization."""


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["worker", "start"], "worker_started"),
        (["worker", "start", "--processes", "2"], "worker_started"),
        (["api", "--port", "0"], "api_started"),
    ],
    ids=["worker", "supervisor", "api"],
)
def test_second_stop_signal_during_shutdown_changes_nothing(cli: Cli, words: list[str], started: str) -> None:
    cli.run("migrate")
    target = cli.write_jobs()
    codes = []
    for gap in GAPS:
        with _started(cli, *words, "--app", target) as process:
            for _ in range(2 if "--processes" in words else 1):
                while json.loads(process.stdout.readline())["event"] != started:
                    pass
            process.send_signal(signal.SIGTERM)
            time.sleep(gap)
            process.send_signal(signal.SIGINT if gap in GAPS[::2] else signal.SIGTERM)
            codes.append(process.wait(60))
    assert codes == [0] * len(GAPS)


def test_supervisor_ends_with_75_if_its_worker_id_is_taken(cli: Cli) -> None:
    cli.run("migrate")
    target = cli.write_jobs()
    with _started(cli, "worker", "start", "--app", target, env={"HOLDFAST_WORKER_ID": "mail-1"}):
        _until(lambda: cli.json("worker", "list")["workers"])
        second = {"HOLDFAST_WORKER_ID": "mail-1", "HOLDFAST_RECYCLE_MEMORY": "4GiB"}
        ended = cli.complete("worker", "start", "--app", target, env=second)
        assert ended.returncode == 75
        assert ended.stderr.count(b"mail-1 is the name of a living worker") == 1
        assert len(cli.json("worker", "list")["workers"]) == 1


def test_mistake_in_injected_faults_is_one_line(cli: Cli) -> None:
    target = cli.write_jobs()
    ended = cli.complete("worker", "start", "--app", target, env={"HOLDFAST_FAULTS": "setle.before:kill@3"})
    assert (ended.returncode, ended.stderr.count(b"\n")) == (78, 1)
    assert b"HOLDFAST_FAULTS: there is no point 'setle.before'; there are " in ended.stderr


STUCK = """
import asyncio, pathlib, time
from holdfast import Holdfast

app = Holdfast()

def hang(name):
    pathlib.Path(name).touch()
    time.sleep(600)

@app.task("plain")
def plain() -> None:
    hang("plain")

@app.task("handed")
async def handed() -> None:
    await asyncio.to_thread(hang, "handed")
"""


def test_stuck_threads_do_not_delay_a_stopped_worker(cli: Cli) -> None:
    target = cli.write_jobs(STUCK)
    ids = [cli.run("enqueue", name, "--app", target).strip() for name in ("plain", "handed")]
    with _started(cli, "worker", "start", "--app", target, "--grace", "100ms") as process:
        _until(lambda: Path("plain").exists() and Path("handed").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        events = {event["event"]: event for event in map(json.loads, process.stdout.read().splitlines())}
    assert (events["handlers_left"]["threads"], events["handlers_left"]["coroutines"]) == (2, 0)
    assert [cli.state(each) for each in ids] == ["queued", "queued"]


def test_child_processes_get_the_options_of_the_supervisor() -> None:
    session = Session()
    session.app, session.config = "shop:app", "x.toml"
    given = {"queues": "mail:1", "concurrency": None, "processes": "3", "role": "follower", "grace": "5s"}
    expected = "--app shop:app --config x.toml --queues mail:1 --role follower --grace 5s --drain"
    assert child_arguments(session, given, drain=True) == expected.split()


def test_a_reader_that_goes_away_ends_the_program_quietly(cli: Cli) -> None:
    cli.run("enqueue", "--stream", "-", stdin='{"task": "work"}\n' * 500)
    with _started(cli, "list", "--limit", "500") as process:
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


DESCRIPTORS = """
import os

def open_files():
    null = os.stat(os.devnull).st_rdev
    return [os.fstat(each).st_rdev == null for each in (0, 1, 2)]

@app.task("here")
def here():
    return open_files()

@app.task("child", executor="process")
def child():
    return open_files()
"""


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_commands_work_without_a_standard_stream(cli: Cli, descriptor: int) -> None:
    """No file, least of all the database, gets the descriptor to which a handler may write as its output."""
    target = cli.write_jobs(JOBS + DESCRIPTORS)
    enqueue = [("enqueue", name, "--key", name, "--app", target) for name in ("here", "child")]
    for words in (*enqueue, ("list",), ("list", "--json"), ("worker", "start", "--drain", "--app", target)):
        ended = cli.complete(*words, preexec_fn=functools.partial(os.close, descriptor))
        assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), (words, ended.stderr)
    assert cli.json("show", "key:here")["result"][descriptor] is True
    assert cli.json("show", "key:child")["result"][descriptor] is True


@pytest.mark.parametrize("words", [("--help",), ("list",), ("list", "--json"), ("enqueue", "work", "--key", "once")])
def test_output_that_cannot_be_written_is_reported(cli: Cli, words: tuple[str, ...]) -> None:
    cli.run("enqueue", "work")
    with Path("/dev/full").open("wb") as full:
        ended = cli.complete(*words, stdout=full)
    assert ended.returncode == 1
    message = b"holdfast: the output cannot be written: No space left on device; changes that were made are kept\n"
    assert ended.stderr.startswith(message)
    assert b"Traceback" not in ended.stderr
    assert cli.json("count")["count"] == (2 if words[0] == "enqueue" else 1)


def test_ctrl_c_exits_watch_with_0_and_others_with_130(cli: Cli) -> None:
    cli.run("migrate")
    with _started(cli, "watch") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with _started(cli, "enqueue", "--stream", "-", "--batch-size", "1", "--json", stdin=-1) as process:
        process.stdin.write(b'{"task": "work"}\n')
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"the jobs of lines 1 to 1 are stored" in process.stderr.read()


def test_a_payload_is_not_awaited_from_a_keyboard(cli: Cli) -> None:
    controller, terminal = pty.openpty()
    try:
        ended = cli.complete("enqueue", "work", "-", stdin=terminal)
    finally:
        os.close(controller)
        os.close(terminal)
    assert ended.returncode == 2
    assert b"this is a terminal" in ended.stderr


def test_on_a_terminal_there_are_colours_unless_they_are_unwanted(cli: Cli) -> None:
    job_id = cli.dead()
    assert b"\x1b[31m" in _on_a_terminal(cli)
    plain = _on_a_terminal(cli, NO_COLOR="1")
    assert b"\x1b[31m" not in plain
    narrow = _on_a_terminal(cli, COLUMNS="50")
    assert job_id.encode() in narrow


def _on_a_terminal(cli: Cli, **environment: str) -> bytes:
    """What ``list`` writes to a terminal."""
    controller, terminal = pty.openpty()
    environment = {"TERM": "xterm-256color", **environment}
    writer = cli.process("list", env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    text = _read_terminal(controller)
    writer.wait(60)
    os.close(controller)
    return text


def _read_terminal(controller: int, mark: bytes = b"\0") -> bytes:
    """Returns the output on a terminal up to ``mark``, or to its end."""
    text = b""
    readable = select.poll()  # unlike select(), it knows no highest number of a descriptor
    readable.register(controller, select.POLLIN)
    while mark not in text and readable.poll(20_000):
        try:
            data = os.read(controller, 65536)
        except OSError:  # Linux says so when the last writer has closed a terminal
            break
        if not data:
            break
        text += data
    return text


HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def test_bar_of_a_tag_ends_with_its_run_and_on_ctrl_c(cli: Cli) -> None:
    first, second = [cli.run("enqueue", "work", "--tag", "run-7").strip() for _ in range(2)]
    interrupted = _watch_tag(cli, lambda process: process.send_signal(signal.SIGINT))
    cli.end(first, Succeeded())
    ended = _watch_tag(cli, lambda _: cli.run("cancel", second))

    assert [code for _, code in (interrupted, ended)] == [130, 1]
    assert "run-7  0 of 2 ended (0 %)" in interrupted[0]
    assert "run-7  1 of 2 ended (50 %)" in ended[0]
    assert "2 of 2 ended (100 %), 1 cancelled" in ended[0]
    for drawn, _ in (interrupted, ended):
        assert "━" * 40 in drawn
        bars, _, rest = drawn.partition(SHOW_CURSOR)
        assert (bars.count(HIDE_CURSOR), bars[-2:], rest) == (1, "\r\n", "")


def _watch_tag(cli: Cli, do: Callable[[Any], object]) -> tuple[str, int]:
    """Returns the output of ``watch --tag`` on a terminal and its exit code. Calls ``do`` once the bar is drawn."""
    controller, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    options = {"env": {"TERM": "xterm-256color", "PYTHONUTF8": "1"}, "stdin": terminal, "stdout": terminal}
    with _started(cli, "watch", "--tag", "run-7", "--interval", "20ms", **options) as process:
        drawn = _read_terminal(controller, "━".encode())
        do(process)
        drawn += _read_terminal(controller, SHOW_CURSOR.encode())
        code = process.wait(60)
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    drawn += _read_terminal(controller)
    os.close(controller)
    return drawn.decode(), code


def test_failing_lifespan_is_reported_with_the_user_frames(cli: Cli) -> None:
    target = cli.write_jobs(
        "from contextlib import asynccontextmanager\nfrom holdfast import Holdfast\n\napp = Holdfast()\n\n"
        "@app.lifespan\n@asynccontextmanager\nasync def life(app):\n    raise RuntimeError('no database')\n    yield\n"
    )
    done = cli.complete("worker", "start", "--app", target)
    given = done.stderr.decode()
    assert done.returncode == 78, given
    assert "holdfast: starting the application failed: RuntimeError: no database\n" in given
    assert "in life\n    raise RuntimeError" in given
    assert given.count('File "') == 1
