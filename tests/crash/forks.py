"""Processes of a fleet that are forked: each costs 50 ms of CPU, where a new interpreter takes 400."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PROGRAM = "tests.crash.programs.fork_server"
_STORES = {"sqlite": ["holdfast.stores.sqlite.store"], "postgresql": ["asyncpg", "holdfast.stores.postgres.store"]}
_STORES |= {"redis": ["redis.asyncio", "holdfast.stores.redis.store"]}


class ForkServer:
    """The process that forks, with the environment of the fleet; it ends with the fleet."""

    def __init__(self, url: str, environment: Mapping[str, str], cwd: Path, log: IO[bytes]) -> None:
        modules = ["holdfast.worker.process", "holdfast.telemetry.logs", *_STORES.get(url.partition(":")[0], [])]
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno()), *modules],
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._received = b""
        self._started: list[int] = []
        self._codes: dict[int, int] = {}

    def start(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Starts a program, as ``python -m`` does."""
        request = {"program": program, "arguments": list(arguments), "environment": dict(environment)}
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        while not self._started:
            self._receive()
        return ForkedProcess(self, self._started.pop(), [sys.executable, "-m", program, *arguments])

    def exit_code(self, pid: int, timeout: float | None = 0.0) -> int | None:
        """Returns the exit code of one of its processes; None if that has not ended within the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._channel], [], [], left)[0]:
                return None
            self._receive()
        return self._codes[pid]

    def _receive(self) -> None:
        """Notes the pid of a new process, and the exit codes of those that have ended."""
        received = self._channel.recv(65536)
        assert received, "the fork server has ended"
        *lines, self._received = (self._received + received).split(b"\n")
        for document in map(json.loads, lines):
            if "pid" in document:
                self._started.append(document["pid"])
            else:
                self._codes[document["ended"]] = document["code"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._channel.close()


class ForkedProcess(subprocess.Popen[bytes]):
    """A forked process, used like a child of this one."""

    def __init__(self, server: ForkServer, pid: int, args: Sequence[str]) -> None:
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
