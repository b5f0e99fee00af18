"""A blocking connection or session of SQLAlchemy 2.

It runs the statements itself: only so does it begin the transaction it believes in. Its SQLite is Python's own driver,
which begins by itself, and is asked directly.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import PendingRollbackError, ResourceClosedError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from holdfast.core.errors import Invalid
from holdfast.stores.base import Rows, Statement
from holdfast.stores.external_tx.adapters import sqlite
from holdfast.stores.external_tx.connection_adapter import (
    ConnectionAdapter,
    refuse_alone,
    refuse_closed,
    refuse_failed,
    with_placeholders,
)


async def adapt_connection(connection: Connection | Session | scoped_session[Session]) -> ConnectionAdapter:
    """The connection, or the session's, as a caller's; the submission begins the transaction, as any statement does."""
    with said_plainly():
        link = connection if isinstance(connection, Connection) else connection.connection()
        physical = check_link(link)
    if isinstance(physical, sqlite3.Connection):
        return await sqlite.adapt_connection(physical)

    async def fetch(statement: Statement) -> Rows:
        with said_plainly():
            return link.execute(*to_text_clause(statement)).all()

    return ConnectionAdapter(link.dialect.name, fetch, physical)


def check_link(link: Connection) -> object:
    """Returns the object that stands for the connection; raises Conflict for one in autocommit mode."""
    pooled = link.connection
    if getattr(pooled.dbapi_connection, "autocommit", None) is True:
        raise refuse_alone("it is in AUTOCOMMIT; take one with another isolation level")
    return pooled.driver_connection


def to_text_clause(statement: Statement) -> tuple[TextClause, dict[str, Any]]:
    """A statement as every dialect takes it."""
    names = {f"p{number}": value for number, value in enumerate(statement.parameters, 1)}
    return text(with_placeholders(statement.sql, ":p{}")), names


@contextmanager
def said_plainly() -> Iterator[None]:
    """Translates errors of the connection; other errors pass unchanged."""
    try:
        yield
    except ResourceClosedError as error:
        raise refuse_closed() from error
    except PendingRollbackError as error:
        raise refuse_failed() from error
    except UnboundExecutionError as error:
        raise Invalid(
            "connection", "a session", "give one of its connections: session.connection(…)", "has several databases"
        ) from error
