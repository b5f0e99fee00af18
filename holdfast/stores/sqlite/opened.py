"""An opened SQLite file: its writer, its readers, and the base of the verb families over them."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.core.errors import Busy, HoldfastError, TooBroad
from holdfast.core.models import JobFilter
from holdfast.core.portal import running_loop
from holdfast.stores.common.searches import is_unsuccessful
from holdfast.stores.sqlite.connection import connect, durability, translate_errors
from holdfast.stores.sqlite.identity import FileIdentity
from holdfast.stores.sqlite.notifications import SqliteNotifications
from holdfast.stores.sqlite.writer import Writer

T = TypeVar("T")

_SEARCH = 0.65  # of the deadline of a call: how long a search by a filter may take


class OpenedSqlite:
    """The parts of an open store, closed together."""

    def __init__(self, path: str, now: Callable[[], int], call_deadline: float | None) -> None:
        self.forked = False
        self._call_deadline = call_deadline
        self.migrated: list[str] = []  # migrations that opening applied
        first = connect(path)
        self.identity = identity = FileIdentity(path, first)
        self._before_closing = weakref.finalize(self, identity.keep_if_replaced)  # at the exit too, without a close()
        self.reader = Reader(path, first, identity)  # for whatever takes its time
        self.lookup = Reader(path, connect(path), identity)  # for quick looks before a claim or a wait
        self.readers = ThreadPoolExecutor(1, thread_name_prefix="holdfast-reader")
        self.search_pool = None if call_deadline is None else SearchPool(path, identity)
        self.notifications = SqliteNotifications(path, self._version)
        self.writer = Writer(path, now, self.notifications, identity, call_deadline)
        self.durability = durability(self.writer.connection)  # stays so; and later it may wait for a lock
        _mark_in_children(self)

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``query`` on the reader: in its own thread beside an event loop, right here otherwise."""
        loop = running_loop()
        if loop is None:
            return self.reader.run_query(query)
        return await loop.run_in_executor(self.readers, self.reader.run_query, query)

    async def search(
        self, search: Callable[[sqlite3.Connection], T], where: JobFilter, *, seconds: float | None = None
    ) -> T:
        """Run a ``search`` that may scan every job. With a call deadline it has its own connection and thread, so it
        delays no other read, and a time limit."""
        search_pool, call_deadline = self.search_pool, self._call_deadline
        if running_loop() is None or search_pool is None or call_deadline is None:
            return await self.read(search)
        usual = search_pool.unsuccessful if is_unsuccessful(where) else search_pool.others
        slot = usual if seconds is None else search_pool.bulk_searches
        return await slot.search(
            search, _SEARCH * call_deadline if seconds is None else seconds, (1 - _SEARCH) * call_deadline
        )

    def _version(self) -> int:
        return self.writer.data_version()

    def close(self) -> None:
        """Close every connection."""
        self._before_closing()
        self.writer.close()
        self.notifications.close()
        self.readers.shutdown()
        if not self.identity.is_replaced:
            self.reader.close()
        if self.search_pool is not None:
            self.search_pool.close()
        self.lookup.close()
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

    def mark_forked() -> None:
        inherited = reference()
        if inherited is not None and not inherited.forked:
            inherited.forked = True
            inherited.writer.drop_lock_files()

    os.register_at_fork(after_in_child=mark_forked)


_STEPS = 100_000  # of SQLite's machine, some milliseconds, between looks at the clock


class Reader:
    """A reading connection that the threads of a process share, one at a time."""

    def __init__(self, path: str, connection: sqlite3.Connection, identity: FileIdentity) -> None:
        self._path = path
        self._connection = connection
        self._identity = identity
        self._lock = threading.Lock()

    def run_query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Returns the result of ``query``."""
        with self._lock, translate_errors(self._path):
            self._identity.check_files()
            return query(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Searcher(Reader):
    """A search that gives up after too long."""

    def __init__(self, path: str, identity: FileIdentity) -> None:
        super().__init__(path, connect(path), identity)
        self._ends = 0.0
        self._leaving = False
        self._connection.set_progress_handler(self._is_over, _STEPS)

    def _is_over(self) -> bool:
        return self._leaving or time.monotonic() > self._ends

    def search(self, search: Callable[[sqlite3.Connection], T], seconds: float) -> T:
        """Returns the result of ``search``; raises TooBroad after so many seconds."""

        def run_in_time(connection: sqlite3.Connection) -> T:
            self._ends = time.monotonic() + seconds
            try:
                return search(connection)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                    raise
                if self._leaving:
                    raise HoldfastError("the store was closed while it was searched") from error
                raise TooBroad(seconds) from error

        return self.run_query(run_in_time)

    def abort_searches(self) -> None:
        """Give up running and pending searches: the store is being closed."""
        self._leaving = True


class SearchSlot:
    """A connection and a thread for one kind of search."""

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self._path = path
        self._searcher = Searcher(path, identity)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-searcher")

    async def search(self, search: Callable[[sqlite3.Connection], T], seconds: float, margin: float) -> T:
        """Returns the result of ``search``; raises Busy if the wait and the search take ``margin`` seconds longer."""
        try:
            async with asyncio.timeout(seconds + margin):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self._searcher.search, search, seconds)
        except TimeoutError:
            raise Busy(f"{self._path} is busy: others search for jobs by a filter; try again") from None

    def close(self) -> None:
        """Give up the running search."""
        self._searcher.abort_searches()
        self._thread.shutdown()
        self._searcher.close()


class SearchPool:
    """Three slots: for searches of bulk changes, which may take long, for mostly quick searches, and for the rest."""

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.bulk_searches, self.unsuccessful, self.others = (SearchSlot(path, identity) for _ in range(3))

    def close(self) -> None:
        """Close all three."""
        for slot in (self.bulk_searches, self.unsuccessful, self.others):
            slot.close()
