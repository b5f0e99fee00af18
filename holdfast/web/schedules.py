"""Schedules: recurring jobs, added, changed and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from holdfast.app.limits import found_definition
from holdfast.core.errors import Conflict
from holdfast.core.schedule import MAX_BACKFILL, MAX_CATCH_UP, MAX_EXPRESSION, Overlap, Schedule, without_alerts
from holdfast.core.validation import check_name
from holdfast.views.documents import ID, JOB, JobId
from holdfast.views.schedules import SCHEDULE, LocalInstant, ScheduleDocument, schedule_document
from holdfast.web.bulk import NOTHING
from holdfast.web.fields import (
    NAME_PATTERN,
    BodySchema,
    Field,
    ValueType,
    any_value,
    boolean_value,
    choice_value,
    client_field_names,
    integer_text,
    integer_value,
    text_value,
)
from holdfast.web.messages import ApiResponse, Refusal, json_response
from holdfast.web.routing import Handler, Operation, RequestContext, ResponseSpec
from holdfast.web.submissions import SUBMISSION, SubmittedJob, check_task, id_taken, read_back

_NAME = ValueType({"type": "string", "pattern": NAME_PATTERN}, lambda value, field: check_name(field, value))
_SPAN = ValueType({"type": ["number", "string"], "minimum": 0, "maxLength": 40}, any_value)
_INSTANT = ValueType({"type": "string", "format": "date-time"}, any_value)
_TIMING = ("cron", "zone", "every", "at", "catch_up", "overlap", "jitter", "max_runs")
_OF_JOBS = (
    "task",
    "payload",
    "queue",
    "priority",
    "max_attempts",
    "timeout",
    "retry",
    "tags",
    "metadata",
    "unique",
    "expires",
)
_READ_AT_ONCE = 500
_HIDDEN = Raw(b"{}")
_PAGE = Field("limit", integer_text(1, 1000, default=100), "Schedules on this page.", example=100)
_AFTER = Field("after", _NAME, "Continue behind this name.", example="nightly-report")

SCHEDULE_REQUEST = BodySchema(
    name="ScheduleRequest",
    doc="A recurring job. Exactly one of `cron`, `every` and `at` says when.",
    fields=(
        Field("name", _NAME, "The schedule's name.", example="nightly-report", required=True),
        *(field for field in SUBMISSION.fields if field.name in _OF_JOBS),
        Field("cron", text_value(1, MAX_EXPRESSION), "Minute, hour, day, month, weekday.", example="0 3 * * *"),
        Field("zone", text_value(1, 64), "The IANA time zone of `cron`; UTC if left out.", example="Europe/Zurich"),
        Field("every", _SPAN, 'An interval: seconds, or "5m".'),
        Field("at", _INSTANT, "An instant in the future, for a job that runs once."),
        Field("catch_up", integer_value(0, MAX_CATCH_UP, default=1), "Missed runs to make up for, the latest ones."),
        Field(
            "overlap",
            choice_value("Overlap", *Overlap, default=Overlap.ALLOW.value),
            "What a run does while the job of the one before has not ended.",
        ),
        Field("jitter", _SPAN, "A span by which each run may start later, up to a day."),
        Field("max_runs", integer_value(1, 1_000_000_000), "Runs after which the schedule ends."),
        Field("replace", boolean_value(False), "Replace a schedule of this name, and keep its count."),
    ),
    refused=[{"required": list(pair)} for pair in (("cron", "every"), ("cron", "at"), ("every", "at"))],
    shown=("cron",),
)
BACKFILL = BodySchema(
    name="BackfillRequest",
    doc="A range of past runs.",
    fields=(
        Field("start", _INSTANT, "The first instant.", example="2025-01-01T00:00:00Z", required=True),
        Field("end", _INSTANT, "The instant behind the last.", example="2025-01-02T00:00:00Z", required=True),
        Field("dry_run", boolean_value(False), "Submit nothing; say which jobs would be submitted."),
    ),
)


class ScheduleList(msgspec.Struct, frozen=True):
    """Schedules by name."""

    schedules: list[ScheduleDocument]


class NextRuns(msgspec.Struct, frozen=True):
    """The next runs of a schedule."""

    runs: list[LocalInstant]


class BackfillAnswer(msgspec.Struct, frozen=True):
    """The jobs of a range of runs."""

    created: Annotated[list[JobId], Meta(description="Jobs that were submitted, or would be.")]
    existing: Annotated[list[JobId], Meta(description="Jobs of runs that were there already.")]


def _shown(call: RequestContext, schedule: Schedule) -> ScheduleDocument:
    """The schedule as this caller may see it."""
    document = schedule_document(schedule, call.redaction)
    return document if call.caller.has_scope("read") else msgspec.structs.replace(document, payload=_HIDDEN)


async def _named(call: RequestContext) -> Schedule:
    """The schedule that the path names, if its queue is the caller's."""
    name = check_name("schedule", call.path["schedule"])
    schedule = await call.app.schedules.get(name)
    return found_definition(schedule if call.caller.allows_queue(schedule.job.queue) else None, f"schedule {name}")


