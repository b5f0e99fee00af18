"""Editing a job that waits."""

from __future__ import annotations

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.validation import check_name
from holdfast.tasks.codec import RawText
from holdfast.views.documents import JOB, JobDocument
from holdfast.web.bulk import EDITED_PAYLOAD, FROM_STEP
from holdfast.web.fields import BodySchema, at_most_one, client_field_names
from holdfast.web.jobs import find_job
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec
from holdfast.web.submissions import SUBMISSION, check_task, id_taken, read_back

_DOCS = {
    "queue": "Move it to this queue.",
    "delay": "A new time, so long from now; 0: at once.",
    "run_at": "A new time. Not together with `delay`.",
    "tags": "All its tags; an empty list takes them off.",
    "expires": 'Cancelled unless a worker takes it by then; "never": it does not expire.',
}
_FIELDS = ("priority", "queue", "delay", "run_at", "tags", "expires")
EDIT = BodySchema(
    name="JobEdit",
    doc="Changes of a job; at least one. What is left out stays.",
    fields=(
        EDITED_PAYLOAD,
        *(
            msgspec.structs.replace(field, doc=_DOCS.get(field.name, field.doc))
            for field in SUBMISSION.fields
            if field.name in _FIELDS
        ),
    ),
    refused=at_most_one("delay", "run_at"),
)

FORK = BodySchema(
    name="ForkRequest",
    doc="How to fork a job.",
    fields=(FROM_STEP, EDITED_PAYLOAD, *(field for field in SUBMISSION.fields if field.name == "id")),
)

_NAMES = [field.name for field in EDIT.fields]


async def edit_one(call: RequestContext) -> ApiResponse:
    """Change a job that waits."""
    job = await find_job(call, call.path["job_id"])
    if not call.body:
        raise Invalid("body", RawText("nothing"), f"give at least one of {', '.join(_NAMES)}", "says no change")
    if "payload" in call.body:
        check_task(call, job.task)
    if "queue" in call.body:
        call.caller.check_queue(check_name("queue", call.body["queue"]))
    with client_field_names():
        edited = await call.app.edit(job.id, **call.body)
    call.changed.append(job.id)
    return json_response(200, call.visible_job(edited))


async def fork_one(call: RequestContext) -> ApiResponse:
    """Submits a copy of a job that has ended."""
    job = await find_job(call, call.path["job_id"])
    if "payload" in call.body:
        check_task(call, job.task)
    with client_field_names():
        handle = await call.app.fork_job(job.id, **call.body)
    call.changed += [handle.id] if handle.created else []
    fork = await read_back(call.app, handle)
    if not call.caller.allows_queue(fork.queue):  # the id stood for a job of another queue
        raise id_taken()
    return json_response(201 if handle.created else 200, call.visible_job(fork))


OPERATIONS = (
    Operation(
        name="fork_job",
        method="POST",
        path="/v1/jobs/{job_id}/fork",
        scope="operate",
        group="Jobs",
        summary="Submit a copy of a job that has ended",
        doc="It keeps the steps before `from_step`, and takes the others anew; the first job stays as it is. It has "
        "the options of the first job, but neither its key, its unique key nor its batch.",
        handler=fork_one,
        body=FORK,
        answers={
            201: ResponseSpec(JobDocument, "The new job.", JOB),
            200: ResponseSpec(JobDocument, "The id stood for this job already.", JOB),
        },
        refusals=(404, 409),
    ),
    Operation(
        name="edit_job",
        method="PATCH",
        path="/v1/jobs/{job_id}",
        scope="operate",
        group="Jobs",
        summary="Change a job that waits",
        doc="A job that is queued, scheduled, failed or waiting is changed in place: a worker takes it with all of the "
        "changes, or they are refused. One that runs or has ended stays as it is, and the answer is 409.",
        handler=edit_one,
        body=EDIT,
        answers={200: ResponseSpec(JobDocument, "The job as it is now.", JOB)},
        refusals=(404, 409),
    ),
)
