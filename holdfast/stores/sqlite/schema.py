"""The schema of a store's file: migrations, and whether there is one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from holdfast.core.errors import StoreMismatch
from holdfast.stores.common.named_sql import Migration, noted_script, split_script
from holdfast.stores.sqlite.connection import (
    APPLICATION_ID,
    bare_connection,
    check_place,
    translate_errors,
)
from holdfast.stores.sqlite.identity import check_side_files

_TABLE = "create table if not exists holdfast_migration (number integer primary key, name text not null) strict"


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration], path: str) -> list[str]:
    """Apply missing migrations, inside the caller's write transaction; returns their names."""
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
    """Words for a missing store, which opening ``path`` would make; None for a store, or a foreign file."""
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
