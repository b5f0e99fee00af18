"""Looking at jobs: one with its attempts and log lines, pages of them, why one does not run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.app.workflows import saved_values
from holdfast.core.clock import wait_first
from holdfast.core.errors import Busy, TooBroad, missing_job
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.models import TERMINAL, Job, JobFilter, JobState, Lease
from holdfast.core.steps import MAX_STEPS, Progress
from holdfast.core.validation import check_key
from holdfast.tasks.codec import write
from holdfast.tasks.job_logger import LEVELS, make_entry
from holdfast.telemetry.trace_context import trace_id_of
from holdfast.views.documents import (
    ID,
    JOB,
    AttemptDocument,
    JobDocument,
    JobId,
    LogLineDocument,
    StepDocument,
    attempt_document,
    line_document,
    step_document,
)
from holdfast.views.explain import Explanation, explain_job, job_facts
from holdfast.views.formatting import Filters
from holdfast.web.fields import (
    CURSOR,
    FILTERS,
    OBJECT,
    PAGING,
    TEXT,
    BodySchema,
    Field,
    array_value,
    choice_value,
    integer_text,
    integer_value,
    seconds_value,
)
from holdfast.web.keys import unauthorized_refusal
from holdfast.web.lease_tokens import SAMPLE, TOKEN_VALUE, WORKER, read_leases, worker_of
from holdfast.web.messages import ApiResponse, Refusal, json_response, wait_request_end
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

LINES, MAX_LINES = 200, 1000  # log lines on a page: unless asked for others, and at most
MAX_WAIT = 60
"""Seconds a client may wait for a job to end."""
_AT_ONCE = 50  # jobs read together
_MAX_PAGE_SIZE = 4 * 1024 * 1024  # characters of payloads and results after which a page ends
_PAGE_FOR = 0.5  # seconds after which a page ends with the jobs found so far
_SEARCH_FOR = 0.1  # seconds after which a page ends if it goes through jobs that do not match
_POLL_SECONDS = 5.0  # seconds between reads of an awaited job: the most that a lost notification delays


class JobDetails(JobDocument, frozen=True, kw_only=True):
    """A job with its attempts that did not succeed."""

    history: Annotated[list[AttemptDocument], Meta(description="Attempts that did not succeed, oldest first.")]
    trace_id: Annotated[str | None, Meta(description="The trace that it was submitted in.")]


class JobPage(msgspec.Struct, frozen=True):
    """Newest first."""

    jobs: list[JobDocument]
    cursor: Annotated[str | None, Meta(description="Continues the listing; null: that was all.")]


class JobCounts(msgspec.Struct, frozen=True):
    """Exact numbers of jobs."""

    states: Annotated[dict[JobState, int], Meta(description="By state, every state among them.")]
    total: int


class LogLinePage(msgspec.Struct, frozen=True):
    """Oldest first."""

    lines: list[LogLineDocument]
    cursor: Annotated[str | None, Meta(description="Continues the listing; null: that was all.")]


class StepPage(msgspec.Struct, frozen=True):
    """In the order of their calls."""

    steps: list[StepDocument]
    after: Annotated[int | None, Meta(description="Continues the listing; null: that was all.")]
    progress: Annotated[Progress | None, Meta(description="How far its handler is; null: it has not said.")]
    state: Annotated[msgspec.Raw | None, Meta(description="What its handler has saved; null: nothing.")]


class JobExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is where it is."""

    id: JobId
    state: JobState
    reasons: Annotated[list[Explanation], Meta(description="The most telling first; never empty.", min_length=1)]


async def find_job(call: RequestContext, reference: str, wait: float = 0) -> Job:
    """The job a path names: by id, or by ``key:NAME``. One of a queue that is not the caller's is not there.

    ``wait``: seconds it may take to end before it is returned.
    """
    if reference.startswith("key:"):
        check_key(reference.removeprefix("key:"), "id")
    job = await call.app.get(reference)
    if not call.caller.allows_queue(job.queue):
        raise missing_job(reference)
    if wait and job.state not in TERMINAL:
        with call.wait_limiter.limit_wait(call.caller):
            return await _ended(call, job, wait)
    return job


