"""Family ``external`` of SQLite: jobs on a caller's own connection, inside its transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.errors import Invalid
from holdfast.core.limits import decode_limits
from holdfast.core.models import JobState, Lease, NewJob, Settled, Submitted, TxOutcome
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.stores.base import Statement, StatementFlow
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.sqlite.connection import WAL_RESET_FIXED_VERSION
from holdfast.stores.sqlite.dependencies import resolve_dependencies
from holdfast.stores.sqlite.limits import LimitedFamily
from holdfast.stores.sqlite.submission import submit_one_by_one
from holdfast.stores.sqlite.writer import Transaction


class SqliteExternal(LimitedFamily):
    """Family ``external`` of SQLite."""

    dialect = "sqlite"

    async def verify(self) -> StatementFlow[None]:
        return self._verify()

    def _verify(self) -> StatementFlow[None]:
        rows = yield Statement("pragma database_list")
        file = next((row[2] for row in rows if row[1] == "main"), "")
        if not file or not Path(file).samefile(self._path):
            raise Invalid(
                "connection",
                file or ":memory:",
                f"it is open on another database; this application's jobs are in {self._path}",
            )
        if sqlite3.sqlite_version_info < WAL_RESET_FIXED_VERSION:
            yield Statement("pragma wal_autocheckpoint=0")  # see connection.py: ours run alone

    def submit_flow(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        self._opened().identity.check_files()
        return self._submit(jobs)

    def _submit(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        # Before a read, after which SQLite would not wait for the lock, and before the clock: see ``_complete``.
        yield Statement(self._sql["begin_writing"])
        if self._limits.cache.is_stale:
            self._limits.cache.set_limits(decode_limits((yield Statement(self._sql["limits"]))))
        answers, _ = yield from submit_one_by_one(self._sql, self._limits.cache.table.bind(jobs), self._now())
        return answers

    def complete_flow(self, lease: Lease, result: str | None, worker: str | None = None) -> StatementFlow[Settled]:
        self._opened().identity.check_files()
        return self._complete(lease, result, worker)

    def _complete(self, lease: Lease, result: str | None, worker: str | None) -> StatementFlow[Settled]:
        yield Statement(self._sql["begin_writing"])
        # The clock is read under the write lock: no event with a later instant becomes visible earlier.
        done = yield Statement(self._sql["complete"], (lease.job_id, lease.claims, result, self._now(), worker))
        if done and done[0][0]:
            ended = [(lease.job_id, JobState.SUCCEEDED)]
            yield from resolve_dependencies(self._sql, ended, self._now())
        rows = yield Statement(self._sql["tx_outcome"], (lease.job_id,))
        state = STATES[rows[0][0]] if rows else None
        return Settled(lease.job_id, lease.claims, bool(done), state)

    def record_step_flow(self, step: NewStep, previous: str | None) -> StatementFlow[StepReceipt]:
        self._opened().identity.check_files()
        return self._record(step, previous)

    def _record(self, step: NewStep, previous: str | None) -> StatementFlow[StepReceipt]:
        yield Statement(self._sql["begin_writing"])
        now_us, lease = self._now(), step.lease
        jobs = yield Statement(self._sql["leased_job"], (lease.job_id, lease.claims, step.worker, now_us))
        if not jobs:
            return StepReceipt(has_lease=False)
        row = (jobs[0][0], step.name, step.number, step.is_ordered, lease.claims, now_us, step.result, previous)
        recorded = yield Statement(self._sql["record_step"], row)
        return StepReceipt(has_lease=True, is_recorded=bool(recorded))

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        return await self._opened().writer.call(lambda transaction: self._outcome(transaction, lease))

    def _outcome(self, transaction: Transaction, lease: Lease) -> TxOutcome:
        """Asked by the one writer there can be, it is never still open."""
        row = transaction.connection.execute(self._sql["tx_outcome"], (lease.job_id,)).fetchone()
        if row is None or row[1] != lease.claims:
            return TxOutcome.LEASE_LOST
        match STATES[row[0]]:
            case JobState.SUCCEEDED:
                return TxOutcome.COMMITTED
            case JobState.RUNNING:
                return TxOutcome.ROLLED_BACK
        return TxOutcome.LEASE_LOST
