"""Batches: jobs without a handler that end when all their members have ended.

A batch (``NewJob.is_batch``) is ``waiting`` until then. Its members are jobs that name it (`Options.batch`), and those
that stand for them, submitted with it or later. The end of a member counts in the transaction that writes it. The last
one ends the batch: it has ``succeeded``, or is ``dead`` with the reason ``dependency`` if a member has failed.
Dependencies on ``failure`` of a batch are resolved when its first member has failed.

No worker takes a batch. A replay of a member opens its batch again, unless that was cancelled; a batch itself is not
replayed. A new member of a batch that has ended is a Conflict, and so is a batch with the id of another job; one of a
job that is no batch is Invalid.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec

from holdfast.core.errors import Conflict, Invalid
from holdfast.core.models import TERMINAL, JobState, NewJob

BATCH_TASK = "holdfast.batch"
"""Task of each batch."""


class BatchProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Numbers of jobs in a batch. ``failed``: members that are dead, cancelled or deleted; they are among ``ended``."""

    members: int
    ended: int
    failed: int


def batch_result(members: int) -> str:
    """Result of a batch all of whose members have succeeded, as JSON text."""
    return f'{{"members":{members}}}'


def describe_failed_members(failed: int, members: int) -> str:
    """Text for a batch that is dead."""
    return f"{failed} of {members} jobs of the batch have failed"


def missing_batch(batch_id: str) -> Invalid:
    """Error for a member of a batch that there is not."""
    remedy = "give the id of a batch, stored or earlier in the same submission"
    return Invalid("batch", batch_id, remedy, "is no batch")


class BatchRefused(Conflict):
    """Error for a submission that does not fit the job stored under the id of its batch."""

    why = "is a job that is no batch; give the batch an id of its own"

    def __init__(self, batch_id: str) -> None:
        self.batch_id = batch_id
        super().__init__(f"batch {batch_id} {self.why}")


class BatchEnded(BatchRefused):
    """Error for a new member of a batch that has ended."""

    why = "has ended, and takes no further jobs; submit a new batch, or let a member add them"


def named_batches(jobs: Sequence[NewJob]) -> list[tuple[str, str]]:
    """Returns the batches that jobs are or name, as pairs (batch, job), without those whose id is new."""
    fresh = fresh_batches(jobs)
    pairs = [(job.id, job.id) for job in jobs if job.is_batch] + [(job.batch, job.id) for job in jobs if job.batch]
    return [pair for pair in pairs if pair[0] not in fresh]


def fresh_batches(jobs: Sequence[NewJob]) -> set[str]:
    """Returns the ids of batches that no other job can have, as no client gave them."""
    return {job.id for job in jobs if job.is_batch and not job.has_client_id}


def check_batches(
    jobs: Sequence[NewJob], states: Mapping[str, JobState | None], known: Container[tuple[str, str]]
) -> None:
    """Raises Invalid for a member of no batch, and Conflict for a batch whose id another job has, or that has ended.

    ``states``: of the stored jobs among ``named_batches``, None for one that is no batch. ``known``: the pairs that are
    stored. A member with a key is none of them if another stands for it: with its batch, it counts as repeated.
    """
    new: set[str] = set()
    for job in jobs:
        if job.is_batch:
            new.add(job.id)
            if states.get(job.id, JobState.WAITING) is None:
                raise BatchRefused(job.id)
        if job.batch is None:
            continue
        state = states.get(job.batch)
        if state is None and job.batch not in new:
            raise missing_batch(job.batch)
        is_repeated = job.batch in new and not (job.key is None and job.unique is None)
        if state in TERMINAL and not is_repeated and (job.batch, job.id) not in known:
            raise BatchEnded(job.batch)
