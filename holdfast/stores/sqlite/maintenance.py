"""Migrating, checking and copying a store's file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from holdfast.core.errors import ConfigError, Invalid, StoreMismatch
from holdfast.core.models import Finding
from holdfast.stores.common.named_sql import Migration, noted_script, split_script, unnamed_queue
from holdfast.stores.sqlite.connection import (
    APPLICATION_ID,
    SOUND_CHECKPOINT,
    bare_connection,
    check_place,
    connect,
    create_private,
    file_system,
    translate_errors,
)
from holdfast.stores.sqlite.identity import check_side_files

_WAL_WARNING = 256 << 20  # bytes
_STUCK_AFTER_US = 60_000_000
_TABLE = "create table if not exists holdfast_migration (number integer primary key, name text not null) strict"


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration], path: str) -> list[str]:
    """Apply what is missing, inside the caller's write transaction; the names of what was applied."""
    (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
    if tables == 0:
        connection.execute(f"pragma application_id={APPLICATION_ID}")
    connection.execute(_TABLE)
    (applied,) = connection.execute("select coalesce(max(number), 0) from holdfast_migration").fetchone()
    newest = migrations[-1].number
    if applied and not _has_tiers(connection):
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


def render_migrations(migrations: Sequence[Migration]) -> str:
    """Renders migrations as SQL for other migration tools; from the first one on with the table they are noted in."""
    scripts = []
    for each in migrations:
        note = f"insert into holdfast_migration (number, name) values ({each.number}, '{each.name}');"  # noqa: S608 - ours
        scripts.append(noted_script(each, note))
    if migrations[0].number == 1:
        scripts.insert(0, f"{_TABLE};\n")
    return "\n".join(["-- For one transaction.\n", *scripts])


def _has_tiers(connection: sqlite3.Connection) -> bool:
    """Returns True if the table of jobs is of the first schema that can be migrated."""
    query = "select count(*) from pragma_table_xinfo('holdfast_job') where name = 'tier'"
    return bool(connection.execute(query).fetchone()[0])


def is_current(reader: sqlite3.Connection, migrations: Sequence[Migration]) -> bool:
    """Returns True if the file already has this very schema, seen without a write."""
    try:
        (applied,) = reader.execute("select max(number) from holdfast_migration").fetchone()
    except sqlite3.OperationalError:  # no such table: a file without our schema
        return False
    return bool(applied == migrations[-1].number) and _has_tiers(reader)


def missing(path: str) -> str | None:
    """What is not there, where opening ``path`` would make a store; None where there is one, or a foreign file."""
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
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)
    create_private(str(partial))
    try:
        with closing(connect(path)) as reader:
            reader.execute("vacuum into ?", (str(partial),))
        with partial.open("rb") as written:
            os.fsync(written.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.rename(file)


def run_checks(statements: Mapping[str, str], path: str, now_us: int) -> list[Finding]:
    """Returns the checks of a store file except for its durability. It reads the whole file, so on a connection of its
    own.
    """
    with translate_errors(path), closing(connect(path)) as reader:
        return [
            _version(),
            _place(path),
            _integrity(reader),
            _log(path),
            _stuck(reader, statements, now_us),
            unnamed_queue(reader.execute(statements["unnamed_queue_jobs"]).fetchone()[0], "holdfast_job"),
            _mode(path),
        ]


def durability(writer: sqlite3.Connection) -> Finding:
    """Returns the durability in effect on the writer's connection."""
    (journal,) = writer.execute("pragma journal_mode").fetchone()
    (level,) = writer.execute("pragma synchronous").fetchone()
    name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(level, str(level))
    text = f"journal_mode={journal}, synchronous={name}"
    if journal == "wal" and level >= 2:
        return Finding("durability", "ok", f"{text}: an acknowledged job survives a power cut")
    return Finding("durability", "error", f"{text}: acknowledged jobs can be lost", "open the file through Holdfast")


def _version() -> Finding:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info >= SOUND_CHECKPOINT:
        return Finding("sqlite", "ok", f"SQLite {version}")
    return Finding(
        "sqlite",
        "ok",
        f"SQLite {version} has the WAL-reset fault (mended in 3.51.3); Holdfast checkpoints alone, under a lock",
        "programs of yours that write this file should set wal_autocheckpoint=0",
    )


def _place(path: str) -> Finding:
    kind = file_system(Path(path).parent) or "unknown"
    return Finding("file system", "ok", f"{path} on {kind}")


def _integrity(reader: sqlite3.Connection) -> Finding:
    (verdict,) = reader.execute("pragma quick_check(1)").fetchone()
    if verdict == "ok":
        return Finding("integrity", "ok", "quick_check found nothing")
    return Finding("integrity", "error", str(verdict), "stop every worker and restore a backup")


def _log(path: str) -> Finding:
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
