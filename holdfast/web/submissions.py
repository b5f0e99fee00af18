"""Submission of one job or of a batch, all or nothing; limits of keys for some queues."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.app import Holdfast, JobHandle
from holdfast.app.workflows import read_dependency
from holdfast.core.batches import missing_batch
from holdfast.core.dependencies import Condition, missing_dependency
from holdfast.core.errors import Conflict, Invalid, NotFound, Unavailable
from holdfast.core.models import Job, JobState, NewJob
from holdfast.core.retry import Retry
from holdfast.tasks.codec import RawText
from holdfast.tasks.command_policy import COMMAND
from holdfast.views.documents import ID, JOB, JobDocument, JobId
from holdfast.web.fields import (
    KEY_VALUE,
    MAX_LIST,
    OBJECT,
    QUEUE_VALUE,
    TAG_VALUE,
    TASK_VALUE,
    BodySchema,
    Field,
    ValueType,
    any_value,
    array_value,
    at_most_one,
    check_object,
    client_field_names,
    missing_field,
    text_value,
    whole_number,
)
from holdfast.web.messages import ApiRequest, ApiResponse, Refusal, json_response
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

KEY_HEADER = "Idempotency-Key"
_TRIES = 5  # to submit, if the job with the same key is deleted meanwhile


def _retry(value: Any, field: str) -> Retry:
    if isinstance(value, str):
        return Retry.parse(text_value(1, 200).check(value, field))
    return Retry.from_builtins(check_object(value, field))


def _attempts(value: Any, field: str) -> Any:
    value = whole_number(value)
    if value != "unlimited" and (isinstance(value, bool) or not isinstance(value, int)):
        raise Invalid(field, value, 'give a whole number, or "unlimited"')
    return value


_SPAN = ValueType({"type": ["number", "string"], "minimum": 0, "maxLength": 40}, any_value)
EXPIRY = ValueType(
    {
        "type": ["number", "string"],
        "exclusiveMinimum": 0,
        "maxLength": 40,
        "description": 'Seconds, a span such as "10m", an instant as RFC 3339 with its offset, or "never".',
    },
    any_value,
)
_ATTEMPTS = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 25}, {"type": "string", "const": "unlimited"}]}
_UNIQUE = {
    "type": ["string", "number", "object"],
    "minLength": 1,
    "maxLength": 40,
    "properties": {
        "during": {"type": ["string", "number"], "description": '"unstarted", "active", or a span such as "10m".'},
        "by": {"type": "array", "items": {"type": "string", "pattern": "^(task|queue|args([.][^.]+)*)$"}},
        "on_conflict": {"type": "string", "pattern": "^(keep|replace|reschedule)$", "default": "keep"},
    },
    "required": ["during"],
    "additionalProperties": False,
}
_DEPENDENCY = ValueType(
    {
        "anyOf": [
            {"type": "string", "format": "uuid"},
            {
                "type": "object",
                "properties": {
                    "job_id": {"type": "string", "format": "uuid"},
                    "on": {"type": "string", "pattern": f"^({'|'.join(Condition)})$", "default": "success"},
                },
                "required": ["job_id"],
                "additionalProperties": False,
            },
        ]
    },
    read_dependency,
)
ID_VALUE = ValueType({"type": "string", "format": "uuid"}, any_value)
SUBMISSION = BodySchema(
    name="Submission",
    doc="A job to be stored. Defaults come from its task, else from the settings.",
    fields=(
        Field("task", TASK_VALUE, "The task's name.", example="email.send", required=True),
        Field("payload", OBJECT, "The arguments by name.", example={"to": "a@b.c"}, required=True),
        Field("queue", QUEUE_VALUE._replace(check=any_value), "The queue it waits in.", example="default"),
        Field(
            "priority",
            ValueType({"type": "integer", "minimum": -100, "maximum": 100}, whole_number),
            "Higher runs first.",
            example=0,
        ),
        Field("delay", _SPAN, 'Not before this long from now: seconds, or "5m".', example=60),
        Field(
            "run_at",
            ValueType({"type": "string", "format": "date-time"}, any_value),
            "Not before this instant: RFC 3339 with its offset, from 2000 to 2199. Not together with `delay`.",
            example="2030-01-31T08:00:00Z",
        ),
        Field("key", KEY_VALUE, "An idempotency key; the header goes before it.", example="welcome-42"),
        Field("key_for", _SPAN, "How long the key lives at least; it lives as long as its job's row anyway."),
        Field(
            "unique",
            ValueType(_UNIQUE, any_value),
            "At most one job for the same work: while one is unstarted, while one is active, or for a span; or an "
            "object with `during`, `by` and `on_conflict`.",
            example="active",
        ),
        Field("expires", EXPIRY, "Cancelled unless a worker takes it by then.", example="10m"),
        Field(
            "max_attempts",
            ValueType(_ATTEMPTS, _attempts),
            'Executions it may have, up to max_attempts_limit; "unlimited" if that setting is.',
            example=5,
        ),
        Field(
            "timeout",
            ValueType({"type": ["number", "string"], "exclusiveMinimum": 0}, any_value),
            "What one attempt may take.",
            example=30,
        ),
        Field(
            "retry",
            ValueType({"type": ["string", "object"], "minLength": 1, "maxLength": 200}, _retry),
            "When to try again, as a job shows it, or as text: `exponential:base=5`, `fixed:3`, `immediate`, `1,5m`.",
            example="exponential:base=5",
        ),
        Field("tags", array_value(TAG_VALUE, 100, least=0), "Words to find it by.", example=["spring"]),
        Field("metadata", OBJECT, "Your own, kept with the job; at most 16 KiB."),
        Field(
            "after",
            array_value(_DEPENDENCY, MAX_LIST),
            "Jobs that must have ended first: ids, or objects with `job_id` and `on` (success, failure or end), of "
            "stored jobs or of earlier ones of the batch with an own `id`. Not together with `delay` or `run_at`.",
            example=[ID],
        ),
        Field("batch", ID_VALUE, "The batch of which it is a member; that must not have ended.", example=ID),
        Field("id", ID_VALUE, "An id of your own making; the same id again is harmless."),
    ),
    refused=at_most_one("delay", "run_at"),
)
BATCH = BodySchema(
    name="SubmissionBatch",
    doc="Jobs to be stored together: all of them or none.",
    fields=(
        Field(
            "jobs",
            array_value(SUBMISSION.reference, MAX_LIST),
            "The jobs, in their order.",
            example=[{"task": "email.send", "payload": {"to": "a@b.c"}, "key": "welcome-42"}],
            required=True,
        ),
    ),
    inner=(SUBMISSION,),
)
_HEADER = Field(
    KEY_HEADER, KEY_VALUE, "At most one job exists for a key; it goes before the body's.", example="welcome-42"
)


WakeUp = Annotated[
    Literal["delayed"] | UnsetType,
    Meta(
        title="WakeUp",
        description="There where the transport could not be notified: the job is stored, and the next sweep finds it.",
    ),
]


TaskWarning = Annotated[
    str | UnsetType,
    Meta(description="There where the application of this API lacks the task: its name may be misspelt."),
]


class SubmittedJob(JobDocument, frozen=True, kw_only=True):
    """The job that was submitted."""

    wake_up: WakeUp = UNSET
    warning: TaskWarning = UNSET


class BatchEntry(msgspec.Struct, frozen=True):
    """A job of a batch."""

    id: JobId
    created: Annotated[bool, Meta(description="false: its key or id stood for this job already.")]
    wake_up: WakeUp = UNSET
    warning: TaskWarning = UNSET


class SubmittedBatch(msgspec.Struct, frozen=True):
    """The jobs of a batch, in its order."""

    jobs: list[BatchEntry]


async def submit(call: RequestContext) -> ApiResponse:
    """Store one job; when the answer is there, it is stored."""
    key = header_key(call.request)
    if key is None and call.app.settings.key_required and "key" not in call.body:
        raise missing_field(KEY_HEADER, "send one; the settings require it")
    asked = draft_submission(call.app, call.body, key=key)
    handle, job = await submit_job(call, asked)
    location = (b"location", f"{quote(call.request.root_path)}/v1/jobs/{handle.id}".encode())
    answer = SubmittedJob(
        **msgspec.structs.asdict(call.visible_job(job, own=handle.created)),
        wake_up=_wake_up(handle),
        warning=_warning(call, handle, asked),
    )
    return json_response(201 if handle.created else 200, answer, location)


async def submit_job(call: RequestContext, new: NewJob) -> tuple[JobHandle[Any], Job]:
    """Stores the job if the caller may submit it. Returns its handle, and the job as the answer shows it."""
    handle, job = await submit_authorized(call, [new], lambda: _store_job(call.app, new), lambda stored: [stored[0]])
    call.unknown_tasks.record_jobs([new])
    call.changed += [handle.id] if handle.created else []
    return handle, job


async def _store_job(app: Holdfast, new: NewJob) -> tuple[JobHandle[Any], Job]:
    """Store the job. Returns a new one as it was stored, although it may run already, and a known one as it is now."""
    for _ in range(_TRIES):
        handle = await app.submit(new)
        if handle.stored_at_us is not None and not new.after:
            return handle, as_stored(new, now_us=handle.stored_at_us)
        try:
            job = await app.get(handle.id)
        except (NotFound, Unavailable) as error:
            if handle.created:  # by this host's clock: the store is unavailable, or a round trip is not worthwhile
                now_us = app.now() if app.now is not None else time.time_ns() // 1000
                return handle, as_stored(new, now_us=now_us)
            if isinstance(error, Unavailable):
                raise _unread_job(handle, error) from None
        else:
            show_as_stored = handle.created and not new.after
            return handle, as_stored(new, now_us=job.created_at_us) if show_as_stored else job
    outcome = "the jobs that this key stood for were deleted one after the other while it was submitted"
    raise Unavailable(outcome, outcome=outcome)


async def read_back(app: Holdfast, handle: JobHandle[Any]) -> Job:
    """Returns the job that was just submitted; raises Unavailable, which says that it was, if it cannot be read."""
    try:
        return await app.get(handle.id)
    except (NotFound, Unavailable) as error:
        raise _unread_job(handle, error) from None


def _unread_job(handle: JobHandle[Any], error: Exception) -> Unavailable:
    outcome = f"job {handle.id} was stored, but could not be read back"
    return Unavailable(f"{outcome}: {error}", outcome=outcome)


def as_stored(new: NewJob, *, now_us: int) -> Job:
    """A job at the moment it was stored."""
    delayed = now_us + new.delay // timedelta(microseconds=1) if new.delay is not None else now_us
    run_at_us = max(now_us, delayed if new.run_at_us is None else new.run_at_us)
    span = new.expires_in
    return Job(
        id=new.id,
        task=new.task,
        queue=new.queue,
        payload=new.payload,
        claims=now_us if new.has_client_id else 0,
        attempts=0,
        max_attempts=new.max_attempts,
        priority=new.priority,
        lost_leases=0,
        run_at_us=run_at_us,
        created_at_us=now_us,
        options=new.options,
        state=JobState.QUEUED if run_at_us <= now_us else JobState.SCHEDULED,
        key=new.key,
        expires_at_us=new.expires_at_us if span is None else now_us + span // timedelta(microseconds=1),
    )


def _wake_up(handle: JobHandle[Any]) -> Literal["delayed"] | UnsetType:
    return "delayed" if handle.wake_up_delayed else UNSET


def _warning(call: RequestContext, handle: JobHandle[Any], job: NewJob) -> str | UnsetType:
    if not handle.created:
        return UNSET
    return call.unknown_tasks.warning_for(job.task, suggests=not call.caller.is_restricted) or UNSET


def header_key(request: ApiRequest) -> str | None:
    """The idempotency key of the header, if there is one."""
    raw = request.headers.get(b"idempotency-key")
    if raw is None:
        return None
    if b"idempotency-key" in request.repeated:
        raise Invalid(KEY_HEADER, RawText("several"), "send one", "were given", code="duplicate_key")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Invalid(KEY_HEADER, raw.decode("latin-1"), "send UTF-8", code="invalid_unicode") from None
    return str(KEY_VALUE.check(text, KEY_HEADER))


def draft_submission(app: Holdfast, given: Mapping[str, Any], path: str = "", key: str | None = None) -> NewJob:
    """The job a submission stands for; Invalid names the field, with ``path`` before it."""
    options = SUBMISSION.read(given, path)
    if key is not None:
        options["key"] = key
    with client_field_names(path):
        return app.draft_job(options.pop("task"), options.pop("payload"), **options)


async def submit_batch(call: RequestContext) -> ApiResponse:
    """Store a batch in one transaction."""
    if header_key(call.request) is not None:
        raise Invalid(KEY_HEADER, RawText("a key for a batch"), "give each job of the batch its own key", "was given")
    jobs = [draft_submission(call.app, given, f"jobs[{index}].") for index, given in enumerate(call.body["jobs"])]
    for index, job in enumerate(jobs):
        if call.app.settings.key_required and job.key is None:
            raise missing_field(f"jobs[{index}].key", "give one; the settings require it")
    try:
        handles = await submit_authorized(call, jobs, lambda: call.app.enqueue_many(jobs, batch_size=MAX_LIST), list)
    except Invalid as error:  # it may be of a job for which another waits, or of a batch
        related = [error.value in (job.batch or "", *(each.job_id for each in job.after)) for job in jobs]
        with client_field_names(f"jobs[{related.index(True)}]." if True in related else ""):
            raise
    call.unknown_tasks.record_jobs(jobs)
    call.changed += [handle.id for handle in handles if handle.created]
    entries = [
        BatchEntry(handle.id, handle.created, _wake_up(handle), _warning(call, handle, job))
        for handle, job in zip(handles, jobs, strict=True)
    ]
    return json_response(201 if any(handle.created for handle in handles) else 200, SubmittedBatch(entries))


OPERATIONS = (
    Operation(
        name="submit_job",
        method="POST",
        path="/v1/jobs",
        scope="submit",
        group="Jobs",
        summary="Submit a job",
        doc="When the answer is there, the job is stored. 201 shows it as it was stored, before any attempt. A key "
        "that stands for a job already answers 200 with that job as it is now, whatever the body says; with the "
        "setting `strict_idempotency` a different submission is a conflict.",
        handler=submit,
        headers=(_HEADER,),
        body=SUBMISSION,
        raw=True,
        answers={
            201: ResponseSpec(SubmittedJob, "The job was stored.", JOB),
            200: ResponseSpec(SubmittedJob, "The key or the id stood for this job already.", JOB),
        },
        refusals=(409,),
    ),
    Operation(
        name="submit_jobs",
        method="POST",
        path="/v1/jobs/batch",
        scope="submit",
        group="Jobs",
        summary="Submit many jobs",
        doc=f"All of them or none, at most {MAX_LIST:,}; on Redis each 200 of them. A conflict with what another "
        "client submits in the same instant, or deletes, is found when others are stored, and Redis may be full after "
        "the first 200; `stored` of the problem has the ids of what is stored.",
        handler=submit_batch,
        body=BATCH,
        batch=True,
        answers={
            201: ResponseSpec(SubmittedBatch, "The jobs were stored.", {"jobs": [{"id": ID, "created": True}]}),
            200: ResponseSpec(SubmittedBatch, "Every job was there already.", {"jobs": [{"id": ID, "created": False}]}),
        },
        refusals=(409,),
    ),
)


T = TypeVar("T")
Handle = JobHandle[Any]
_MAX_LOOKUP = 100  # jobs that are asked for together: each may have a large payload


def check_task(call: RequestContext, task: str) -> None:
    """A command job is a program of the caller's choosing: only ``admin`` may choose one."""
    if task == COMMAND and not call.caller.has_scope("admin"):
        raise Refusal(403, "forbidden", "a command job needs the scope admin", "use a key with scope admin")


