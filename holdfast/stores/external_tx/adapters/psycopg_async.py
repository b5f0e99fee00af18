"""A connection of psycopg 3 that belongs to an event loop."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import tuple_row

from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.adapters.psycopg import check_connection
from holdfast.stores.external_tx.connection_adapter import ConnectionAdapter, with_placeholders


async def adapt_connection(connection: psycopg.AsyncConnection[Any]) -> ConnectionAdapter:
    """The connection as a caller's. Without autocommit the submission begins the transaction, as any statement does."""
    check_connection(connection)

    async def fetch(statement: Statement) -> Rows:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(with_placeholders(statement.sql, "%s").encode(), statement.parameters)
            return await cursor.fetchall()

    return ConnectionAdapter("postgresql", fetch, connection)
