"""Connections of an open SQLite store, closed together."""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.core.models import JobFilter
from holdfast.core.portal import running_loop
from holdfast.stores.common.requests import is_unsuccessful
from holdfast.stores.sqlite.connection import connect, durability
from holdfast.stores.sqlite.identity import FileIdentity
from holdfast.stores.sqlite.notifications import Wakes
from holdfast.stores.sqlite.readers import Reader, SearchPool
from holdfast.stores.sqlite.writer import Writer

T = TypeVar("T")

_SEARCH = 0.65  # of the patience of a call: how long a search by a filter may take


class OpenedSqlite:
    """The parts of an open store, closed together."""

    def __init__(self, path: str, now: Callable[[], int], patience: float | None) -> None:
        self.forked = False
        self._patience = patience
        self.migrated: list[str] = []  # what opening applied, for who asks
        first = connect(path)
        self.identity = identity = FileIdentity(path, first)
        self._before_closing = weakref.finalize(self, identity.keep_if_replaced)  # at the exit too, without a close()
        self.reader = Reader(path, first, identity)  # for whatever takes its time
        self.glance = Reader(path, connect(path), identity)  # for quick looks before a claim or a wait
        self.readers = ThreadPoolExecutor(1, thread_name_prefix="holdfast-reader")
        self.doors = None if patience is None else SearchPool(path, identity)
        self.wakes = Wakes(path, self._version)
        self.writer = Writer(path, now, self.wakes, identity, patience)
        self.durability = durability(self.writer.connection)  # stays so; and later it may wait for a lock
        _mark_in_children(self)

    async def read(self, look: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``look`` on the reader: in its own thread beside an event loop, right here otherwise."""
        loop = running_loop()
        if loop is None:
            return self.reader.run_search(look)
        return await loop.run_in_executor(self.readers, self.reader.run_search, look)

    async def search(
        self, look: Callable[[sqlite3.Connection], T], where: JobFilter, *, seconds: float | None = None
    ) -> T:
        """Run a ``look`` that may scan every job. With a bounded patience it has its own connection and thread, so it
        delays no other read, and a time limit."""
        doors, patience = self.doors, self._patience
        if running_loop() is None or doors is None or patience is None:
            return await self.read(look)
        usual = doors.unsuccessful if is_unsuccessful(where) else doors.others
        door = usual if seconds is None else doors.changes
        return await door.search(look, _SEARCH * patience if seconds is None else seconds, (1 - _SEARCH) * patience)

    def _version(self) -> int:
        return self.writer.version()

    def close(self) -> None:
        """Close every connection."""
        self._before_closing()
        self.writer.close()
        self.wakes.close()
        self.readers.shutdown()
        if not self.identity.is_replaced:
            self.reader.close()
        if self.doors is not None:
            self.doors.close()
        self.glance.close()
        self.identity.close()


class SqliteFamily:
    """Base of a store's families of verbs: its open file, its clock, its named statements, its path."""

    def __init__(
        self, opened: Callable[[], OpenedSqlite], now: Callable[[], int], statements: Mapping[str, str], path: str
    ) -> None:
        self._opened = opened
        self._now = now
        self._sql = statements
        self._path = path


def _mark_in_children(opened: OpenedSqlite) -> None:
    """A connection used across fork() commits the parent's open transaction: so children must not use it."""
    reference = weakref.ref(opened)

    def mark() -> None:
        inherited = reference()
        if inherited is not None and not inherited.forked:
            inherited.forked = True
            inherited.writer.drop_lock_files()

    os.register_at_fork(after_in_child=mark)
