"""Submission of jobs to PostgreSQL: the statement for a batch, and what its answers mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from holdfast.core.models import NewJob, Submitted
from holdfast.stores.postgres.cursors import END, START, QueuePosition
from holdfast.stores.postgres.encoding import (
    NumberedStatement,
    are_uniform,
    is_plain,
    job_columns,
    key_columns,
    uniform_columns,
)
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import DuplicateKey, Rows


async def insert_batch(
    statements: Mapping[str, NumberedStatement],
    notifications: PostgresNotifications,
    jobs: Sequence[NewJob],
    fetch: Callable[..., Awaitable[Rows]],
) -> tuple[list[Submitted], bool]:
    """The answers; and True if waiters were notified of the jobs in the same transaction."""
    if not all(map(is_plain, jobs)):
        rows = await fetch(statements["insert_keyed_jobs"], **job_columns(jobs), **key_columns(jobs))
        ordered = sorted(rows, key=lambda row: row[0])
        answers = [Submitted(job_id, created, changed=changed) for _, job_id, created, changed, _ in ordered]
        return answers, False
    if are_uniform(jobs):
        notice = notifications.transaction_notice(f"queue:{jobs[0].queue}") if len(jobs) == 1 else {}
        with suppress(DuplicateKey):
            await fetch(
                statements["insert_lone_job" if notice else "insert_uniform_jobs"], **uniform_columns(jobs), **notice
            )
            return [Submitted(job.id, True) for job in jobs], bool(notice)
    return _created(jobs, await fetch(statements["insert_jobs"], **job_columns(jobs))), False


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
