"""Inline mode: enqueue runs the job at once. Manual mode: jobs are only stored. Both use a private store."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from holdfast.app import Holdfast
from holdfast.app.submitter import Submitter
from holdfast.core.batches import BATCH_TASK
from holdfast.core.errors import JobFailed
from holdfast.core.lifecycle import DEFERRALS, HandlerSignal
from holdfast.core.models import Job, JobState, NewJob, Submitted
from holdfast.core.portal import drive_coroutine
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.tasks import Context
from holdfast.worker.context import WorkerContext
from holdfast.worker.handler_limits import HandlerLimits
from holdfast.worker.invocation import HandlerInvoker
from holdfast.worker.log_writer import LogWriter
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from holdfast.worker.step_writer import StepWriter

_READY = (JobState.QUEUED, JobState.SCHEDULED)
_LEASE = timedelta(days=1)  # never renewed; there is no other worker


@contextmanager
def manual(app: Holdfast) -> Iterator[None]:
    """Inside, jobs are stored in a private store and do not run: see ``assert_enqueued``."""
    with override_store(app, {}):
        yield


@contextmanager
def inline(app: Holdfast) -> Iterator[None]:
    """Inside, ``enqueue`` runs the job once, delayed or not, before it returns.

    ``enqueue`` raises the error of the handler: one attempt, no retry. After ``Snooze`` and ``RetryAfter`` the job is
    scheduled. An argument or a result that does not fit raises JobFailed.
    """
    errors: dict[str, BaseException] = {}

    async def remember_job(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        try:
            return await call_next(context)
        except BaseException as error:
            errors[context.id] = error
            raise

    with override_store(app, {}, middlewares=[remember_job, *app.middlewares]):
        vars(app).update(_submitter=InlineSubmitter(app, errors))
        yield


class InlineSubmitter(Submitter):
    """Submitter that runs the stored jobs before it returns."""

    def __init__(self, app: Holdfast, errors: dict[str, BaseException]) -> None:
        super().__init__(app.open_store, lambda: app.settings, app.events, app.spans)
        self._app = app
        self._errors = errors

    async def submit(self, job: NewJob) -> Submitted:
        answer = await super().submit(_undelayed(job))
        await self._run([answer])
        return answer

    async def submit_all(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        answers = await super().submit_all([_undelayed(job) for job in jobs])
        await self._run(answers)
        return answers

    async def _run(self, answers: Sequence[Submitted]) -> None:
        fresh = [answer.job_id for answer in answers if answer.created]
        if not fresh:
            return
        store = await self._app.open_store()
        runnable = fresh
        while runnable:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                asyncio.run(run_once(self._app, runnable))
            else:
                await run_once(self._app, runnable)
            jobs = [job for job in await store.query.summaries(fresh) if job is not None]
            # Jobs that waited for others of the submission may be due now.
            due = [job.id for job in jobs if job.started_at_us is None and job.state in _READY]
            runnable = due if due != runnable else []
        for job_id in fresh:
            job = await store.query.get(job_id)
            if job is not None and job.task != BATCH_TASK:  # its members have the errors
                self._raise_error_of(job)

    def _raise_error_of(self, job: Job) -> None:
        error = self._errors.pop(job.id, None)
        deferred = job.state is JobState.SCHEDULED and job.reason in DEFERRALS
        if job.state not in (JobState.FAILED, JobState.DEAD) and not deferred:
            return
        if error is None or (isinstance(error, HandlerSignal) and job.state is JobState.DEAD):
            raise JobFailed(job.id, f"job {job.id} is {job.state} ({job.reason}): {job.error}") from error
        if not isinstance(error, HandlerSignal):
            raise error


def _undelayed(job: NewJob) -> NewJob:
    return msgspec.structs.replace(job, delay=None, run_at_us=None)


async def run_once(app: Holdfast, job_ids: Sequence[str]) -> None:
    """Runs one attempt of these jobs with the runner and settler of a worker."""
    store = await app.open_store()
    shared = WorkerContext(app, app.settings, "inline")
    invoker = HandlerInvoker(app, app.settings)
    await invoker.open()
    log_writer = LogWriter(shared, store)
    runner = Runner(shared, invoker, log_writer, HandlerLimits(shared, store), StepWriter(shared, store))
    settler = Settler(shared, store, log_writer.flush)
    watching = asyncio.create_task(runner.watch_deadlines())
    try:
        claim = await store.queueing.claim(
            ClaimRequest("inline", {EVERY_QUEUE: len(job_ids)}, limit=len(job_ids), lease_for=_LEASE, only=job_ids)
        )
        shared.deliver_jobs(claim.jobs, shared.clock.monotonic())
        runner.resize(1)
        while shared.busy:
            shared.flush_now.clear()
            await shared.flush_now.wait()
        await settler.flush()
        await log_writer.flush()
    finally:
        watching.cancel()
        await runner.close()
        await invoker.close()


_PRIVATE = "_has_private_store"


def has_private_store(app: Holdfast) -> bool:
    """Returns True if the application is under test: it has a private store."""
    return _PRIVATE in vars(app)


@contextmanager
def override_store(app: Holdfast, changed: Mapping[str, Any], **others: Any) -> Iterator[None]:
    """Inside, ``app`` has a private store, the settings ``changed``, and these other attributes.

    Afterwards it is restored and the store is removed, unless ``changed`` has its ``url``.
    """
    before = dict(vars(app))
    stores = {view: vars(view)["_store"] for view in app.views}
    for view in stores:
        vars(view)["_store"] = None
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        own = {"url": f"sqlite:///{Path(folder) / 'jobs.db'}", "transport": "none"}
        settings = app.settings.replace_values(**({} if "url" in changed else own), **changed)
        submitter = Submitter(app.open_store, lambda: settings, app.events, app.spans)
        vars(app).update({"settings": settings, "_store": None, "_submitter": submitter, _PRIVATE: True, **others})
        try:
            yield
        finally:
            for each in (app, *app.views):
                drive_coroutine(_close(each))
                vars(each)["_store"] = stores.get(each)
            vars(app).clear()
            vars(app).update(before)


async def _close(app: Holdfast) -> None:
    store = vars(app)["_store"]
    if store is not None:
        await store.close()
