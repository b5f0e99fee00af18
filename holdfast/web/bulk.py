"""Cancel, replay and delete: one job, or all jobs selected by ids or a filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.app import Holdfast
from holdfast.app.handle import find_ids, refused_state
from holdfast.core.errors import Busy, Conflict, Invalid, TooBroad, Unavailable
from holdfast.core.ids import parse_id
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.validation import LONGEST, RATE_PATTERN, check_key, parse_rate
from holdfast.stores.common.requests import CHOICE_SECONDS
from holdfast.stores.common.searches import UNSUCCESSFUL
from holdfast.tasks.codec import RawText
from holdfast.views.bulk_operations import CANCEL, DELETE, BulkOperation, PacedCalls, by_state, replay_operation
from holdfast.views.documents import ID, JOB, JobDocument, JobSnapshot
from holdfast.web.fields import (
    FILTERS,
    OBJECT,
    BodySchema,
    Field,
    ValueType,
    array_value,
    at_most_one,
    boolean_value,
    client_field_names,
    integer_value,
    none_of,
    seconds_value,
    text_value,
)
from holdfast.web.jobs import find_job, parse_filter
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.routing import Handler, Operation, RequestContext, ResponseSpec
from holdfast.web.submissions import check_task

MAX_JOBS = 1000
"""Jobs that one call changes."""
_MAX_COUNTED = 1_000_000  # jobs that a dry run counts
_MAX_DELAY = int(LONGEST.total_seconds())


class BulkAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an operation on many jobs, or of its dry run."""

    dry_run: bool
    count: Annotated[int, Meta(description="Jobs that were changed, or would be.", ge=0)]
    changed: Annotated[list[JobSnapshot], Meta(description="Those jobs as they are now; none for a dry run.")]
    refused: Annotated[
        list[JobSnapshot], Meta(description="Named jobs whose state does not allow it, or that are not there.")
    ]
    more: Annotated[bool, Meta(description="Matching jobs are left: call again. Of a dry run: more than it counted.")]
    seconds: Annotated[
        float,
        Meta(
            description="With a rate, how long until the next would be ready: `after` of the call that goes on.", ge=0
        ),
    ] = 0.0


def _one_or_many(field: Field) -> Field:
    """Returns the field for a body, which may hold one value or several."""
    if not field.many:
        return field
    one, several = field.value, array_value(field.value, 100)

    def check_value(value: Any, name: str) -> list[Any]:
        return [one.check(value, name)] if isinstance(value, str) else several.check(value, name)

    return msgspec.structs.replace(
        field, value=ValueType({"anyOf": [one.schema, several.schema]}, check_value), many=False
    )


FILTER = BodySchema(
    name="JobFilter", doc="Every field that is given must match.", fields=tuple(map(_one_or_many, FILTERS))
)


def _only_true(value: Any, field: str) -> bool:
    if value is not True:
        raise Invalid(field, value, "give true, or leave the field out")
    return True


def _check_rate(value: Any, field: str) -> str:
    parse_rate(value, field)
    return str(value)


def _check_reference(text: str, field: str) -> str:
    if text.startswith("key:"):
        check_key(text.removeprefix("key:"), field)
    elif parse_id(text) is None:
        raise Invalid(field, text, "give a job's id (a UUID or ULID), or key: and its idempotency key")
    return text


def _filter(value: Any, field: str) -> dict[str, Any]:
    """Parses a filter. Refuses an empty one: ``all`` selects every job."""
    read: dict[str, Any] = FILTER.value.check(value, field)
    if not read:
        raise Invalid(field, RawText("an empty object"), "name a field in it, or say all: true in its place")
    return read


