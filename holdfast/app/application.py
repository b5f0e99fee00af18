"""Holdfast, the application: registers tasks, submits jobs, reads and operates on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from holdfast.app.bound_task import with_defaults
from holdfast.app.editing import JobEditing
from holdfast.app.handle import (
    JobHandle,
    canonical_id,
    check_batch_size,
    check_drafts,
    check_limit,
    check_no_function,
    check_selection,
    checked_filter,
    find_ids,
)
from holdfast.app.in_process import WorkerMethods
from holdfast.app.overview import OverviewMethods
from holdfast.app.registration import Middleware
from holdfast.app.submitter import JobOptions, Submitter, draft_job, follow_answers, split_batches
from holdfast.app.sync import BlockingMethod, BlockingView, iterate_blocking
from holdfast.app.tagged_jobs import EndedJob, TaggedJobMethods
from holdfast.app.workflows import WorkflowMethods
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.encryption import Codec, check_key_id, check_readable
from holdfast.core.errors import ConfigError, ForkedConnection, Invalid, missing_job
from holdfast.core.events import Events
from holdfast.core.fault_points import check_environment
from holdfast.core.job_logs import LogPage
from holdfast.core.limits import Limit
from holdfast.core.models import Attempt, BulkResult, Job, JobFilter, NewJob, Page, ReplayRate, States, Submitted
from holdfast.core.portal import drive_coroutine, requires_loop, running_loop
from holdfast.core.resources import Resources
from holdfast.core.schedule import Schedule
from holdfast.core.validation import check_name, check_options, check_task_name, parse_count, parse_duration, parse_rate
from holdfast.core.workers import WorkerCommand
from holdfast.settings.settings import Settings
from holdfast.stores import ExternalTransactions, check_url, open_store
from holdfast.stores.base import AT_ONCE, Selection, Store
from holdfast.stores.encrypted_store import EncryptedStore, TextCipher
from holdfast.tasks import HandlerScope, Registry, decode_payload, encode_payload
from holdfast.tasks.command_policy import COMMAND, CommandPolicy, command_policy, draft_command
from holdfast.telemetry.metrics import time_calls
from holdfast.telemetry.trace_context import open_traces, submission
from holdfast.transports import DeliveryLedger, TransportConfig, with_transport

T = TypeVar("T")


class Holdfast(JobEditing, OverviewMethods, TaggedJobMethods, WorkflowMethods, WorkerMethods):
    """An application: its tasks and the queue they run on.

    ``url`` names the store (``sqlite:///holdfast.db``); without it, settings decide: HOLDFAST_URL, holdfast.toml.
    Any setting can be given by name and goes before file and environment, and before ``settings``.
    ``codec`` encrypts payloads and results before they reach the store; ``readable``: names of
    arguments that stay readable there. ``clock`` and ``now`` are for tests.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        now: Callable[[], int] | None = None,
        codec: Codec | None = None,
        readable: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        check_environment()
        given = {name: value for name, value in {"url": url, **arguments}.items() if value is not None}
        self.settings = (
            Settings.load(**given) if settings is None else settings.replace_values(**given) if given else settings
        )
        check_url(self.settings.url)
        if codec is not None:
            check_key_id(codec.key_id)
        self.codec = codec
        self.readable = check_readable(readable)
        self.clock: Clock = clock or SystemClock()
        self.now = now
        self.call_deadline: float | None = None  # seconds a call of the store takes, if a caller waits for its answer
        self.events = Events()
        self.registry = Registry()
        self.middlewares: list[Middleware] = []
        self.handler_scopes: list[HandlerScope] = []
        self.lifespans: list[Callable[[Holdfast], AbstractAsyncContextManager[Any]]] = []
        self.providers: dict[type, Callable[[], Any]] = {}
        self.declared: dict[str, Schedule] = {}
        self.declared_limits: dict[str, Limit] = {}
        self.views: weakref.WeakSet[Holdfast] = weakref.WeakSet()  # with stores of their own, closed with it
        self._store: Store | None = None
        self._making = threading.Lock()
        self._users = 0
        self._in_flight = DeliveryLedger()
        self.spans = open_traces(
            self.settings.traces, hides_errors=bool(self.settings.redacted), hides_refused=codec is not None
        )
        """The maker of spans; None if tracing is off."""
        self._submitter = Submitter(self.open_store, lambda: self.settings, self.events, self.spans, self._as_stored)
        self.external_tx = ExternalTransactions(self.open_store, self._await_or_block)
        """Submits and completes jobs inside a transaction that the caller holds."""

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Holdfast:
        await self.open_store()
        self._users += 1
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._users -= 1
        if not self._users:  # a handler may enter the application its worker runs on
            await self._close()

    @requires_loop
    async def close(self) -> None:
        """Closes the store. The next call opens it again."""
        await self._close()

    async def _close(self) -> None:
        for each in (self, *self.views):
            store, each._store = each._store, None
            if store is not None:
                await store.close()

    @property
    def sync(self) -> BlockingHoldfast:
        """The same methods for blocking callers: ``app.sync.get(id)``."""
        return BlockingHoldfast(self, self)

    def run_blocking(self, call: Coroutine[Any, Any, T], *, in_this_thread: bool = False) -> T:
        """Runs a coroutine for a blocking caller; ``in_this_thread``: it owns the caller's connection."""
        if in_this_thread:
            return drive_coroutine(call)
        try:
            store = self._unopened()
        except BaseException:
            call.close()
            raise
        return store.blocking(call)

    def _current_connection(self) -> Any:
        """The caller's connection whose transaction blocking submissions join by themselves. None: there is none."""
        return None

    async def _await_or_block(self, call: Coroutine[Any, Any, T]) -> T:
        """Awaits a call of the store; without a running event loop, runs it as a blocking call."""
        return await call if running_loop() is not None else self.run_blocking(call)

    def new_store(self, call_deadline: float | None = None) -> Store:
        """An unopened store on the same jobs, for another thread; ``call_deadline``: seconds a call may take."""
        store = self._new_bare_store(call_deadline)
        return store if self.codec is None else EncryptedStore(store, self.codec, self.readable)

    def _new_bare_store(self, call_deadline: float | None = None) -> Store:
        """An unopened store that encrypts and decrypts nothing."""
        settings = self.settings
        store = open_store(
            settings.url, now=self.now, call_deadline=self.call_deadline if call_deadline is None else call_deadline
        )
        if settings.transport == "none" or settings.transport_url is None:
            return time_calls(store, self.events)
        if settings.source_of("url") == "default":
            raise ConfigError(f"transport: {settings.transport} needs a PostgreSQL; set url to postgresql://…")
        keys = settings.transport_key, settings.transport_dead_key
        config = TransportConfig(settings.transport, settings.transport_url, *keys)
        wrapped = with_transport(store, config, lease=settings.lease, in_flight=self._in_flight, emit=self.events.emit)
        return time_calls(wrapped, self.events)

    def _as_stored(self, job: NewJob) -> str:
        """Returns the payload of a job as the store has it, and as limits read it there: with a codec, encrypted."""
        text, codec = job.payload, self.codec
        return text if codec is None else TextCipher(codec, self.readable).encrypt_payload(job.id, job.task, text)

    def _unopened(self) -> Store:
        with self._making:
            if self._store is None:
                self._store = self.new_store()
            return self._store

    async def open_store(self) -> Store:
        """The store, open. After a fork the child gets one of its own."""
        store = self._store or self._unopened()
        try:
            await store.open()
        except ForkedConnection:
            self._store = store = self.new_store()
            await store.open()
        return store

    def forget_limits(self) -> None:
        """Reads the limits again at the next submission: one was changed."""
        self._submitter.depths.mark_stale()

    # ── submitting ────────────────────────────────────────────────────────────────────────────────────────────
    @requires_loop
    async def enqueue(
        self, /, task: str, payload: Mapping[str, Any] | None = None, *, connection: Any = None, **options: Any
    ) -> JobHandle[Any]:
        """Submit by name, without the function: ``app.enqueue("email.send", {"to": …}, delay=60)``.

        The options are those of ``task.options``. A task registered here checks the payload first.
        """
        job = self.draft_job(task, {} if payload is None else payload, **options)
        self.registry.warn_if_misspelt(task)
        return await self.submit(job, connection=connection)

    def draft_job(self, task: str, payload: Mapping[str, Any] | str, **options: Any) -> NewJob:
        """Returns the job that ``enqueue`` would submit, validated. ``payload``: a mapping, or JSON of an object."""
        check_options(options, JobOptions.__struct_fields__)
        check_no_function(task)
        limit = self.settings.payload_limit
        if not isinstance(payload, Mapping | str):
            raise Invalid("payload", payload, "give an object: the arguments by name")
        text = encode_payload(payload if isinstance(payload, Mapping) else decode_payload(payload, limit), limit)
        job_options = JobOptions(**options)
        registered = self.registry.get(check_task_name(task))
        if registered is not None:
            registered.bind(text)  # Invalid if it does not fit
            job_options = with_defaults(job_options, registered)
        elif task == COMMAND:
            self.command_policy().parse_command(text)
        return draft_job(task, text, job_options, self.settings, self.codec)

    def command_policy(self, settings: Settings | None = None) -> CommandPolicy:
        """The policy for command jobs of these settings, or of the application's."""
        return command_policy(settings or self.settings)

    @requires_loop
    async def run_command(
        self,
        /,
        *argv: str,
        stdin: str | None = None,
        cwd: str | None = None,
        resources: Resources | Mapping[str, Any] | None = None,
        sandbox: str | None = None,
        network: bool = False,
        connection: Any = None,
        **options: Any,
    ) -> JobHandle[Any]:
        """Submit a command job: a program with its arguments, run without a shell where settings allow commands."""
        fields = {"stdin": stdin, "cwd": cwd, "sandbox": sandbox, "network": network or None, "resources": resources}
        job = self.draft_job(COMMAND, draft_command({"argv": list(argv), **fields}), **options)
        return await self.submit(job, connection=connection)

    async def submit(self, job: NewJob, *, connection: Any = None) -> JobHandle[Any]:
        """Submit a drafted job; inside the transaction of ``connection`` if one is given."""
        check_drafts([job])
        connection = await self._find_connection(connection)
        if connection is None:
            answer = await self._submitter.submit(job)
        else:
            (answer,) = await self._submitted_within(connection, [job])
        return JobHandle(self, answer)

    async def _find_connection(self, given: Any) -> Any:
        """Returns the connection whose transaction a submission joins; an integration may find one itself."""
        return given

    async def _submitted_within(self, connection: Any, jobs: Sequence[NewJob]) -> list[Submitted]:
        if self.settings.strict_idempotency:
            await self._await_or_block(self._submitter.check_before(jobs))
        reserved = await self._await_or_block(self._submitter.admit_jobs(jobs))
        try:
            with submission(self.spans, jobs) as spanned:
                answers = await self.external_tx.submit(connection, spanned)
        finally:
            self._submitter.depths.release_room(reserved)
        # Emits no event: whether these jobs exist is decided by a commit or rollback that we never hear of.
        await self._await_or_block(self._submitter.check_keys(jobs, answers))
        return answers

    async def _submit_together(self, jobs: Sequence[NewJob], connection: Any) -> list[JobHandle[Any]]:
        """Stores drafted jobs in one transaction: a new one, or that of a connection of the caller's."""
        connection = await self._find_connection(connection)
        if connection is None:
            answers = await self._submitter.submit_all(jobs)
        else:
            answers = await self._submitted_within(connection, jobs)
        return [JobHandle(self, answer) for answer in answers]

    @requires_loop
    async def enqueue_many(
        self, jobs: Iterable[NewJob] | AsyncIterable[NewJob], *, batch_size: int = 1000, connection: Any = None
    ) -> list[JobHandle[Any]]:
        """Submit many drafted jobs (``task.new_job(…)``, ``app.draft_job(…)``), one transaction per batch."""
        size = check_batch_size(batch_size)
        connection = await self._find_connection(connection)
        within = None if connection is None else partial(self._submitted_within, connection)
        answers = await self._submitter.submit_many(jobs, size, within)
        return [JobHandle(self, answer) for answer in answers]

    async def enqueue_stream(
        self, jobs: Iterable[NewJob] | AsyncIterable[NewJob], *, batch_size: int = 1000
    ) -> AsyncIterator[list[JobHandle[Any]]]:
        """Stores a stream too long to hold, in batches; yields the handles of each before it draws the next."""
        submit = follow_answers(self._submitter.submit_all)
        async for each in split_batches(jobs, check_batch_size(batch_size)):
            yield [JobHandle(self, answer) for answer in await submit(each)]

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────
    def handle(self, job_id: str) -> JobHandle[Any]:
        """A handle on a job by its id. Raises `InvalidId` for text that is no id."""
        return JobHandle(self, Submitted(canonical_id(job_id), created=False))

    @requires_loop
    async def get(self, job_id: str) -> Job:
        """A job by its id, or by ``key:NAME``; NotFound if there is none, also for text that is no id."""
        return await self._get(job_id)

    async def _get(self, job_id: str) -> Job:
        store = await self.open_store()
        if str(job_id).startswith("key:"):
            job = await store.query.by_key(job_id.removeprefix("key:"))
        else:
            job = await store.query.get(canonical_id(job_id))
        if job is None:
            raise missing_job(job_id)
        return job

    @requires_loop
    async def find(self, where: JobFilter | None = None, *, limit: int = 50, cursor: str | None = None) -> Page:
        """A page of jobs, newest first; ``page.cursor`` continues."""
        parse_count(limit, "limit", least=1, most=500, text=False)
        return await (await self.open_store()).query.find(checked_filter(where), limit=limit, cursor=cursor)

    @requires_loop
    async def count(self, where: JobFilter | None = None) -> int:
        """Counts the jobs that match."""
        return await (await self.open_store()).query.count(checked_filter(where))

    @requires_loop
    async def attempts(self, job_id: str) -> list[Attempt]:
        """The attempts of a job that did not succeed, oldest first."""
        return await (await self.open_store()).query.attempts((await self._get(job_id)).id)

    @requires_loop
    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        """The log lines of a job, by ``context.log``, oldest first; ``page.cursor`` continues."""
        parse_count(limit, "limit", least=1, most=1000, text=False)
        return await (await self.open_store()).query.logs((await self._get(job_id)).id, limit=limit, cursor=cursor)

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    @requires_loop
    async def cancel(self, selection: str | Selection, *, limit: int = 1000) -> BulkResult:
        """Cancel by id, ids or filter, at most ``limit`` jobs a call; ``more`` says whether to call again."""
        check_limit(limit)
        return await (await self.open_store()).admin.cancel(await self._ids(selection), limit=limit)

    @requires_loop
    async def replay(
        self,
        selection: str | Selection,
        *,
        force: bool = False,
        payload: Mapping[str, Any] | None = None,
        limit: int = 1000,
        rate: str | None = None,
        after: float | str | timedelta = 0,
        from_step: str | None = None,
    ) -> BulkResult:
        """Queue again with all attempts. ``payload`` replaces the arguments of a single job; it is checked first.
        ``from_step``: a single job forgets this step and those behind it, and takes them again.

        ``rate`` (``"10/s"``): the first is ready ``after`` so long, later ones by and by, scheduled until then.
        """
        check_limit(limit)
        every = timedelta(0) if rate is None else parse_rate(rate)
        pace = ReplayRate(every=every, after=parse_duration(after, "after"))
        return await self._replay(selection, force=force, payload=payload, limit=limit, pace=pace, from_step=from_step)

    async def _replay(
        self,
        selection: str | Selection,
        *,
        force: bool,
        payload: Mapping[str, Any] | None,
        limit: int = 1000,
        pace: ReplayRate = AT_ONCE,
        from_step: str | None = None,
    ) -> BulkResult:
        store = await self.open_store()
        chosen = await self._ids(selection)
        text: str | None = None
        if payload is not None:
            if isinstance(chosen, JobFilter) or len(chosen) != 1:
                raise Invalid("payload", dict(payload), "edited arguments go to one job: name its id")
            text = self._checked_payload(await self._get(chosen[0]), payload)
        number = None if from_step is None else await self._step_number(chosen, from_step)
        return await store.admin.replay(chosen, force=force, payload=text, from_step=number, limit=limit, pace=pace)

    @requires_loop
    async def delete(self, selection: str | Selection, *, limit: int = 1000, states: States = None) -> BulkResult:
        """Remove jobs that are not running, with key and history. ``states``: refuses a job in any other."""
        check_limit(limit)
        return await (await self.open_store()).admin.delete(await self._ids(selection), limit=limit, states=states)

    async def _ids(self, selection: str | Selection) -> Selection:
        if isinstance(selection, JobFilter):
            return selection
        check_selection(selection)
        asked = [selection] if isinstance(selection, str) else [*map(str, selection)]
        if len(asked) == 1 and asked[0].startswith("key:"):
            return [(await self._get(asked[0])).id]
        # The store refuses a key that no job has, as any id that it does not know.
        return [job_id or key for key, job_id in (await find_ids(await self.open_store(), asked)).items()]

    @requires_loop
    async def pause(self, queue: str) -> None:
        """No worker takes a job of this queue until it is resumed."""
        await (await self.open_store()).admin.pause(check_name("queue", queue))

    @requires_loop
    async def resume(self, queue: str) -> None:
        """Undo ``pause``."""
        await (await self.open_store()).admin.resume(check_name("queue", queue))

    @requires_loop
    async def stop_workers(self, workers: Sequence[str] | None = None, *, drain: bool = False) -> list[str]:
        """Ask these workers (None: every living one) to stop, or to empty their queues first; the ids asked."""
        return await (await self.open_store()).admin.send_command(
            WorkerCommand.DRAIN if drain else WorkerCommand.STOP, workers
        )

    @requires_loop
    async def backup(self, path: str) -> None:
        """A consistent copy of a live store."""
        await (await self.open_store()).health.backup(path)

    @requires_loop
    async def migrate(self) -> list[str]:
        """Bring the store's schema up to date; returns the applied migrations."""
        return await (await self.open_store()).migrate()


class BlockingHoldfast(BlockingView):
    """``app.sync``: the async methods of an application for blocking callers."""

    __slots__ = ()

    close = BlockingMethod(Holdfast.close)
    enqueue = BlockingMethod(Holdfast.enqueue)
    run_command = BlockingMethod(Holdfast.run_command)
    submit = BlockingMethod(Holdfast.submit)
    enqueue_many = BlockingMethod(Holdfast.enqueue_many)
    get = BlockingMethod(Holdfast.get)
    find = BlockingMethod(Holdfast.find)
    count = BlockingMethod(Holdfast.count)
    count_states = BlockingMethod(Holdfast.count_states)
    wait_for_tag = BlockingMethod(Holdfast.wait_for_tag)
    attempts = BlockingMethod(Holdfast.attempts)
    logs = BlockingMethod(Holdfast.logs)
    steps = BlockingMethod(Holdfast.steps)
    saved_values = BlockingMethod(Holdfast.saved_values)
    read_waits = BlockingMethod(Holdfast.read_waits)
    enqueue_batch = BlockingMethod(Holdfast.enqueue_batch)
    read_batch = BlockingMethod(Holdfast.read_batch)
    signal = BlockingMethod(Holdfast.signal)
    kept_signals = BlockingMethod(Holdfast.kept_signals)
    queues = BlockingMethod(Holdfast.queues)
    stats = BlockingMethod(Holdfast.stats)
    read_history = BlockingMethod(Holdfast.read_history)
    find_error_groups = BlockingMethod(Holdfast.find_error_groups)
    count_encryption_keys = BlockingMethod(Holdfast.count_encryption_keys)
    workers = BlockingMethod(Holdfast.workers)
    doctor = BlockingMethod(Holdfast.doctor)
    repair = BlockingMethod(Holdfast.repair)
    cancel = BlockingMethod(Holdfast.cancel)
    replay = BlockingMethod(Holdfast.replay)
    delete = BlockingMethod(Holdfast.delete)
    edit = BlockingMethod(Holdfast.edit)
    fork_job = BlockingMethod(Holdfast.fork_job)
    cancel_one = BlockingMethod(Holdfast.cancel_one)
    replay_one = BlockingMethod(Holdfast.replay_one)
    unique_holder = BlockingMethod(Holdfast.unique_holder)
    pause = BlockingMethod(Holdfast.pause)
    resume = BlockingMethod(Holdfast.resume)
    stop_workers = BlockingMethod(Holdfast.stop_workers)
    backup = BlockingMethod(Holdfast.backup)
    migrate = BlockingMethod(Holdfast.migrate)

    def stream_tag(self, tag: str, *, cursor: str | None = None) -> Iterator[EndedJob]:
        """Yields the jobs of a tag as they end, as ``Holdfast.stream_tag`` does."""
        app: Any = self._thing
        return iterate_blocking(self._blocker, "stream_tag", app._stream_pages(tag, cursor))
