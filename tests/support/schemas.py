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
from typing import NamedTuple

import psycopg

from holdfast.stores.common.named_sql import load_migrations
from holdfast.stores.postgres.store import render_migrations
from tests.support.postgres import SUPERUSER, Postgres, shared

_MANY = 1_000
_TABLES = "SELECT relname::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r' ORDER BY 1"
# Of everything that makes up a schema, which it is and the transaction that wrote it; and which migrations it has had.
_MADE_OF = """
WITH place AS (SELECT oid FROM pg_namespace WHERE nspname = '{schema}'),
    class AS (SELECT oid FROM pg_class WHERE relnamespace = (SELECT oid FROM place)),
    part AS (
        SELECT oid, xmin, 0 AS number FROM pg_namespace WHERE oid = (SELECT oid FROM place)
        UNION ALL SELECT oid, xmin, 1 FROM pg_class WHERE relnamespace = (SELECT oid FROM place)
        UNION ALL SELECT oid, xmin, 2 FROM pg_proc WHERE pronamespace = (SELECT oid FROM place)
        UNION ALL SELECT oid, xmin, 3 FROM pg_constraint WHERE connamespace = (SELECT oid FROM place)
        UNION ALL SELECT oid, xmin, 4 FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM class)
        UNION ALL SELECT indexrelid, xmin, 5 FROM pg_index WHERE indexrelid IN (SELECT oid FROM class)
        UNION ALL SELECT attrelid, xmin, 6 + attnum FROM pg_attribute WHERE attrelid IN (SELECT oid FROM class)
    )
SELECT (SELECT string_agg(part::text, ' ' ORDER BY oid, number) FROM part),
    (SELECT string_agg(each::text, ' ' ORDER BY number) FROM {schema}.migration each)"""


class _Schema(NamedTuple):
    name: str
    made_of: str


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
    if _made_of(connection, schema.name) == schema.made_of and _emptied(connection, schema.name):
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
    return _Schema(name, _made_of(administrator, name))


def _made_of(connection: psycopg.Connection, schema: str) -> str:
    """What of a schema is not rows; nothing, where it has gone."""
    try:
        return str(connection.execute(_MADE_OF.format(schema=schema).encode()).fetchone())
    except psycopg.errors.UndefinedTable:
        return ""


def _emptied(connection: psycopg.Connection, schema: str) -> bool:
    """Delete all rows, and number jobs from one again; say whether they were few."""
    tables = [f"{schema}.{name}" for (name,) in connection.execute(_TABLES, [schema]) if name != "migration"]
    deleted = [connection.execute(f"DELETE FROM {table}".encode()).rowcount for table in tables]  # noqa: S608 - ours
    connection.execute(f"SELECT setval(pg_get_serial_sequence('{schema}.job', 'seq'), 1, false)".encode())
    connection.execute(f"INSERT INTO {schema}.identity VALUES (gen_random_uuid())".encode())  # noqa: S608 - ours
    return sum(deleted) < _MANY
