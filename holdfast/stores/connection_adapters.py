"""Adapters of the connections that callers hold, one for each database library.

A library is imported only once one of its connections is given.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.errors import Conflict, Invalid
from holdfast.core.portal import running_loop
from holdfast.stores.base import Rows, Statement

if TYPE_CHECKING:
    import aiosqlite
    import asyncpg
    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper
    from sqlalchemy import Connection, TextClause
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

_FAILED = "25P02"  # in_failed_sql_transaction
_WANTED = (
    "give a connection of sqlite3, aiosqlite, asyncpg, psycopg or Django, or a session or connection of SQLAlchemy "
    "(one connection, not the pool or the engine), to the database of this application; or leave it out"
)


class ConnectionAdapter(NamedTuple):
    """A connection that is open, in a transaction or about to begin one, and fit for statements."""

    dialect: str
    fetch: Callable[[Statement], Awaitable[Rows]]
    physical: object | None
    """The object that lives as long as the connection to the server; None: nothing can be remembered of it."""


def with_placeholders(sql: str, place: str) -> str:
    """``sql`` with ``place`` for each ``?``, where ``{}`` in it is the number of the parameter, from 1."""
    numbers = iter(range(1, 1 + sql.count("?")))
    return re.sub(r"\?", lambda _: place.format(next(numbers)), sql)


def closed_error() -> Conflict:
    """Returns the error for a connection that is closed."""
    return Conflict("connection: it is closed, or was given back to its pool; use it while you hold it")


def no_transaction_error(how: str) -> Conflict:
    """Returns the error for a connection on which no transaction is open; ``how`` says how to begin one."""
    return Conflict(f"connection: no transaction is open on it, so the job would commit by itself; {how}")


def failed_transaction_error() -> Conflict:
    """Returns the error for a transaction that can only be rolled back."""
    return Conflict(
        "connection: its transaction has failed before and can only be rolled back; roll back, then begin again"
    )


def is_failed(error: BaseException) -> bool:
    """Returns True if a driver (or its wrapper) says that the transaction had failed before."""
    seen: BaseException | None = error
    while seen is not None:
        if _FAILED in (getattr(seen, "sqlstate", None), getattr(getattr(seen, "orig", None), "sqlstate", None)):
            return True
        seen = seen.__cause__
    return False


async def adapt_connection(connection: object) -> ConnectionAdapter:
    """The caller's connection for any of the libraries; Invalid for something else."""
    names = (f"{each.__module__}.{each.__qualname__}" for each in type(connection).__mro__)
    adapt = next((_ADAPTERS[name] for name in names if name in _ADAPTERS), None)
    if adapt is None:
        raise Invalid("connection", connection, _WANTED)
    if adapt in _OF_A_LOOP and running_loop() is None:
        raise Invalid(
            "connection", type(connection).__name__, "it belongs to an event loop: await the call there, without .sync"
        )
    return await adapt(connection)


async def _adapt_sqlite(connection: sqlite3.Connection) -> ConnectionAdapter:
    """The connection as a caller's. Python's own handling begins a transaction by itself, at the first insert."""
    _check_sqlite(connection)

    async def fetch(statement: Statement) -> Rows:
        return _fetch_sqlite(connection, statement)

    return ConnectionAdapter("sqlite", fetch, None)


async def _adapt_aiosqlite(connection: aiosqlite.Connection) -> ConnectionAdapter:
    """The connection as a caller's: that of sqlite3 beneath it, used in the thread that it belongs to."""
    # There is no public way to run a function in that thread, and Python tells nowhere else if it commits by itself.
    run: Callable[..., Awaitable[Any]] = connection._execute
    try:
        physical = connection._conn
        await run(_check_sqlite, physical)
    except ValueError as error:
        raise closed_error() from error

    async def fetch(statement: Statement) -> Rows:
        rows: Rows = await run(_fetch_sqlite, physical, statement)
        return rows

    return ConnectionAdapter("sqlite", fetch, None)


