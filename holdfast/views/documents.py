"""Documents of jobs, attempts, queues and workers, for CLI and HTTP API. Their field names are part of the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from holdfast.core.dependencies import NEVER_US
from holdfast.core.faults import Fault, FaultPlan
from holdfast.core.job_logs import LogLine
from holdfast.core.models import TERMINAL, Attempt, BulkResult, Finding, Job, JobState, QueueInfo, Step, UniqueKey
from holdfast.core.workers import WorkerCommand, WorkerInfo
from holdfast.tasks.codec import decode_json, write
from holdfast.views.formatting import format_timestamp

ID = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"
"""Job id in examples."""
_AT = "2030-01-31T08:00:00.000000Z"

JobId = Annotated[str, Meta(description="A UUIDv7.", examples=[ID], extra_json_schema={"format": "uuid"})]
Instant = Annotated[
    str,
    Meta(
        description="RFC 3339, in UTC, to the microsecond.", examples=[_AT], extra_json_schema={"format": "date-time"}
    ),
]
TaskName = Annotated[str, Meta(description="The task's name.", examples=["email.send"])]
QueueName = Annotated[str, Meta(description="The queue it waits in.", examples=["default"])]
Counted = Annotated[int, Meta(ge=0)]


class UniqueDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A job's policy of uniqueness."""

    during: Annotated[
        str | float,
        Meta(
            description='While there is no other: "unstarted", "active", or for so many seconds.', examples=["active"]
        ),
    ]
    on_conflict: Annotated[
        str, Meta(description="What another submission does to this job: keep, replace or reschedule.")
    ]


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A job with everything its row says."""

    id: JobId
    task: TaskName
    queue: QueueName
    state: Annotated[JobState, Meta(description="Where the job stands.")]
    reason: Annotated[str | None, Meta(description="Why it is dead, or why its latest attempt did not succeed.")]
    payload: Annotated[Raw, Meta(description="The arguments by name.", examples=[{"to": "a@b.c"}])]
    result: Annotated[Raw | None, Meta(description="What the task returned; null where it returned nothing.")]
    error: Annotated[str | None, Meta(description="Of the latest failed attempt, at most 4,096 characters.")]
    error_group: Annotated[str | None, Meta(description="Id of the group of jobs that failed with the same error.")]
    priority: Annotated[int, Meta(description="From -100 to 100; higher runs first.")]
    attempts: Annotated[int, Meta(description="Executions that count.", ge=0)]
    max_attempts: Annotated[int | None, Meta(description="Executions it may have; null: no limit.")]
    failures: Annotated[int, Meta(description="Executions that failed.", ge=0)]
    claims: Annotated[
        int, Meta(description="The fencing token: grows with each claim. 0, or when it was submitted: unclaimed.", ge=0)
    ]
    lost_leases: Annotated[int, Meta(description="Leases lost in a row.", ge=0)]
    cancelling: Annotated[bool, Meta(description="It is running, and was asked to stop.")]
    key: Annotated[str | None, Meta(description="Its idempotency key.")]
    unique: Annotated[
        UniqueDocument | None, Meta(description="Its policy for other jobs that do the same work; null: none.")
    ]
    batch: Annotated[str | None, Meta(description="The batch of which it is a member.")]
    forks: Annotated[str | None, Meta(description="The job whose first steps it has kept.")]
    tags: list[str]
    metadata: Annotated[dict[str, Any] | None, Meta(description="The submitter's own.")]
    timeout: Annotated[float | None, Meta(description="Seconds one attempt may take.")]
    retry: Annotated[dict[str, Any] | None, Meta(description="Its own retry policy; null: its task's.")]
    worker: Annotated[str | None, Meta(description="Who took it last.")]
    created_at: Instant
    run_at: Annotated[
        Instant | None, Meta(description="Not before this instant; null: it waits for others, without a deadline.")
    ]
    expires_at: Annotated[
        Instant | None, Meta(description="It is cancelled if no worker has taken it by then; null: it does not expire.")
    ]
    started_at: Annotated[Instant | None, Meta(description="When its latest attempt began.")]
    lease_until: Annotated[Instant | None, Meta(description="Until then it is its worker's.")]
    ended_at: Instant | None


class AttemptDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that did not succeed."""

    attempt: Counted
    claims: Counted
    worker: str | None
    state: Annotated[JobState, Meta(description="Where it left the job.")]
    reason: str | None
    error: str | None
    traceback: str | None
    started_at: Instant | None
    ended_at: Instant
    seconds: Annotated[float | None, Meta(description="How long it took.")]


class LogLineDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a job's handler logged."""

    attempt: Counted
    claims: Counted
    at: Instant
    level: Annotated[str, Meta(description="debug, info, warning, error or critical.", examples=["info"])]
    text: Annotated[str, Meta(examples=["fetched"])]
    fields: Annotated[Raw | None, Meta(description="Its details: an object.", examples=[{"rows": 3}])]


class QueueDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with its counts; every state is named."""

    name: QueueName
    paused: Annotated[bool, Meta(description="No worker takes a job of it.")]
    oldest_ready_seconds: Annotated[float | None, Meta(description="The age of its oldest ready job.")]
    states: Annotated[dict[str, int], Meta(description="How many of its jobs are in each state.")]
    at_least: Annotated[
        list[JobState],
        Meta(description="States of which it has, or may have, more: only so many jobs of a state are counted."),
    ]
    ended_per_second: Annotated[float, Meta(description="Its throughput in the last five minutes.", ge=0)]
    announced: Annotated[
        int | None,
        Meta(description="Ids of its ready jobs that wait in the transport; none without one, or while it is away."),
    ] = None


class WorkerDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process as of its last heartbeat."""

    id: str
    host: str
    pid: int
    state: Annotated[str, Meta(description="working, stopping, draining, or lost: silent for three heartbeats.")]
    queues: Annotated[str, Meta(description="Those it serves, each with its bound.", examples=["mail:10,default"])]
    concurrency: Counted
    running: Counted
    succeeded: Counted
    failed: Counted
    version: Annotated[str | None, Meta(description="Of the application; null: it does not say.")]
    memory: Annotated[int | None, Meta(description="Resident bytes of the process; null: it does not say.")]
    started_at: Instant
    seen_at: Instant


class JobSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A job and the state it is in."""

    id: str
    state: Annotated[JobState | None, Meta(description="null: there is no such job.")]


class OperatedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an operation."""

    changed: Annotated[list[JobSnapshot], Meta(description="Jobs that were changed, as they are now.")]
    refused: Annotated[
        list[JobSnapshot], Meta(description="Jobs whose state does not allow it, or that are not there.")
    ]


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at a glance."""

    store: Annotated[str, Meta(description="Where the jobs are kept, without a password.")]
    queues: list[QueueDocument]
    totals: Annotated[dict[str, int], Meta(description="How many jobs are in each state, in all queues.")]
    at_least: Annotated[list[JobState], Meta(description="States of which there are, or may be, more.")]
    workers: list[WorkerDocument]


class FindingDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``doctor``."""

    name: str
    level: str
    text: str
    remedy: str | None


def to_builtins(value: Any) -> Any:
    """Converts a document, or a part of one, to dictionaries and lists."""
    match value:
        case msgspec.Struct():
            return {name: to_builtins(each) for name, each in msgspec.structs.asdict(value).items()}
        case list():
            return [to_builtins(each) for each in value]
        case Raw():
            return decode_json(value)
    return value


def job_document(job: Job) -> JobDocument:
    """Returns the document of a job."""
    options = job.options_or_default
    return JobDocument(
        id=job.id,
        task=job.task,
        queue=job.queue,
        state=job.state,
        reason=job.reason,
        payload=raw_json(job.payload),
        result=None if job.result is None else raw_json(job.result),
        error=job.error,
        error_group=job.error_group,
        priority=job.priority,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        failures=job.failures,
        claims=job.claims,
        lost_leases=job.lost_leases,
        cancelling=job.cancelling,
        key=job.key,
        unique=None if options.unique is None else _unique_document(options.unique),
        batch=options.batch,
        forks=options.forks,
        tags=list(options.tags),
        metadata=options.metadata,
        timeout=options.timeout,
        retry=options.retry,
        worker=job.worker,
        created_at=format_timestamp(job.created_at_us),
        run_at=None if job.run_at_us >= NEVER_US else format_timestamp(job.run_at_us),
        expires_at=_dated(job.expires_at_us),
        started_at=_dated(job.started_at_us),
        lease_until=_dated(job.lease_until_us),
        ended_at=_dated(job.ended_at_us),
    )