LIMIT = Field(
    "limit", integer_value(1, MAX_JOBS, default=MAX_JOBS), "Jobs this call changes at most.", example=MAX_JOBS
)
DRY_RUN = Field("dry_run", boolean_value(False), "Only count.", example=True)
_FORCE = Field("force", boolean_value(False), "Also what has succeeded.", example=False)
RATE = Field(
    "rate",
    ValueType({"type": "string", "pattern": RATE_PATTERN}, _check_rate),
    "How many become ready in a second, minute (`m`), hour or day; the others are `scheduled` until then.",
    example="10/s",
)
AFTER = Field(
    "after",
    ValueType(
        {"type": "number", "minimum": 0, "maximum": _MAX_DELAY, "default": 0},
        lambda value, field: seconds_value(_MAX_DELAY).check(value, field).total_seconds(),
    ),
    "Seconds until the first is ready: for a call that continues at a `rate`, the `seconds` of the call before.",
    example=0,
)
EDITED_PAYLOAD = Field("payload", OBJECT, "Edited arguments; leave it out to keep them.", example={"to": "a@b.c"})
_SELECTION = (
    Field(
        "ids",
        array_value(text_value(1, 600, _check_reference), MAX_JOBS),
        "These jobs, each by its id or `key:NAME`.",
        example=[ID],
    ),
    Field(
        "filter",
        ValueType({**FILTER.reference.schema, "minProperties": 1}, _filter),
        "The jobs that match; at least one field.",
    ),
    Field("all", ValueType({"type": "boolean", "const": True}, _only_true), "Every job there is."),
    DRY_RUN,
    LIMIT,
)
_SELECTORS = ("ids", "filter", "all")
_NOT_EXACTLY_ONE = (*at_most_one(*_SELECTORS), none_of(*_SELECTORS))
SELECTION = BodySchema(
    name="JobSelection",
    doc="Which jobs: give `ids`, `filter` or `all`.",
    fields=_SELECTION,
    inner=(FILTER,),
    refused=_NOT_EXACTLY_ONE,
)
REPLAY = BodySchema(
    name="ReplayRequest",
    doc="Which jobs: give `ids`, `filter` or `all`.",
    fields=(*_SELECTION, _FORCE, RATE, AFTER),
    inner=(FILTER,),
    refused=_NOT_EXACTLY_ONE,
)
FROM_STEP = Field("from_step", text_value(1, 300), "This step and those behind it are forgotten, and taken again.")
REPLAY_ONE = BodySchema(name="ReplayJobRequest", doc="How to replay a job.", fields=(_FORCE, EDITED_PAYLOAD, FROM_STEP))
NOTHING = BodySchema(name="EmptyBody", doc="An empty object.", fields=())


# ── one job ───────────────────────────────────────────────────────────────────────────────────────────────────────
async def cancel_one(call: RequestContext) -> ApiResponse:
    """Cancels a job that has not started, or asks a running one to stop."""
    job = await find_job(call, call.path["job_id"])
    await call.app.cancel_one(job.id)
    call.changed.append(job.id)
    return json_response(200, call.visible_job(await call.app.get(job.id)))


async def replay_one(call: RequestContext) -> ApiResponse:
    """Queue a job again."""
    return await replay_job(call, await find_job(call, call.path["job_id"]))


async def replay_job(call: RequestContext, job: Job) -> ApiResponse:
    """Replays a job with the options of the body; returns the answer."""
    force, payload = call.body.get("force", False), call.body.get("payload")
    if payload is not None:
        check_task(call, job.task)
    try:
        with client_field_names():
            await call.app.replay_one(job.id, force=force, payload=payload, from_step=call.body.get("from_step"))
    except Conflict:
        holder = await call.app.unique_holder(job.id) if call.caller.is_restricted else None
        if holder is not None and not call.caller.allows_queue(holder.queue):
            advice = "another job has the same unique key; replay it when that one gives it up"
            raise Conflict(f"job {job.id} cannot be replayed: {advice}") from None
        raise
    call.changed.append(job.id)
    return json_response(200, call.visible_job(await call.app.get(job.id)))


async def delete_one(call: RequestContext) -> ApiResponse:
    """Delete a job that is not running."""
    job = await find_job(call, call.path["job_id"])
    states = call.query.get("state")
    operated = await call.app.delete(job.id, states=states and [*map(JobState, states)])
    if not operated.changed:
        state = refused_state(operated)  # raises NotFound if it is gone
        why = f"it is {state} now" if state in DELETE.legal else DELETE.advice
        raise Conflict(f"job {job.id} cannot be deleted: {why}")
    call.changed.append(job.id)
    return ApiResponse(204)


