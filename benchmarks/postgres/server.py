"""The server all rows share, with PostgreSQL's own settings, and new databases on it."""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import psutil
import psycopg

from tests.support.postgres import MAIN, Postgres, installed

_DEFAULTS = {"shared_buffers": "128MB", "autovacuum_naptime": "1min"}
"""Those of PostgreSQL itself, which the servers of tests do not have."""


@cache
def _server() -> Postgres:
    """Durable: fsync and synchronous_commit are on. It ends with this process."""
    server = Postgres(settings=_DEFAULTS)
    server.start()
    atexit.register(server.close)
    return server


class Database:
    """One database of the server; ``url`` is what clients connect to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = _server().url(name)

    def execute(self, sql: str, *values: object) -> list[Any]:
        """Run one statement here; the rows, if it has any."""
        return _server().execute(sql, *values, database=self.name)

    def transactions(self) -> int:
        """How many there have been here. Asking adds none; each shows up to a second after its end."""
        rows = _server().execute(
            "select xact_commit + xact_rollback from pg_stat_database where datname = %s", self.name
        )
        return int(rows[0][0])


@cache
def _postmaster() -> psutil.Process:
    with psycopg.connect(_server().url()) as connection:
        parent = psutil.Process(connection.info.backend_pid).parent()
    assert parent is not None
    return parent


@contextmanager
def database() -> Iterator[Database]:
    """A new one, dropped in the end."""
    server = _server()
    made = Database(server.create_database())
    try:
        yield made
    finally:
        server.execute(f"drop database {made.name} with (force)")


def checkpoint() -> None:
    """Begin every measurement with the same: nothing left to write, and each page to be logged whole at first."""
    _server().execute("checkpoint")


def cpu_seconds() -> float:
    """CPU time of all the server's processes so far, those that have ended included."""
    postmaster = _postmaster()
    times = postmaster.cpu_times()
    spent = times.user + times.system + times.children_user + times.children_system
    for process in postmaster.children():
        try:
            each = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent += each.user + each.system
    return float(spent)


def version() -> str:
    """That of the server, started or not."""
    given = subprocess.check_output([installed(MAIN) / "bin" / "postgres", "--version"], text=True)
    return given.split()[-1]
