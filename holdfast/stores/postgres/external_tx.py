"""Statements on a caller's own connection: verification, submission, completion.

Each is one call of a function of the schema, with one text: every driver and every session can send that, whatever its
encoding. In one without an encoding psycopg answers with bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.models import JobState, Lease, NewJob, Settled, Submitted, TxOutcome
from holdfast.stores.base import Statement, StatementFlow
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.postgres.encoding import encode_options, is_id, span_us, text_or_none, to_text
from holdfast.stores.postgres.pool import PostgresPool
from holdfast.stores.postgres.statements import NumberedStatement

_encode = msgspec.json.Encoder().encode
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")


class Identity(NamedTuple):
    """Identity of a database, different from that of its copies."""

    mark: str
    database: str
    number: str


async def database_identity(links: PostgresPool, statements: Mapping[str, NumberedStatement]) -> Identity:
    """The identity of the store's own database."""
    (row,) = await links.fetch(statements["identity"])
    return Identity(*row)


def verify(statements: Mapping[str, NumberedStatement], ours: Identity, place: str) -> StatementFlow[None]:
    """Verifies that the connection is open on the database at ``place``, and that its role may use the queue there."""
    ((database, role, found, allowed),) = map(_texts, (yield Statement(statements["find_identity"].sql)))
    if not found or database != ours.database:
        raise _another(database, place)
    if not allowed:
        raise Invalid(
            "connection",
            f"role {role}",
            "grant it usage on the schema of this application's jobs, and select, insert and update on its tables",
            "may not submit",
        )
    (theirs,) = map(_texts, (yield Statement(statements["identity"].sql)))
    if theirs != ours:
        raise _another(database, place)


def _another(database: str, place: str) -> Invalid:
    return Invalid("connection", database, f"it is open on another database; this application's jobs are in {place}")


def submit_steps(
    statements: Mapping[str, NumberedStatement], jobs: Sequence[NewJob], now_us: int | None
) -> StatementFlow[list[Submitted]]:
    """Store the jobs."""
    if not jobs:
        return []
    batch = _ascii({"at": now_us, "jobs": [_row(job) for job in jobs]})
    rows = yield Statement(statements["enlist"].sql, (batch,))
    return [Submitted(job_id, created) for job_id, created in map(_texts, rows)]


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
        "keep_for": span_us(job.key_for),
        "options": None if options is None else encode_options(options),
        "given": job.given_id,
        "tags": None if options is None or not options.tags else options.tags,
    }


def complete_steps(
    statements: Mapping[str, NumberedStatement], lease: Lease, result: str | None, now_us: int | None
) -> StatementFlow[Settled]:
    """End the job as succeeded, under its lease."""
    done = {"at": now_us, "id": lease.job_id, "claims": lease.claims, "result": text_or_none(result)}
    ((accepted, state),) = yield Statement(statements["complete"].sql, (_ascii(done),))
    return Settled(lease.job_id, lease.claims, accepted, None if state is None else STATES[state])


async def tx_outcome(links: PostgresPool, statements: Mapping[str, NumberedStatement], lease: Lease) -> TxOutcome:
    """Returns the outcome of a completion."""
    if not is_id(lease.job_id):
        return TxOutcome.LOST
    rows = await links.fetch(statements["completed"], id=lease.job_id)
    if not rows and await links.fetch(statements["states_of"], ids=[lease.job_id]):
        return TxOutcome.OPEN
    for state, claims in rows:
        if claims == lease.claims and STATES[state] in _FATES:
            return _FATES[STATES[state]]
    return TxOutcome.LOST


_FATES = {JobState.SUCCEEDED: TxOutcome.KEPT, JobState.RUNNING: TxOutcome.UNDONE}


def _texts(row: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.decode() if isinstance(value, bytes) else value for value in row)


def _ascii(said: Any) -> str:
    """JSON of ASCII alone."""
    text = _encode(said).decode()
    return text if text.isascii() else _BEYOND_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    pairs = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{pairs[at : at + 4]}" for at in range(0, len(pairs), 4))
