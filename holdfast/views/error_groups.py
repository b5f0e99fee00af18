"""Documents of groups of errors, for CLI, HTTP API and console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.error_groups import ErrorGroup, find_place
from holdfast.core.redaction import Redaction
from holdfast.stores.base import Store
from holdfast.views.documents import Counted, Instant, JobId, QueueName, TaskName
from holdfast.views.formatting import format_timestamp


class FailedHour(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a group whose latest attempt failed within an hour."""

    start: Instant
    number: Annotated[int, Meta(ge=1)]


class ErrorGroupDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that failed with the same error: of one kind, raised at one place, apart from numbers and ids."""

    id: Annotated[str, Meta(description="For the filter error_group.", examples=["5f0c9a41d2be"])]
    error: Annotated[str | None, Meta(description="Of the job that failed last; null: the job is gone.")]
    dead: Counted
    retrying: Annotated[int, Meta(description="Jobs that wait for their next attempt.", ge=0)]
    first_seen: Annotated[Instant, Meta(description="Earliest failure among these jobs.")]
    last_seen: Instant
    tasks: Annotated[list[TaskName], Meta(description="The one with the most of these jobs first.")]
    queues: list[QueueName]
    latest_job: Annotated[JobId, Meta(description="The job that failed last.")]
    hours: Annotated[list[FailedHour], Meta(description="Hours with failures, the earliest first.")]


class ErrorGroupDetails(ErrorGroupDocument, frozen=True, kw_only=True):
    """A group with the latest failure."""

    place: Annotated[str | None, Meta(description="Where the code raised it.", examples=["shop/mail.py in send"])]
    traceback: str | None


async def describe_groups(store: Store, groups: Sequence[ErrorGroup], redaction: Redaction) -> list[ErrorGroupDocument]:
    """Returns the documents of groups, with the error text of the latest job of each."""
    ids = [group.latest for group in groups]
    if redaction.hides:  # what errors may quote stands in the payload
        jobs = [await store.query.get(job_id) for job_id in ids]
    else:
        jobs = await store.query.summaries(ids)
    errors = [None if job is None else redaction.redact_job(job).error for job in jobs]
    return [_group_document(group, error) for group, error in zip(groups, errors, strict=True)]


async def describe_group(store: Store, group: ErrorGroup, redaction: Redaction) -> ErrorGroupDetails:
    """Returns the document of a group with the traceback of the latest failure."""
    job = await store.query.get(group.latest)
    attempts = [] if job is None else redaction.redact_attempts(job, await store.query.attempts(job.id))
    traceback = attempts[-1].traceback if attempts else None
    shared = _group_document(group, None if job is None else redaction.redact_job(job).error)
    return ErrorGroupDetails(**msgspec.structs.asdict(shared), place=find_place(traceback), traceback=traceback)


def _group_document(group: ErrorGroup, error: str | None) -> ErrorGroupDocument:
    return ErrorGroupDocument(
        id=group.id,
        error=error,
        dead=group.dead,
        retrying=group.retrying,
        first_seen=format_timestamp(group.first_us),
        last_seen=format_timestamp(group.last_us),
        tasks=list(group.tasks),
        queues=list(group.queues),
        latest_job=group.latest,
        hours=[FailedHour(start=format_timestamp(start), number=number) for start, number in group.hours],
    )


GROUP = {
    "id": "5f0c9a41d2be",
    "error": "ConnectionRefusedError: [Errno 111]",
    "dead": 12,
    "retrying": 3,
    "first_seen": "2030-01-31T08:00:00.000000Z",
    "last_seen": "2030-01-31T08:00:00.000000Z",
    "tasks": ["email.send"],
    "queues": ["default"],
    "latest_job": "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77",
    "hours": [{"start": "2030-01-31T08:00:00.000000Z", "number": 15}],
}
"""Example of a group."""
