"""Faults built in on purpose, one at a time, into the processes that the history checker watches: it must find each.

Most take a condition out of a statement of the SQLite store. A change whose text is not in its statement is an error:
then the statement was changed, and the fault has to be, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import NamedTuple

from holdfast.core.models import NewJob, Submitted
from holdfast.stores.common.named_sql import load_statements
from holdfast.stores.sqlite import store as sqlite_store
from holdfast.stores.sqlite.queueing import SqliteQueueing


class Change(NamedTuple):
    """A text in a statement, and what takes its place."""

    statement: str
    old: str
    new: str = ""


_LEASE_HAS_ENDED = "(+lease_until <= :now) = :lease_expired"
_RUNNING = "+state = 2 and " + _LEASE_HAS_ENDED

CHANGES: Mapping[str, Sequence[Change]] = {
    "settle-without-token": [Change("settle_one", "+claims = :claims and ")],
    "settle-after-lease": [Change("settle_one", _LEASE_HAS_ENDED, "(:lease_expired = 0 or +lease_until <= :now)")],
    "heartbeat-after-lease": [Change("extend_leases", " and +holdfast_job.lease_until > :now")],
    "keys-freed-early": [Change("delete_keys_of", " and coalesce(keep_until, 0) <= :before")],
    "sweep-before-lease-end": [
        Change("expired_leases", " and j.lease_until <= :now"),
        Change("settle_one", _LEASE_HAS_ENDED, "(:lease_expired or +lease_until > :now)"),
    ],
    "retention-takes-running": [
        Change(
            "find_prunable",
            "state >= 5 and state = :state and ended_at <= :before",
            "(state = 2 or state = :state and ended_at <= :before)",
        ),
        Change(
            "prune_jobs",
            "+state = :state and ended_at <= :before",
            "(+state = 2 or +state = :state and ended_at <= :before)",
        ),
    ],
    "claim-takes-running": [
        Change("pick_ready", "state = 0", "state in (0, 2)"),
        Change("pick_with_suspects", "state = 0", "state in (0, 2)"),
    ],
    "replay-of-running": [Change("replay", "+state in (3, 6, 7)", "+state in (2, 3, 6, 7)")],
    "settled-twice": [Change("settle_one", _RUNNING, f"(state in (3, 6) or {_RUNNING})")],
    "cancellation-lost": [Change("settle_one", "case when cancelling and :state < 5", "case when 0")],
    "order-ignored": [Change("pick_ready", "order by rank, run_at, seq", "order by seq desc")],
}
EARLY_ANSWER = "answered-before-commit"
FAULTS = (*CHANGES, EARLY_ANSWER)


def build_in(fault: str) -> None:
    """Builds a fault into this process. Stores that are made from now on have it."""
    if fault == EARLY_ANSWER:
        SqliteQueueing.submit = _submit_later  # type: ignore[method-assign]
    else:
        vars(sqlite_store)["load_statements"] = lambda source: change_statements(source, CHANGES[fault])


def change_statements(source: Traversable, changes: Sequence[Change]) -> Mapping[str, str]:
    """Returns the statements of a file with these changes."""
    statements = dict(load_statements(source))
    for change in changes:
        text = statements[change.statement]
        if change.old not in text:
            raise ValueError(f"faults.py: {change.old!r} is not in the statement {change.statement}; adapt the fault")
        statements[change.statement] = text.replace(change.old, change.new)
    return statements


_submit = SqliteQueueing.submit
_under_way: set[asyncio.Task[list[Submitted]]] = set()


async def _submit_later(self: SqliteQueueing, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Answers before the write."""

    async def write() -> list[Submitted]:
        await asyncio.sleep(0.02)
        return await _submit(self, jobs)

    task = asyncio.create_task(write())
    _under_way.add(task)
    return [Submitted(job.id, created=True) for job in jobs]
