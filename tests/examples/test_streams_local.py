"""The `streams` example on this machine: the note of `start`, signals, ports, and commands that cannot run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast import ConfigError
from tests.examples.common import until
from tests.examples.programs import environment
from tests.examples.readme import free_ports
from tests.examples.streams_support import EXAMPLE, OWN_VARIABLES
from tests.support.servers import private_folder

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]
RUNNING = "error: streams.json: the system runs already; stop it first: python -m streams stop\n"
NOTHING = "error: streams.json: no system runs in this directory; start it: python -m streams start\n"
INVALID = "error: streams.json: is not a note of `python -m streams start`; move it away\n"


def run_command(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Runs a command in the folder; returns its exit code and its errors."""
    given = environment(EXAMPLE, OWN_VARIABLES, **variables)
    command = [sys.executable, "-m", "streams", *words]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no part of the system."""
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def held_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a note and locks it, as a running `start` does."""
    monkeypatch.chdir(tmp_path)
    note = tmp_path / "streams.json"
    with note.open("w", encoding="utf-8") as file:

        def write(**fields: object) -> Path:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps(fields))
            file.flush()
            return note

        yield write


# ── the note ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_stop_leaves_a_process_that_recycled_the_id(
    sleeper: subprocess.Popen[bytes], held_note: Callable[..., Path]
) -> None:
    """The note is locked: the start time alone tells the processes apart."""
    note = held_note(pid=sleeper.pid, started=1)
    assert run_command(note.parent, "stop") == (78, NOTHING)
    assert sleeper.poll() is None


def test_stop_leaves_the_process_of_an_unlocked_note(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    from streams.local.note import read_start_ticks

    note = {"pid": sleeper.pid, "started": read_start_ticks(sleeper.pid)}
    (tmp_path / "streams.json").write_text(json.dumps(note), encoding="utf-8")
    assert run_command(tmp_path, "stop") == (78, NOTHING)
    assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["[]", "{}", '{"pid": "x"}', "\xff"])
def test_file_that_is_no_note_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    note = tmp_path / "streams.json"
    note.write_bytes(text.encode("latin-1"))
    for words in (["stop"], ["start"]):
        assert run_command(tmp_path, *words, GATEWAY_PORT="http") == (78, INVALID)
    assert note.read_bytes() == text.encode("latin-1")


@pytest.mark.parametrize("number", ["0", "-1", "257"])
def test_number_of_workers_is_checked(tmp_path: Path, number: str) -> None:
    (tmp_path / "streams.json").write_text("no note", encoding="utf-8")  # else it would start
    code, error = run_command(tmp_path, "start", "--workers", number)
    assert (code, "--workers: give a whole number from 1 to 256" in error) == (2, True)


@pytest.mark.parametrize("text", ['{"pid": -1, "started": null}', '{"pid": 0, "started": null}', '{"pid": 7}'])
def test_stop_signals_no_process_of_an_invalid_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """In this process, where `os.kill` does nothing: -1 stands for all processes."""
    from streams.local.start import stop

    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr("streams.local.start.STOP_TIMEOUT", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streams.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a note"):
        stop()
    assert killed == []


def test_stop_of_another_users_system_is_refused(
    held_note: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from streams.local.note import read_start_ticks
    from streams.local.start import stop

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError

    held_note(pid=os.getpid(), started=read_start_ticks(os.getpid()))
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} belongs to another user; stop it as that user"):
        stop()


def test_stop_returns_when_the_process_ends_and_leaves_its_note(tmp_path: Path) -> None:
    given = environment(EXAMPLE, OWN_VARIABLES)
    code = "import time; from streams.local import note, start\nwith note.hold_note() as write:"
    code += "\n  write(start.describe_process()); print('held', flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=given, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert run_command(tmp_path, "start") == (78, RUNNING)
        starting = "error: streams.json: the system is starting; try again when the gateway answers\n"
        assert run_command(tmp_path, "run", "users", "true") == (78, starting)
        assert run_command(tmp_path, "stop") == (0, "")
        assert holder.wait(60) == -signal.SIGTERM
    assert (tmp_path / "streams.json").exists()
    assert run_command(tmp_path, "stop") == (78, NOTHING)


def test_second_start_is_refused_and_keeps_the_first_note(tmp_path: Path) -> None:
    folder, note = private_folder("streams"), tmp_path / "streams.json"
    with free_ports(2) as ports:
        given = [environment(EXAMPLE, OWN_VARIABLES, TMPDIR=str(folder), GATEWAY_PORT=port) for port in ports]
        command = [sys.executable, "-m", "streams", "start"]
        pipe = subprocess.PIPE
        both = [subprocess.Popen(command, cwd=tmp_path, env=each, stderr=pipe, text=True) for each in given]
        try:
            until(lambda: any(each.poll() is not None for each in both), "the end of the second")
            (refused,) = [each for each in both if each.poll() is not None]
            (first,) = [each for each in both if each is not refused]
            assert (refused.returncode, refused.communicate()[1]) == (78, RUNNING)
            assert json.loads(note.read_text(encoding="utf-8"))["pid"] == first.pid
            until(lambda: list(folder.iterdir()), "the folder of the system")  # signals are caught before
            first.send_signal(signal.SIGTERM)
            assert (first.communicate(timeout=90)[1], first.returncode, note.exists()) == ("", 0, False)
        finally:
            for each in both:
                each.terminate()
                each.wait(90)
    folder.rmdir()


# ── signals, ports, commands ──────────────────────────────────────────────────────────────────────────────────────────
def test_hangup_stays_ignored_under_nohup() -> None:
    code = "import signal; from streams.local.start import catch_signals, interrupt\n"
    code += "for given in (signal.SIG_DFL, signal.SIG_IGN):\n signal.signal(signal.SIGHUP, given); catch_signals()"
    code += "\n print(signal.getsignal(signal.SIGHUP) is interrupt)"
    given = environment(EXAMPLE, OWN_VARIABLES)
    assert subprocess.check_output([sys.executable, "-c", code], env=given, text=True) == "True\nFalse\n"


class Healthy(BaseHTTPRequestHandler):
    """Answers as the gateway of another system does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_gateway_of_another_system_does_not_answer_the_health_check(tmp_path: Path) -> None:
    from streams.local.system import System

    with HTTPServer(("127.0.0.1", 0), Healthy) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        system = System(tmp_path, workers=0, gateway_port=other.server_port)
        system.sites["gateway"].start()
        try:
            with pytest.raises(ConfigError, match=r"(?s)gateway does not start.*address already in use"):
                system.wait_for_site("gateway")
        finally:
            system.sites["gateway"].stop()
            other.shutdown()


@pytest.mark.parametrize("program", ["nosuchcmd", "/"])
def test_unknown_command_is_refused_in_one_line(held_note: Callable[..., Path], program: str) -> None:
    from streams.local.note import read_start_ticks

    note = held_note(pid=os.getpid(), started=read_start_ticks(os.getpid()), settings={"users": {}})
    code, errors = run_command(note.parent, "run", "users", program)
    assert code == 78
    assert errors.startswith(f"error: {program}: cannot be run (")
    assert errors.count("\n") == 1