async def submit_authorized(
    call: RequestContext,
    jobs: Sequence[NewJob],
    store: Callable[[], Awaitable[T]],
    handles_of: Callable[[T], Sequence[Handle]],
) -> T:
    """Stores these jobs if the caller may submit all of them. ``handles_of``: their handles in the answer.

    A key, or an id, that stands for a job in another's queue is a conflict which says nothing of that job. Who takes
    a key for one in the same instant is found afterwards; then the conflict says what is stored all the same.
    """
    for job in jobs:
        call.caller.check_queue(job.queue)
        check_task(call, job.task)
    if not call.caller.is_restricted:
        return await store()
    await _check_related(call, jobs)
    if await _is_taken(call, jobs):
        raise id_taken()
    try:
        answer = await store()
    except Conflict as error:
        if await _is_taken(call, jobs):  # it may name a job that came in between
            raise id_taken(error.stored) from None
        raise
    handles = handles_of(answer)
    if await _is_foreign(call, [handle.id for handle in handles if not handle.created]):
        raise id_taken([handle.id if handle.created else None for handle in handles])
    return answer


def id_taken(stored: Sequence[str | None] = ()) -> Conflict:
    """Returns the refusal of a key, or an id, that stands for a job of a foreign queue; it names no job."""
    error = Conflict("the key, or the id, of a job stands for something else already; use another")
    error.stored = stored
    return error


