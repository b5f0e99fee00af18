"""A connection or session of SQLAlchemy 2 that belongs to an event loop."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.adapters.sqlalchemy import check_link, said_plainly, to_text_clause
from holdfast.stores.external_tx.connection_adapter import ConnectionAdapter, refuse_closed


async def adapt_connection(connection: AsyncConnection | AsyncSession | async_scoped_session[Any]) -> ConnectionAdapter:
    """The connection, or the session's, as a caller's; the submission begins the transaction, as any statement does."""
    with said_plainly():
        link = connection if isinstance(connection, AsyncConnection) else await connection.connection()
        if link.sync_connection is None:
            raise refuse_closed()
        physical = check_link(link.sync_connection)

    async def fetch(statement: Statement) -> Rows:
        with said_plainly():
            return (await link.execute(*to_text_clause(statement))).all()

    return ConnectionAdapter(link.dialect.name, fetch, physical)