async def job_story(call: RequestContext, job: Job) -> JobDetails:
    """Everything about one job."""
    attempts = call.redaction.redact_attempts(job, await call.app.attempts(job.id)) if job.claims else []
    fields = msgspec.structs.asdict(call.visible_job(job))
    history = [attempt_document(each) for each in attempts]
    return JobDetails(**fields, history=history, trace_id=trace_id_of(job))


async def get_job(call: RequestContext) -> ApiResponse:
    """Returns one job, at once or when it has ended."""
    job = await find_job(call, call.path["job_id"], call.query.get("wait", 0))
    return json_response(200, await job_story(call, job))


async def _ended(call: RequestContext, job: Job, timeout: float) -> Job:
    """The job when it has ended; or as it stands after so many seconds, once the client is gone or the server stops."""
    store = await call.app.open_store()
    clock = call.app.clock
    deadline = clock.monotonic() + timeout
    ended = asyncio.create_task(wait_request_end(call.request))
    try:
        while job.state not in TERMINAL and not ended.done():
            left = deadline - clock.monotonic()
            if left <= 0:
                break
            notified = asyncio.ensure_future(store.queueing.wait([f"job:{job.id}"], timeout=min(left, _POLL_SECONDS)))
            try:
                await wait_first(notified, ended)
            finally:
                notified.cancel()
            if not call.is_still_authorized():
                raise unauthorized_refusal()
            job = await call.app.get(job.id)
            if not call.caller.allows_queue(job.queue):
                raise missing_job(job.id)
    finally:
        ended.cancel()
    return job


async def find(call: RequestContext) -> ApiResponse:
    """A page of jobs."""
    query = dict(call.query)
    limit, cursor = query.pop("limit", 50), query.pop("cursor", None)
    return json_response(200, await page_of(call, await parse_filter(call, query), limit, cursor))


async def count(call: RequestContext) -> ApiResponse:
    """Counts jobs by state."""
    counts = await call.app.count_states(await parse_filter(call, call.query))
    return json_response(200, JobCounts(counts.states, counts.total))


async def page_of(call: RequestContext, where: JobFilter, limit: int, cursor: str | None) -> JobPage:
    """At most so many jobs. A page of long payloads, or one that takes long to find, ends early: it would hold up
    all other requests."""
    jobs: list[JobDocument] = []
    store = await call.app.open_store()
    size, until = 0, call.app.clock.monotonic() + _PAGE_FOR
    while True:
        at_once = min(limit - len(jobs), _AT_ONCE)
        try:
            page = await store.query.find(where, limit=at_once, cursor=cursor, seconds=_SEARCH_FOR)
        except (TooBroad, Busy):
            if not jobs:
                raise
            return JobPage(jobs, cursor)
        cursor = page.cursor
        jobs += [call.visible_job(job) for job in page.jobs]
        size += sum(len(job.payload) + len(job.result or "") for job in page.jobs)
        is_full = len(jobs) == limit or size >= _MAX_PAGE_SIZE
        if cursor is None or is_full or len(page.jobs) < at_once or call.app.clock.monotonic() > until:
            return JobPage(jobs, cursor)


async def parse_filter(
    call: RequestContext, given: Mapping[str, object], states: tuple[JobState, ...] = ()
) -> JobFilter:
    """The filter that a query or a body says, within the caller's queues; ``states`` where it names none."""
    if "error" in given:
        _check_error_scope(call)
    filters = msgspec.convert(given, Filters)
    where = await filters.build_filter(call.app, states)
    return msgspec.structs.replace(where, queue=call.caller.own_queue(where.queue))


def _check_error_scope(call: RequestContext) -> None:
    """Refuses a filter by error text if the caller may not see these texts: matches would reveal them by letters."""
    if call.redaction.hides:
        detail = "jobs cannot be chosen by their error: it may quote what the setting redacted hides"
    elif not call.caller.has_scope("read"):
        detail = "choosing jobs by their error needs the scope read"
    else:
        return
    raise Refusal(403, "forbidden", detail, "choose by reason, task, tag, worker or time")


async def lines(call: RequestContext) -> ApiResponse:
    """A page of a job's log lines."""
    job = await find_job(call, call.path["job_id"])
    page = await call.app.logs(job.id, limit=call.query.get("limit", LINES), cursor=call.query.get("cursor"))
    shown = call.redaction.redact_logs(job, page.lines)
    return json_response(200, LogLinePage([line_document(line) for line in shown], page.cursor))


