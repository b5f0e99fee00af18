"""Claims over HTTP: a worker in any language claims jobs, with long polling."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from holdfast.core.errors import HoldfastError, Invalid, Unavailable
from holdfast.core.models import Job
from holdfast.core.workers import WorkerCommand, WorkerHeartbeat
from holdfast.tasks.codec import RawText
from holdfast.views.documents import ID, Instant, JobId, QueueName, raw_json
from holdfast.views.formatting import format_timestamp
from holdfast.web.fields import NAME_PATTERN, TASK_VALUE, BodySchema, Field, ValueType, array_value, integer_value
from holdfast.web.jobs import MAX_WAIT
from holdfast.web.keys import unauthorized_refusal
from holdfast.web.lease_tokens import (
    EVERY,
    LEASE,
    SAMPLE,
    STATUS_FIELDS,
    WORKER,
    Token,
    WorkerStatus,
    allowed_capacity,
    parse_worker,
    queue_or_wildcard,
    token_of,
    worker_of,
)
from holdfast.web.long_poll import OUTAGE_PAUSE, ClaimResult, PendingClaim, RemoteClaimRequest
from holdfast.web.messages import ApiResponse, json_response, wait_disconnected
from holdfast.web.routing import Operation, RequestContext, ResponseSpec
from holdfast.worker.policy import timeout_of

MAX_CLAIM = 500
"""Jobs one claim takes."""
_MAX_TASKS = 1000
_MAX_QUEUES = 100

CommandName = Annotated[
    WorkerCommand,
    Meta(
        description="What an operator asks of the worker. `drain`: go on until a claim brings nothing, then leave. "
        "`stop`: take no more, finish what runs within a grace, then leave."
    ),
]


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be run now."""

    token: Token
    id: JobId
    task: Annotated[str, Meta(description="Which handler it is for.", examples=["email.send"])]
    queue: QueueName
    payload: Annotated[Raw, Meta(description="The arguments by name.", examples=[{"to": "a@b.c"}])]
    attempt: Annotated[int, Meta(description="Which of its attempts this is, from 1.", ge=0)]
    claims: Annotated[
        int, Meta(description="Grows with each claim: a fencing token for what is written elsewhere.", ge=1)
    ]
    max_attempts: Annotated[int | None, Meta(description="Executions it may have; null: no limit.")]
    priority: int
    timeout: Annotated[float | None, Meta(description="Seconds it may take; then stop it and settle it as failed.")]
    alone: Annotated[bool, Meta(description="It may have killed two workers: run no other job beside it.")]
    run_at: Instant
    created_at: Instant
    tags: list[str]
    metadata: Annotated[dict[str, Any] | None, Meta(description="The submitter's own.")]
    traceparent: Annotated[
        str | None, Meta(description="W3C Trace Context of the submission: what the attempt's span links to.")
    ]
    tracestate: str | None


class ClaimAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a claim."""

    jobs: list[ClaimedJob]
    lease: Annotated[float, Meta(description="Seconds for which the jobs are the worker's: extend at a third of it.")]
    waited: Annotated[
        float,
        Meta(
            description="Seconds that the request had waited when the jobs were claimed; 0 without jobs. No lease "
            "began earlier: count it from the moment at which you sent the request, plus `waited`.",
            ge=0,
        ),
    ]
    command: CommandName
    quarantined: Annotated[
        bool, Meta(description="A job waits that is to run alone: finish what you have, and claim with `running` 0.")
    ]


# ── the body ──────────────────────────────────────────────────────────────────────────────────────────────────────
_QUEUE = ValueType({"type": "string", "pattern": rf"{NAME_PATTERN[:-1]}$|^\*$"}, queue_or_wildcard)
_NAMES = array_value(_QUEUE, _MAX_QUEUES)
_SLOTS = integer_value(0, MAX_CLAIM)


def _queues(value: Any, field: str) -> dict[str, int | None]:
    """Parses queues with their free slots; without slots, the limit of the claim applies."""
    if isinstance(value, dict):
        if not 1 <= len(value) <= _MAX_QUEUES:
            raise Invalid(field, RawText(f"an object of {len(value):,}"), f"name 1 to {_MAX_QUEUES} queues")
        return {queue_or_wildcard(name, field): _SLOTS.check(slots, f"{field}.{name}") for name, slots in value.items()}
    return dict.fromkeys(_NAMES.check(value, field))


CLAIM = BodySchema(
    name="ClaimRequest",
    doc="What a worker can take now: no more than it can start at once.",
    fields=(
        WORKER,
        Field(
            "queues",
            ValueType(
                {
                    "anyOf": [
                        _NAMES.schema,
                        {
                            "type": "object",
                            "minProperties": 1,
                            "maxProperties": _MAX_QUEUES,
                            "propertyNames": _QUEUE.schema,
                            "additionalProperties": _SLOTS.schema,
                        },
                    ]
                },
                _queues,
            ),
            "Names, or an object of names and free slots; `*` is all others together. Default: every queue.",
            example={"mail": 5, "*": 2},
        ),
        Field(
            "limit",
            integer_value(1, MAX_CLAIM),
            "Maximum number of jobs. Default: the slots of its queues, else 1.",
            example=5,
        ),
        Field(
            "tasks",
            array_value(TASK_VALUE, _MAX_TASKS),
            "The tasks it has handlers for. A job of another is given back for a worker that has one, "
            "as the settings `unknown_task` and `defer_for` say. Default: all tasks.",
            example=["email.send"],
        ),
        Field(
            "wait",
            integer_value(0, MAX_WAIT, default=0),
            "Seconds to wait for jobs where there are none, or as many as the setting `claim_wait` allows.",
            example=30,
        ),
        LEASE,
        *STATUS_FIELDS,
    ),
)


def _request(
    call: RequestContext, capacity: dict[str, int], wildcard_queues: frozenset[str], limit: int, status: WorkerStatus
) -> RemoteClaimRequest:
    tasks = call.body.get("tasks")
    return RemoteClaimRequest(
        worker=worker_of(call),
        capacity=capacity,
        wildcard_queues=wildcard_queues,
        limit=limit,
        lease_for=lease_for(call),
        tasks=None if tasks is None else frozenset(tasks),
        is_idle=status.running == 0,
    )


def lease_for(call: RequestContext) -> timedelta:
    """Returns the duration of leases."""
    asked: timedelta = call.body.get("lease", call.app.settings.lease)
    return asked


def _shown_queues(call: RequestContext, names: Iterable[str]) -> str:
    """Returns the queues of a worker for lists of workers: the wildcard means the queues of its key."""
    shown = {each for name in names for each in (call.caller.queues if name == EVERY else [name])}
    return ",".join(sorted(shown))


def heartbeat_of(call: RequestContext, given: WorkerStatus, queues: str | None = None) -> WorkerHeartbeat:
    """Returns the state of a worker to store; missing fields come from this process."""
    known = call.remote_workers.get_worker(worker_of(call))
    known.queues = queues or known.queues or ",".join(call.caller.queues)
    known.reported = WorkerHeartbeat(
        worker=worker_of(call),
        host=given.host,
        pid=given.pid,
        queues=known.queues,
        concurrency=given.concurrency,
        running=given.running,
        succeeded=given.succeeded or 0,
        failed=given.failed or 0,
        has_deltas=given.succeeded is None and given.failed is None,
        version=given.version,
        memory=given.memory,
    )
    return known.reported


# ── the operation ─────────────────────────────────────────────────────────────────────────────────────────────────
async def claim(call: RequestContext) -> ApiResponse:
    """Long-polls for jobs. Releases them if the client has disconnected."""
    arrived_at = call.app.clock.monotonic()
    given = parse_worker(call)
    slots = call.body.get("queues") or {EVERY: None}
    limit = call.body.get("limit") or min(MAX_CLAIM, sum(each or 0 for each in slots.values())) or 1
    capacity = {name: limit if each is None else each for name, each in slots.items()}
    request = _request(call, *await allowed_capacity(call, capacity), limit, given)
    heartbeat = heartbeat_of(call, given, _shown_queues(call, slots))
    await call.remote_workers.start_sweeper()
    command = await _read_command(call, heartbeat, request.lease_for)
    if command is WorkerCommand.STOP or not any(capacity.values()):
        return _answer(call, request, ClaimResult([]), command, arrived_at)
    long_poll = _LongPollClaim(call, capacity, request, heartbeat, command)
    result = await long_poll.claim_jobs(min(call.body.get("wait", 0), call.app.settings.claim_wait.total_seconds()))
    return _answer(call, request, result, long_poll.command, arrived_at)


async def _read_command(call: RequestContext, heartbeat: WorkerHeartbeat, lease_for: timedelta) -> WorkerCommand:
    """Returns the command for the worker; registers the worker unless its last heartbeat is recent."""
    known = call.remote_workers.get_worker(heartbeat.worker)
    interval = min(call.app.settings.heartbeat, lease_for / 3).total_seconds()
    if known.heartbeat_at is not None and call.app.clock.monotonic() - known.heartbeat_at < interval:
        return known.command
    return (await call.remote_workers.heartbeat(heartbeat, [], lease_for)).command


class _LongPollClaim:
    """A claim that waits for jobs, until its timeout, a stop command or the client's disconnect."""

    def __init__(
        self,
        call: RequestContext,
        capacity: dict[str, int],
        request: RemoteClaimRequest,
        heartbeat: WorkerHeartbeat,
        command: WorkerCommand,
    ) -> None:
        self._call = call
        self._capacity = capacity  # as requested: the wildcard of a restricted key may include new queues later
        self._request = request
        self._heartbeat = heartbeat
        self._pending_claims = call.pending_claims
        self.command = command
        self._gone = asyncio.ensure_future(wait_disconnected(call.request))

    async def claim_jobs(self, wait: float) -> ClaimResult:
        """Claims jobs; releases them if the request is cancelled or its client disconnects."""
        claiming = asyncio.create_task(self._claim_or_wait(wait), name="holdfast-claim")
        try:
            result = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(self._release_later)
            raise
        finally:
            self._gone.cancel()
        if result.jobs and self._gone.done() and not self._gone.cancelled():
            await self._call.remote_workers.release_jobs(self._request.worker, result.jobs)
            return ClaimResult([])
        if wait > 0 and not self._call.is_still_authorized():
            await self._call.remote_workers.release_jobs(self._request.worker, result.jobs)
            raise unauthorized_refusal()
        return result

    def _release_later(self, claiming: asyncio.Task[ClaimResult]) -> None:
        if not claiming.cancelled() and claiming.exception() is None and claiming.result().jobs:
            workers = self._call.remote_workers
            workers.run_in_background(workers.release_jobs(self._request.worker, claiming.result().jobs))

    async def _claim_or_wait(self, wait: float) -> ClaimResult:
        result = await self._pending_claims.claim_now(self._request)
        if result.jobs or wait <= 0:
            return result
        if self.command is not WorkerCommand.NONE:  # no limit: the worker must receive its command
            return await self._wait_in_queue(wait)
        with self._call.wait_limiter.limit_wait(self._call.caller):
            return await self._wait_in_queue(wait)

    async def _wait_in_queue(self, wait: float) -> ClaimResult:
        """Waits for the claim's turn and returns its result."""
        pending = self._pending_claims.enqueue_claim(self._request)
        try:
            await self._wait(pending, wait)
        except HoldfastError:
            result = await self._pending_claims.cancel_claim(pending)
            if not result.jobs:  # else their claim would be lost
                raise
            return result
        return await self._pending_claims.cancel_claim(pending)

    async def _wait(self, pending: PendingClaim, wait: float) -> None:
        """Waits at most ``wait`` seconds, also for a store that is away; sends heartbeats: the worker stays listed."""
        clock, interval = self._call.app.clock, self._call.app.settings.heartbeat.total_seconds()
        deadline = clock.monotonic() + wait
        while self.command is not WorkerCommand.STOP and (left := deadline - clock.monotonic()) > 0:
            try:
                await clock.run_bounded(self._wait_for_event(pending.result, left), min(left, interval))
                if pending.result.done() or self._gone.done() or not self._call.is_still_authorized():
                    return
                capacity, wildcard_queues = await allowed_capacity(self._call, self._capacity)
                request = msgspec.structs.replace(self._request, capacity=capacity, wildcard_queues=wildcard_queues)
                self._pending_claims.update_request(pending, request)
                reply = await self._call.remote_workers.renew_heartbeat(self._heartbeat, self._request.lease_for)
                self.command = reply.command
            except Unavailable:
                await clock.sleep(min(left, OUTAGE_PAUSE))

    async def _wait_for_event(self, result: asyncio.Future[ClaimResult], seconds: float) -> None:
        """Waits for jobs, a disconnect, or a notification for this worker."""
        store = await self._call.app.open_store()
        topics = [f"worker:{self._request.worker}"]
        notifications = asyncio.ensure_future(store.queueing.wait(topics, timeout=seconds + 1))
        waits: list[asyncio.Future[Any]] = [result, self._gone, notifications]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if notifications.done():
                notifications.result()
        finally:
            notifications.cancel()


