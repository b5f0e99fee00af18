"""Connections that read: one that threads take turns on, and the connections of searches, which may take long."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.core.errors import Busy, HoldfastError, TooBroad
from holdfast.stores.sqlite.connection import connect, translate_errors
from holdfast.stores.sqlite.identity import FileIdentity

T = TypeVar("T")

_STEPS = 100_000  # of SQLite's machine, some milliseconds, between looks at the clock


class Reader:
    """A reading connection that threads take turns on."""

    def __init__(self, path: str, connection: sqlite3.Connection, identity: FileIdentity) -> None:
        self._path = path
        self._connection = connection
        self._identity = identity
        self._turn = threading.Lock()

    def run_search(self, look: Callable[[sqlite3.Connection], T]) -> T:
        """Returns the result of ``look``."""
        with self._turn, translate_errors(self._path):
            self._identity.check_files()
            return look(self._connection)

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

    def search(self, look: Callable[[sqlite3.Connection], T], seconds: float) -> T:
        """Returns the result of ``look``; raises TooBroad after so many seconds."""

        def run_looking(connection: sqlite3.Connection) -> T:
            self._ends = time.monotonic() + seconds
            try:
                return look(connection)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                    raise
                if self._leaving:
                    raise HoldfastError("the store was closed while it was searched") from error
                raise TooBroad(seconds) from error

        return self.run_search(run_looking)

    def deregister(self) -> None:
        """Give up running and pending searches: the store is being closed."""
        self._leaving = True


class SearchSlot:
    """A connection and a thread for one kind of search."""

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self._path = path
        self._searcher = Searcher(path, identity)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-searcher")

    async def search(self, look: Callable[[sqlite3.Connection], T], seconds: float, room: float) -> T:
        """Returns the result of ``look``; raises Busy if the wait and the search take ``room`` seconds longer."""
        try:
            async with asyncio.timeout(seconds + room):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self._searcher.search, look, seconds)
        except TimeoutError:
            raise Busy(f"{self._path} is busy: others look for jobs by a filter; try again") from None

    def close(self) -> None:
        """Give up the running search."""
        self._searcher.deregister()
        self._thread.shutdown()
        self._searcher.close()


class SearchPool:
    """Three slots: for changes, which may take long, for mostly quick searches, and for the rest."""

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.changes, self.unsuccessful, self.others = (SearchSlot(path, identity) for _ in range(3))

    def close(self) -> None:
        """Close all three."""
        for door in (self.changes, self.unsuccessful, self.others):
            door.close()
