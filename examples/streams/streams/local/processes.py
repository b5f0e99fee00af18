"""Child processes: start, wait until ready, stop, kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast import ConfigError

START_TIMEOUT = 90.0  # seconds until a program must be ready
STOP_TIMEOUT = 30.0  # seconds until a program must have ended; then it is killed


class Process:
    """A program with its output in a log file, in a session of its own: Ctrl-C does not reach it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], user: int | None = None
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = environment
        self._user = user
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts the program; again, after it has ended."""
        groups: list[int] | None = None if self._user is None else []
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=self._user,
                group=self._user,
                extra_groups=groups,
            )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Asks the program to end and waits for that."""
        if self._child is None:
            return
        self._child.send_signal(signal.SIGCONT)
        self._child.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_TIMEOUT)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the program and its children."""
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Waits until the program is ready; ConfigError with the end of its log if it ends before or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT
        while not is_ready():
            if not self.is_running or time.monotonic() > deadline:
                output = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise ConfigError(f"{self.name} does not start; its log {self.log} ends with:\n{output}")
            time.sleep(0.05)


def free_port() -> int:
    """Returns a port of 127.0.0.1 that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def accepts_connections(port: int) -> bool:
    """Returns True if a program listens on this port of 127.0.0.1."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