def _check_may_submit(call: RequestContext, queue: str, task: str) -> None:
    """A schedule submits jobs: its caller must be allowed to."""
    call.caller.check_queue(queue)
    check_task(call, task)
    if not call.caller.has_scope("submit"):
        raise Refusal(403, "forbidden", "a schedule submits jobs: this needs the scope submit too", "use another key")


async def list_schedules(call: RequestContext) -> ApiResponse:
    """Returns a page of the schedules whose queues are the caller's."""
    store = await call.app.open_store()
    after, most = call.query.get("after", ""), call.query.get("limit", 100)
    own: list[Schedule] = []
    while len(own) < most and (page := await store.schedules.read_schedules(after=after, limit=_READ_AT_ONCE)):
        own += [each for each in without_alerts(page) if call.caller.allows_queue(each.job.queue)]
        after = page[-1].name
    return json_response(200, ScheduleList([_shown(call, each) for each in own[:most]]))


async def show_schedule(call: RequestContext) -> ApiResponse:
    """Returns one schedule."""
    return json_response(200, _shown(call, await _named(call)))


async def add_schedule(call: RequestContext) -> ApiResponse:
    """Adds a schedule, or replaces one."""
    given = dict(call.body)
    name, replacing = given.pop("name"), given.pop("replace", False)
    timing: Mapping[str, Any] = {field: given.pop(field) for field in _TIMING if field in given}
    with client_field_names():
        job = call.app.draft_job(given.pop("task"), given.pop("payload"), **given)
    _check_may_submit(call, job.queue, job.task)
    known = without_alerts(await (await call.app.open_store()).schedules.read_schedules(name))
    if any(not call.caller.allows_queue(each.job.queue) for each in known):
        raise Conflict(f"schedule {name} exists; choose another name")
    schedule = await call.app.schedules.add(name, job, replace_existing=replacing, **timing)
    return json_response(200 if known else 201, _shown(call, schedule))


async def remove_schedule(call: RequestContext) -> ApiResponse:
    """Removes a schedule; its jobs stay."""
    await call.app.schedules.remove((await _named(call)).name)
    return ApiResponse(204)


def _pausing(*, paused: bool) -> Handler:
    async def handle(call: RequestContext) -> ApiResponse:
        name = (await _named(call)).name
        schedules = call.app.schedules
        return json_response(200, _shown(call, await (schedules.pause if paused else schedules.resume)(name)))

    return handle


async def run_schedule(call: RequestContext) -> ApiResponse:
    """Submits a job of the schedule now."""
    schedule = await _named(call)
    _check_may_submit(call, schedule.job.queue, schedule.job.task)
    handle = await call.app.schedules.run(schedule.name)
    call.changed += [handle.id] if handle.created else []
    job = await read_back(call.app, handle)
    if not call.caller.allows_queue(job.queue):  # it holds the unique key, in a queue of others
        raise id_taken()
    answer = SubmittedJob(**msgspec.structs.asdict(call.visible_job(job)))
    return json_response(201 if handle.created else 200, answer)


async def backfill_schedule(call: RequestContext) -> ApiResponse:
    """Submits the jobs of a range of runs."""
    schedule = await _named(call)
    _check_may_submit(call, schedule.job.queue, schedule.job.task)
    start, end, is_dry = call.body["start"], call.body["end"], call.body.get("dry_run", False)
    handles = await call.app.schedules.backfill(schedule.name, start, end, dry_run=is_dry)
    created = [handle.id for handle in handles if handle.created]
    call.changed += [] if is_dry else created
    return json_response(200, BackfillAnswer(created, [handle.id for handle in handles if not handle.created]))