# ── many ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _on_many(change: BulkOperation | None) -> Handler:
    async def handle(call: RequestContext) -> ApiResponse:
        done = change or replay_operation(force=call.body.get("force", False), rate=call.body.get("rate"))
        return json_response(200, await run_bulk(call, done, call.body))

    return handle


async def run_bulk(
    call: RequestContext, change: BulkOperation, provided: Mapping[str, Any], states: Sequence[JobState] = ()
) -> BulkAnswer:
    """Changes the selected jobs, or counts them. ``states``: used if the filter names none."""
    ids = provided.get("ids")
    selectors = [name for name in _SELECTORS if name in provided]
    if len(selectors) != 1:
        remedy = "give exactly one of ids, filter and all"
        raise Invalid("body", RawText(" and ".join(selectors) or "nothing"), remedy, "does not say which jobs")
    limit, dry_run = provided.get("limit", MAX_JOBS), provided.get("dry_run", False)
    pace = PacedCalls(change, timedelta(seconds=provided.get("after", 0)))
    if ids is not None:
        return await _change_named(call, change, pace, ids, dry_run=dry_run)
    filters = by_state(await parse_filter(call, provided.get("filter") or {}, tuple(states)), change.legal)
    if dry_run:
        return await _count_matching(call.app, pace, filters)
    return await _change_matching(call, change, pace, filters, limit)


async def _change_named(
    call: RequestContext, change: BulkOperation, pace: PacedCalls, references: Sequence[str], *, dry_run: bool
) -> BulkAnswer:
    own, others = await _find_jobs(call, references)
    if dry_run:
        return _dry_run_answer(sum(map(change.can_change, own)), pace, len(own))
    operated = await getattr(call.app, change.name)([job.id for job in own], limit=MAX_JOBS, **pace.batch_options())
    call.changed += [job_id for job_id, _ in operated.changed]
    pace.pace_batch(len(own))  # refused jobs count too
    return _answer(operated.changed, [*operated.refused, *others], pace, more=False)


async def _find_jobs(call: RequestContext, references: Sequence[str]) -> tuple[list[Job], list[tuple[str, None]]]:
    """Returns the jobs that the references name, in queues of the caller, and the references to no such job. Reads no
    payloads: a thousand may exceed the memory."""
    store = await call.app.open_store()
    ids = await find_ids(store, references)
    jobs = await store.query.summaries(list(dict.fromkeys(filter(None, ids.values()))))
    own = {job.id: job for job in jobs if job is not None and call.caller.allows_queue(job.queue)}
    return list(own.values()), [(each, None) for each, job_id in ids.items() if job_id not in own]


async def _count_matching(app: Holdfast, pace: PacedCalls, filters: Sequence[JobFilter]) -> BulkAnswer:
    """Counts matching jobs. Raises TooBroad or Busy only if the change would; a slow count sets ``more``."""
    store, number, more = await app.open_store(), 0, False
    for job_filter in _merge_filters(filters):
        try:
            found = await store.query.count(job_filter, limit=MAX_JOBS, seconds=CHOICE_SECONDS)
        except (TooBroad, Busy):
            if not number:
                raise
            found, more = 0, True
        if found == MAX_JOBS:
            try:
                found = await store.query.count(job_filter, limit=_MAX_COUNTED + 1, seconds=CHOICE_SECONDS)
            except (TooBroad, Busy):
                more = True
        number += found
    counted = min(number, _MAX_COUNTED)
    return _dry_run_answer(counted, pace, counted, more=more or number > _MAX_COUNTED)


def _merge_filters(filters: Sequence[JobFilter]) -> list[JobFilter]:
    """Merges filters by index: dead and cancelled jobs have one, other states another."""
    states = [state for job_filter in filters for state in job_filter.states]
    groups = [tuple(state for state in states if (state in UNSUCCESSFUL) is few) for few in (True, False)]
    return [msgspec.structs.replace(filters[0], states=group) for group in groups if group]


def _dry_run_answer(number: int, pace: PacedCalls, passed: int, *, more: bool = False) -> BulkAnswer:
    pace.pace_batch(passed)
    return BulkAnswer(dry_run=True, count=number, changed=[], refused=[], more=more, seconds=pace.after.total_seconds())


