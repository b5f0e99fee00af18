"""Django's ``connection``, or one of its ``connections``."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.adapters import sqlite
from holdfast.stores.external_tx.connection_adapter import (
    ConnectionAdapter,
    refuse_alone,
    refuse_closed,
    refuse_failed,
    with_placeholders,
)

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


async def adapt_connection(connection: BaseDatabaseWrapper) -> ConnectionAdapter:
    """This thread's connection as a caller's: inside ``transaction.atomic()``."""
    if connection.in_atomic_block and connection.closed_in_transaction:
        raise refuse_closed()
    if connection.needs_rollback:
        raise refuse_failed()
    if not connection.in_atomic_block and connection.get_autocommit():
        raise refuse_alone("begin one first: with transaction.atomic()")
    if isinstance(connection.connection, sqlite3.Connection):
        return await sqlite.adapt_connection(connection.connection)

    async def fetch(statement: Statement) -> Rows:
        with connection.cursor() as cursor:
            cursor.execute(with_placeholders(statement.sql, "%s"), statement.parameters)
            rows: Rows = cursor.fetchall()
            return rows

    return ConnectionAdapter(connection.vendor, fetch, connection.connection)
