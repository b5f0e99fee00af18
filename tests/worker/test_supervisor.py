"""The supervisor: its policy as a table, and its children as real processes that are tiny.

A child tells what happens to it on a named pipe. Reading that pipe to its end waits for the end of every child.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.events import ChildEnded, Event, Events
from holdfast.settings.settings import Settings, Watch
from holdfast.worker import supervisor as supervising
from holdfast.worker.stop_signals import STOP_SIGNALS, StopRequests
from holdfast.worker.supervisor import (
    FINISHED,
    NAME_TAKEN,
    RECYCLE,
    SUPERVISOR_PIPE,
    ChildRun,
    Restart,
    Supervisor,
    exit_code,
    is_hopeless,
    next_restart,
    supervise,
)

PREAMBLE = """
import os, signal, sys
from pathlib import Path
place = Path(sys.argv[1])
def say(text):
    os.write(out, f"{text}\\n".encode())
out = os.open(place / "reports", os.O_WRONLY) if (place / "reports").exists() else -1
def first(name="first"):
    try:
        (place / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
"""


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Restores this process's signal handlers: those of a supervisor go with its process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


AT_ONCE = Settings.load(environ={}, directory="/", grace="0s")


def _run(
    place: Path,
    program: str,
    *,
    processes: int = 1,
    settings: Settings = AT_ONCE,
    extra_time: float = 30.0,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> tuple[int, list[Event]]:
    """The exit code of a supervisor of such children, and the events it emitted."""
    events, heard = Events(), list[Event]()
    events.subscribe(heard.append, ChildEnded)

    async def supervised() -> int:
        command = [sys.executable, "-S", "-c", PREAMBLE + program + f"\nsys.exit({FINISHED})", str(place)]
        supervisor = Supervisor(command, processes, settings, events, extra_time=extra_time)
        running = asyncio.ensure_future(supervisor.run())
        if meanwhile is not None:
            await meanwhile()
        return await running

    return asyncio.run(supervised()), heard


@pytest.mark.parametrize(
    ("run", "restart"),
    [
        (ChildRun(FINISHED, 5.0, 1, 0), None),
        (ChildRun(0, 5.0, 1, 0), Restart(0.1, 1)),  # a handler's os._exit(0): the worker was not asked to end
        (ChildRun(RECYCLE, 0.0, 9, 3), Restart(0.0, 0)),
        (ChildRun(-9, 5.0, 1, 0), Restart(0.1, 1)),
        (ChildRun(1, 5.0, 2, 1), Restart(0.2, 2)),
        (ChildRun(75, 5.0, 3, 2), Restart(0.4, 3)),
        (ChildRun(1, 5.0, 9, 8), Restart(25.6, 9)),
        (ChildRun(1, 5.0, 10, 9), Restart(30.0, 10)),
        (ChildRun(1, 5.0, 100_000, 99_999), Restart(30.0, 100_000)),
        (ChildRun(1, 60.0, 10, 9), Restart(0.1, 1)),
        (ChildRun(78, 5.0, 2, 0), Restart(0.1, 1)),
    ],
)
def test_a_child_is_started_again_unless_it_ended_well(run: ChildRun, restart: Restart | None) -> None:
    assert next_restart(run, lambda: 0.0) == restart


def test_no_child_is_started_once_it_is_to_stop(tmp_path: Path) -> None:
    """The stop and the end of the pause before a restart come in one iteration of the event loop."""
    events = Events()
    command = [sys.executable, "-S", "-c", PREAMBLE + "(place / str(os.getpid())).touch(); sys.exit(1)", str(tmp_path)]
    supervisor = Supervisor(command, 1, AT_ONCE, events)

    def stop_in_time(ended: ChildEnded) -> None:
        loop = asyncio.get_running_loop()
        if ended.restart_in is not None:
            loop.call_later(ended.restart_in - 0.02, time.sleep, 0.1)
            loop.call_later(ended.restart_in, supervisor.stop, "a test")

    events.subscribe(stop_in_time, ChildEnded)
    asyncio.run(supervisor.run())
    assert len(list(tmp_path.iterdir())) == 1


def test_chance_takes_away_up_to_half_of_a_pause() -> None:
    run = ChildRun(1, 5.0, 2, 1)
    assert next_restart(run, lambda: 1.0) == Restart(0.1, 2)
    assert next_restart(run, lambda: 0.5) == Restart(0.15000000000000002, 2)


@pytest.mark.parametrize(
    ("code", "starts", "hopeless"),
    [
        (78, 1, True),
        (2, 1, True),
        (NAME_TAKEN, 1, True),
        (78, 2, False),
        (NAME_TAKEN, 2, False),
        (1, 1, False),
        (75, 1, False),
    ],
)
def test_only_the_very_first_start_can_be_hopeless(code: int, starts: int, hopeless: bool) -> None:
    assert is_hopeless(ChildRun(code, 0.1, starts, 0)) is hopeless


@pytest.mark.parametrize(
    ("code", "asked", "expected"),
    [
        (0, True, 0),
        (FINISHED, False, 0),
        (RECYCLE, True, 0),
        (3, True, 3),
        (-9, True, 137),
        (-15, True, 0),
        (-15, False, 143),
        (78, False, 78),
        (NAME_TAKEN, False, 75),
    ],
)
def test_what_a_child_adds_to_the_exit_code(code: int, asked: bool, expected: int) -> None:
    assert exit_code(code, asked=asked) == expected


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    code, heard = _run(tmp_path, "if first(): os.kill(os.getpid(), signal.SIGKILL)\nif first('second'): sys.exit(75)")
    assert code == 0
    assert [(event.cause, event.restart_in is not None) for event in heard if isinstance(event, ChildEnded)] == [
        ("killed by SIGKILL", True),
        ("exit code 75", True),
    ]


def test_a_child_that_exits_with_0_unasked_has_not_finished(tmp_path: Path) -> None:
    code, heard = _run(tmp_path, "if first(): os._exit(0)")
    assert code == 0
    assert [event.cause for event in heard if isinstance(event, ChildEnded)] == ["exit code 0"]


def test_a_child_that_wants_to_be_replaced_is_replaced_silently(tmp_path: Path) -> None:
    code, heard = _run(tmp_path, f"sys.exit({RECYCLE} if first() else {FINISHED})")
    assert (code, heard) == (0, [])
    assert (tmp_path / "first").exists()


def test_children_that_end_well_are_left_alone(tmp_path: Path) -> None:
    code, heard = _run(tmp_path, "assert first(str(os.getpid()))", processes=2)
    assert (code, heard) == (0, [])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("code", [2, 78])
def test_a_hopeless_first_start_stops_everything(tmp_path: Path, code: int) -> None:
    ended, heard = _run(tmp_path, f"if first(): sys.exit({code})\nsignal.pause()", processes=3)
    assert ended == code
    assert [event.cause for event in heard if isinstance(event, ChildEnded)] == [f"exit code {code}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_burst_of_stop_signals_is_handed_on_once(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(supervising, "StopRequests", lambda: StopRequests(clock.monotonic))
    os.mkfifo(tmp_path / "reports")
    program = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
say(str(os.getpid()) if os.getsid(0) == os.getpid() else "follows")
signal.sigwait([signal.SIGTERM])
say("stopping")
signal.sigwait([signal.SIGUSR1])
say("again" if signal.sigpending() else "once")
signal.sigwait([signal.SIGTERM])
say("at once" if not signal.sigpending() else "more than twice")
"""

    async def stop_twice() -> None:
        with await asyncio.to_thread(_reports, tmp_path) as given:
            child = int(await asyncio.to_thread(given.readline))
            signal.raise_signal(number)
            assert await asyncio.to_thread(given.readline) == "stopping\n"
            clock.advance(0.9)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.1)  # the event loop has heard both
            os.kill(child, signal.SIGUSR1)
            assert await asyncio.to_thread(given.readline) == "once\n"
            clock.advance(0.2)
            signal.raise_signal(number)
            assert await asyncio.to_thread(given.read) == "at once\n"

    assert _run(tmp_path, program, meanwhile=stop_twice) == (0, [])


