"""Status of a commit that was sent and never answered: the server remembers its transactions for long enough."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import asyncpg

from holdfast.core.errors import Unavailable

_ENDED_IN, _CHECKS = 1.0, 20  # seconds a server may take to end what a lost connection left it, and checks in that time
# The number of the transaction, and the timeline: a standby that was promoted may use the same number again.
_BEGUN = "select pg_current_xact_id()::text, substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
_ENDED = "select pg_xact_status($1::text::xid8), substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"


class Commit(NamedTuple):
    """A transaction that is about to be committed."""

    number: str
    timeline: str


async def begun_commit(connection: Any) -> Commit:
    """The transaction this connection has open."""
    return Commit(*await connection.fetchrow(_BEGUN))


async def is_committed(connection: Any, commit: Commit) -> bool:
    """Returns True if it was committed. Unavailable where this server cannot say: it has not ended yet, or was begun on
    another server, whose numbers this one may have given to others since.
    """
    for _ in range(_CHECKS):
        try:
            status, timeline = await connection.fetchrow(_ENDED, commit.number)
        except asyncpg.InvalidParameterValueError:  # it lies in the future: this server never heard of it
            return False
        if status == "aborted":
            return False
        if status == "committed" and timeline == commit.timeline:
            return True
        if status != "in progress":
            raise Unavailable(
                "another PostgreSQL server has taken over, which cannot say whether a change was committed"
            )
        await asyncio.sleep(_ENDED_IN / _CHECKS)
    raise Unavailable("PostgreSQL has neither committed nor rolled back a change yet whose answer was lost")