def _answer(
    call: RequestContext, asked: RemoteClaimRequest, result: ClaimResult, command: WorkerCommand, arrived_at: float
) -> ApiResponse:
    call.changed += [job.id for job in result.jobs]
    claimed = ClaimAnswer(
        jobs=[_claimed(call, job, isolated=result.isolated) for job in result.jobs],
        lease=asked.lease_for.total_seconds(),
        waited=_waited_seconds(result, arrived_at),
        command=command,
        quarantined=result.has_quarantined,
    )
    return json_response(200, claimed)


def _waited_seconds(result: ClaimResult, arrived_at: float) -> float:
    """Returns the seconds from the request's arrival to the claim of its jobs, rounded down: a lease that is counted
    from then may end too early for the worker, never too late."""
    if not result.jobs or result.claimed_at is None:
        return 0.0
    return math.floor((result.claimed_at - arrived_at) * 1000) / 1000


def _claimed(call: RequestContext, job: Job, *, isolated: bool) -> ClaimedJob:
    options = job.options_or_default
    return ClaimedJob(
        token=token_of(job.lease),
        id=job.id,
        task=job.task,
        queue=job.queue,
        payload=raw_json(job.payload),
        attempt=job.attempts,
        claims=job.claims,
        max_attempts=job.max_attempts,
        priority=job.priority,
        timeout=timeout_of(job, call.app.registry.get(job.task), call.app.settings),
        alone=isolated,
        run_at=format_timestamp(job.run_at_us),
        created_at=format_timestamp(job.created_at_us),
        tags=list(options.tags),
        metadata=options.metadata,
        traceparent=options.traceparent,
        tracestate=options.tracestate,
    )


_AT = "2030-01-31T08:00:00.000000Z"
_JOB: dict[str, Any] = {
    "token": SAMPLE,
    "id": ID,
    "task": "email.send",
    "queue": "mail",
    "payload": {"to": "a@b.c"},
    "attempt": 1,
    "claims": 1,
    "max_attempts": 5,
    "priority": 0,
    "timeout": 30.0,
    "alone": False,
    "run_at": _AT,
    "created_at": _AT,
    "tags": [],
    "metadata": None,
    "traceparent": None,
    "tracestate": None,
}
OPERATIONS = (
    Operation(
        name="claim_jobs",
        method="POST",
        path="/v1/claims",
        scope="work",
        group="Work",
        summary="Take jobs to run them",
        doc="For workers in any language. Where nothing is ready, `wait` says how long the answer may take. If the "
        "client hangs up before, what was taken for it is given back.",
        handler=claim,
        body=CLAIM,
        answers={
            200: ResponseSpec(
                ClaimAnswer,
                "The jobs, if there are any.",
                {"jobs": [_JOB], "lease": 30.0, "waited": 0.004, "command": "none", "quarantined": False},
            )
        },
        refusals=(429,),
    ),
)
