"""Submission of a job as a flow of statements, and keys: for connections of ours and of callers."""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
from msgspec.structs import replace

from holdfast.core.job_changes import EDITABLE, JobChanges
from holdfast.core.models import JobState, NewJob, Submitted, UniqueKey
from holdfast.stores.base import Rows, Statement, StatementFlow
from holdfast.stores.common.named_sql import CODES
from holdfast.stores.sqlite.dependencies import (
    Resolution,
    add_dependencies,
    add_members,
    check_dependencies,
    check_members,
)
from holdfast.stores.sqlite.encoding import INLINE_PAYLOAD, expiry_us, job_row, options_text, run_at_us, span_us

_IN_ANY_STATE = 255  # bits of every state
_INSERTED_TOGETHER = 25  # rows of one statement, for which SQLite opens the table's indexes once
NOT_STARTED_STATES = sum(1 << CODES[state] for state in EDITABLE)
_REPLACEABLE = NOT_STARTED_STATES - (1 << CODES[JobState.WAITING])


def submit_one_by_one(
    statements: Mapping[str, str], jobs: Sequence[NewJob], now_us: int
) -> StatementFlow[tuple[list[Submitted], Resolution]]:
    """Stores the jobs, as statements any connection can run. Returns also what ended members of batches resolve."""
    yield from check_dependencies(statements, jobs)
    yield from check_members(statements, jobs)
    answers = []
    answered: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for job in jobs:
        answer = yield from _submit_one(statements, job, now_us)
        answers.append(answer)
        answered[job.id] = answer.job_id
        if job.after and answer.created:
            yield from add_dependencies(statements, job, answered, now_us)
        for step in job.first_steps if answer.created else ():
            yield Statement(statements["copy_step"], (job.id, *msgspec.structs.astuple(step)))
        if job.is_batch and answer.created:
            yield Statement(statements["init_batch"], (job.id,))
        if job.batch is not None:
            members.setdefault(job.batch, []).append(answer.job_id)
    resolution = Resolution()
    for batch_id, job_ids in members.items():
        resolution.add((yield from add_members(statements, batch_id, job_ids, now_us)))
    return answers, resolution


def _submit_one(statements: Mapping[str, str], job: NewJob, now_us: int) -> StatementFlow[Submitted]:
    key_for = None if job.key_for is None else span_us(job.key_for)
    if job.key is not None:
        holder = yield from _take_key(statements, job.id, job.key, key_for, _IN_ANY_STATE, now_us)
        # Its own key, which it took before, outlives its row.
        if holder is not None and (holder != job.id or not (yield Statement(statements["is_stored"], (job.id,)))):
            return Submitted(holder, False)
    if job.unique is not None and not (yield Statement(statements["is_stored"], (job.id,))):
        holder = yield from take_unique(statements, job.id, job.unique, now_us)
        if holder != job.id:
            yield Statement(statements["release_key"], (job.key,))
            on_conflict = "keep" if job.after else job.unique.on_conflict  # a waiting job has no run_at of its own
            changed = yield from _apply_conflict(statements, job, on_conflict, holder, now_us)
            return Submitted(holder, False, changed=changed)
    inserted = yield Statement(statements["insert_single_job"], job_row(job, now_us))
    for name, rows in extra_rows([job], now_us):
        for each in rows:
            yield Statement(statements[name], each)
    if job.key is not None:
        yield Statement(statements["mark_keyed"], (job.id, job.key))
    return Submitted(job.id, bool(inserted), stored_at_us=now_us if inserted else None)


def take_unique(statements: Mapping[str, str], job_id: str, unique: UniqueKey, now_us: int) -> StatementFlow[str]:
    """Takes a unique key for the job unless another holds it. Returns the holder."""
    holding_states = sum(1 << CODES[state] for state in unique.states)
    holder = yield from _take_key(statements, job_id, unique.key, unique.window_us, holding_states, now_us)
    return holder or job_id


def _take_key(
    statements: Mapping[str, str], job_id: str, key: str, key_for_us: int | None, holding_states: int, now_us: int
) -> StatementFlow[str | None]:
    """Takes a key for the job unless one holds it; ``holding_states``: bits, for states in which one does.
    Returns the holder; None if it is the job from now on."""
    keep_until = None if key_for_us is None else now_us + key_for_us
    if (yield Statement(statements["take_key"], (key, job_id, keep_until, now_us, holding_states))):
        return None
    ((holder,),) = yield Statement(statements["key_holder"], (key,))
    return str(holder)


