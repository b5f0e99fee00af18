"""A connection of the standard library's ``sqlite3``."""

from __future__ import annotations

import sqlite3

from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.connection_adapter import ConnectionAdapter, refuse_alone, refuse_closed


async def adapt_connection(connection: sqlite3.Connection) -> ConnectionAdapter:
    """The connection as a caller's. Python's own handling begins a transaction by itself, at the first insert."""
    try:
        within = connection.in_transaction
        by_itself = connection.isolation_level is None or getattr(connection, "autocommit", None) is True  # Python 3.12
        connection.total_changes  # noqa: B018 - raises where the connection is closed, as the others do not
    except sqlite3.ProgrammingError as error:
        if "closed" in str(error):
            raise refuse_closed() from error
        raise
    if by_itself and not within:
        raise refuse_alone("BEGIN one first")

    async def fetch(statement: Statement) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(statement.sql, tuple(statement.parameters)).fetchall()

    return ConnectionAdapter("sqlite", fetch, None)
