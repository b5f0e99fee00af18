"""From a caller's arguments to jobs in the store.

A job is validated whole before anything is stored. Lone concurrent submitters of one event loop share transactions: the
first goes at once, those that arrive while it is under way go together in the next; many of them in two, so that the
store works on one while this process prepares the other.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.app.backpressure import QueueDepths
from holdfast.app.batches import Batch, check_waits, parse_batch
from holdfast.app.handle import check_drafts
from holdfast.app.workflows import After, check_circles, parse_dependencies
from holdfast.core.batches import BATCH_TASK
from holdfast.core.encryption import Codec, is_encrypted, require_decrypted
from holdfast.core.errors import Conflict, HoldfastError, Invalid, Unavailable
from holdfast.core.events import Events, JobCreated, JobDuplicate
from holdfast.core.fault_points import fault_point
from holdfast.core.faults import FAULTS_TASK
from holdfast.core.ids import check_id, new_id
from holdfast.core.job_changes import check_expiry, needs_clock, with_expiry
from holdfast.core.metric_events import JobsSubmitted
from holdfast.core.models import Job, NewJob, Options, Submitted, to_microseconds
from holdfast.core.portal import running_loop
from holdfast.core.retry import Retry, as_retry
from holdfast.core.schedule import ALERTS_SCHEDULE
from holdfast.core.unique import Unique, as_unique
from holdfast.core.validation import (
    check_key,
    check_metadata,
    check_name,
    check_priority,
    check_span,
    check_tags,
    check_task_name,
    check_timeout,
    parse_instant,
)
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.stores.common.unconfirmed import name_unconfirmed, stored_ids
from holdfast.telemetry.trace_context import submission

if TYPE_CHECKING:
    from holdfast.telemetry.spans import Spans

_Jobs = Iterable[NewJob] | AsyncIterable[NewJob]
_Submit = Callable[[Sequence[NewJob]], Coroutine[Any, Any, list[Submitted]]]
_MAX_GROUP = 500  # jobs of lone submitters in one transaction
_MAX_ALIASES = 100_000  # jobs of earlier batches that were answered with others: a stream may be endless
_HALVED = 16  # jobs of lone submitters that are worth two transactions
_MAX_ATTEMPTS = 1_000_000
_MAX_LOOKUP = 100  # jobs that are asked for together: each may have a large payload


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a submission beside task and payload. None: leave it to task and settings; for ``max_attempts`` that
    is UNSET, and None is no limit. The text "unlimited" is no limit either, where the setting ``max_attempts_limit``
    says so too.
    """

    id: str | None = None
    queue: str | None = None
    priority: int | None = None
    delay: float | timedelta | str | None = None
    run_at: datetime | str | None = None
    key: str | None = None
    key_for: float | timedelta | str | None = None
    unique: Unique | str | float | timedelta | None = None
    expires: float | timedelta | datetime | str | None = None
    max_attempts: int | str | UnsetType | None = UNSET
    timeout: float | timedelta | str | None = None
    retry: Retry | str | None = None
    tags: Sequence[str] = ()
    metadata: dict[str, object] | None = None
    after: After | Iterable[After] | None = None
    batch: Batch | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tags, str):  # a sequence of letters, to whatever adds the task's own
            check_tags(self.tags)


def draft_job(task: str, payload: str, options: JobOptions, settings: Settings, codec: Codec | None = None) -> NewJob:
    """Returns the job of these options, validated; raises Invalid, which names the field."""
    if options.delay is not None and options.run_at is not None:
        raise Invalid("run_at", options.run_at, "give delay or run_at, not both")
    if task == BATCH_TASK:
        raise Invalid("task", task, "submit a batch with its jobs: app.enqueue_batch(…), or POST /v1/batches")
    if task == FAULTS_TASK:
        raise Invalid("task", task, "switch faults on by app.faults.start(…), `holdfast chaos` or POST /v1/faults")
    if task == ALERTS_SCHEDULE:
        raise Invalid("task", task, "write rules of alerts into the settings; workers evaluate them")
    job = NewJob(
        id=new_id() if options.id is None else check_id(options.id),
        has_client_id=options.id is not None,
        task=check_task_name(task),
        payload=payload,
        queue="default" if options.queue is None else check_name("queue", options.queue),
        priority=0 if options.priority is None else check_priority(options.priority),
        delay=None if options.delay is None else check_span(options.delay, "delay"),
        run_at_us=None if options.run_at is None else to_microseconds(parse_instant(options.run_at)),
        max_attempts=_checked_attempts(options.max_attempts, settings),
        key=None if options.key is None else check_key(options.key, limit=settings.key_limit),
        key_for=None if options.key_for is None else check_span(options.key_for, "key_for"),
        options=_stored_options(options),
    )
    if options.after is not None:
        if options.delay is not None or options.run_at is not None:
            raise Invalid("after", options.after, "leave out delay and run_at; let the handler sleep: context.sleep(…)")
        job = msgspec.structs.replace(job, after=parse_dependencies(options.after))
        check_waits(job)
    if options.expires is not None:
        job = with_expiry(job, options.expires)
    return job if options.unique is None else as_unique(options.unique).bind(job, codec)


