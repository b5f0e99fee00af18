"""Private servers for tests: each has a folder and a port of its own, and ends with the test."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

NOBODY = 65534
SERVER_USER = NOBODY if os.geteuid() == 0 else None
"""User of the servers; None: that of the tests. Some servers refuse to be root's."""

PORTS = range(20_000, 32_000)
"""Below what systems give to outgoing connections: the port of a stopped server stays free for it, and a client that
knocks there cannot be connected to itself."""

PATIENCE = 60
"""Seconds to wait for a server on a busy machine."""


@cache
def base() -> Path:
    """The folder that everything of ours is in; servers may read it, others may not write it."""
    folder = Path(tempfile.gettempdir()) / f"holdfast-tests-{os.geteuid()}"
    folder.mkdir(mode=0o755, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user; remove it or set TMPDIR")
    return folder


def private_folder(prefix: str) -> Path:
    """A new folder that belongs to the servers' user."""
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=base()))
    if SERVER_USER is not None:
        os.chown(folder, SERVER_USER, SERVER_USER)
    return folder


def as_server(argv: Sequence[str | Path], given: str = "") -> None:
    """Run a program as the servers' user and say something to it; RuntimeError with its answer where it fails."""
    done = subprocess.run(
        [str(word) for word in argv],
        user=SERVER_USER,
        group=SERVER_USER,
        extra_groups=None if SERVER_USER is None else [],
        cwd="/",
        env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{argv[0]} failed with {done.returncode}:\n{done.stdout}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file against every other test process of this user."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name``, made by the first of all test processes that wants it, and then kept for later runs.

    A folder that has lost files since, as those in a temporary folder may, is made anew.
    """
    folder = base() / name
    with locked(base() / f"{name}.lock"):
        if _is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{name}-draft-", dir=base()))
        draft.chmod(0o755)
        make(draft)
        (draft / "files").write_text(str(_count(draft)), encoding="utf-8")
        draft.rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    note = folder / "files"
    return note.exists() and note.read_text(encoding="utf-8") == str(_count(folder) - 1)


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


class Port:
    """A port of 127.0.0.1 that no other test process gets until ``release``, whether something listens or not.

    A test that fails may forget to release it. It is released with the object then: no other test is blamed for it.
    """

    def __init__(self) -> None:
        folder = base() / "ports"
        folder.mkdir(exist_ok=True)
        for number in random.Random().sample(PORTS, len(PORTS)):
            lock = os.open(folder / str(number), os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(("127.0.0.1", number))
            except OSError:
                os.close(lock)
            else:
                self.number = number
                self._release = weakref.finalize(self, os.close, lock)
                return
        raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop}")

    def release(self) -> None:
        """Let others have it."""
        self._release()


class Guarded:
    """Programs that end when this process ends, however it ends, and a folder that goes with them."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(folder)],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._guard.stdin is not None
        os.register_at_fork(after_in_child=self._guard.stdin.close)

    def start(self, argv: Sequence[str | Path]) -> psutil.Process:
        """Start one more program, as the servers' user; what it says goes to the log."""
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        command = {"argv": [str(word) for word in argv], "user": SERVER_USER, "log": str(self.log)}
        print(json.dumps(command), file=self._guard.stdin, flush=True)
        return psutil.Process(int(self._guard.stdout.readline()))

    def close(self) -> None:
        """End them all and remove the folder."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        assert self._guard.stdout is not None
        self._guard.stdout.close()


def kill_all(process: psutil.Process) -> None:
    """kill -9 of a program and of all it started, at one instant: none of them sees another die."""
    process.send_signal(signal.SIGSTOP)
    family = [*process.children(recursive=True), process]
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    await_end(family)


def freeze_all(process: psutil.Process) -> Callable[[], None]:
    """SIGSTOP of a program and of all it started: connections stay, and nothing is answered. What wakes them again."""
    process.suspend()  # first: it starts no others meanwhile
    family = [process, *process.children(recursive=True)]
    for each in family[1:]:
        with suppress(psutil.NoSuchProcess):
            each.suspend()

    def thaw() -> None:
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.resume()

    return thaw


def await_end(family: Sequence[psutil.Process]) -> None:
    """Wait until all of them are gone. An orphan may have no parent to reap it: a zombie is gone."""
    until(lambda: all(map(is_gone, family)), f"the end of {family}")


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, reaped or not, with all its threads: as long as one is left, its sockets are open."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for the condition, with patience."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE} s in vain for {what}")
        time.sleep(0.01)