async def _change_matching(
    call: RequestContext, change: BulkOperation, pace: PacedCalls, filters: Sequence[JobFilter], limit: int
) -> BulkAnswer:
    """Changes at most ``limit`` matching jobs, one state after the other."""
    changed: list[tuple[str, JobState]] = []
    for position, job_filter in enumerate(filters):
        try:
            left = limit - len(changed)
            operated = await getattr(call.app, change.name)(job_filter, limit=left, **pace.batch_options())
        except (TooBroad, Unavailable):
            if not changed:
                raise
            return _answer(changed, [], pace, more=True)
        changed += operated.changed
        call.changed += [job_id for job_id, _ in operated.changed]
        pace.pace_batch(len(operated.changed))
        if operated.more or len(changed) >= limit:
            more = operated.more or await _is_any_left(call.app, filters[position + 1 :])
            return _answer(changed, [], pace, more=more)
    return _answer(changed, [], pace, more=False)


async def _is_any_left(app: Holdfast, filters: Sequence[JobFilter]) -> bool:
    """Returns True if more jobs match, or if the count fails: the next call finds out."""
    try:
        store = await app.open_store()
        for job_filter in filters:
            if await store.query.count(job_filter, limit=1):
                return True
    except (TooBroad, Unavailable):
        return True
    return False


def _answer(
    changed: Sequence[tuple[str, JobState]],
    refused: Sequence[tuple[str, JobState | None]],
    pace: PacedCalls,
    *,
    more: bool,
) -> BulkAnswer:
    return BulkAnswer(
        dry_run=False,
        count=len(changed),
        changed=[JobSnapshot(id=job_id, state=state) for job_id, state in changed],
        refused=[JobSnapshot(id=job_id, state=state) for job_id, state in refused],
        more=more,
        seconds=pace.after.total_seconds(),
    )


def _example(state: str) -> dict[str, Any]:
    changed = [{"id": ID, "state": state}]
    return {"dry_run": False, "count": 1, "changed": changed, "refused": [], "more": False, "seconds": 0}


def job_operation(
    name: str, handler: Handler, summary: str, body: BodySchema, *, path: str = "", example: Any = JOB
) -> Operation:
    """Returns an operation on one job, which answers with the job."""
    return Operation(
        name=name,
        method="POST",
        path=path or f"/v1/jobs/{{job_id}}/{name.removesuffix('_job')}",
        scope="operate",
        group="Jobs",
        summary=summary,
        handler=handler,
        body=body,
        body_optional=True,
        answers={200: ResponseSpec(JobDocument, "The job as it is now.", example)},
        refusals=(404, 409),
    )


def _on_selection(name: str, change: BulkOperation | None, summary: str, body: BodySchema, state: str) -> Operation:
    return Operation(
        name=f"{name}_jobs",
        method="POST",
        path=f"/v1/jobs/{name}",
        scope="operate",
        group="Jobs",
        summary=summary,
        doc=f"At most {MAX_JOBS:,} a call; `more` says whether to call again. `dry_run` only counts.",
        handler=_on_many(change),
        body=body,
        answers={200: ResponseSpec(BulkAnswer, "What was done.", _example(state))},
    )


OPERATIONS = (
    job_operation("cancel_job", cancel_one, "Cancel a job that waits, or ask one that runs to stop", NOTHING),
    job_operation(
        "replay_job", replay_one, "Queue a dead, failed or cancelled job again with all attempts", REPLAY_ONE
    ),
    Operation(
        name="delete_job",
        method="DELETE",
        path="/v1/jobs/{job_id}",
        scope="operate",
        group="Jobs",
        summary="Delete a job that is not running; its key is free again",
        handler=delete_one,
        query=(msgspec.structs.replace(FILTERS[0], doc="Only in this state; several: in any of them."),),
        answers={204: ResponseSpec(None, "It is gone.")},
        refusals=(404, 409),
    ),
    _on_selection("cancel", CANCEL, "Cancel many jobs", SELECTION, "cancelled"),
    _on_selection("replay", None, "Replay many jobs", REPLAY, "queued"),
    _on_selection("delete", DELETE, "Delete many jobs", SELECTION, "dead"),
)
