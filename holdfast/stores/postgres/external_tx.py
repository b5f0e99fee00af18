"""Family ``external`` of PostgreSQL: jobs on a caller's own connection, inside its transaction.

Each is one statement with one text, most of them a call of a function of the schema: every driver and every session can
send that, whatever its encoding. In one without an encoding psycopg answers with bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.limits import LimitTable
from holdfast.core.models import JobState, Lease, NewJob, Settled, Submitted, TxOutcome
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.stores.base import Statement, StatementFlow
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.postgres.dependencies import (
    batch_document,
    check_locked,
    check_stored,
    dependency_batch,
    has_repeated_batch,
    member_pairs,
    outside_jobs,
    possible_ids,
    split_at_held_keys,
)
from holdfast.stores.postgres.encoding import NumberedStatement, encode_options, is_id, span_us, text_or_none, to_text
from holdfast.stores.postgres.limits import stored_limits
from holdfast.stores.postgres.pool import PostgresPool

_encode = msgspec.json.Encoder().encode
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")


class Identity(NamedTuple):
    """Identity of a database, different from that of its copies."""

    mark: str
    database: str
    number: str


class PostgresExternal:
    """Family ``external`` of PostgreSQL."""

    dialect = "postgresql"

    def __init__(
        self,
        pool: Callable[[], PostgresPool],
        statements: Mapping[str, NumberedStatement],
        now: Callable[[], int] | None,
        place: str,
        limit_cache: LimitCache,
    ) -> None:
        self._pool = pool
        self._sql = statements
        self._now = now
        self._place = place
        self._limit_cache = limit_cache
        self._identity: Identity | None = None

    async def verify(self) -> StatementFlow[None]:
        if self._identity is None:
            (row,) = await self._pool().fetch(self._sql["identity"])
            self._identity = Identity(*row)
        return self._verify(self._identity)

    def _verify(self, expected: Identity) -> StatementFlow[None]:
        ((database, role, found, allowed),) = map(_texts, (yield Statement(self._sql["find_identity"].sql)))
        if not found or database != expected.database:
            raise _another(database, self._place)
        if not allowed:
            raise Invalid(
                "connection",
                f"role {role}",
                "grant it usage on the schema of this application's jobs and its sequences, and select, insert and "
                "update on its tables",
                "may not submit",
            )
        (identity,) = map(_texts, (yield Statement(self._sql["identity"].sql)))
        if identity != expected:
            raise _another(database, self._place)

    def submit_flow(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        if not jobs:
            return []
        outside = outside_jobs(jobs)
        if outside:
            ids = ",".join(possible_ids(outside))
            rows = yield Statement(self._sql["lock_dependencies_inside"].sql, (ids,))
            check_stored(outside, [job_id for (job_id,) in map(_texts, rows)])
        batches = batch_document(jobs)
        if batches:
            check_locked(jobs, [*map(_texts, (yield Statement(self._sql["lock_batches_inside"].sql, (batches,))))])
        table = self._limit_cache.table
        if self._limit_cache.is_stale:
            seen = [*map(_texts, (yield Statement(self._sql["limits_and_isolation"].sql)))]
            limits = stored_limits(row[:2] for row in seen if row[0] is not None)
            # A snapshot of the transaction may be older than a limit that other submissions have to obey.
            table = self._limit_cache.set_limits(limits) if seen[0][2] == "read committed" else LimitTable(limits)
        answers: list[Submitted] = []
        ids_by_given: dict[str, str] = {}
        for chunk in split_at_held_keys(table.bind(jobs)):
            stored_chunk = yield from self._submit_chunk(chunk)
            answers += stored_chunk
            if batches and has_repeated_batch(chunk, stored_chunk):
                check_locked(jobs, [*map(_texts, (yield Statement(self._sql["lock_batches_inside"].sql, (batches,))))])
            members, instant = member_pairs(jobs, answers), self._instant()
            dependencies = dependency_batch(chunk, stored_chunk, ids_by_given, instant, members=members, notifies=True)
            if dependencies is not None:
                yield Statement(self._sql["wait_for_jobs_inside"].sql, (dependencies,))
        return answers

    def _submit_chunk(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        rows = yield Statement(self._sql["submit_batch"].sql, (encode_batch(jobs, self._instant()),))
        answers = [Submitted(job_id, created, changed=changed) for job_id, created, changed in map(_texts, rows)]
        expiring = [
            {
                "id": answer.job_id,
                "created": answer.created,
                "expires_at": job.expires_at_us,
                "expires_in": span_us(job.expires_in),
            }
            for job, answer in zip(jobs, answers, strict=True)
            if answer.changed or (answer.created and job.expires)
        ]
        if expiring:
            yield Statement(self._sql["set_expiries"].sql, (_ascii({"at": self._instant(), "jobs": expiring}),))
        return answers

    def complete_flow(self, lease: Lease, result: str | None, worker: str | None = None) -> StatementFlow[Settled]:
        done = {
            "at": self._instant(),
            "id": lease.job_id,
            "claims": lease.claims,
            "worker": worker,
            "result": text_or_none(result),
        }
        ((accepted, state),) = yield Statement(self._sql["complete"].sql, (_ascii(done),))
        return Settled(lease.job_id, lease.claims, accepted, None if state is None else STATES[state])

    def record_step_flow(self, step: NewStep, previous: str | None) -> StatementFlow[StepReceipt]:
        lease = step.lease
        if not is_id(lease.job_id):
            return StepReceipt(has_lease=False)
        given = {
            "at": self._instant(),
            "id": lease.job_id,
            "claims": lease.claims,
            "worker": step.worker,
            "number": step.number,
            "is_ordered": step.is_ordered,
            "name": to_text(step.name),
            "result": text_or_none(step.result),
            "previous": text_or_none(previous),
        }
        ((has_lease, is_recorded),) = yield Statement(self._sql["record_step"].sql, (_ascii(given),))
        return StepReceipt(has_lease, is_recorded)

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        if not is_id(lease.job_id):
            return TxOutcome.LEASE_LOST
        rows = await self._pool().fetch(self._sql["tx_outcome"], id=lease.job_id)
        if not rows and await self._pool().fetch(self._sql["states_of"], ids=[lease.job_id]):
            return TxOutcome.PENDING
        for state, claims in rows:
            if claims == lease.claims and STATES[state] in _OUTCOME_BY_STATE:
                return _OUTCOME_BY_STATE[STATES[state]]
        return TxOutcome.LEASE_LOST

    def _instant(self) -> int | None:
        return None if self._now is None else self._now()


def encode_batch(jobs: Sequence[NewJob], instant: int | None) -> str:
    """Jobs as ``holdfast.submit_batch`` takes them; ``instant``: None for the server's clock."""
    return _ascii({"at": instant, "jobs": [_row(job) for job in jobs]})


