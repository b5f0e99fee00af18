"""Ids in Redis as ULIDs: 26 characters for readers of the keys, UUIDs as everywhere for users of the store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Unpack

from msgspec.structs import replace

from holdfast.core.batches import BatchProgress, BatchRefused, missing_batch
from holdfast.core.dependencies import describe_failed_dependency, missing_dependency
from holdfast.core.error_groups import FailedJob
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.ids import as_ulid, parse_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.job_logs import LogBatch, LogPage
from holdfast.core.models import (
    Attempt,
    BulkResult,
    Claim,
    ExpiredJob,
    Job,
    JobEvent,
    JobEvents,
    JobFilter,
    Lease,
    NewJob,
    Options,
    Page,
    Reason,
    Settled,
    Settlement,
    States,
    Step,
    Submitted,
)
from holdfast.core.schedule import ScheduleChange
from holdfast.core.steps import NewStep
from holdfast.core.waits import ChildStatus, JobWaits, SentSignal, Signal, SignalReceipt, SignalWait
from holdfast.core.workers import HeartbeatReply, WorkerHeartbeat
from holdfast.stores.base import Admin, ClaimRequest, Maintenance, Query, Queueing, Schedules, Selection, Workflow
from holdfast.stores.forwarding import (
    ForwardingAdmin,
    ForwardingMaintenance,
    ForwardingQuery,
    ForwardingQueueing,
    ForwardingSchedules,
    ForwardingWorkflow,
    ReplayOptions,
)
from holdfast.stores.redis.pool import parse_url
from holdfast.stores.redis.store import RedisStore

_BY_HAND = "by-hand:"
"""Marks ids written by hand that are no ULIDs: each has to be found again as it stands."""


def redis_store(url: str, now: Callable[[], int] | None, call_deadline: float | None) -> RedisStore:
    """The store behind a URL of Redis, with ids as it says."""
    kind = UlidStore if parse_url(url).ulids else RedisStore
    return kind(url, now=now, call_deadline=call_deadline)


def encode_id(job_id: str) -> str:
    """A job's id as Redis has it."""
    try:
        return as_ulid(job_id)
    except ValueError:  # one written by hand, or of no job
        return job_id.removeprefix(_BY_HAND)


def decode_id(text: str) -> str:
    """A job's id from its form in Redis; the inverse of ``encode_id``."""
    canonical = parse_id(text) if len(text) == 26 else None
    return canonical if canonical is not None and as_ulid(canonical) == text else _BY_HAND + text


class UlidStore(RedisStore):
    """The Redis store of a URL with ``ids=ulid``: ids are turned at its families."""

    @property
    def queueing(self) -> Queueing:
        return UlidQueueing(super().queueing)

    @property
    def maintenance(self) -> Maintenance:
        return UlidMaintenance(super().maintenance)

    @property
    def admin(self) -> Admin:
        return UlidAdmin(super().admin)

    @property
    def query(self) -> Query:
        return UlidQuery(super().query)

    @property
    def schedules(self) -> Schedules:
        return UlidSchedules(super().schedules)

    @property
    def workflow(self) -> Workflow:
        return UlidWorkflow(super().workflow)


