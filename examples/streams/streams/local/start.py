"""``start`` runs the whole system until Ctrl-C or ``stop``; ``run`` runs a command with the settings of a service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from holdfast import ConfigError
from streams.local.processes import accepts_connections
from streams.local.system import SERVICES, System

NOTE = Path("streams.json")
"""In the working directory while the system runs: its process and its addresses."""
STOP_TIMEOUT = 90.0  # seconds
GATEWAY_PORT = "GATEWAY_PORT"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def start(workers: int) -> int:
    """Runs everything until Ctrl-C, ``stop`` or the end of a part. Returns the exit code."""
    if read_note() is not None:
        raise ConfigError(f"{NOTE}: the system runs already; stop it first: python -m streams stop")
    port = read_port()
    try:
        with suppress(KeyboardInterrupt), running_system(gateway_port=port, workers=workers) as system:
            NOTE.write_text(json.dumps(describe(system), indent=2), encoding="utf-8")
            print(f"The gateway answers at {system.urls['gateway']}; {system.urls['gateway']}/docs describes it.")
            print(f"The provider answers at {system.urls['provider']}. Ctrl-C ends everything.", flush=True)
            while all(process.is_running for process in system.processes):
                time.sleep(0.2)
            ended = ", ".join(process.name for process in system.processes if not process.is_running)
            print(f"{ended} has ended, so everything does", file=sys.stderr)
            return 1
        return 0
    finally:
        NOTE.unlink(missing_ok=True)  # last: `stop` waits for it


def read_port() -> int:
    """Returns the gateway's port from the environment; ConfigError if it is none, or in use."""
    text = os.environ.get(GATEWAY_PORT) or "8000"
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"{GATEWAY_PORT}: {text!r} is not valid; give a port from 1 to 65535")
    if accepts_connections(int(text)):
        raise ConfigError(f"{GATEWAY_PORT}: a program listens on port {text} already; name another port")
    return int(text)


def describe(system: System) -> dict[str, Any]:
    """Returns the note for ``stop``, ``run`` and ``pending``."""
    settings = {name: system.service_settings(name) for name in SERVICES}
    return {"pid": os.getpid(), "urls": system.urls, "settings": settings}


@contextmanager
def running_system(
    *, workers: int, gateway_port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[System]:
    """Starts everything in a temporary folder. In the end no process and no file is left."""
    for number in SIGNALS:
        signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory(prefix="streams-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # the servers may run as another user
        system = System(folder, workers=workers, gateway_port=gateway_port, settings=settings)
        try:
            system.start()
            yield system
        finally:
            system.stop()


def interrupt(*_: object) -> None:
    """Ends everything. A second signal does not break that off."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def stop() -> None:
    """Stops the system that ``start`` runs in this directory, and waits until it is gone."""
    pid = running_note()["pid"]
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT
    while NOTE.exists():
        if time.monotonic() > deadline:
            raise ConfigError(f"process {pid} does not end; kill it")
        time.sleep(0.1)


def run(service: str, command: Sequence[str]) -> int:
    """Runs a command with the settings of a service, such as ``holdfast list``. Returns its exit code."""
    environment = {**os.environ, **running_note()["settings"][service]}
    words = [sys.executable, "-m", *command] if command[0] == "holdfast" else command
    return subprocess.run(words, env=environment, check=False).returncode


def running_note() -> dict[str, Any]:
    """Returns the note of the running system; ConfigError if there is none."""
    note = read_note()
    if note is None:
        raise ConfigError(f"{NOTE}: no system runs in this directory; start it: python -m streams start")
    return note


def read_note() -> dict[str, Any] | None:
    """Returns the note, None if the process that wrote it is gone."""
    try:
        note: dict[str, Any] = json.loads(NOTE.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return note if is_alive(note["pid"]) else None


def is_alive(pid: int) -> bool:
    """Returns True if there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