def test_child_that_does_not_stop_is_killed_and_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reports")

    async def stop() -> None:
        with await asyncio.to_thread(_reports, tmp_path) as given:
            await asyncio.to_thread(given.readline)
        signal.raise_signal(signal.SIGTERM)

    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('deaf')\nwhile True: signal.pause()"
    code, heard = _run(tmp_path, program, extra_time=0.05, meanwhile=stop)
    assert code == 137
    assert [(event.cause, event.restart_in) for event in heard if isinstance(event, ChildEnded)] == [
        ("killed by SIGKILL", None)
    ]


FINISHES = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
say("works")
assert signal.sigtimedwait([signal.SIGTERM], 10), "it was not asked to stop"
signal.sigtimedwait([signal.SIGUSR1], {seconds})
"""
"""A child that goes on for so long after the signal to stop."""


@pytest.mark.parametrize(("before", "after"), [("0s", "1m"), ("1m", "0s")], ids=["raised", "lowered"])
def test_children_get_a_grace_period_that_just_changed(tmp_path: Path, before: str, after: str) -> None:
    """Whether they have seen the change or not."""
    os.mkfifo(tmp_path / "reports")
    file = tmp_path / "holdfast.toml"
    file.write_text(f'grace = "{before}"\n')

    async def change_and_stop() -> None:
        with await asyncio.to_thread(_reports, tmp_path) as given:
            await asyncio.to_thread(given.readline)
        file.write_text(f'grace = "{after}"\n')
        signal.raise_signal(signal.SIGTERM)

    settings, program = Settings.load(environ={}, path=file), FINISHES.format(seconds=0.3)
    assert _run(tmp_path, program, settings=settings, extra_time=0.05, meanwhile=change_and_stop) == (0, [])


def test_changed_grace_period_survives_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "reports")
    file = tmp_path / "holdfast.toml"
    file.write_text('grace = "0s"\n')
    followed = asyncio.Event()

    class Followed(Watch):
        def poll_changes(self) -> Settings | None:
            newer = super().poll_changes()
            if newer is not None:
                followed.set()
            return newer

    monkeypatch.setattr(supervising, "Watch", Followed)
    monkeypatch.setattr(supervising, "_SETTINGS_INTERVAL", 0.01)

    async def change_break_and_stop() -> None:
        with await asyncio.to_thread(_reports, tmp_path) as given:
            await asyncio.to_thread(given.readline)
        file.write_text('grace = "1m"\n')
        await followed.wait()
        file.write_text("grace =")
        signal.raise_signal(signal.SIGTERM)

    settings, program = Settings.load(environ={}, path=file), FINISHES.format(seconds=0.3)
    assert _run(tmp_path, program, settings=settings, extra_time=0.05, meanwhile=change_break_and_stop) == (0, [])


def test_children_are_stopped_when_the_directory_is_gone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reports")
    folder = tmp_path / "release" / "shop"
    folder.mkdir(parents=True)
    (folder / "holdfast.toml").write_text('grace = "1m"\n')

    async def delete_and_stop() -> None:
        with await asyncio.to_thread(_reports, tmp_path) as given:
            await asyncio.to_thread(given.readline)
        shutil.rmtree(tmp_path / "release")
        signal.raise_signal(signal.SIGTERM)

    settings, program = Settings.load(environ={}, directory=folder), FINISHES.format(seconds=0.3)
    assert _run(tmp_path, program, settings=settings, extra_time=0.05, meanwhile=delete_and_stop) == (0, [])


def test_a_stop_during_a_pause_starts_nothing_again(tmp_path: Path) -> None:
    events = Events()
    events.subscribe(lambda _: signal.raise_signal(signal.SIGTERM), ChildEnded)
    program = "first(str(os.getpid()))\nsys.exit(1)"
    command = [sys.executable, "-S", "-c", PREAMBLE + program, str(tmp_path)]
    assert asyncio.run(Supervisor(command, 1, AT_ONCE, events).run()) == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_program_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    missing, heard = tmp_path / "missing", list[Event]()
    events = Events()

    def install(event: Event) -> None:
        heard.append(event)
        missing.write_text(f"#!/bin/sh\nexit {FINISHED}\n")
        missing.chmod(0o755)

    events.subscribe(install, ChildEnded)
    supervisor = Supervisor([str(missing)], 1, AT_ONCE, events)
    assert asyncio.run(supervisor.run()) == 0
    assert [(event.pid, event.cause) for event in heard if isinstance(event, ChildEnded)] == [
        (0, "cannot be started: No such file or directory")
    ]


ORPHAN = """
import asyncio
from holdfast.worker.supervisor import watch_parent
async def main():
    orphaned = asyncio.Event()
    watch_parent(orphaned.set, lambda: 0.2)
    say("watching" if "{variable}" not in os.environ else "still set")
    await orphaned.wait()
    say("orphaned")
    if {stubborn}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
