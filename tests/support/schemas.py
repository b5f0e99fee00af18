"""Schemas as ``holdfast migrate`` leaves them, for tests that do not care whose they were before.

Making one and dropping it takes a server longer than what most tests do with it. So one that a test gives back is
emptied and goes to the next, unless the test changed more than rows, or left so many that a new one is quicker made.
"""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import psycopg

from holdfast.stores.common.named_sql import load_migrations
from holdfast.stores.postgres.store import render_migrations
from tests.support.postgres import SUPERUSER, Postgres, shared

_MANY = 1_000
# Whatever is changed in a schema is a new row of a catalogue, by a later transaction; whatever is dropped is one less.
_MADE_OF = """
WITH place AS (SELECT oid, xmin FROM pg_namespace WHERE nspname = '{schema}'),
    class AS (SELECT oid, xmin, relkind FROM pg_class WHERE relnamespace = (SELECT oid FROM place)),
    part AS (
        SELECT xmin FROM place
        UNION ALL SELECT xmin FROM class
        UNION ALL SELECT xmin FROM pg_proc WHERE pronamespace = (SELECT oid FROM place)
        UNION ALL SELECT xmin FROM pg_constraint WHERE connamespace = (SELECT oid FROM place)
        UNION ALL SELECT xmin FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM class WHERE relkind = 'r')
        UNION ALL SELECT xmin FROM pg_index WHERE indexrelid IN (SELECT oid FROM class WHERE relkind = 'i')
        UNION ALL SELECT xmin FROM pg_attribute WHERE attrelid IN (SELECT oid FROM class)
        UNION ALL SELECT xmin FROM {schema}.migration
    )
SELECT count(*), max(xmin::text::bigint) FROM part"""
_TABLES = """SELECT relname::text FROM pg_class
    WHERE relnamespace = %s::regnamespace AND relkind = 'r' AND relname <> 'migration' ORDER BY 1"""


class _Schema(NamedTuple):
    name: str
    made_of: tuple[Any, ...]
    emptying: bytes
    """Statements that delete all rows, and number jobs from one again."""


@cache
def _spare(major: int) -> list[_Schema]:
    """The empty, unused ones."""
    return []


@contextmanager
def migrated_schema(major: int) -> Iterator[str]:
    """The name of a schema on the shared server that has every migration, and no job."""
    spare, connection = _spare(major), _connection(major)
    schema = spare.pop() if spare else _made(shared(major), connection)
    yield schema.name
    if _made_of(connection, schema.name) == schema.made_of and _emptied(connection, schema):
        spare.append(schema)
    else:
        connection.execute(f"DROP SCHEMA IF EXISTS {schema.name} CASCADE".encode())


@cache
def _connection(major: int) -> psycopg.Connection:
    server = shared(major)
    connection = psycopg.connect(server.url(user=SUPERUSER), autocommit=True, connect_timeout=10)
    atexit.register(connection.close)
    connection.execute("SET lock_timeout = '30s'; SET client_min_messages = error")
    return connection


def _made(server: Postgres, administrator: psycopg.Connection) -> _Schema:
    name = f"m{uuid.uuid4().hex[:12]}"
    migrations = load_migrations(files("holdfast.stores.postgres") / "migrations")
    with psycopg.connect(server.url(), autocommit=True, connect_timeout=10) as connection:
        connection.execute(render_migrations(migrations, name).encode())
    statements = [f"DELETE FROM {name}.{table}" for (table,) in administrator.execute(_TABLES, [name])]  # noqa: S608 - ours
    statements.append(f"SELECT setval(pg_get_serial_sequence('{name}.job', 'seq'), 1, false)")
    statements.append(f"INSERT INTO {name}.identity VALUES (gen_random_uuid())")  # noqa: S608 - ours
    return _Schema(name, _made_of(administrator, name), "; ".join(statements).encode())


def _made_of(connection: psycopg.Connection, schema: str) -> tuple[Any, ...]:
    """What of a schema is not rows; nothing, where it has gone."""
    try:
        return connection.execute(_MADE_OF.format(schema=schema).encode()).fetchone() or ()
    except psycopg.errors.UndefinedTable:
        return ()


def _emptied(connection: psycopg.Connection, schema: _Schema) -> bool:
    """Empty the schema; say whether it had few rows."""
    cursor = connection.execute(schema.emptying, prepare=False)
    deleted = cursor.rowcount
    while cursor.nextset():
        deleted += cursor.rowcount
    return deleted < _MANY
