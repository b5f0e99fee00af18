"""Family ``health`` of SQLite: checks of the file, and copies of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.models import Finding
from holdfast.core.portal import running_loop
from holdfast.stores.common.named_sql import nameless_queue
from holdfast.stores.sqlite.connection import WAL_RESET_FIXED_VERSION, connect, file_system, translate_errors
from holdfast.stores.sqlite.opened import SqliteFamily

T = TypeVar("T")

_WAL_WARNING = 256 << 20  # bytes
_LEAST_ROOM = 8 << 20  # bytes
_STUCK_AFTER_US = 60_000_000


class SqliteHealth(SqliteFamily):
    """Family ``health`` of SQLite."""

    async def doctor(self) -> list[Finding]:
        durability, now_us = await self.durability(), self._now()
        return [durability, *await _in_thread(lambda: run_checks(self._sql, self._path, now_us))]

    async def durability(self) -> Finding:
        opened = self._opened()
        opened.identity.check_files()
        return opened.durability

    async def repair(self) -> list[Finding]:
        return []  # a file holds together or is restored from a backup

    async def backup(self, path: str) -> None:
        self._opened().identity.check_files()
        await _in_thread(lambda: copy_file(self._path, path))

    async def server_time_us(self) -> int:
        return self._now()


async def _in_thread(work: Callable[[], T]) -> T:
    """Run work that reads a whole file: on a thread of its own beside an event loop, right here otherwise."""
    if running_loop() is None:
        return work()
    return await asyncio.to_thread(work)


def copy_file(path: str, target: str) -> None:
    """A consistent copy of a live file under a name that must be free. On its own connection: it may take long."""
    file = Path(target)
    if "\0" in target or not file.name:
        raise Invalid("path", target, "name the file to be made")
    with translate_errors(target):
        if file.exists():
            raise ConfigError(f"{target} exists already; name a file that does not")
        if not file.parent.is_dir():
            raise ConfigError(f"the folder {file.parent} does not exist; create it or name another file")
        _copy(path, file)


def _copy(path: str, file: Path) -> None:
    # Under its own name only once it is whole: a copy that was killed must not pass for a backup.
    # Another one may be made under that name meanwhile.
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{file.name}.partial-", delete=False) as partial:
        try:
            with closing(connect(path)) as reader:
                reader.execute("vacuum into ?", (partial.name,))
            os.fsync(partial.fileno())
            Path(partial.name).rename(file)
        except BaseException:
            Path(partial.name).unlink(missing_ok=True)
            raise


def run_checks(statements: Mapping[str, str], path: str, now_us: int) -> list[Finding]:
    """Returns the checks of a store file but for durability. It reads the whole file, so on its own connection."""
    with translate_errors(path), closing(connect(path)) as reader:
        return [
            _version(),
            _place(path),
            _integrity(reader),
            _wal(path),
            _stuck(reader, statements, now_us),
            nameless_queue(reader.execute(statements["nameless_queue_jobs"]).fetchone()[0], "holdfast_job"),
            _mode(path),
        ]


def _version() -> Finding:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info >= WAL_RESET_FIXED_VERSION:
        return Finding("sqlite", "ok", f"SQLite {version}")
    return Finding(
        "sqlite",
        "ok",
        f"SQLite {version} has the WAL-reset fault (mended in 3.51.3); Holdfast checkpoints alone, under a lock",
        "programs of yours that write this file should set wal_autocheckpoint=0 (the Django integration does)",
    )


def _place(path: str) -> Finding:
    folder = Path(path).parent
    free = shutil.disk_usage(folder).free
    text = f"{path} on {file_system(folder) or 'unknown'}, {free / (1 << 20):,.0f} MiB free"
    if free < _LEAST_ROOM:
        return Finding("file system", "error", text, "free space: without it nothing can be submitted or settled")
    return Finding("file system", "ok", text)


def _integrity(reader: sqlite3.Connection) -> Finding:
    (verdict,) = reader.execute("pragma quick_check(1)").fetchone()
    if verdict == "ok":
        return Finding("integrity", "ok", "quick_check found nothing")
    return Finding("integrity", "error", str(verdict), "stop every worker and restore a backup")


def _wal(path: str) -> Finding:
    wal = Path(path + "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    text = f"write-ahead log {size / (1 << 20):.1f} MiB"
    if size < _WAL_WARNING:
        return Finding("log", "ok", text)
    return Finding("log", "warning", text, "a reader keeps an old snapshot open: find and end it")


def _stuck(reader: sqlite3.Connection, statements: Mapping[str, str], now_us: int) -> Finding:
    (stuck,) = reader.execute(statements["stuck"], {"before": now_us - _STUCK_AFTER_US}).fetchone()
    if not stuck:
        return Finding("leases", "ok", "no job runs under a lease that expired over a minute ago")
    return Finding("leases", "warning", f"{stuck} jobs run under expired leases", "start a worker: it recovers them")


def _mode(path: str) -> Finding:
    mode = Path(path).stat().st_mode & 0o777
    if mode & 0o002:
        return Finding("permissions", "error", f"anybody may write {path} (mode {mode:o})", f"chmod 600 {path}")
    return Finding("permissions", "ok", f"mode {mode:o}")
