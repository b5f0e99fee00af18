"""Identity of the database and its side files, so that no job is written where other programs do not read.

Processes share SQLite's log (``-wal``) through an index (``-shm``). If one of these files is removed or replaced, a
program that has it open and a program that opens it later overwrite each other's commits. An open store therefore
stops, and opening waits until the last program that has the old files has closed them.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress

from holdfast.core.errors import StoreMismatch, StoreReplaced, Unavailable
from holdfast.stores.sqlite.connection import BUSY_SECONDS, bare_connection

_PAUSE = 0.005  # seconds between attempts to have the file alone
_SIDE_FILES = ("-wal", "-shm")
_FRAMES = slice(16, 20)  # of the index: how many frames of the log are valid
_WAL_HEADER, _FRAME_HEADER = 32, 24  # bytes
_PAGE_SIZE, _WAL_SALT, _FRAME_SALT = slice(8, 12), slice(16, 24), slice(8, 16)


class FileIdentity:
    """Inodes of the three files when the store was opened, and whether the log still holds its content."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        """``connection`` stays open for the life of the process if a file is replaced."""
        self._connection = connection
        connection.execute("select count(*) from sqlite_master").fetchall()  # a new file has them from its first read
        self.inodes = read_inodes(path)
        paths = path, *(path + suffix for suffix in _SIDE_FILES)
        self._known = tuple(zip(paths, self.inodes, (False, True, False), strict=True))
        self._wal_path, self._index_path = (path + suffix for suffix in _SIDE_FILES)
        self._wal = os.open(self._wal_path, os.O_RDONLY | os.O_CLOEXEC)
        self._index: int | None = None
        self._wal_has_begun = False
        self.wal_header = b""
        """Header of the log at the last check: another one each time that SQLite begins the log anew."""
        self.is_replaced = False

    def check_files(self) -> None:
        """Raises ``StoreReplaced`` if a file was removed, replaced or cut to 0 bytes."""
        self._check(self._known)
        self._check_wal()

    def check_side_files(self) -> None:
        """The same for the index and the content of the log."""
        self._check(self._known[-1:])
        self._check_wal()

    def wal_has_frame(self, number: int) -> bool:
        """Returns True if the log has so many frames since SQLite began it anew. Older ones may lie behind them."""
        size = _FRAME_HEADER + int.from_bytes(self.wal_header[_PAGE_SIZE], "big")
        header = os.pread(self._wal, _FRAME_HEADER, _WAL_HEADER + (number - 1) * size)
        return bool(header) and header[_FRAME_SALT] == self.wal_header[_WAL_SALT]

    def keep_if_replaced(self) -> None:
        """Keeps the connection open if a file was replaced since the last call. Called before connections close."""
        with suppress(StoreReplaced, OSError):
            self.check_files()

    def close(self) -> None:
        """Closes the log. The index stays open: to close it would end the locks that SQLite has on it."""
        os.close(self._wal)

    def _check_wal(self) -> None:
        self.wal_header = header = os.pread(self._wal, _WAL_HEADER, 0)
        if any(header[:4]):
            self._wal_has_begun = True
        elif header or (self._wal_has_begun and self._has_lost_frames()):
            raise self._replaced(self._wal_path, "was cut to 0 bytes")

    def _has_lost_frames(self) -> bool:
        """Compares the empty log with its index, since a truncating checkpoint of another program empties both."""
        if self._index is None:
            self._index = os.open(self._index_path, os.O_RDONLY | os.O_CLOEXEC)
        # Twice: the other program may have written the next frames between the two looks.
        return all(any(os.pread(self._index, 48, 0)[_FRAMES]) and not os.pread(self._wal, 4, 0) for _ in range(2))

    def _check(self, files: Iterable[tuple[str, int | None, bool]]) -> None:
        for path, inode, may_be_empty in files:
            try:
                status = os.stat(path)  # noqa: PTH116 - four times a transaction, and a Path costs more than the call
            except FileNotFoundError:
                raise self._replaced(path, "was removed") from None
            if status.st_ino != inode:
                raise self._replaced(path, "was replaced")
            if not may_be_empty and not status.st_size:
                raise self._replaced(path, "was cut to 0 bytes")

    def _replaced(self, path: str, what: str) -> StoreReplaced:
        if not self.is_replaced:
            self.is_replaced = True
            # Closing the last connection would copy an outdated log into the file and delete the log of others.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        return StoreReplaced(f"{path} {what} while this program had it open; restart this program")


def read_inodes(path: str) -> tuple[int | None, ...]:
    """Inodes of the database, its log and the log's index; None for a missing file."""
    return tuple(_inode(each) for each in (path, *(path + suffix for suffix in _SIDE_FILES)))


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - as above
    except FileNotFoundError:
        return None


def check_side_files(path: str, seconds: float | None = None) -> tuple[int | None, ...] | None:
    """Refuses a database whose log or index was removed while a program has it open. Waits ``seconds`` for that program
    to end, at most ``BUSY_SECONDS``.

    Returns the inodes of complete files. Returns None after it had the file for itself: the log, if there was one, is
    copied into the database.
    """
    _check_not_cut(path)
    deadline = time.monotonic() + (BUSY_SECONDS if seconds is None else min(seconds, BUSY_SECONDS))
    while None in (seen := read_inodes(path)):
        if _settled_alone(path):
            return None
        if time.monotonic() > deadline:
            missing = path + next(suffix for suffix, inode in zip(_SIDE_FILES, seen[1:], strict=True) if inode is None)
            raise Unavailable(f"{missing} was removed while another program has {path} open; stop that program first")
        time.sleep(_PAUSE)
    return seen


def _check_not_cut(path: str) -> None:
    """SQLite would delete the log of an empty database."""
    log = path + "-wal"
    try:
        is_cut = not os.stat(path).st_size and bool(os.stat(log).st_size)  # noqa: PTH116 - as above
    except FileNotFoundError:
        return
    if is_cut:
        raise StoreMismatch(
            f"{path} was cut to 0 bytes, though its log {log} holds data; restore a backup, or remove both"
        )


def _settled_alone(path: str) -> bool:
    """Opens the file without an index, which SQLite allows only to its single user; False if there is another one."""
    try:
        with closing(bare_connection(path, timeout=0.0)) as connection:
            connection.execute("pragma locking_mode=exclusive").fetchall()
            connection.execute("select count(*) from sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True
