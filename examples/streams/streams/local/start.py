"""``start`` runs the whole system until Ctrl-C or ``stop``; ``run`` runs a command with the settings of a service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast import ConfigError
from streams.local.note import Note, hold_note, read_note, read_running_note, read_service_settings, read_start_ticks
from streams.local.processes import accepts_connections
from streams.local.system import SERVICES, System

STOP_TIMEOUT = 90.0  # seconds
GATEWAY_PORT = "GATEWAY_PORT"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start(workers: int) -> int:
    """Runs everything until Ctrl-C, ``stop`` or the end of a part. Returns the exit code."""
    with hold_note() as write_note, suppress(KeyboardInterrupt):
        write_note(describe_process())
        with running_system(gateway_port=read_port(), workers=workers) as system:
            write_note(describe_system(system))
            print(f"The gateway answers at {system.urls['gateway']}; {system.urls['gateway']}/docs describes it.")
            print(f"The provider answers at {system.urls['provider']}. Ctrl-C ends everything.", flush=True)
            while all(process.is_running for process in system.processes):
                time.sleep(0.2)
            ended = ", ".join(process.name for process in system.processes if not process.is_running)
            print(f"{ended} has ended, so everything does", file=sys.stderr)
            return 1
    return 0


def read_port() -> int:
    """Returns the gateway's port from the environment; ConfigError if it is none, or in use."""
    text = os.environ.get(GATEWAY_PORT) or "8000"
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"{GATEWAY_PORT}: {text!r} is not valid; give a port from 1 to 65535")
    if accepts_connections(int(text)):
        raise ConfigError(f"{GATEWAY_PORT}: a program listens on port {text} already; name another port")
    return int(text)


def describe_process() -> Note:
    """Returns the note for ``stop``."""
    return Note(pid=os.getpid(), started=read_start_ticks(os.getpid()))


def describe_system(system: System) -> Note:
    """Returns the note for ``stop``, ``run`` and ``pending``."""
    settings = {name: system.service_settings(name) for name in SERVICES}
    return describe_process().model_copy(update={"urls": system.urls, "settings": settings})


@contextmanager
def running_system(
    *, workers: int, gateway_port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[System]:
    """Starts everything in a temporary folder. In the end no process and no file is left."""
    catch_signals()
    with tempfile.TemporaryDirectory(prefix="streams-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # the servers may run as another user
        system = System(folder, workers=workers, gateway_port=gateway_port, settings=settings)
        try:
            system.start()
            yield system
        finally:
            system.stop()


def catch_signals() -> None:
    """Lets each signal end everything; SIGHUP stays ignored under nohup."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def interrupt(*_: object) -> None:
    """Ends everything. A second signal does not break that off."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def stop() -> None:
    """Stops the system that ``start`` runs in this directory, and waits until it is gone."""
    pid = read_running_note().pid
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise ConfigError(f"process {pid} belongs to another user; stop it as that user") from None
    deadline = time.monotonic() + STOP_TIMEOUT
    while (note := read_note()) is not None and note.pid == pid:
        if time.monotonic() > deadline:
            raise ConfigError(f"process {pid} does not end; kill it")
        time.sleep(0.1)


def run(service: str, command: Sequence[str]) -> int:
    """Runs a command with the settings of a service, such as ``holdfast list``. Returns its exit code."""
    environment = {**os.environ, **read_service_settings(service)}
    words = [sys.executable, "-m", *command] if command[0] == "holdfast" else command
    try:
        return subprocess.run(words, env=environment, check=False).returncode
    except OSError as error:
        raise ConfigError(f"{words[0]}: cannot be run ({error.strerror}); give a program on PATH") from None
