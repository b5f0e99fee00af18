"""Programs that are forked: each costs 50 ms of CPU, where a new interpreter that imports Holdfast takes 500."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from holdfast.core.fault_points import FAULTS_VARIABLE

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.fork_server"
IMPORTED = (
    "holdfast.cli.main",
    "holdfast.worker.process",
    "holdfast.telemetry.logs",
    "holdfast.stores.sqlite.store",
    "holdfast.stores.postgres.store",
    "holdfast.stores.redis.store",
    "asyncpg",
    "redis.asyncio",
    "uvicorn",
    "fastapi",
)
"""Modules that the fork server imports; none of them reads the environment at import."""

_GLANCE = 0.2
"""Seconds after which who waits looks whether another thread has received what it waits for."""


def start(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str], output: int, session: bool = False
) -> subprocess.Popen[bytes]:
    """Starts ``python -m WORDS`` in a folder, with this environment and no other, both outputs to a descriptor.

    ``session``: it leads a session of its own. It is a new interpreter where the environment says what is read only
    while an interpreter starts, or while Holdfast is imported."""
    if FAULTS_VARIABLE in environment or _read_at_start(environment) != _read_at_start(os.environ):
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=session,
        )
    request = {"words": list(words), "folder": str(folder), "environment": dict(environment), "session": session}
    return _server().start(request, output)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that an interpreter reads when it starts, but for the import path."""
    return {name: environment[name] for name in environment if name.startswith("PYTHON") and name != "PYTHONPATH"}


class _ForkServer:
    """The process that forks; it ends with the test process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno()), *IMPORTED],
                env={name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
                | {"PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._received = b""
        self._started: list[int] = []
        self._codes: dict[int, int] = {}

    def start(self, request: Mapping[str, object], output: int) -> ForkedProcess:
        """Starts a program, as ``python -m`` does."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            sent = socket.send_fds(self._channel, [line], [output, output])
            self._channel.sendall(line[sent:])
            while not self._started:
                self._receive()
            return ForkedProcess(self, self._started.pop(), [sys.executable, "-m", *request["words"]])

    def exit_code(self, pid: int, timeout: float | None = 0.0) -> int | None:
        """Returns the exit code of one of its processes; None if that has not ended within the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if pid not in self._codes and select.select([self._channel], [], [], 0)[0]:
                    self._receive()
                if pid in self._codes:
                    return self._codes[pid]
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            select.select([self._channel], [], [], _GLANCE if left is None else min(left, _GLANCE))

    def _receive(self) -> None:
        """Notes the pid of a new process, and the exit codes of those that have ended."""
        received = self._channel.recv(65536)
        assert received, "the fork server has ended"
        *lines, self._received = (self._received + received).split(b"\n")
        for document in map(json.loads, lines):
            if "pid" in document:
                self._codes.pop(document["pid"], None)  # of a process that had the same pid
                self._started.append(document["pid"])
            else:
                self._codes[document["ended"]] = document["code"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._channel.close()


@cache
def _server() -> _ForkServer:
    server = _ForkServer()
    atexit.register(server.close)
    return server


class ForkedProcess(subprocess.Popen[bytes]):
    """A forked process, used like a child of this one."""

    def __init__(self, server: _ForkServer, pid: int, args: Sequence[str]) -> None:
        self._child_created = False  # not a child of this process: nothing to reap
        self._server = server
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None

    def poll(self) -> int | None:
        """See ``Popen``."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See ``Popen``."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return int(self.returncode)
