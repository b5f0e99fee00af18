"""The SQLite store: one file, any number of processes on one host. Composes its verb families; see ``writer.py``."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import ForkedConnection, HoldfastError, StoreMismatch
from holdfast.core.portal import drive_coroutine
from holdfast.stores.base import Admin, External, Health, Limits, Maintenance, Query, Queueing, Schedules, Workflow
from holdfast.stores.common.named_sql import (
    Migration,
    chosen_migrations,
    load_migrations,
    load_statements,
    noted_script,
)
from holdfast.stores.sqlite.admin import SqliteAdmin
from holdfast.stores.sqlite.connection import (
    APPLICATION_ID,
    bare_connection,
    check_owner,
    check_place,
    create_private,
    translate_errors,
)
from holdfast.stores.sqlite.external_tx import SqliteExternal
from holdfast.stores.sqlite.health import SqliteHealth
from holdfast.stores.sqlite.identity import check_side_files
from holdfast.stores.sqlite.limits import SqliteLimits
from holdfast.stores.sqlite.maintenance import SqliteMaintenance
from holdfast.stores.sqlite.opened import OpenedSqlite
from holdfast.stores.sqlite.query import SqliteQuery
from holdfast.stores.sqlite.queueing import SqliteQueueing
from holdfast.stores.sqlite.schedules import SqliteSchedules
from holdfast.stores.sqlite.workflow import SqliteWorkflow
from holdfast.stores.sqlite.writer import Transaction

T = TypeVar("T")

_FORKED = "this store was opened before fork(); make another one in the child process"


class SQLiteStore:
    """A store in one file. ``now`` (microseconds since 1970) replaces the host's clock; only tests give one.
    ``call_deadline``: seconds a call from an event loop waits for a file that another program has locked, if fewer than
    usual."""

    def __init__(self, path: str, *, now: Callable[[], int] | None = None, call_deadline: float | None = None) -> None:
        self.path = os.path.realpath(path)  # links resolved: all of us lock the same files
        self.url = f"sqlite:///{self.path}"
        self._now = now or _host_clock
        here = files("holdfast.stores.sqlite")
        self._sql = load_statements(here / "queries.sql")
        self._call_deadline = call_deadline
        self._migrations = load_migrations(here / "migrations")
        parts = (self._current, self._now, self._sql, self.path)
        limits = SqliteLimits(*parts)
        self.limits: Limits = limits
        self.queueing: Queueing = SqliteQueueing(*parts, limits)
        self.maintenance: Maintenance = SqliteMaintenance(*parts)
        self.admin: Admin = SqliteAdmin(*parts, limits)
        self.query: Query = SqliteQuery(*parts)
        self.schedules: Schedules = SqliteSchedules(*parts, limits)
        self.workflow: Workflow = SqliteWorkflow(*parts, limits)
        self.health: Health = SqliteHealth(*parts)
        self.external: External = SqliteExternal(*parts, limits)
        self._opened: OpenedSqlite | None = None
        self._lock = threading.Lock()

    async def open(self) -> None:
        with self._lock:
            if self._opened is None:
                self._opened = self._opening()
            elif self._opened.forked:
                raise ForkedConnection(_FORKED)

    def _opening(self) -> OpenedSqlite:
        check_place(self.path)
        with translate_errors(self.path):
            create_private(self.path)
            opened = self._opened_together()
            try:
                if not opened.reader.run_query(lambda reader: is_current(reader, self._migrations)):
                    opened.migrated = opened.writer.write(self._migrating)
            except BaseException:
                opened.close()
                raise
        return opened

    def _opened_together(self) -> OpenedSqlite:
        """Opens the files that every other open store uses: once more if their last user removes them meanwhile."""
        while True:
            seen = check_side_files(self.path, self._call_deadline)
            check_owner(self.path)
            opened = OpenedSqlite(self.path, self._now, self._call_deadline)
            if seen is None or seen == opened.identity.inodes:
                return opened
            opened.close()

    async def missing(self) -> str | None:
        return describe_missing(self.path)

    def _migrating(self, transaction: Transaction) -> list[str]:
        return apply_migrations(transaction.connection, self._migrations, self.path)

    async def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and not opened.forked:
            opened.close()

    async def migrate(self) -> list[str]:
        opened = self._current()
        applied, opened.migrated = opened.migrated, []
        return applied + await opened.writer.call(self._migrating)

    def migration_sql(self, span: str) -> str:
        return render_migrations(chosen_migrations(self._migrations, span))

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        return drive_coroutine(call)

    def _current(self) -> OpenedSqlite:
        opened = self._opened
        if opened is None:
            raise HoldfastError("this store is not open; await open() first, or use the application as a context")
        if opened.forked:
            raise ForkedConnection(_FORKED)
        return opened


def _host_clock() -> int:
    return time.time_ns() // 1000


# ── migrations ────────────────────────────────────────────────────────────────────────────────────────────────────────
_TABLE = "create table if not exists holdfast_migration (number integer primary key, name text not null) strict"


def apply_migrations(connection: sqlite3.Connection, migrations: Sequence[Migration], path: str) -> list[str]:
    """Apply missing migrations, inside the caller's write transaction; returns their names."""
    (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
    if tables == 0:
        connection.execute(f"pragma application_id={APPLICATION_ID}")
    connection.execute(_TABLE)
    (applied,) = connection.execute("select coalesce(max(number), 0) from holdfast_migration").fetchone()
    newest = migrations[-1].number
    if applied and not _has_limits(connection):
        raise StoreMismatch(
            f"{path} was made by an earlier Holdfast (schema {applied}), and cannot be brought up to date; "
            "let the version that made it finish its jobs, then give another file"
        )
    if applied > newest:
        raise StoreMismatch(
            f"{path} has schema {applied}, this Holdfast knows {newest}; upgrade Holdfast to at least what wrote it"
        )
    missing = [each for each in migrations if each.number > applied]
    for migration in missing:
        connection.execute(
            "insert into holdfast_migration (number, name) values (?, ?)", (migration.number, migration.name)
        )
        for statement in split_script(migration.script):
            connection.execute(statement)
    return [migration.name for migration in missing]


def split_script(script: str) -> list[str]:
    """A migration's statements one by one, to run inside the caller's transaction. No ``;`` inside literals."""
    bare = re.sub(r"--[^\n]*", "", script)
    statements: list[str] = []
    begun = ""
    for part in bare.split(";"):
        begun += part
        if not begun.strip():
            begun = ""
        elif sqlite3.complete_statement(f"{begun};"):  # not so inside a trigger
            statements.append(begun.strip())
            begun = ""
        else:
            begun += ";"
    return statements


def render_migrations(migrations: Sequence[Migration]) -> str:
    """Renders migrations as SQL for other migration tools; from the first one on with the table they are noted in."""
    scripts = []
    for each in migrations:
        note = f"insert into holdfast_migration (number, name) values ({each.number}, '{each.name}');"  # noqa: S608 - ours
        scripts.append(noted_script(each, note))
    if migrations[0].number == 1:
        scripts.insert(0, f"{_TABLE};\n")
    return "\n".join(["-- For one transaction.\n", *scripts])


def _has_limits(connection: sqlite3.Connection) -> bool:
    """Returns True if the table of jobs is of the first schema that can be migrated."""
    query = "select count(*) from pragma_table_info('holdfast_job') where name = 'partition'"
    return bool(connection.execute(query).fetchone()[0])


def is_current(reader: sqlite3.Connection, migrations: Sequence[Migration]) -> bool:
    """Returns True if the file already has this very schema, seen without a write."""
    try:
        (applied,) = reader.execute("select max(number) from holdfast_migration").fetchone()
    except sqlite3.OperationalError:  # no such table: a file without our schema
        return False
    return bool(applied == migrations[-1].number) and _has_limits(reader)


def describe_missing(path: str) -> str | None:
    """Text for a missing store, which opening ``path`` would make; None for a store, or a foreign file."""
    # Not the methods of Path: they raise where this user may not look. What hinders opening is for opening to say.
    if os.path.isdir(os.path.dirname(path)) and not os.path.lexists(path):  # noqa: PTH112, PTH120
        return f"there is no database at {path} yet"
    check_place(path)
    with translate_errors(path):
        check_side_files(path)
    with translate_errors(path), closing(bare_connection(f"{Path(path).as_uri()}?mode=ro", uri=True)) as reader:
        (application,) = reader.execute("pragma application_id").fetchone()
        tables = reader.execute("select count(*) from sqlite_master where name = 'holdfast_migration'").fetchone()[0]
    if tables or application not in (0, APPLICATION_ID):
        return None
    return f"the database at {path} has no tables of Holdfast yet"
