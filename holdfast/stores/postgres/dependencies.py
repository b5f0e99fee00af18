"""Dependencies in PostgreSQL: those of new jobs, and the decisions of ended jobs that waiters are notified of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.batches import check_batches, named_batches
from holdfast.core.dependencies import missing_dependency
from holdfast.core.models import NewJob, Submitted
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.postgres.encoding import is_id
from holdfast.stores.postgres.notifications import PostgresNotifications

_encode = msgspec.json.Encoder().encode


class Resolution(NamedTuple):
    """Result of ``holdfast.resolve_dependencies``: queues with jobs that became due, and jobs that ended."""

    queues: set[str]
    ended: list[str]

    def notify_committed(
        self, notifications: PostgresNotifications, topics: Iterable[str] = (), ended: Sequence[str] = ()
    ) -> None:
        """Notifies of them, and of further topics and ended jobs, after the commit."""
        notifications.notify_committed({*topics, *self.topics}, [*ended, *self.ended])

    @property
    def topics(self) -> set[str]:
        """The topics of workers that wait for due jobs."""
        return {f"{kind}:{queue}" for queue in self.queues for kind in ("queue", "due")}


NOTHING_RESOLVED = Resolution(set(), [])


def read_resolution(rows: Iterable[Sequence[Any]]) -> Resolution:
    """Reads rows of a queue or an ended job each."""
    resolution = Resolution(set(), [])
    for queue, job_id in rows:
        if queue is not None:
            resolution.queues.add(queue)
        if job_id is not None:
            resolution.ended.append(job_id)
    return resolution


def outside_jobs(jobs: Sequence[NewJob], known: Collection[str] = ()) -> list[str]:
    """Returns the ids that the jobs wait for and that are no earlier job of the batch: these must be stored already.

    ``known``: jobs whose submission is repeated, which changes nothing.
    """
    seen: set[str] = set()
    outside: dict[str, None] = {}
    for job in jobs:
        if job.id not in known:
            outside.update((each.job_id, None) for each in job.after if each.job_id not in seen)
        seen.add(job.id)
    return list(outside)


def check_stored(outside: Sequence[str], stored: Iterable[str]) -> None:
    """Raises `Invalid` if one of the ids that must be stored is not."""
    missing = set(outside).difference(stored)
    for job_id in outside:
        if job_id in missing:
            raise missing_dependency(job_id)


def batch_document(jobs: Sequence[NewJob]) -> str | None:
    """Batches and their members as ``lock_batches`` takes them; None for none."""
    pairs = named_batches(jobs)
    asked = [{"batch": batch_id, "job_id": job_id} for batch_id, job_id in pairs if is_id(batch_id) and is_id(job_id)]
    return _encode(asked).decode() if pairs else None


def check_locked(jobs: Sequence[NewJob], rows: Sequence[Sequence[Any]]) -> None:
    """Raises Invalid or Conflict if a job cannot be a batch, or a member of one. ``rows``: of ``lock_batches``."""
    states = {batch_id: None if code is None else STATES[code] for batch_id, _, code, _ in rows}
    check_batches(jobs, states, {(batch_id, job_id) for batch_id, job_id, _, is_known in rows if is_known})


def has_repeated_batch(jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> bool:
    """Returns True if the id of a batch was there: perhaps stored since ``lock_batches``, by a job that is no batch."""
    return any(job.is_batch and not answer.created for job, answer in zip(jobs, answers, strict=False))


def split_at_held_keys(jobs: Sequence[NewJob]) -> list[Sequence[NewJob]]:
    """Splits a batch where a job has the unique key of an earlier one with dependencies.

    Dependencies are resolved in between: one that fails cancels the earlier job, and the key is free.
    """
    chunks: list[Sequence[NewJob]] = []
    start, keys = 0, set[str]()
    for number, job in enumerate(jobs):
        if job.unique is None:
            continue
        if job.unique.key in keys:
            chunks.append(jobs[start:number])
            start, keys = number, set()
        if job.after:
            keys.add(job.unique.key)
    return [*chunks, jobs[start:]]


def dependency_batch(
    jobs: Sequence[NewJob],
    answers: Sequence[Submitted],
    ids: dict[str, str],
    instant: int | None,
    *,
    members: Sequence[Mapping[str, str]],
    notifies: bool,
) -> str | None:
    """Dependencies of new jobs, and of batches on members, as ``holdfast.add_dependencies`` takes them; None for none.

    ``ids``: the jobs that stand for those of earlier chunks of the batch; these are added. ``members``: see
    ``member_pairs``.
    """
    conditions: dict[tuple[str, str], str] = {}
    for job, answer in zip(jobs, answers, strict=True):
        for each in job.after if answer.created else ():
            conditions.setdefault((answer.job_id, ids.get(each.job_id, each.job_id)), each.on)
        ids.setdefault(job.id, answer.job_id)
    dependencies = [
        {"waiter": waiter, "job_id": job_id, "condition": on} for (waiter, job_id), on in conditions.items()
    ]
    batch = {"at": instant, "notifies": notifies, "dependencies": dependencies, "members": members}
    return _encode(batch).decode() if dependencies or members else None


def member_pairs(jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> list[Mapping[str, str]]:
    """Batches and their members. All of a submission join at its last chunk: no batch ends before."""
    if len(answers) < len(jobs):
        return []
    return [
        {"batch": job.batch, "job_id": answer.job_id}
        for job, answer in zip(jobs, answers, strict=True)
        if job.batch is not None
    ]


def possible_ids(ids: Iterable[str]) -> list[str]:
    """Returns the ids that a job can have at all."""
    return list(filter(is_id, ids))
