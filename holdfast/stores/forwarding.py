"""Wrappers of a store: every verb of a family is forwarded, through an interceptor that may delay, refuse or time it.

Base classes of the stores that change some verbs: they override them. A verb that is missing here is an error of the
type checker.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack

from holdfast.core.batches import BatchProgress
from holdfast.core.error_groups import FailedJob
from holdfast.core.history import HistoryInterval, HistoryRow
from holdfast.core.job_changes import JobChanges
from holdfast.core.job_logs import LogBatch, LogPage
from holdfast.core.limits import Assigned, BucketUse, Limit, LimitChange
from holdfast.core.models import (
    Attempt,
    BulkResult,
    Claim,
    ExpiredJob,
    Finding,
    Job,
    JobEvents,
    JobFilter,
    Lease,
    NewJob,
    Page,
    QueueInfo,
    ReplayRate,
    Settled,
    Settlement,
    States,
    Step,
    Submitted,
    TxOutcome,
)
from holdfast.core.schedule import DueSchedules, Schedule, ScheduleChange
from holdfast.core.stats import JobStats, StateCounts
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.core.waits import ChildStatus, JobWaits, KeptSignal, SentSignal, Signal, SignalReceipt, SignalWait
from holdfast.core.workers import HeartbeatReply, WorkerCommand, WorkerHeartbeat, WorkerInfo
from holdfast.stores.base import (
    Admin,
    ClaimRequest,
    External,
    Health,
    Limits,
    Maintenance,
    Query,
    Queueing,
    Schedules,
    Selection,
    StatementFlow,
    Store,
    Workflow,
)

T = TypeVar("T")


class Interceptor(Protocol):
    """Runs the call of a verb; may delay, refuse or time it."""

    async def __call__(self, verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T: ...


async def run_directly(verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Interceptor that only runs the call."""
    return await call()


class ForwardingStore:
    """Forwards the life of a store, and wraps each of its families."""

    def __init__(self, inner: Store, intercept: Interceptor = run_directly) -> None:
        self._inner = inner
        self._intercept = intercept
        self.url = inner.url

    @property
    def queueing(self) -> Queueing:
        return ForwardingQueueing(self._inner.queueing, self._intercept)

    @property
    def maintenance(self) -> Maintenance:
        return ForwardingMaintenance(self._inner.maintenance, self._intercept)

    @property
    def admin(self) -> Admin:
        return ForwardingAdmin(self._inner.admin, self._intercept)

    @property
    def query(self) -> Query:
        return ForwardingQuery(self._inner.query, self._intercept)

    @property
    def schedules(self) -> Schedules:
        return ForwardingSchedules(self._inner.schedules, self._intercept)

    @property
    def limits(self) -> Limits:
        return ForwardingLimits(self._inner.limits, self._intercept)

    @property
    def workflow(self) -> Workflow:
        return ForwardingWorkflow(self._inner.workflow, self._intercept)

    @property
    def health(self) -> Health:
        return ForwardingHealth(self._inner.health, self._intercept)

    @property
    def external(self) -> External | None:
        external = self._inner.external
        return None if external is None else ForwardingExternal(external, self._intercept)

    async def open(self) -> None:
        await self._intercept("open", self._inner.open)

    async def missing(self) -> str | None:
        return await self._inner.missing()

    async def close(self) -> None:
        await self._intercept("close", self._inner.close)

    async def migrate(self) -> list[str]:
        return await self._intercept("migrate", self._inner.migrate)

    def migration_sql(self, span: str) -> str:
        return self._inner.migration_sql(span)

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        return self._inner.blocking(call)


class _Family(Generic[T]):
    """Forwards the verbs of one family."""

    def __init__(self, inner: T, intercept: Interceptor = run_directly) -> None:
        self._inner = inner
        self._intercept = intercept