async def list_next_runs(call: RequestContext) -> ApiResponse:
    """Returns the next runs of a schedule."""
    runs = await call.app.schedules.next_runs((await _named(call)).name, call.query.get("count", 5))
    return json_response(200, NextRuns([each.isoformat() for each in runs]))


def _operation(name: str, method: str, path: str, summary: str, handler: Handler, **more: Any) -> Operation:
    """Returns an operation on schedules; one with a name in its path may answer 404."""
    parts: dict[str, Any] = {"scope": "read" if method == "GET" else "operate", "group": "Schedules"}
    if "{" in path:
        parts["refusals"] = (404, *more.pop("refusals", ()))
    if method == "POST" and "body" not in more:
        more |= {"body": NOTHING, "body_optional": True}
    return Operation(name=name, method=method, path=path, summary=summary, handler=handler, **parts, **more)


_ONE = "/v1/schedules/{schedule}"
_DOCUMENT = ResponseSpec(ScheduleDocument, "The schedule.", SCHEDULE)
_ADDED = {
    201: ResponseSpec(ScheduleDocument, "The schedule was added.", SCHEDULE),
    200: ResponseSpec(ScheduleDocument, "The schedule was replaced.", SCHEDULE),
}
OPERATIONS = (
    _operation(
        "list_schedules",
        "GET",
        "/v1/schedules",
        "List schedules by name",
        list_schedules,
        doc="A key that is limited to queues sees those of its queues.",
        query=(_PAGE, _AFTER),
        answers={200: ResponseSpec(ScheduleList, "A page.", {"schedules": [SCHEDULE]})},
    ),
    _operation(
        "add_schedule",
        "POST",
        "/v1/schedules",
        "Add a schedule",
        add_schedule,
        doc="Needs the scope `submit` too. A schedule that code declares is changed there, not here.",
        body=SCHEDULE_REQUEST,
        answers=_ADDED,
        refusals=(409,),
    ),
    _operation("show_schedule", "GET", _ONE, "Show a schedule", show_schedule, answers={200: _DOCUMENT}),
    _operation(
        "remove_schedule",
        "DELETE",
        _ONE,
        "Remove a schedule; its jobs stay",
        remove_schedule,
        doc="One that code declares returns when a worker starts.",
        answers={204: ResponseSpec(None, "The schedule is gone.")},
        refusals=(409,),
    ),
    _operation(
        "pause_schedule",
        "POST",
        f"{_ONE}/pause",
        "Make no jobs until the schedule is resumed",
        _pausing(paused=True),
        answers={200: _DOCUMENT},
        refusals=(409,),
    ),
    _operation(
        "resume_schedule",
        "POST",
        f"{_ONE}/resume",
        "Go on with the next run from now",
        _pausing(paused=False),
        answers={200: _DOCUMENT},
        refusals=(409,),
    ),
    _operation(
        "run_schedule",
        "POST",
        f"{_ONE}/run",
        "Submit a job of the schedule now",
        run_schedule,
        doc="Beside its times, also while it is paused. Needs the scope `submit` too.",
        answers={
            201: ResponseSpec(SubmittedJob, "The job was stored.", JOB),
            200: ResponseSpec(SubmittedJob, "This job has the unique key already; none was stored.", JOB),
        },
        refusals=(409,),
    ),
    _operation(
        "backfill_schedule",
        "POST",
        f"{_ONE}/backfill",
        "Submit the jobs of a range of runs",
        backfill_schedule,
        doc=f"At most {MAX_BACKFILL:,}. A run whose job is still in the store is not repeated. Needs the scope "
        "`submit` too.",
        body=BACKFILL,
        answers={200: ResponseSpec(BackfillAnswer, "The jobs.", {"created": [ID], "existing": []})},
    ),
    _operation(
        "list_next_runs",
        "GET",
        f"{_ONE}/next",
        "Show the next runs in the schedule's zone",
        list_next_runs,
        query=(Field("count", integer_text(1, 100, default=5), "Number of runs.", example=5),),
        answers={200: ResponseSpec(NextRuns, "The runs; none if paused or ended.", {"runs": SCHEDULE["next_runs"]})},
    ),
)