def _stored_options(options: JobOptions) -> Options | None:
    given = (options.timeout, options.retry, options.metadata, options.batch)
    if not options.tags and all(each is None for each in given):
        return None
    return Options(
        timeout=None if options.timeout is None else check_timeout(options.timeout).total_seconds(),
        retry=None if options.retry is None else as_retry(options.retry).to_builtins(),
        metadata=None if options.metadata is None else check_metadata(options.metadata),
        tags=check_tags(options.tags) if options.tags else (),
        batch=None if options.batch is None else parse_batch(options.batch),
    )


def _checked_attempts(asked: int | str | UnsetType | None, settings: Settings) -> int | None:
    if isinstance(asked, UnsetType):
        return settings.max_attempts
    limit = settings.max_attempts_limit
    if asked is None or (asked == "unlimited" and limit is None):
        return None
    if asked == "unlimited":
        remedy = f'give a whole number from 1 to {limit}, or set max_attempts_limit = "unlimited"'
        raise Invalid("max_attempts", asked, remedy)
    most, otherwise = (_MAX_ATTEMPTS, ', or "unlimited"') if limit is None else (limit, "")
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= most:
        raise Invalid("max_attempts", asked, f"give a whole number from 1 to {most}{otherwise}")
    return asked


class Submitter:
    """Hands new jobs to the store."""

    def __init__(
        self,
        store: Callable[[], Awaitable[Store]],
        settings: Callable[[], Settings],
        events: Events,
        spans: Spans | None,
        as_stored: Callable[[NewJob], str],
    ) -> None:
        self._store = store
        self.depths = QueueDepths(store, as_stored)
        self._spans = spans
        self._settings = settings
        self._events = events
        self._groups: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_CallBatcher, _CallBatcher]] = (
            weakref.WeakKeyDictionary()
        )

    async def submit(self, job: NewJob) -> Submitted:
        """Store one job, together with other submissions of this moment. Jobs with a key, also a unique one, or with
        dependencies go apart: another caller's open transaction may hold theirs, and the others do not wait for it."""
        try:
            if self._spans is None:
                return await self._submit_single(job)
            with self._spans.submission_span([job]) as [traced]:
                return await self._submit_single(traced)
        except Unavailable as error:
            raise name_unconfirmed(error, job) from error.__cause__

    async def _submit_single(self, job: NewJob) -> Submitted:
        loop = running_loop()
        if loop is None:
            (answer,) = await self._send([job])
        else:
            groups = self._groups.get(loop)
            if groups is None:
                groups = self._groups[loop] = _CallBatcher(self._send), _CallBatcher(self._send)
            may_wait = job.has_extras and (job.key is not None or job.unique is not None or job.has_relations)
            answer = await groups[may_wait].submit(job)
        if not answer.created or self._events.has_subscriber(JobCreated):
            await self.emit_submitted([job], [answer])
        return answer

    async def submit_all(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store a batch in one transaction. A Conflict lists the jobs stored all the same."""
        if self._settings().strict_idempotency:
            await self.check_before(jobs)
        with submission(self._spans, jobs) as traced:
            answers = await self._send(traced)
            try:
                await self.emit_submitted(jobs, answers)
            except Conflict as error:
                error.stored = stored_ids(answers)
                raise
        return answers

    async def submit_many(self, jobs: _Jobs, size: int, within: _Submit | None = None) -> list[Submitted]:
        """Store batch after batch; while one is on its way to the store, the next is made, unless ``within`` submits
        into a caller's transaction. ``stored`` of an error covers all batches up to the one that failed."""
        answers: list[Submitted] = []
        send_next = follow_answers(within or self.submit_all)
        under_way: asyncio.Task[None] | None = None

        async def submit(batch: list[NewJob]) -> None:
            try:
                answers.extend(await send_next(batch))
            except HoldfastError as error:
                if answers and within is None:
                    error.stored = [*stored_ids(answers), *(error.stored or [None] * len(batch))]
                raise

        try:
            async for batch in split_batches(jobs, size):
                if within is not None or running_loop() is None:
                    await submit(batch)
                    continue
                if under_way is not None:
                    await under_way
                under_way = asyncio.create_task(submit(batch))
                await asyncio.sleep(0)  # it leaves before the next one is made
        except HoldfastError as error:  # perhaps of the source of the jobs
            if under_way is not None:
                await asyncio.wait([under_way])
            if answers and within is None:
                error.stored = error.stored or stored_ids(answers)
            raise
        finally:
            if under_way is not None:
                await under_way
        return answers

    async def _send(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        store = await self._store()
        reserved = await self.admit_jobs(jobs)
        try:
            fault_point("submit.before")
            answers = await store.queueing.submit(jobs)
            fault_point("submit.after")
        finally:
            self.depths.release_room(reserved)
        if self._events.has_subscriber(JobsSubmitted):
            self._measure(jobs, answers)
        return answers

    async def admit_jobs(self, jobs: Sequence[NewJob]) -> Counter[str]:
        """Refuses jobs that can never begin, by the store's clock, and reserves room in the queues of the others."""
        extras = [job for job in jobs if job.has_extras]
        if extras:
            check_circles(extras)
            mixed = [job for job in extras if needs_clock(job)]
            now_us = await (await self._store()).health.server_time_us() if mixed else 0
            for job in mixed:
                check_expiry(job, now_us)
        return await self.depths.reserve_room(jobs)

    def _measure(self, jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> None:
        pairs = list(zip(jobs, answers, strict=True))
        created = Counter(job.task for job, answer in pairs if answer.created)
        deduplicated = Counter(job.task for job, answer in pairs if not answer.created)
        self._events.emit(JobsSubmitted(created=created, deduplicated=deduplicated))

    async def emit_submitted(self, jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> None:
        """Tell observers, as far as the keys stand for the submitted jobs."""
        await self.check_keys(jobs, answers)
        if not self._events.has_subscriber(JobCreated) and not self._events.has_subscriber(JobDuplicate):
            return
        for job, answer in zip(jobs, answers, strict=True):
            kind = JobCreated if answer.created else JobDuplicate
            self._events.emit(kind(job_id=answer.job_id, task=job.task, queue=job.queue))

    async def check_keys(self, jobs: Sequence[NewJob], answers: Sequence[Submitted]) -> None:
        """With strict idempotency, refuse a key that stands for something else."""
        if not self._settings().strict_idempotency:
            return
        store = await self._store()
        again = [pair for pair in zip(jobs, answers, strict=True) if not pair[1].created and pair[0].key is not None]
        for start in range(0, len(again), _MAX_LOOKUP):
            chunk = again[start : start + _MAX_LOOKUP]
            found = await store.query.by_keys([str(job.key) for job, _ in chunk])
            for (job, answer), stored in zip(chunk, found, strict=True):
                if stored is None and job.unique is not None:
                    continue  # the key is free: another job does the same work
                first = stored if stored and stored.id == answer.job_id else await store.query.get(answer.job_id)
                if first is not None:
                    _check_same(job, first)

    async def check_before(self, jobs: Sequence[NewJob]) -> None:
        """Refuses a batch with a key of another job before any of its jobs is stored. A concurrent submission of the
        same key is found afterwards."""
        keyed = [job for job in jobs if job.key is not None]
        store = await self._store()
        firsts: dict[str | None, NewJob] = {}
        for start in range(0, len(keyed), _MAX_LOOKUP):
            chunk = keyed[start : start + _MAX_LOOKUP]
            found = await store.query.by_keys([str(job.key) for job in chunk])
            for job, stored in zip(chunk, found, strict=True):
                _check_same(job, stored or firsts.setdefault(job.key, job))


def _check_same(job: NewJob, first: Job | NewJob) -> None:
    if (first.task, first.queue) == (job.task, job.queue) and not is_encrypted(job.payload):
        require_decrypted(first.payload, f"the payload of job {first.id}, for which key {job.key!r} stands,")
    if (first.task, first.queue, first.payload) != (job.task, job.queue, job.payload):
        raise Conflict(
            f"key {job.key!r} already stands for job {first.id} with another task, queue or payload; "
            "use a new key for a different job"
        )


class _CallBatcher:
    """The lone submitters of one event loop."""

    def __init__(self, send: _Submit) -> None:
        self._send = send
        self._under_way = 0
        self._pending: list[tuple[NewJob, asyncio.Future[Submitted]]] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def submit(self, job: NewJob) -> Submitted:
        if self._under_way:
            answer: asyncio.Future[Submitted] = asyncio.get_running_loop().create_future()
            self._pending.append((job, answer))
            return await answer
        self._under_way += 1
        try:
            (submitted,) = await self._send([job])
        except Unavailable as error:
            self._fail_pending(error)
            raise
        finally:
            self._under_way -= 1
            if self._pending:
                self._start_sender()
        return submitted

    def _start_sender(self) -> None:
        self._under_way += 1
        sender = asyncio.ensure_future(self._send_pending())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _send_pending(self) -> None:
        try:
            while self._pending:
                batch = self._next_batch()
                if batch:
                    await self._send_batch(batch)
                await asyncio.sleep(0)  # callers that were answered may submit again
        finally:
            self._under_way -= 1

    def _next_batch(self) -> list[tuple[NewJob, asyncio.Future[Submitted]]]:
        """Returns the pending submissions of the next batch; of many only half, and a second sender starts."""
        size = min(len(self._pending), _MAX_GROUP)
        if size >= _HALVED and self._under_way < 2:
            self._start_sender()
            size -= size // 2
        batch, self._pending = self._pending[:size], self._pending[size:]
        return [(job, answer) for job, answer in batch if not answer.cancelled()]

    def _fail_pending(self, error: Unavailable) -> None:
        """Fails the pending submissions with the error of their store at once, instead of retrying each."""
        if error.affects_all:
            pending, self._pending = self._pending, []
            for _, answer in pending:
                _fail(answer, error)

    async def _send_batch(self, batch: list[tuple[NewJob, asyncio.Future[Submitted]]]) -> None:
        try:
            answers = await self._send([job for job, _ in batch])
        except Unavailable as error:
            # The store is down: fail the batch at once instead of retrying each job.
            stored, error.stored = error.stored or [None] * len(batch), ()
            for (_, answer), job_id in zip(batch, stored, strict=True):
                if job_id is not None and not answer.done():
                    answer.set_result(Submitted(job_id, created=True))
                _fail(answer, error)
            self._fail_pending(error)
            return
        except HoldfastError as error:
            if len(batch) == 1:
                _fail(batch[0][1], error)
                return
            for each in batch:  # so that only the guilty caller errs
                await self._send_batch([each])
            return
        except BaseException as error:
            for _, answer in batch:
                _fail(answer, error)
            if isinstance(error, Exception):  # a bug: its callers get the error, pending ones may not meet it
                return
            raise
        for (_, answer), submitted in zip(batch, answers, strict=True):
            if not answer.done():
                answer.set_result(submitted)


def _fail(answer: asyncio.Future[Submitted], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)


def follow_answers(submit: _Submit) -> _Submit:
    """Returns ``submit`` for batch after batch: a job that waits for one of an earlier batch which was answered with
    another, by its key, waits for that one."""
    aliases: dict[str, str] = {}

    def follow_aliases(job: NewJob) -> NewJob:
        found = [(each, aliases.get(each.job_id, job.id)) for each in job.after]
        after = [msgspec.structs.replace(each, job_id=alias) if alias != job.id else each for each, alias in found]
        return msgspec.structs.replace(job, after=tuple(after)) if after else job

    async def submit_next(jobs: Sequence[NewJob]) -> list[Submitted]:
        if aliases:
            jobs = [*map(follow_aliases, jobs)]
        answers = await submit(jobs)
        pairs = zip(jobs, answers, strict=True)
        aliases.update((job.id, answer.job_id) for job, answer in pairs if answer.job_id != job.id)
        while len(aliases) > _MAX_ALIASES:
            del aliases[next(iter(aliases))]
        return answers

    return submit_next


async def split_batches(jobs: _Jobs, size: int) -> AsyncIterator[list[NewJob]]:
    """Cut any iterable, async or not, into batches; it may be endless and is never held whole."""
    if not isinstance(jobs, Iterable if running_loop() is None else AsyncIterable | Iterable):
        raise Invalid("jobs", jobs, "give a list of drafted jobs: [task.new_job(…)]")
    if not isinstance(jobs, AsyncIterable):
        rest = iter(jobs)
        while batch := list(islice(rest, size)):
            check_drafts(batch)
            yield batch
        return
    batch = []
    async for job in jobs:
        batch.append(job)
        if len(batch) >= size:
            check_drafts(batch)
            yield batch
            batch = []
    check_drafts(batch)
    if batch:
        yield batch