class UlidQueueing(ForwardingQueueing):
    """Queueing, with ids as ULIDs in Redis."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        try:
            with _reading_refusals():
                answers = await self._inner.submit([_encode_job(job) for job in jobs])
        except HoldfastError as error:
            error.stored = [job_id and decode_id(job_id) for job_id in error.stored]
            raise
        return [replace(answer, job_id=decode_id(answer.job_id)) for answer in answers]

    async def claim(self, request: ClaimRequest) -> Claim:
        if request.ids is not None:
            request = replace(request, ids=[encode_id(job_id) for job_id in request.ids])
        claim = await self._inner.claim(request)
        return replace(claim, jobs=_decode_jobs(claim.jobs), expired=tuple(_decode_expired(claim.expired)))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        answers = await self._inner.settle([replace(each, job_id=encode_id(each.job_id)) for each in settlements])
        return [replace(answer, job_id=each.job_id) for answer, each in zip(answers, settlements, strict=True)]

    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        encoded = [_encode_lease(lease) for lease in leases]
        return await self._inner.heartbeat(heartbeat, encoded, lease_for=lease_for)

    async def append_logs(self, records: Sequence[LogBatch]) -> list[bool]:
        return await self._inner.append_logs([replace(each, lease=_encode_lease(each.lease)) for each in records])

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        await self._inner.wait([_encode_topic(topic) for topic in topics], timeout=timeout)


@contextmanager
def _reading_refusals() -> Iterator[None]:
    """Raises the errors of a submission with ids as UUIDs."""
    try:
        yield
    except Invalid as error:
        raise _decode_refusal(error) from None
    except BatchRefused as error:
        raise type(error)(decode_id(error.batch_id)) from None


def _decode_refusal(error: Invalid) -> Invalid:
    if error.field == "after":
        return missing_dependency(decode_id(str(error.value)))
    return missing_batch(decode_id(str(error.value))) if error.field == "batch" else error


def _encode_lease(lease: Lease) -> Lease:
    return Lease(encode_id(lease.job_id), lease.claims)


def _encode_job(job: NewJob) -> NewJob:
    after = tuple(replace(each, job_id=encode_id(each.job_id)) for each in job.after)
    return replace(job, id=encode_id(job.id), after=after, options=_encode_options(job.options))


def _encode_options(options: Options | None) -> Options | None:
    if options is None or options.batch is None:
        return options
    return replace(options, batch=encode_id(options.batch))


class UlidWorkflow(ForwardingWorkflow):
    """Steps and waits, with ids as ULIDs in Redis."""

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        return await self._inner.save_steps([replace(step, lease=_encode_lease(step.lease)) for step in steps])

    async def read_steps(self, job_id: str) -> list[Step]:
        return await self._inner.read_steps(encode_id(job_id))

    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        step = replace(wait.step, lease=_encode_lease(wait.step.lease))
        return await self._inner.receive_signal(replace(wait, step=step))

    async def send_signal(self, signal: Signal) -> SentSignal:
        sent = await self._inner.send_signal(signal)
        return sent if sent.job_id is None else replace(sent, job_id=decode_id(sent.job_id))

    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        written = [_encode_job(child) for child in children]
        with _reading_refusals():
            started = await self._inner.start_children(_encode_lease(lease), written, worker)
        return started and [replace(child, job_id=decode_id(child.job_id)) for child in started]

    async def read_batch(self, job_id: str) -> BatchProgress | None:
        return await self._inner.read_batch(encode_id(job_id))

    async def read_waits(self, job_id: str) -> JobWaits:
        found = await self._inner.read_waits(encode_id(job_id))
        return replace(
            found,
            dependencies=[replace(each, job_id=decode_id(each.job_id)) for each in found.dependencies],
            dependents=[replace(each, job_id=decode_id(each.job_id)) for each in found.dependents],
        )


class UlidAdmin(ForwardingAdmin):
    """Changes by operators, with ids as ULIDs in Redis."""

    async def cancel(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        return _decode_operated(await self._inner.cancel(_encode_selection(selection), limit=limit))

    async def replay(self, selection: Selection, **options: Unpack[ReplayOptions]) -> BulkResult:
        return _decode_operated(await self._inner.replay(_encode_selection(selection), **options))

    async def edit(self, job_id: str, changes: JobChanges) -> BulkResult:
        written = replace(changes, options=_encode_options(changes.options))
        return _decode_operated(await self._inner.edit(encode_id(job_id), written))

    async def delete(self, selection: Selection, *, limit: int = 1000, states: States = None) -> BulkResult:
        return _decode_operated(await self._inner.delete(_encode_selection(selection), limit=limit, states=states))


class UlidMaintenance(ForwardingMaintenance):
    """Maintenance, with ids as ULIDs in Redis."""

    async def expire_unstarted(self, *, limit: int) -> list[ExpiredJob]:
        return _decode_expired(await self._inner.expire_unstarted(limit=limit))

    async def find_expired_leases(self, *, limit: int) -> list[Job]:
        return _decode_jobs(await self._inner.find_expired_leases(limit=limit))


class UlidSchedules(ForwardingSchedules):
    """Schedules, with ids as ULIDs in Redis."""

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        with _reading_refusals():
            return await self._inner.write_schedule(replace(change, jobs=[_encode_job(job) for job in change.jobs]))


class UlidQuery(ForwardingQuery):
    """Reads, with ids as ULIDs in Redis."""

    async def events(self, after: str | int | None, *, limit: int, max_age: timedelta) -> JobEvents:
        page = await self._inner.events(after, limit=limit, max_age=max_age)
        return replace(page, events=[_decode_event(each) for each in page.events])

    async def get(self, job_id: str) -> Job | None:
        job = await self._inner.get(encode_id(job_id))
        return job and _decode_job(job)

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        jobs = await self._inner.get_many([encode_id(job_id) for job_id in job_ids])
        return [job and _decode_job(job) for job in jobs]

    async def summaries(self, job_ids: Sequence[str]) -> list[Job | None]:
        jobs = await self._inner.summaries([encode_id(job_id) for job_id in job_ids])
        return [job and _decode_job(job) for job in jobs]

    async def by_key(self, key: str) -> Job | None:
        job = await self._inner.by_key(key)
        return job and _decode_job(job)

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        return [job and _decode_job(job) for job in await self._inner.by_keys(keys)]

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        page = await self._inner.find(where, limit=limit, cursor=cursor, seconds=seconds)
        return Page(jobs=_decode_jobs(page.jobs), cursor=page.cursor)

    async def attempts(self, job_id: str) -> list[Attempt]:
        return await self._inner.attempts(encode_id(job_id))

    async def failed_jobs(self, limit: int) -> list[FailedJob]:
        return [replace(job, job_id=decode_id(job.job_id)) for job in await self._inner.failed_jobs(limit)]

    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        return await self._inner.logs(encode_id(job_id), limit=limit, cursor=cursor)


def _decode_job(job: Job) -> Job:
    if job.options is not None and job.options.batch is not None:
        job = replace(job, options=replace(job.options, batch=decode_id(job.options.batch)))
    return replace(job, id=decode_id(job.id), error=_decode_error(job.reason, job.error))


def _decode_jobs(jobs: Iterable[Job]) -> list[Job]:
    return [_decode_job(job) for job in jobs]


def _decode_expired(expired: Iterable[ExpiredJob]) -> list[ExpiredJob]:
    return [replace(job, job_id=decode_id(job.job_id)) for job in expired]


def _decode_event(event: JobEvent) -> JobEvent:
    return replace(event, job_id=decode_id(event.job_id), error=_decode_error(event.reason, event.error))


_FAILED_DEPENDENCY = re.compile(describe_failed_dependency("(.+)", "(.+)"))


def _decode_error(reason: str | None, error: str | None) -> str | None:
    """The text of a failed dependency with the id as a UUID."""
    match = None if reason != Reason.DEPENDENCY else _FAILED_DEPENDENCY.fullmatch(error or "")
    return error if match is None else describe_failed_dependency(decode_id(match[1]), match[2])


def _decode_operated(operated: BulkResult) -> BulkResult:
    changed = [(decode_id(job_id), state) for job_id, state in operated.changed]
    refused = [(decode_id(job_id), state) for job_id, state in operated.refused]
    return BulkResult(changed=changed, refused=refused, more=operated.more)


def _encode_selection(selection: Selection) -> Selection:
    return selection if isinstance(selection, JobFilter) else [encode_id(job_id) for job_id in selection]


def _encode_topic(topic: str) -> str:
    return f"job:{encode_id(topic.removeprefix('job:'))}" if topic.startswith("job:") else topic
