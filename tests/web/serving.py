"""The API as a process of its own, and requests to it over its socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.support.plain_http import PLAIN

ROOT = Path(__file__).resolve().parents[2]
_DEADLINE = 90.0


class Served:
    """``holdfast api`` on a free port."""

    def __init__(self, folder: Path, url: str, *words: str, **settings: str) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("HOLDFAST_") or name.startswith("HOLDFAST_TRANSPORT")  # a home says that by it
        }
        given = {f"HOLDFAST_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "api", "--port", "0", "--url", url, *words],
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), "HOLDFAST_LOG_FORMAT": "json", **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address: str = self.line("api_started")["address"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.lines.append(json.loads(line) if line.startswith("{") else {"event": line})
                self._heard.notify_all()
        with self._heard:
            self.lines.append({"event": "the end"})
            self._heard.notify_all()

    def line(self, event: str) -> dict[str, Any]:
        """The first log line of this event, awaited."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.lines if line["event"] in (event, "the end")), None)

        with self._heard:
            line = self._heard.wait_for(found, _DEADLINE)
        assert line is not None, self.lines
        assert line["event"] == event, self.lines
        return line

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=_DEADLINE)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=_DEADLINE, **{"verify": PLAIN, **options})

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its exit code."""
        self.process.send_signal(number)
        return self.process.wait(_DEADLINE)

    def kill(self) -> None:
        """End it as a crash would, if it has not ended."""
        self.process.kill()
        self.process.wait(_DEADLINE)
        self._reader.join(_DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def answer_on(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(65_536):
            answer += part
    return answer