async def _check_related(call: RequestContext, jobs: Sequence[NewJob]) -> None:
    """Refuses jobs that wait for one in another's queue, and members of such a batch, as if it were not there."""
    own = {job.id for job in jobs}
    related = {each.job_id: "after" for job in jobs for each in job.after if each.job_id not in own}
    related |= {job.batch: "batch" for job in jobs if job.batch is not None and job.batch not in own}
    ids = [*related]
    for start in range(0, len(ids), _MAX_LOOKUP):
        piece = ids[start : start + _MAX_LOOKUP]
        for job_id, job in zip(piece, await (await call.app.open_store()).query.summaries(piece), strict=True):
            if job is not None and not call.caller.allows_queue(job.queue):
                raise missing_batch(job_id) if related[job_id] == "batch" else missing_dependency(job_id)


async def _is_taken(call: RequestContext, jobs: Sequence[NewJob]) -> bool:
    """Returns True if one of the keys, or of the ids that the caller gave, is that of a job in another's queue."""
    if await _is_foreign(call, [job.id for job in jobs if job.has_client_id]):
        return True
    store = await call.app.open_store()
    keys = [job.key for job in jobs if job.key is not None]
    for start in range(0, len(keys), _MAX_LOOKUP):
        found = await store.query.by_keys(keys[start : start + _MAX_LOOKUP])
        if any(job is not None and not call.caller.allows_queue(job.queue) for job in found):
            return True
    return False


async def _is_foreign(call: RequestContext, ids: Sequence[str]) -> bool:
    """Returns True if one of these ids is that of a job in another's queue."""
    if not ids:
        return False
    found = await (await call.app.open_store()).query.summaries(ids)
    return any(job is not None and not call.caller.allows_queue(job.queue) for job in found)
