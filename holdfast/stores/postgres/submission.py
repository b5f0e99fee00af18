"""Submission of jobs to PostgreSQL: the statement for a batch, and what its answers mean."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from holdfast.core.errors import Unavailable
from holdfast.core.models import NewJob, Submitted
from holdfast.stores.common.requests import find_extra_time
from holdfast.stores.common.unconfirmed import perhaps_stored
from holdfast.stores.postgres.cursors import END, START, QueuePosition
from holdfast.stores.postgres.dependencies import (
    Resolution,
    batch_document,
    check_locked,
    check_stored,
    dependency_batch,
    has_repeated_batch,
    member_pairs,
    outside_jobs,
    possible_ids,
    read_resolution,
    split_at_held_keys,
)
from holdfast.stores.postgres.encoding import (
    NumberedStatement,
    are_uniform,
    copied_steps,
    is_one_row,
    job_columns,
    key_columns,
    one_job,
    to_text,
    uniform_columns,
)
from holdfast.stores.postgres.listener_lock import RECHECK_SECONDS
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Fetch, PostgresPool, Rows, UniqueViolation


async def insert_batch(
    statements: Mapping[str, NumberedStatement],
    notifications: PostgresNotifications,
    pool: PostgresPool,
    jobs: Sequence[NewJob],
    extras: Sequence[NewJob],
) -> tuple[list[Submitted], bool]:
    """The answers; and whether other processes are still to be notified of the jobs. ``extras``: all but plain ones."""
    uncertain: list[bool] = []  # a try that was cut off may have stored it: then an id of ours that is known is new
    fetch = functools.partial(pool.fetch, on_uncertain=lambda: uncertain.append(True), extra_time=_extra_time(jobs))
    try:
        answers, needs_notify = await _insert(statements, notifications, jobs, extras, fetch)
    except Unavailable as error:
        raise perhaps_stored(error) if uncertain else error from error.__cause__
    if uncertain:
        answers = [
            replace(answer, created=answer.created or answer.job_id == job.id)
            for job, answer in zip(jobs, answers, strict=True)
        ]
    return answers, needs_notify


def _extra_time(jobs: Sequence[NewJob]) -> float:
    return find_extra_time(len(jobs), sum(len(job.payload) for job in jobs))


async def _insert(
    statements: Mapping[str, NumberedStatement],
    notifications: PostgresNotifications,
    jobs: Sequence[NewJob],
    extras: Sequence[NewJob],
    fetch: Callable[..., Awaitable[Rows]],
) -> tuple[list[Submitted], bool]:
    if are_uniform(jobs) and all(map(is_one_row, extras)):
        with suppress(UniqueViolation):
            if len(jobs) == 1:
                return await _insert_one(statements, notifications, jobs[0], fetch)
            await fetch(statements["insert_uniform_jobs"], **uniform_columns(jobs))
            return [Submitted(job.id, True) for job in jobs], True
    return await insert_each(statements, jobs, fetch), True


async def _insert_one(
    statements: Mapping[str, NumberedStatement],
    notifications: PostgresNotifications,
    job: NewJob,
    fetch: Callable[..., Awaitable[Rows]],
) -> tuple[list[Submitted], bool]:
    sent = notifications.reserve_notification(f"queue:{job.queue}")
    began = time.monotonic()
    ((stored_at_us, outcome),) = await fetch(statements["insert_one_job"], **one_job(job), **sent)
    was_slow = time.monotonic() - began >= RECHECK_SECONDS  # a process that waits by now may have missed the commit
    if sent["channel"] is not None:
        notifications.record_transaction()
    return [Submitted(job.id, True, stored_at_us=stored_at_us)], outcome == "to notify" or (
        outcome == "no listener" and was_slow
    )


async def insert_each(
    statements: Mapping[str, NumberedStatement], jobs: Sequence[NewJob], fetch: Callable[..., Awaitable[Rows]]
) -> list[Submitted]:
    """Inserts any batch, with no error for jobs that are there already. Leaves their dependencies out."""
    if all(map(is_one_row, jobs)):
        return _created(jobs, await fetch(statements["insert_jobs"], **job_columns(jobs)))
    rows = await fetch(statements["insert_keyed_jobs"], **job_columns(jobs), **key_columns(jobs))
    ordered = sorted(rows, key=lambda row: row[0])
    return [
        Submitted(job_id, created, changed=changed, stored_at_us=stored_at_us)
        for _, job_id, created, changed, _, stored_at_us in ordered
    ]


async def insert_dependent(
    statements: Mapping[str, NumberedStatement], pool: PostgresPool, jobs: Sequence[NewJob]
) -> tuple[list[Submitted], Resolution]:
    """Inserts jobs that wait, and members of batches.

    Raises `Invalid` if what they refer to is not there, and `Conflict` if a batch has ended; then nothing is stored.
    """
    try:
        return await pool.transaction(
            lambda fetch: insert_related(statements, jobs, fetch, pool.instant), extra_time=_extra_time(jobs)
        )
    except Unavailable as error:
        if error.outcome and isinstance(error.__cause__, Unavailable):
            raise perhaps_stored(error.__cause__) from error.__cause__
        raise


async def insert_related(
    statements: Mapping[str, NumberedStatement], jobs: Sequence[NewJob], fetch: Fetch, instant: int | None
) -> tuple[list[Submitted], Resolution]:
    """Inserts any batch in a transaction, with the dependencies, batches and steps of its jobs.

    Raises `Invalid` and `Conflict` as ``insert_dependent``, before anything is inserted.
    """
    if not any(job.has_relations for job in jobs):
        return await insert_each(statements, jobs, fetch) if jobs else [], Resolution(set(), [])
    batches = await _lock_related(statements, jobs, fetch)
    answers: list[Submitted] = []
    ids: dict[str, str] = {}
    rows: list[Sequence[Any]] = []
    for chunk in split_at_held_keys(jobs):
        stored_chunk = await insert_each(statements, chunk, fetch)
        answers += stored_chunk
        members = member_pairs(jobs, answers)
        batch = dependency_batch(chunk, stored_chunk, ids, instant, members=members, notifies=False)
        rows += [] if batch is None else await fetch(statements["wait_for_jobs"], batch=batch)
        for job, answer in zip(chunk, stored_chunk, strict=True):
            if job.first_steps and answer.created:
                await fetch(statements["copy_steps"], id=job.id, **copied_steps(job.first_steps))
    if batches and has_repeated_batch(jobs, answers):
        check_locked(jobs, await fetch(statements["lock_batches"], members=batches))
    return answers, read_resolution(rows)


async def _lock_related(
    statements: Mapping[str, NumberedStatement], jobs: Sequence[NewJob], fetch: Fetch
) -> str | None:
    """Locks the stored jobs that these wait for, and then their batches, which it returns as ``batch_document``."""
    outside, batches = outside_jobs(jobs), batch_document(jobs)
    if outside:
        stored = {job_id for (job_id,) in await fetch(statements["lock_dependencies"], ids=possible_ids(outside))}
        if len(stored) < len(outside):
            check_stored(outside_jobs(jobs, await _known_jobs(statements, jobs, fetch)), stored)
    if batches:
        check_locked(jobs, await fetch(statements["lock_batches"], members=batches))
    return batches


async def _known_jobs(
    statements: Mapping[str, NumberedStatement], jobs: Sequence[NewJob], fetch: Callable[..., Awaitable[Rows]]
) -> set[str]:
    """Returns the ids among the jobs' whose id or key stands for a stored job."""
    known = {row[0] for row in await fetch(statements["states_of"], ids=possible_ids(job.id for job in jobs))}
    keys = [to_text(job.key) for job in jobs if job.key is not None]
    owned = {row[0] for row in await fetch(statements["key_holders"], keys=keys)}
    return known | {job.id for job in jobs if job.key is not None and to_text(job.key) in owned}


def _created(jobs: Sequence[NewJob], rows: Rows) -> list[Submitted]:
    """Which of the jobs were stored: all of them, or those among the rows, each once."""
    if len(rows) == len(jobs):
        return [Submitted(job.id, True) for job in jobs]
    new = {job_id for (job_id,) in rows}
    answers = []
    for job in jobs:
        answers.append(Submitted(job.id, job.id in new))
        new.discard(job.id)
    return answers


def first_positions(jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> dict[str, QueuePosition]:
    """Returns the position of the first new or changed job of each queue: behind all of its priority."""
    ranks: dict[str, int] = {}
    for job, answer in zip(jobs, answers, strict=True):
        rank = START.rank if answer.changed else -job.priority  # a changed job may have any priority
        if (answer.created or answer.changed) and rank < ranks.get(job.queue, END.rank):
            ranks[job.queue] = rank
    return {queue: END._replace(rank=rank) for queue, rank in ranks.items()}