def _apply_conflict(
    statements: Mapping[str, str], job: NewJob, on_conflict: str, holder: str, now_us: int
) -> StatementFlow[bool]:
    """Replaces or reschedules the job that holds the unique key of this one; returns whether it did."""
    if on_conflict == "keep":
        return False
    changes = JobChanges(run_at_us=run_at_us(job, now_us), expires_at_us=expiry_us(job, now_us))
    if on_conflict == "replace":
        changes = replace(changes, priority=job.priority, payload=job.payload)
    rewritten = yield from rewrite_unstarted(statements, holder, changes, now_us, _REPLACEABLE)
    if rewritten and on_conflict == "replace":  # it is under the limits of the payload it has now
        yield Statement(statements["set_partition"], (rewritten[0][0], job.partition, job.weights))
    return bool(rewritten)


def rewrite_unstarted(
    statements: Mapping[str, str],
    job_id: str,
    changes: JobChanges,
    now_us: int,
    states: int,
    *,
    unstarted: bool = False,
) -> StatementFlow[Rows]:
    """Changes a job in one of ``states``, given as bits. Returns its row; none if the job is in another state.
    ``unstarted``: only if no worker has taken it."""
    rank = None if changes.priority is None else -changes.priority
    run_at = run_at_us(changes, now_us) if changes.has_time else None
    given = (job_id, now_us, states, changes.queue, rank, run_at, int(unstarted))
    rewritten = yield Statement(statements["rewrite_unstarted"], given)
    if not rewritten:
        return []
    if changes.payload is not None:
        inline = changes.payload if len(changes.payload) <= INLINE_PAYLOAD else None
        yield Statement(statements["drop_payload"], (job_id,))
        yield Statement(statements["rewrite_payload"], (job_id, inline))
        yield Statement(statements["insert_payload"], (job_id, changes.payload))  # unless it is in the job's row
    if changes.options is not None:
        yield Statement(statements["drop_tags"], (job_id,))
        yield Statement(statements["rewrite_options"], (job_id, options_text(changes.options)))
        for tag in changes.options.tags:
            yield Statement(statements["insert_tag"], (job_id, tag))
    if changes.has_expiry:
        yield from _rewrite_expiry(statements, job_id, expiry_us(changes, now_us))
    return rewritten


def _rewrite_expiry(statements: Mapping[str, str], job_id: str, expires_at: int | None) -> StatementFlow[None]:
    yield Statement(statements["drop_expiry"], (job_id,))
    yield Statement(statements["clear_expiry"], (job_id,))
    if expires_at is not None:
        yield Statement(statements["set_expiry"], (job_id, expires_at))
        yield Statement(statements["insert_expiry"], (job_id, expires_at))


def extra_rows(jobs: Sequence[NewJob], now_us: int) -> list[tuple[str, list[tuple[object, ...]]]]:
    """Returns the extra rows of some jobs: large payloads, tags, expiries and partitions."""
    large: list[tuple[object, ...]] = [(job.id, job.payload) for job in jobs if len(job.payload) > INLINE_PAYLOAD]
    tags: list[tuple[object, ...]] = [
        (job.id, tag) for job in jobs if job.options is not None for tag in job.options.tags
    ]
    expiring: list[tuple[object, ...]] = [(job.id, expiry_us(job, now_us)) for job in jobs if job.expires]
    partitions: set[tuple[object, ...]] = {(job.queue, job.partition) for job in jobs if job.partition is not None}
    queues: set[tuple[object, ...]] = {(queue,) for queue, _ in partitions}
    named = (
        ("insert_payload", large),
        ("insert_tag", tags),
        ("set_expiry", expiring),
        ("insert_expiry", expiring),
        ("add_limited_queue", [*queues]),
        ("add_partition", [*partitions]),
    )
    return [(name, rows) for name, rows in named if rows]


def insert_rows(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Inserts rows by the statement that inserts one; returns how many were not there yet."""
    single = len(rows) % _INSERTED_TOGETHER
    inserted = connection.executemany(statement, rows[:single]).rowcount
    for start in range(single, len(rows), _INSERTED_TOGETHER):
        values = tuple(chain.from_iterable(rows[start : start + _INSERTED_TOGETHER]))
        inserted += connection.execute(_insert_of_several(statement), values).rowcount
    return inserted


@functools.cache
def _insert_of_several(statement: str) -> str:
    return re.sub(r"values (\(.+\))", lambda found: f"values {', '.join([found[1]] * _INSERTED_TOGETHER)}", statement)


def is_one_row(job: NewJob) -> bool:
    """Returns True for a job whose row is all there is to store."""
    if job.partition is not None or len(job.payload) > INLINE_PAYLOAD:
        return False
    return not job.has_extras or not (
        must_be_stored_alone(job) or job.expires or (job.options is not None and job.options.tags)
    )


def must_be_stored_alone(job: NewJob) -> bool:
    """Returns True for a job to be stored alone: another one may have its key, or wait for it."""
    return job.key is not None or job.unique is not None or job.has_relations
