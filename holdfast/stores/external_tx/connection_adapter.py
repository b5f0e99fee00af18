"""Interface of a connection that a caller holds."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from holdfast.core.errors import Conflict
from holdfast.stores.base import Rows, Statement

_FAILED = "25P02"  # in_failed_sql_transaction


class ConnectionAdapter(NamedTuple):
    """A connection that is open, in a transaction or about to begin one, and fit for statements."""

    dialect: str
    fetch: Callable[[Statement], Awaitable[Rows]]
    physical: object | None
    """What stands for the connection to the server as long as that lasts; None: nothing can be remembered of it."""


def with_placeholders(sql: str, place: str) -> str:
    """``sql`` with ``place`` for each ``?``, where ``{}`` in it is the number of the parameter, from 1."""
    numbers = iter(range(1, 1 + sql.count("?")))
    return re.sub(r"\?", lambda _: place.format(next(numbers)), sql)


def refuse_closed() -> Conflict:
    """There is nothing at the other end."""
    return Conflict("connection: it is closed, or was given back to its pool; use it while you hold it")


def refuse_alone(how: str) -> Conflict:
    """Nothing to be part of."""
    return Conflict(f"connection: no transaction is open on it, so the job would commit by itself; {how}")


def refuse_failed() -> Conflict:
    """A transaction that can only be rolled back."""
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