def _unique_document(unique: UniqueKey) -> UniqueDocument:
    during = (unique.window_us or 0) / 1e6 if unique.during is None else unique.during
    return UniqueDocument(during=during, on_conflict=unique.on_conflict)


def raw_json(text: str) -> Raw:
    """Returns stored JSON unchanged; corrupt JSON as a JSON text."""
    try:
        decode_json(text)
    except (msgspec.DecodeError, RecursionError):
        return Raw(write(text))
    return Raw(text.encode())


def _dated(us: int | None) -> str | None:
    return None if us is None else format_timestamp(us)


def attempt_document(attempt: Attempt) -> AttemptDocument:
    """Returns the document of an attempt."""
    seconds = None if attempt.started_at_us is None else (attempt.ended_at_us - attempt.started_at_us) / 1e6
    return AttemptDocument(
        attempt=attempt.attempt,
        claims=attempt.claims,
        worker=attempt.worker,
        state=attempt.state,
        reason=attempt.reason,
        error=attempt.error,
        traceback=attempt.traceback,
        started_at=_dated(attempt.started_at_us),
        ended_at=format_timestamp(attempt.ended_at_us),
        seconds=seconds,
    )


class StepDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a job that has ended."""

    name: Annotated[str, Meta(description="Unique in its job.", examples=["charge"])]
    number: Annotated[int, Meta(description="Of its call, from 1.", ge=1)]
    claims: Annotated[int, Meta(description="Of the lease under which it ended.", ge=0)]
    ended_at: Instant
    result: Annotated[Raw | None, Meta(description="What its function returned; null: nothing.")]


def step_document(step: Step) -> StepDocument:
    """Returns the document of a step."""
    return StepDocument(
        name=step.name,
        number=step.number,
        claims=step.claims,
        ended_at=format_timestamp(step.ended_at_us),
        result=None if step.result is None else raw_json(step.result),
    )


def line_document(line: LogLine) -> LogLineDocument:
    """Returns the document of a log line."""
    return LogLineDocument(
        attempt=line.attempt,
        claims=line.claims,
        at=format_timestamp(line.at_us),
        level=line.level,
        text=line.text,
        fields=None if line.fields is None else raw_json(line.fields),
    )


def queue_document(queue: QueueInfo) -> QueueDocument:
    """Returns the document of a queue; it names every state."""
    return QueueDocument(
        name=queue.name,
        paused=queue.paused,
        oldest_ready_seconds=None if queue.oldest_ready is None else queue.oldest_ready.total_seconds(),
        states={state.value: queue.states.get(state.value, 0) for state in JobState},
        at_least=_more([queue]),
        ended_per_second=round(queue.ended_per_second, 6),
        announced=queue.announced,
    )


def worker_document(worker: WorkerInfo) -> WorkerDocument:
    """Returns the document of a worker, from its last heartbeat."""
    heartbeat = worker.heartbeat
    return WorkerDocument(
        id=heartbeat.worker,
        host=heartbeat.host,
        pid=heartbeat.pid,
        state=worker_state(worker),
        queues=heartbeat.queues,
        concurrency=heartbeat.concurrency,
        running=heartbeat.running,
        succeeded=heartbeat.succeeded,
        failed=heartbeat.failed,
        version=heartbeat.version,
        memory=heartbeat.memory,
        started_at=format_timestamp(worker.started_at_us),
        seen_at=format_timestamp(worker.seen_at_us),
    )


def worker_state(worker: WorkerInfo) -> str:
    """Returns ``working``, ``stopping`` or ``draining`` (by command), or ``lost``: silent for three heartbeats."""
    if not worker.alive:
        return "lost"
    return {WorkerCommand.STOP: "stopping", WorkerCommand.DRAIN: "draining"}.get(worker.command, "working")


def _more(queues: Sequence[QueueInfo]) -> list[JobState]:
    return [state for state in JobState if any(state in queue.at_least for queue in queues)]


def state_totals(queues: Sequence[QueueInfo]) -> dict[str, int]:
    """Returns the number of jobs in each state, in all of these queues."""
    counts: Counter[str] = Counter()
    for each in queues:
        counts.update(each.states)
    return {state.value: counts[state.value] for state in JobState}


def status_document(store: str, queues: Sequence[QueueInfo], workers: Sequence[WorkerInfo]) -> StatusDocument:
    """Returns the document of ``status``: queues, totals and workers."""
    return StatusDocument(
        store=store,
        queues=[queue_document(each) for each in queues],
        totals=state_totals(queues),
        at_least=_more(queues),
        workers=[worker_document(each) for each in workers],
    )


def operated_document(operated: BulkResult) -> OperatedDocument:
    """Returns the document of an operation's result."""
    return OperatedDocument(
        changed=[JobSnapshot(id=job_id, state=state) for job_id, state in operated.changed],
        refused=[JobSnapshot(id=job_id, state=state) for job_id, state in operated.refused],
    )