def _check_sqlite(connection: sqlite3.Connection) -> None:
    """Raises Conflict for a connection that cannot take a statement into a transaction."""
    try:
        in_transaction = connection.in_transaction
        is_autocommit = connection.isolation_level is None or getattr(connection, "autocommit", None) is True  # 3.12
        connection.total_changes  # noqa: B018 - raises where the connection is closed, as the others do not
    except sqlite3.ProgrammingError as error:
        if "closed" in str(error):
            raise closed_error() from error
        raise
    if is_autocommit and not in_transaction:
        raise no_transaction_error("BEGIN one first")


def _fetch_sqlite(connection: sqlite3.Connection, statement: Statement) -> Rows:
    """Returns the rows as tuples, whatever the connection makes of its own."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor.execute(statement.sql, tuple(statement.parameters)).fetchall()


async def _adapt_asyncpg(connection: asyncpg.Connection) -> ConnectionAdapter:
    """The connection as a caller's: inside ``async with connection.transaction()``."""
    physical = getattr(connection, "_con", connection)  # a pool's proxy has no public way to what it stands for
    if physical is None or connection.is_closed():
        raise closed_error()
    if not connection.is_in_transaction():
        raise no_transaction_error("begin one first: async with connection.transaction()")

    async def fetch(statement: Statement) -> Rows:
        rows = await connection.fetch(with_placeholders(statement.sql, "${}"), *statement.parameters)
        return [tuple(row) for row in rows]

    return ConnectionAdapter("postgresql", fetch, physical)


async def _adapt_psycopg(connection: psycopg.Connection[Any]) -> ConnectionAdapter:
    """The connection as a caller's. Without autocommit the submission begins the transaction, as any statement does."""
    import psycopg
    from psycopg.rows import tuple_row

    _check_psycopg(connection)

    async def fetch(statement: Statement) -> Rows:
        # Not the connection's own kind of cursor: that may have other parameters and other rows.
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(with_placeholders(statement.sql, "%s").encode(), statement.parameters).fetchall()

    return ConnectionAdapter("postgresql", fetch, connection)


async def _adapt_psycopg_async(connection: psycopg.AsyncConnection[Any]) -> ConnectionAdapter:
    """The connection as a caller's. Without autocommit the submission begins the transaction, as any statement does."""
    import psycopg
    from psycopg.rows import tuple_row

    _check_psycopg(connection)

    async def fetch(statement: Statement) -> Rows:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(with_placeholders(statement.sql, "%s").encode(), statement.parameters)
            return await cursor.fetchall()

    return ConnectionAdapter("postgresql", fetch, connection)