async def list_steps(call: RequestContext) -> ApiResponse:
    """A page of a job's steps. One of large results ends before its limit."""
    job = await find_job(call, call.path["job_id"])
    after, limit = call.query.get("after", 0), call.query.get("limit", LINES)
    store = await call.app.open_store()
    record = call.redaction.redact_steps(await store.workflow.read_steps(job.id))
    steps, saved = [step for step in record if step.number], saved_values(record)
    sizes = itertools.accumulate(len(step.result or "") for step in steps[after:])
    end = after + 1 + sum(size < _MAX_PAGE_SIZE for size in itertools.islice(sizes, limit - 1))
    documents = [step_document(step) for step in steps[after:end]]
    state = None if saved.state is None else msgspec.Raw(write(saved.state))
    return json_response(200, StepPage(documents, end if end < len(steps) else None, saved.progress, state))


async def why(call: RequestContext) -> ApiResponse:
    """Why a job is where it is."""
    job = await find_job(call, call.path["job_id"])
    facts = await job_facts(call.app, job)
    related = [each for each in (*facts.awaited, facts.holder) if each is not None]
    hidden = frozenset(each.id for each in related if not call.caller.allows_queue(each.queue))
    seen = msgspec.structs.replace(facts, redacted=call.caller.is_restricted, hidden=hidden)
    reasons = list(explain_job(call.redaction.redact_job(job), seen))
    return json_response(200, JobExplanation(id=job.id, state=job.state, reasons=reasons))


_WAIT = Field(
    "wait",
    integer_text(0, MAX_WAIT, default=0),
    "Answer when the job has ended, at the latest after this many seconds.",
    example=0,
)
_STEP = {
    "name": "charge",
    "number": 2,
    "claims": 1,
    "ended_at": "2030-01-31T08:00:00.000000Z",
    "result": {"cents": 1250},
}
_LINES = Field("limit", integer_text(1, MAX_LINES, default=LINES), "Lines on this page.", example=LINES)
_LINE = {
    "attempt": 1,
    "claims": 1,
    "at": "2030-01-31T08:00:00.000000Z",
    "level": "info",
    "text": "fetched",
    "fields": {"rows": 3},
}
_COUNTS = {state: {"succeeded": 45, "dead": 5}.get(state, 0) for state in JobState}
_BEHIND = {"code": "behind", "text": "it waits behind 4 jobs of queue default", "remedy": "start more workers"}


_MAX_AGE = 86_400
_MAX_RECORD_LINES = 100
_MAX_NUMBER = 1_000_000


class LogLinesAnswer(msgspec.Struct, frozen=True):
    """Outcome of the lines."""

    kept: Annotated[bool, Meta(description="false: the lease is lost, and so are the lines.")]
    dropped: Annotated[int, Meta(description="Lines whose number is over the setting `job_lines`.", ge=0)]


LINE = BodySchema(
    name="NewLogLine",
    doc="A line that a handler logs.",
    fields=(
        Field(
            "number",
            integer_value(1, _MAX_NUMBER),
            "Among the lines of its attempt, from 1: the same number again is the same line.",
            example=1,
            required=True,
        ),
        Field("text", TEXT, "What it says; cut at `job_line_size`.", example="fetched", required=True),
        Field("level", choice_value("LogLevel", *LEVELS, default="info"), "How much it matters.", example="info"),
        Field("fields", OBJECT, "More of it, for programs.", example={"rows": 3}),
        Field("ago", seconds_value(_MAX_AGE), "Age of the line in seconds.", example=0),
    ),
)
SAY = BodySchema(
    name="LogLinesRequest",
    doc="Log lines of one running job.",
    fields=(
        WORKER,
        Field("token", TOKEN_VALUE, "Of the job's lease.", example=SAMPLE, required=True),
        Field(
            "lines",
            array_value(LINE.reference, _MAX_RECORD_LINES),
            "In their order.",
            example=[{"number": 1, "text": "fetched", "fields": {"rows": 3}}],
            required=True,
        ),
    ),
    inner=(LINE,),
)