def _another(database: str, place: str) -> Invalid:
    return Invalid("connection", database, f"it is open on another database; this application's jobs are in {place}")


def _row(job: NewJob) -> dict[str, Any]:
    options = job.options
    return {
        "id": job.id,
        "queue": job.queue,
        "task": job.task,
        "payload": to_text(job.payload),
        "rank": -job.priority,
        "run_at": job.run_at_us,
        "delay": span_us(job.delay),
        "max_attempts": job.max_attempts,
        "key": text_or_none(job.key),
        "key_for": span_us(job.key_for),
        "options": None if options is None else encode_options(options),
        "has_client_id": job.has_client_id,
        "tags": None if options is None or not options.tags else options.tags,
        "unique_key": job.unique,
        "partition": text_or_none(job.partition),
        "weights": job.weights,
        "is_waiting": job.waits,
    }


_OUTCOME_BY_STATE = {JobState.SUCCEEDED: TxOutcome.COMMITTED, JobState.RUNNING: TxOutcome.ROLLED_BACK}


def _texts(row: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.decode() if isinstance(value, bytes) else value for value in row)


def _ascii(given: Any) -> str:
    """JSON of ASCII alone."""
    text = _encode(given).decode()
    return text if text.isascii() else _BEYOND_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    pairs = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{pairs[at : at + 4]}" for at in range(0, len(pairs), 4))
