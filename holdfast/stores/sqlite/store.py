"""The SQLite store: one file, any number of processes on one host. Composes its verb families; see ``writer.py``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any, TypeVar

from holdfast.core.errors import ForkedConnection, HoldfastError
from holdfast.core.portal import drive_coroutine
from holdfast.stores.base import Admin, External, Health, Maintenance, Query, Queueing
from holdfast.stores.common.named_sql import chosen_migrations, load_migrations, load_statements
from holdfast.stores.sqlite import schema
from holdfast.stores.sqlite.admin import SqliteAdmin
from holdfast.stores.sqlite.connection import check_owner, check_place, create_private, translate_errors
from holdfast.stores.sqlite.external_tx import SqliteExternal
from holdfast.stores.sqlite.health import SqliteHealth
from holdfast.stores.sqlite.identity import check_side_files
from holdfast.stores.sqlite.maintenance import SqliteMaintenance
from holdfast.stores.sqlite.opened import OpenedSqlite
from holdfast.stores.sqlite.query import SqliteQuery
from holdfast.stores.sqlite.queueing import SqliteQueueing
from holdfast.stores.sqlite.writer import Transaction

T = TypeVar("T")

_FORKED = "this store was opened before fork(); make another one in the child process"


class SQLiteStore:
    """A store in one file. ``now`` (microseconds since 1970) replaces the host's clock; only tests give one.
    ``patience``: seconds a call from an event loop waits for a file that another program has locked, if fewer than
    usual."""

    def __init__(self, path: str, *, now: Callable[[], int] | None = None, patience: float | None = None) -> None:
        self.path = os.path.realpath(path)  # links resolved: all of us lock the same files
        self.url = f"sqlite:///{self.path}"
        self._now = now or _host_clock
        here = files("holdfast.stores.sqlite")
        self._sql = load_statements(here / "queries.sql")
        self._patience = patience
        self._migrations = load_migrations(here / "migrations")
        parts = (self._current, self._now, self._sql, self.path)
        self.queueing: Queueing = SqliteQueueing(*parts)
        self.maintenance: Maintenance = SqliteMaintenance(*parts)
        self.admin: Admin = SqliteAdmin(*parts)
        self.query: Query = SqliteQuery(*parts)
        self.health: Health = SqliteHealth(*parts)
        self.external: External = SqliteExternal(*parts)
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
                if not opened.reader.run_search(lambda reader: schema.is_current(reader, self._migrations)):
                    opened.migrated = opened.writer.write(self._migrating)
            except BaseException:
                opened.close()
                raise
        return opened

    def _opened_together(self) -> OpenedSqlite:
        """Opens the files that every other open store uses: once more if their last user removes them meanwhile."""
        while True:
            seen = check_side_files(self.path, self._patience)
            check_owner(self.path)
            opened = OpenedSqlite(self.path, self._now, self._patience)
            if seen is None or seen == opened.identity.inodes:
                return opened
            opened.close()

    async def missing(self) -> str | None:
        return schema.missing(self.path)

    def _migrating(self, transaction: Transaction) -> list[str]:
        return schema.migrate(transaction.connection, self._migrations, self.path)

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
        return schema.render_migrations(chosen_migrations(self._migrations, span))

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