class ForwardingQueueing(_Family[Queueing]):
    """Forwards every verb to ``inner``."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        return await self._intercept("submit", lambda: self._inner.submit(jobs))

    async def claim(self, request: ClaimRequest) -> Claim:
        return await self._intercept("claim", lambda: self._inner.claim(request))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        return await self._intercept("settle", lambda: self._inner.settle(settlements))

    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        return await self._intercept("heartbeat", lambda: self._inner.heartbeat(heartbeat, leases, lease_for=lease_for))

    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        return await self._intercept("append_logs", lambda: self._inner.append_logs(records))

    async def deregister(self, worker: str) -> None:
        await self._intercept("deregister", lambda: self._inner.deregister(worker))

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        await self._intercept("wait", lambda: self._inner.wait(topics, timeout=timeout))


class ForwardingMaintenance(_Family[Maintenance]):
    """Forwards every verb to ``inner``."""

    async def promote_due(self, *, limit: int) -> int:
        return await self._intercept("promote_due", lambda: self._inner.promote_due(limit=limit))

    async def expire_unstarted(self, *, limit: int) -> list[ExpiredJob]:
        return await self._intercept("expire_unstarted", lambda: self._inner.expire_unstarted(limit=limit))

    async def find_expired_leases(self, *, limit: int) -> list[Job]:
        return await self._intercept("find_expired_leases", lambda: self._inner.find_expired_leases(limit=limit))

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        return await self._intercept("prune", lambda: self._inner.prune(ended_for, limit=limit))

    async def count_ended(self, *, limit: int) -> bool:
        return await self._intercept("count_ended", lambda: self._inner.count_ended(limit=limit))

    async def reannounce(self) -> int:
        return await self._intercept("reannounce", self._inner.reannounce)


class ReplayOptions(TypedDict, total=False):
    """Arguments of ``Admin.replay``, for stores that pass them on."""

    force: bool
    payload: str | None
    from_step: int | None
    limit: int
    pace: ReplayRate


class ForwardingAdmin(_Family[Admin]):
    """Forwards every verb to ``inner``."""

    async def cancel(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        return await self._intercept("cancel", lambda: self._inner.cancel(selection, limit=limit))

    async def replay(self, selection: Selection, **options: Unpack[ReplayOptions]) -> BulkResult:
        return await self._intercept("replay", lambda: self._inner.replay(selection, **options))

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        return await self._intercept("edit", lambda: self._inner.edit(job_id, changes))

    async def delete(self, selection: Selection, *, limit: int = 1000, states: States = None) -> BulkResult:
        return await self._intercept("delete", lambda: self._inner.delete(selection, limit=limit, states=states))

    async def pause(self, queue: str) -> None:
        await self._intercept("pause", lambda: self._inner.pause(queue))

    async def resume(self, queue: str) -> None:
        await self._intercept("resume", lambda: self._inner.resume(queue))

    async def send_command(self, command: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        return await self._intercept("send_command", lambda: self._inner.send_command(command, workers))


class ForwardingQuery(_Family[Query]):
    """Forwards every verb to ``inner``."""

    async def get(self, job_id: str) -> Job | None:
        return await self._intercept("get", lambda: self._inner.get(job_id))

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        return await self._intercept("get_many", lambda: self._inner.get_many(job_ids))

    async def summaries(self, job_ids: Sequence[str]) -> list[Job | None]:
        return await self._intercept("summaries", lambda: self._inner.summaries(job_ids))

    async def by_key(self, key: str) -> Job | None:
        return await self._intercept("by_key", lambda: self._inner.by_key(key))

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        return await self._intercept("by_keys", lambda: self._inner.by_keys(keys))

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        return await self._intercept(
            "find", lambda: self._inner.find(where, limit=limit, cursor=cursor, seconds=seconds)
        )

    async def count(self, where: JobFilter, *, limit: int | None = None, seconds: float | None = None) -> int:
        return await self._intercept("count", lambda: self._inner.count(where, limit=limit, seconds=seconds))

    async def count_states(self, where: JobFilter) -> StateCounts:
        return await self._intercept("count_states", lambda: self._inner.count_states(where))

    async def attempts(self, job_id: str) -> list[Attempt]:
        return await self._intercept("attempts", lambda: self._inner.attempts(job_id))

    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        return await self._intercept("logs", lambda: self._inner.logs(job_id, limit=limit, cursor=cursor))

    async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
        return await self._intercept("queues", lambda: self._inner.queues(recent=recent, max_count=max_count))

    async def queue_depths(self, *, max_count: int) -> list[QueueInfo]:
        return await self._intercept("queue_depths", lambda: self._inner.queue_depths(max_count=max_count))

    async def workers(self) -> list[WorkerInfo]:
        return await self._intercept("workers", self._inner.workers)

    async def stats(self, *, recent: timedelta, max_count: int) -> JobStats:
        return await self._intercept("stats", lambda: self._inner.stats(recent=recent, max_count=max_count))

    async def read_history(self, since_us: int, interval: HistoryInterval) -> list[HistoryRow]:
        return await self._intercept("read_history", lambda: self._inner.read_history(since_us, interval))

    async def failed_jobs(self, limit: int) -> list[FailedJob]:
        return await self._intercept("failed_jobs", lambda: self._inner.failed_jobs(limit))

    async def events(self, after: str | int | None, *, limit: int, max_age: timedelta) -> JobEvents:
        return await self._intercept("events", lambda: self._inner.events(after, limit=limit, max_age=max_age))


class ForwardingSchedules(_Family[Schedules]):
    """Forwards every verb to ``inner``."""

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        return await self._intercept("write_schedule", lambda: self._inner.write_schedule(change))

    async def read_schedules(self, name: str | None = None, *, after: str = "", limit: int = 1000) -> list[Schedule]:
        return await self._intercept(
            "read_schedules", lambda: self._inner.read_schedules(name, after=after, limit=limit)
        )

    async def due_schedules(self, *, limit: int) -> DueSchedules:
        return await self._intercept("due_schedules", lambda: self._inner.due_schedules(limit=limit))


class ForwardingLimits(_Family[Limits]):
    """Forwards every verb to ``inner``."""

    async def write_limit(self, change: LimitChange) -> int | None:
        return await self._intercept("write_limit", lambda: self._inner.write_limit(change))

    async def read_limits(self) -> list[Limit]:
        return await self._intercept("read_limits", self._inner.read_limits)

    async def assign_partitions(
        self, *, queue: str | None = None, task: str | None = None, after: str = "", limit: int = 1000
    ) -> Assigned:
        return await self._intercept(
            "assign_partitions", lambda: self._inner.assign_partitions(queue=queue, task=task, after=after, limit=limit)
        )

    async def bucket_use(self, buckets: Sequence[str]) -> list[BucketUse]:
        return await self._intercept("bucket_use", lambda: self._inner.bucket_use(buckets))

    async def count_unstarted(self, buckets: Sequence[str], *, max_count: int) -> list[int]:
        return await self._intercept(
            "count_unstarted", lambda: self._inner.count_unstarted(buckets, max_count=max_count)
        )

    async def take_tokens(self, bucket: str, tokens: int) -> timedelta:
        return await self._intercept("take_tokens", lambda: self._inner.take_tokens(bucket, tokens))

    async def pause_buckets(self, buckets: Sequence[str], pause_for: timedelta) -> None:
        await self._intercept("pause_buckets", lambda: self._inner.pause_buckets(buckets, pause_for))


class ForwardingWorkflow(_Family[Workflow]):
    """Forwards every verb to ``inner``."""

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        return await self._intercept("save_steps", lambda: self._inner.save_steps(steps))

    async def read_steps(self, job_id: str) -> list[Step]:
        return await self._intercept("read_steps", lambda: self._inner.read_steps(job_id))

    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        return await self._intercept("receive_signal", lambda: self._inner.receive_signal(wait))

    async def send_signal(self, signal: Signal) -> SentSignal:
        return await self._intercept("send_signal", lambda: self._inner.send_signal(signal))

    async def read_signals(self, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        return await self._intercept("read_signals", lambda: self._inner.read_signals(topic, limit=limit))

    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        return await self._intercept("start_children", lambda: self._inner.start_children(lease, children, worker))

    async def read_batch(self, job_id: str) -> BatchProgress | None:
        return await self._intercept("read_batch", lambda: self._inner.read_batch(job_id))

    async def read_waits(self, job_id: str) -> JobWaits:
        return await self._intercept("read_waits", lambda: self._inner.read_waits(job_id))


class ForwardingHealth(_Family[Health]):
    """Forwards every verb to ``inner``."""

    async def doctor(self) -> list[Finding]:
        return await self._intercept("doctor", self._inner.doctor)

    async def durability(self) -> Finding:
        return await self._intercept("durability", self._inner.durability)

    async def repair(self) -> list[Finding]:
        return await self._intercept("repair", self._inner.repair)

    async def backup(self, path: str) -> None:
        await self._intercept("backup", lambda: self._inner.backup(path))

    async def server_time_us(self) -> int:
        return await self._intercept("server_time_us", self._inner.server_time_us)


class ForwardingExternal(_Family[External]):
    """Forwards every verb to ``inner``."""

    def __init__(self, inner: External, intercept: Interceptor = run_directly) -> None:
        super().__init__(inner, intercept)
        self.dialect = inner.dialect

    async def verify(self) -> StatementFlow[None]:
        return await self._intercept("verify", self._inner.verify)

    def submit_flow(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        return self._inner.submit_flow(jobs)

    def complete_flow(self, lease: Lease, result: str | None, worker: str | None = None) -> StatementFlow[Settled]:
        return self._inner.complete_flow(lease, result, worker)

    def record_step_flow(self, step: NewStep, previous: str | None) -> StatementFlow[StepReceipt]:
        return self._inner.record_step_flow(step, previous)

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        return await self._intercept("tx_outcome", lambda: self._inner.tx_outcome(lease))