def _check_psycopg(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Conflict for a connection that cannot take a statement into a transaction."""
    from psycopg.pq import TransactionStatus

    if connection.closed:
        raise closed_error()
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise failed_transaction_error()
    if status == TransactionStatus.IDLE and connection.autocommit:
        raise no_transaction_error("begin one first: with connection.transaction()")


async def _adapt_sqlalchemy(connection: Connection | Session | scoped_session[Session]) -> ConnectionAdapter:
    """The connection, or the session's, as a caller's; the submission begins the transaction, as any statement does."""
    from sqlalchemy import Connection

    with _plain_sqlalchemy_errors():
        link = connection if isinstance(connection, Connection) else connection.connection()
        physical = _begin_sqlalchemy(link)
    if isinstance(physical, sqlite3.Connection):
        return await _adapt_sqlite(physical)

    async def fetch(statement: Statement) -> Rows:
        with _plain_sqlalchemy_errors():
            return link.execute(*_to_text_clause(statement)).all()

    return ConnectionAdapter(link.dialect.name, fetch, physical)


async def _adapt_sqlalchemy_async(
    connection: AsyncConnection | AsyncSession | async_scoped_session[Any],
) -> ConnectionAdapter:
    """The connection, or the session's, as a caller's; the submission begins the transaction, as any statement does."""
    from sqlalchemy.ext.asyncio import AsyncConnection

    with _plain_sqlalchemy_errors():
        link = connection if isinstance(connection, AsyncConnection) else await connection.connection()
        if link.sync_connection is None:
            raise closed_error()
        physical = await link.run_sync(_begin_sqlalchemy)
    if link.dialect.driver == "aiosqlite":
        return await _adapt_aiosqlite(physical)

    async def fetch(statement: Statement) -> Rows:
        with _plain_sqlalchemy_errors():
            return (await link.execute(*_to_text_clause(statement))).all()

    return ConnectionAdapter(link.dialect.name, fetch, physical)


def _begin_sqlalchemy(link: Connection) -> Any:
    """Returns the driver's connection, in a transaction of SQLAlchemy's; raises Conflict for one in autocommit mode."""
    pooled = link.connection
    if getattr(pooled.dbapi_connection, "autocommit", None) is True:
        raise no_transaction_error("it is in AUTOCOMMIT; take one with another isolation level")
    if not link.in_transaction():  # without one, its commit() and rollback() do not reach the driver
        link.begin()
    return pooled.driver_connection


def _to_text_clause(statement: Statement) -> tuple[TextClause, dict[str, Any]]:
    """A statement as every dialect takes it."""
    from sqlalchemy import text

    names = {f"p{number}": value for number, value in enumerate(statement.parameters, 1)}
    return text(with_placeholders(statement.sql, ":p{}")), names


@contextmanager
def _plain_sqlalchemy_errors() -> Iterator[None]:
    """Translates errors of the connection; other errors pass unchanged."""
    from sqlalchemy.exc import PendingRollbackError, ResourceClosedError, UnboundExecutionError

    try:
        yield
    except ResourceClosedError as error:
        raise closed_error() from error
    except PendingRollbackError as error:
        raise failed_transaction_error() from error
    except UnboundExecutionError as error:
        raise Invalid(
            "connection", "a session", "give one of its connections: session.connection(…)", "has several databases"
        ) from error


async def _adapt_django(connection: BaseDatabaseWrapper) -> ConnectionAdapter:
    """This thread's connection as a caller's: inside ``transaction.atomic()``."""
    if connection.in_atomic_block and connection.closed_in_transaction:
        raise closed_error()
    if connection.needs_rollback:
        raise failed_transaction_error()
    if not connection.in_atomic_block and connection.get_autocommit():
        raise no_transaction_error("begin one first: with transaction.atomic()")
    if isinstance(connection.connection, sqlite3.Connection):
        return await _adapt_sqlite(connection.connection)

    async def fetch(statement: Statement) -> Rows:
        with connection.cursor() as cursor:
            cursor.execute(with_placeholders(statement.sql, "%s"), statement.parameters)
            rows: Rows = cursor.fetchall()
            return rows

    return ConnectionAdapter(connection.vendor, fetch, connection.connection)


_ADAPTERS: dict[str, Callable[[Any], Awaitable[ConnectionAdapter]]] = {
    "sqlite3.Connection": _adapt_sqlite,
    "aiosqlite.core.Connection": _adapt_aiosqlite,
    "asyncpg.connection.Connection": _adapt_asyncpg,
    "asyncpg.pool.PoolConnectionProxy": _adapt_asyncpg,
    "psycopg.Connection": _adapt_psycopg,
    "psycopg.AsyncConnection": _adapt_psycopg_async,
    "sqlalchemy.engine.base.Connection": _adapt_sqlalchemy,
    "sqlalchemy.orm.session.Session": _adapt_sqlalchemy,
    "sqlalchemy.orm.scoping.scoped_session": _adapt_sqlalchemy,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": _adapt_sqlalchemy_async,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _adapt_sqlalchemy_async,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": _adapt_sqlalchemy_async,
    "django.db.backends.base.base.BaseDatabaseWrapper": _adapt_django,
    "django.utils.connection.ConnectionProxy": _adapt_django,
}
"""The adapter for each kind of connection, by the full name of its class, or of one that it inherits from."""
_OF_A_LOOP = frozenset({_adapt_aiosqlite, _adapt_asyncpg, _adapt_psycopg_async, _adapt_sqlalchemy_async})
"""Adapters of connections that belong to an event loop."""
