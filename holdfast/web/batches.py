"""Batches: jobs that end when all their members have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.app.batches import draft_batch
from holdfast.core.dependencies import Condition
from holdfast.core.models import JobState, NewJob
from holdfast.views.documents import ID, JobId
from holdfast.views.workflows import BatchDocument
from holdfast.web.fields import MAX_LIST, OBJECT, QUEUE_VALUE, TAG_VALUE, BodySchema, Field, array_value, missing_field
from holdfast.web.jobs import find_job
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec
from holdfast.web.submissions import ID_VALUE, SUBMISSION, draft_submission, submit_authorized

_CALLBACKS = {
    "on_success": (Condition.SUCCESS, "Jobs that start when all jobs of the batch have succeeded."),
    "on_failure": (Condition.FAILURE, "Jobs that start when the first job of the batch has failed."),
    "on_end": (Condition.END, "Jobs that start when all jobs of the batch have ended."),
}
NEW_BATCH = BodySchema(
    name="NewBatch",
    doc="A batch with its jobs and callbacks, stored together: all of them or none.",
    fields=(
        Field(
            "jobs",
            array_value(SUBMISSION.reference, MAX_LIST),
            "The first jobs of the batch. Its jobs may submit further ones with its id as their `batch`.",
            example=[{"task": "email.send", "payload": {"to": "a@b.c"}}],
            required=True,
        ),
        *[
            Field(name, array_value(SUBMISSION.reference, 100, least=0), f"{text} Each at most once.")
            for name, (_, text) in _CALLBACKS.items()
        ],
        Field("id", ID_VALUE, "An id of your own making; the same batch with the same id again is harmless."),
        Field("batch", ID_VALUE, "Another batch of which it is a member.", example=ID),
        Field("queue", QUEUE_VALUE, "By default that of its first job.", example="default"),
        Field("tags", array_value(TAG_VALUE, 100, least=0), "Words to find it by.", example=["spring"]),
        Field("metadata", OBJECT, "Your own, kept with the batch; at most 16 KiB."),
    ),
    inner=(SUBMISSION,),
)


class SubmittedJobs(msgspec.Struct, frozen=True):
    """A batch that was submitted, and the ids of its first jobs, in their order."""

    id: JobId
    created: Annotated[bool, Meta(description="false: its id stood for this batch already.")]
    jobs: list[JobId]


class BatchState(BatchDocument, frozen=True, kw_only=True):
    """State and progress of a batch."""

    id: JobId
    state: JobState


async def create_batch(call: RequestContext) -> ApiResponse:
    """Stores a batch."""
    body = call.body
    if call.app.settings.key_required and "id" not in body:
        raise missing_field("id", "give one; the settings require idempotency")
    members = _draft_jobs(call, body, "jobs")
    callbacks = [(condition, _draft_jobs(call, body, name)) for name, (condition, _) in _CALLBACKS.items()]
    jobs = draft_batch(
        members,
        callbacks,
        id=body.get("id"),
        batch=body.get("batch"),
        queue=body.get("queue"),
        tags=body.get("tags", ()),
        metadata=body.get("metadata"),
    )
    handles = await submit_authorized(call, jobs, lambda: call.app.enqueue_many(jobs, batch_size=len(jobs)), list)
    call.unknown_tasks.record_jobs(jobs[1:])
    call.changed += [handle.id for handle in handles if handle.created]
    answer = SubmittedJobs(handles[0].id, handles[0].created, [each.id for each in handles[1 : len(members) + 1]])
    return json_response(201 if handles[0].created else 200, answer)


def _draft_jobs(call: RequestContext, body: Mapping[str, Any], field: str) -> list[NewJob]:
    return [draft_submission(call.app, given, f"{field}[{n}].") for n, given in enumerate(body.get(field, ()))]


async def show_batch(call: RequestContext) -> ApiResponse:
    """Returns the progress of a batch."""
    job = await find_job(call, call.path["job_id"])
    found = await call.app.read_batch(job.id)
    return json_response(200, BatchState(found.members, found.ended, found.failed, id=job.id, state=job.state))


OPERATIONS = (
    Operation(
        name="create_batch",
        method="POST",
        path="/v1/batches",
        scope="submit",
        group="Workflows",
        summary="Submit a batch of jobs with callbacks",
        doc="The batch is a job without a handler. It succeeds when all its jobs have; else it is dead when the last "
        "one has ended. On Redis each 200 jobs are stored together, and the batch ends when all are.",
        handler=create_batch,
        body=NEW_BATCH,
        batch=True,
        answers={
            201: ResponseSpec(SubmittedJobs, "The batch was stored.", {"id": ID, "created": True, "jobs": [ID]}),
            200: ResponseSpec(SubmittedJobs, "It was there already.", {"id": ID, "created": False, "jobs": [ID]}),
        },
        refusals=(409,),
    ),
    Operation(
        name="show_batch",
        method="GET",
        path="/v1/batches/{job_id}",
        scope="read",
        group="Workflows",
        summary="Show the progress of a batch",
        doc="Its numbers are counted as its jobs end: the answer takes no longer for a large batch.",
        handler=show_batch,
        answers={
            200: ResponseSpec(
                BatchState, "The batch.", {"id": ID, "state": "waiting", "members": 100, "ended": 42, "failed": 1}
            )
        },
        refusals=(404,),
    ),
)
