"""A blocking connection of psycopg 3."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.connection_adapter import (
    ConnectionAdapter,
    refuse_alone,
    refuse_closed,
    refuse_failed,
    with_placeholders,
)


async def adapt_connection(connection: psycopg.Connection[Any]) -> ConnectionAdapter:
    """The connection as a caller's. Without autocommit the submission begins the transaction, as any statement does."""
    check_connection(connection)

    async def fetch(statement: Statement) -> Rows:
        # Not the connection's own kind of cursor: that may have other parameters and other rows.
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(with_placeholders(statement.sql, "%s").encode(), statement.parameters).fetchall()

    return ConnectionAdapter("postgresql", fetch, connection)


def check_connection(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Conflict for a connection that cannot take a statement into a transaction."""
    if connection.closed:
        raise refuse_closed()
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise refuse_failed()
    if status == TransactionStatus.IDLE and connection.autocommit:
        raise refuse_alone("begin one first: with connection.transaction()")
