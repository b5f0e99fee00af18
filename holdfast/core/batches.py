"""Batches: jobs without a handler that end when all their members have ended.

A batch (``NewJob.is_batch``) is ``waiting`` until then. Its members are jobs that name it (`Options.batch`), and those
that stand for them, submitted with it or later. The end of a member counts in the transaction that writes it. The last
one ends the batch: it has ``succeeded``, or is ``dead`` with the reason ``dependency`` if a member has failed.
Dependencies on ``failure`` of a batch are resolved when its first member has failed.

No worker takes a batch. A replay of a member opens its batch again, unless that was cancelled; a batch itself is not
replayed. A new member of a batch that has ended is a Conflict; one of a job that is no batch is Invalid.
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


class BatchEnded(Conflict):
    """Error for a new member of a batch that has ended."""

    def __init__(self, batch_id: str) -> None:
        self.batch_id = batch_id
        remedy = "submit a new batch, or let a member add them"
        super().__init__(f"batch {batch_id} has ended, and takes no further jobs; {remedy}")


def members_of_stored_batches(jobs: Sequence[NewJob]) -> dict[str, list[str]]:
    """Returns the members of batches that must be stored already, those that are no earlier job of the submission."""
    inside: set[str] = set()
    members: dict[str, list[str]] = {}
    for job in jobs:
        if job.is_batch:
            inside.add(job.id)
        if job.batch is not None and job.batch not in inside:
            members.setdefault(job.batch, []).append(job.id)
    return members


def check_batches(
    outside: Mapping[str, Sequence[str]], states: Mapping[str, JobState], known: Container[tuple[str, str]]
) -> None:
    """Raises Invalid if a batch that must be stored is not, and Conflict if one with new members has ended.

    ``states``: of the batches that are stored. ``known``: their members, as pairs (batch, member).
    """
    for batch_id, members in outside.items():
        if batch_id not in states:
            raise missing_batch(batch_id)
        if states[batch_id] in TERMINAL and not all((batch_id, job_id) in known for job_id in members):
            raise BatchEnded(batch_id)