async def append_job_logs(call: RequestContext) -> ApiResponse:
    """Appends log lines to a job that the worker runs, or has just settled as succeeded."""
    lease: Lease = call.body["token"]
    read = [LINE.read(each, f"lines[{index}].") for index, each in enumerate(call.body["lines"])]
    settings = call.app.settings
    new = [
        NewLine(
            each["number"],
            each.get("ago", timedelta(0)),
            *make_entry(each.get("level", "info"), each["text"], each.get("fields", {}), settings.job_line_size),
        )
        for each in sorted(read, key=lambda line: int(line["number"]))
        if each["number"] <= settings.job_lines
    ]
    store = await call.app.open_store()
    (record,) = await read_leases(store, worker_of(call), [lease])
    job = record.job
    own = job is not None and job.worker == worker_of(call) and job.claims == lease.claims
    kept = own and (not new or (await store.queueing.append_logs([LogBatch(lease, new)]))[0])
    call.changed += [lease.job_id] if kept else []
    return json_response(200, LogLinesAnswer(kept, len(read) - len(new)))


OPERATIONS = (
    Operation(
        name="list_jobs",
        method="GET",
        path="/v1/jobs",
        scope="read",
        group="Jobs",
        summary="List jobs",
        doc="Newest first. Every filter that is given must match. A page of long payloads, or that takes long to find, "
        "ends before its limit: `cursor` says whether there is more.",
        handler=find,
        query=(*FILTERS, *PAGING),
        answers={200: ResponseSpec(JobPage, "A page.", {"jobs": [JOB], "cursor": None})},
    ),
    Operation(
        name="count_jobs",
        method="GET",
        path="/v1/jobs/counts",
        scope="read",
        group="Jobs",
        summary="Count jobs by state",
        doc="Exact numbers of the jobs that match, of a whole run by its `tag` for example. Every filter that is given "
        "must match.",
        handler=count,
        query=FILTERS,
        answers={200: ResponseSpec(JobCounts, "The numbers.", {"states": _COUNTS, "total": 50})},
    ),
    Operation(
        name="show_job",
        method="GET",
        path="/v1/jobs/{job_id}",
        scope="read",
        group="Jobs",
        summary="Show a job",
        doc="With its result, and the attempts that did not succeed. With `wait` the answer comes when it has ended.",
        handler=get_job,
        query=(_WAIT,),
        answers={200: ResponseSpec(JobDetails, "The job.", JOB | {"history": [], "trace_id": None})},
        refusals=(404, 429),
    ),
    Operation(
        name="list_log_lines",
        method="GET",
        path="/v1/jobs/{job_id}/lines",
        scope="read",
        group="Jobs",
        summary="List the log lines of a job",
        doc="What its handler logged by `context.log`, of all attempts, oldest first.",
        handler=lines,
        query=(_LINES, CURSOR),
        answers={200: ResponseSpec(LogLinePage, "A page.", {"lines": [_LINE], "cursor": None})},
        refusals=(404,),
    ),
    Operation(
        name="list_steps",
        method="GET",
        path="/v1/jobs/{job_id}/steps",
        scope="read",
        group="Jobs",
        summary="List the steps of a job",
        doc="What its handler has done by `context.step`, in the order of the calls.",
        handler=list_steps,
        query=(
            Field("limit", integer_text(1, MAX_LINES, default=LINES), "Steps on this page.", example=LINES),
            Field("after", integer_text(0, MAX_STEPS, default=0), "Continue behind so many steps.", example=LINES),
        ),
        answers={
            200: ResponseSpec(
                StepPage,
                "A page.",
                {
                    "steps": [_STEP],
                    "after": None,
                    "progress": {"done": 30, "total": 100, "message": "pages"},
                    "state": None,
                },
            )
        },
        refusals=(404,),
    ),
    Operation(
        name="explain_job",
        method="GET",
        path="/v1/jobs/{job_id}/why",
        scope="read",
        group="Jobs",
        summary="Say why a job is where it is",
        handler=why,
        answers={
            200: ResponseSpec(JobExplanation, "The reasons.", {"id": ID, "state": "queued", "reasons": [_BEHIND]})
        },
        refusals=(404,),
    ),
    Operation(
        name="append_log_lines",
        method="POST",
        path="/v1/claims/lines",
        scope="work",
        group="Work",
        summary="Keep log lines with a running job",
        doc="Before it is settled: afterwards only success still takes lines. To send them again is harmless.",
        handler=append_job_logs,
        body=SAY,
        batch=True,
        answers={200: ResponseSpec(LogLinesAnswer, "What became of them.", {"kept": True, "dropped": 0})},
    ),
)
