"""A connection of asyncpg, or its pool's proxy of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.connection_adapter import (
    ConnectionAdapter,
    refuse_alone,
    refuse_closed,
    with_placeholders,
)

if TYPE_CHECKING:
    import asyncpg


async def adapt_connection(connection: asyncpg.Connection) -> ConnectionAdapter:
    """The connection as a caller's: inside ``async with connection.transaction()``."""
    physical = getattr(connection, "_con", connection)  # a pool's proxy has no public way to what it stands for
    if physical is None or connection.is_closed():
        raise refuse_closed()
    if not connection.is_in_transaction():
        raise refuse_alone("begin one first: async with connection.transaction()")

    async def fetch(statement: Statement) -> Rows:
        rows = await connection.fetch(with_placeholders(statement.sql, "${}"), *statement.parameters)
        return [tuple(row) for row in rows]

    return ConnectionAdapter("postgresql", fetch, physical)