asyncio.run(main())
"""

ORPHANED = """
import asyncio, sys
from holdfast.settings.settings import Settings
from holdfast.core.events import Events
from holdfast.worker.supervisor import Supervisor
asyncio.run(Supervisor(sys.argv[1:], 2, Settings.load(), Events()).run())
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path, stubborn: bool) -> None:
    os.mkfifo(tmp_path / "reports")
    program = PREAMBLE + ORPHAN.format(stubborn=stubborn, variable=SUPERVISOR_PIPE)
    command = [sys.executable, "-c", ORPHANED, sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(command, env=environment) as supervisor, _reports(tmp_path) as given:
        assert [given.readline(), given.readline()] == ["watching\n"] * 2
        supervisor.kill()
        assert given.read() == "orphaned\n" * 2


@pytest.mark.parametrize(
    ("given", "ports"),
    [({}, ["", ""]), ({"metrics_port": 9091}, [" --metrics-port 9091", " --metrics-port 9092"])],
    ids=["no port", "a port"],
)
def test_supervise_starts_one_worker_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], ports: list[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/started\nexit {FINISHED}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    settings = Settings.load(environ={}, directory=tmp_path, processes=2, **given)
    assert supervise(["--app", "shop:app"], settings, Events()) == 0
    line = "-m holdfast worker start --app shop:app --processes 1"
    assert sorted((tmp_path / "started").read_text().splitlines()) == [line + port for port in ports]


def _reports(place: Path) -> TextIO:
    return (place / "reports").open()