def finding_document(finding: Finding) -> FindingDocument:
    """Returns the document of a finding of ``doctor``."""
    return FindingDocument(name=finding.name, level=finding.level, text=finding.text, remedy=finding.remedy or None)


def replays_after(job: Job, attempts: Sequence[Attempt]) -> list[bool]:
    """Returns, for each attempt that did not succeed, True if the job was replayed before the next one."""
    return find_replays(job.state, job.attempts, [(each.state, each.attempt) for each in attempts])


def find_replays(state: JobState, count: int, history: Sequence[tuple[JobState, int]]) -> list[bool]:
    """Returns, for each attempt in ``history`` (state and number), True if a replay followed it.

    A replay leaves a terminal state and restarts the numbers; ``count`` is that of the job.
    """
    if not history:
        return []
    replays = [left in TERMINAL or later <= number for (left, number), (_, later) in pairwise(history)]
    left, number = history[-1]
    if left in TERMINAL:
        return [*replays, state is not left]
    counted = count - (state in (JobState.RUNNING, JobState.SUCCEEDED))
    return [*replays, counted < number]


# ── examples ──────────────────────────────────────────────────────────────────────────────────────────────────────────
JOB: dict[str, Any] = {
    "id": ID,
    "task": "email.send",
    "queue": "default",
    "state": "queued",
    "reason": None,
    "payload": {"to": "a@b.c"},
    "result": None,
    "error": None,
    "error_group": None,
    "priority": 0,
    "attempts": 0,
    "max_attempts": 5,
    "failures": 0,
    "claims": 0,
    "lost_leases": 0,
    "cancelling": False,
    "key": "welcome-42",
    "unique": None,
    "batch": None,
    "forks": None,
    "tags": [],
    "metadata": None,
    "timeout": None,
    "retry": None,
    "worker": None,
    "created_at": _AT,
    "run_at": _AT,
    "expires_at": None,
    "started_at": None,
    "lease_until": None,
    "ended_at": None,
}
DEAD_JOB = JOB | {
    "state": "dead",
    "reason": "max_attempts",
    "error": "ConnectionRefusedError: [Errno 111]",
    "error_group": "5f0c9a41d2be",
    "attempts": 5,
    "failures": 5,
    "claims": 5,
    "worker": "w-7c1f",
    "started_at": _AT,
    "ended_at": _AT,
}
QUEUE: dict[str, Any] = {
    "name": "default",
    "paused": False,
    "oldest_ready_seconds": 1.25,
    "announced": None,
    "at_least": [],
    "ended_per_second": 0.7,
    "states": {
        "scheduled": 0,
        "waiting": 0,
        "queued": 12,
        "running": 3,
        "failed": 1,
        "succeeded": 210,
        "dead": 0,
        "cancelled": 0,
    },
}
WORKER: dict[str, Any] = {
    "id": "w-7c1f",
    "host": "app-1",
    "pid": 4711,
    "state": "working",
    "queues": "mail:10,default",
    "concurrency": 10,
    "running": 3,
    "succeeded": 210,
    "failed": 1,
    "version": "2.4.1",
    "memory": 91226112,
    "started_at": _AT,
    "seen_at": _AT,
}


class FaultPlanDocument(msgspec.Struct, frozen=True):
    """Faults that are on; none are if ``faults`` is empty."""

    faults: Annotated[list[Fault], Meta(description="The faults.")]
    seed: Annotated[int | None, Meta(description="Of the draws.")] = None
    until: Annotated[Instant | None, Meta(description="When they end.")] = None


def plan_document(plan: FaultPlan | None) -> FaultPlanDocument:
    """Returns the document of the faults that are on; None: none are."""
    if plan is None:
        return FaultPlanDocument([])
    return FaultPlanDocument(list(plan.faults), plan.seed, format_timestamp(plan.until_us))
