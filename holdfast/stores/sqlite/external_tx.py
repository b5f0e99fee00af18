"""Statements on a caller's own connection beside submissions: verification and completion."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.errors import Invalid
from holdfast.core.models import JobState, Lease, Settled, TxOutcome
from holdfast.stores.base import Statement, StatementFlow
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.sqlite.connection import SOUND_CHECKPOINT
from holdfast.stores.sqlite.writer import Transaction


def verify(path: str) -> StatementFlow[None]:
    """Verifies that the connection is open on this file."""
    rows = yield Statement("pragma database_list")
    file = next((row[2] for row in rows if row[1] == "main"), "")
    if not file or not Path(file).samefile(path):
        raise Invalid(
            "connection", file or ":memory:", f"it is open on another database; this application's jobs are in {path}"
        )
    if sqlite3.sqlite_version_info < SOUND_CHECKPOINT:
        yield Statement("pragma wal_autocheckpoint=0")  # see connection.py: ours run alone


def complete_steps(
    statements: Mapping[str, str], lease: Lease, result: str | None, now: Callable[[], int]
) -> StatementFlow[Settled]:
    """End the job as succeeded, under its lease. The clock is read as the one who writes: no other's ending that is
    dated later can be seen sooner."""
    yield Statement(statements["begin_writing"])
    done = yield Statement(statements["complete"], (lease.job_id, lease.claims, result, now()))
    standing = yield Statement(statements["completed"], (lease.job_id,))
    state = STATES[standing[0][0]] if standing else None
    return Settled(lease.job_id, lease.claims, bool(done), state)


def tx_outcome(transaction: Transaction, statements: Mapping[str, str], lease: Lease) -> TxOutcome:
    """Returns the outcome of a completion. Asked by the one writer there can be, it is never still open."""
    standing = transaction.connection.execute(statements["completed"], (lease.job_id,)).fetchone()
    if standing is None or standing[1] != lease.claims:
        return TxOutcome.LOST
    match STATES[standing[0]]:
        case JobState.SUCCEEDED:
            return TxOutcome.KEPT
        case JobState.RUNNING:
            return TxOutcome.UNDONE
    return TxOutcome.LOST
