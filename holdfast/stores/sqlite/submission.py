"""Submission of a job as a flow of statements, and keys: for connections of ours and of callers."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TypeVar

from holdfast.core.models import NewJob, Submitted, UniqueKey
from holdfast.stores.base import Statement, StatementFlow
from holdfast.stores.common.named_sql import CODES
from holdfast.stores.sqlite.encoding import INLINE_PAYLOAD, limited_row, span_us

T = TypeVar("T")

_IN_ANY_STATE = 255  # bits of every state


def submit_one_by_one(
    statements: Mapping[str, str], jobs: Sequence[NewJob], now_us: int
) -> StatementFlow[list[Submitted]]:
    """Store the jobs, as statements any connection can run."""
    answers = []
    for job in jobs:
        answer = yield from _submit_one(statements, job, now_us)
        answers.append(answer)
    return answers


def _submit_one(statements: Mapping[str, str], job: NewJob, now_us: int) -> StatementFlow[Submitted]:
    key_for = None if job.key_for is None else span_us(job.key_for)
    if job.key is not None:
        owner = yield from _take_key(statements, job.id, job.key, key_for, _IN_ANY_STATE, now_us)
        if owner != job.id:
            return Submitted(owner, False)
    if job.unique is not None and not (yield Statement(statements["is_stored"], (job.id,))):
        holder = yield from take_unique(statements, job.id, job.unique, now_us)
        if holder != job.id:
            yield Statement(statements["release_key"], (job.key, job.id))
            changed = yield from _apply_conflict(statements, job, job.unique.on_conflict, holder, now_us)
            return Submitted(holder, False, changed=changed)
    inserted = yield Statement(statements["insert_single_job"], limited_row(job, now_us))
    for name, rows in extra_rows([job]):
        for each in rows:
            yield Statement(statements[name], each)
    if job.key is not None:
        yield Statement(statements["mark_keyed"], (job.id, job.key))
    return Submitted(job.id, bool(inserted))


def take_unique(statements: Mapping[str, str], job_id: str, unique: UniqueKey, now_us: int) -> StatementFlow[str]:
    """Takes a unique key for the job unless another holds it. Returns the owner."""
    held = sum(1 << CODES[state] for state in unique.states)
    return (yield from _take_key(statements, job_id, unique.key, unique.window_us, held, now_us))


def _take_key(
    statements: Mapping[str, str], job_id: str, key: str, lifetime_us: int | None, held: int, now_us: int
) -> StatementFlow[str]:
    """Takes a key for the job unless another holds it; ``held``: the states in which one does. Returns the owner."""
    keep_until = None if lifetime_us is None else now_us + lifetime_us
    yield Statement(statements["take_key"], (key, job_id, keep_until, now_us, held))
    ((owner,),) = yield Statement(statements["key_owner"], (key,))
    return str(owner)


def _apply_conflict(
    statements: Mapping[str, str], job: NewJob, policy: str, holder: str, now_us: int
) -> StatementFlow[bool]:
    """Replaces or reschedules the job that holds the unique key of this one; returns whether it did."""
    if policy == "keep":
        return False
    _, _, _, payload, state, rank, run_at, *_, partition, weights = limited_row(job, now_us)
    if policy == "reschedule":
        return bool((yield Statement(statements["reschedule_unique"], (holder, state, run_at))))
    values = (holder, state, run_at, rank, payload, partition, weights)
    if not (yield Statement(statements["replace_unique"], values)):
        return False
    yield Statement(statements["drop_payload"], (holder,))
    if payload is None:
        yield Statement(statements["clear_inline_payload"], (holder,))
        yield Statement(statements["insert_payload"], (holder, job.payload))
    return True


def extra_rows(jobs: Sequence[NewJob]) -> list[tuple[str, list[tuple[object, ...]]]]:
    """Returns the extra rows of some jobs: large payloads, tags and partitions."""
    large: list[tuple[object, ...]] = [(job.id, job.payload) for job in jobs if len(job.payload) > INLINE_PAYLOAD]
    tags: list[tuple[object, ...]] = [
        (job.id, tag) for job in jobs if job.options is not None for tag in job.options.tags
    ]
    partitions: set[tuple[object, ...]] = {(job.queue, job.partition) for job in jobs if job.partition is not None}
    queues: set[tuple[object, ...]] = {(queue,) for queue, _ in partitions}
    lists = (("list_queue", [*queues]), ("list_partition", [*partitions]))
    return [(name, rows) for name, rows in (("insert_payload", large), ("insert_tag", tags), *lists) if rows]


def is_plain(job: NewJob) -> bool:
    """Returns True for a job whose row is all there is to store."""
    return (
        job.key is None
        and job.partition is None
        and job.unique is None
        and len(job.payload) <= INLINE_PAYLOAD
        and (job.options is None or not job.options.tags)
    )


def run_flow(connection: sqlite3.Connection, flow: StatementFlow[T]) -> T:
    """Runs a statement flow on a connection of ours."""
    try:
        statement = next(flow)
        while True:
            statement = flow.send(connection.execute(statement.sql, statement.parameters).fetchall())
    except StopIteration as stop:
        answer: T = stop.value
        return answer
