"""Runs jobs under test once, with the runner and settler of a worker, and raises the errors of their handlers."""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from holdfast.app import Holdfast
from holdfast.core.batches import BATCH_TASK
from holdfast.core.errors import JobFailed
from holdfast.core.lifecycle import DEFERRALS, AttemptEnd
from holdfast.core.models import Job, JobFilter, JobState, NewJob
from holdfast.core.portal import running_loop
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from holdfast.tasks import Context
from holdfast.testing.temporary_stores import TemporaryStore
from holdfast.worker.context import WorkerState, lease_valid_until_of
from holdfast.worker.handler_limits import HandlerLimits
from holdfast.worker.invocation import HandlerInvoker
from holdfast.worker.log_writer import LogWriter
from holdfast.worker.runner import RunnerPool
from holdfast.worker.settler import Settler
from holdfast.worker.step_writer import StepWriter

_READY = (JobState.QUEUED, JobState.SCHEDULED)
_LEASE = timedelta(days=1)  # never renewed; there is no other worker
_MAX_RUN = 500  # jobs of one round of ``run_ready``


class JobRunner:
    """Runs jobs of one application under test, which has its middleware ``remember_error``."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._errors: dict[str, BaseException] = {}

    async def remember_error(self, context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        """Middleware that keeps the error of a handler."""
        try:
            return await call_next(context)
        except BaseException as error:
            self._errors[context.id] = error
            raise

    async def run_jobs(self, job_ids: Sequence[str]) -> None:
        """Runs these jobs of the store once, and those of them that become ready by it; raises the first error."""
        if job_ids:
            await self._run_in(self._app, job_ids)

    async def run_ready(self, ran: Collection[str] = ()) -> None:
        """Runs every job of the store that is ready, also those that become ready by it; raises the first error.

        ``ran``: ids of jobs whose copies have run before their transactions were committed.
        """
        store = await self._app.open_store()
        seen = set(ran)
        while True:
            await store.maintenance.promote_due(limit=_MAX_RUN)
            page = await store.query.find(JobFilter(states=(JobState.QUEUED,)), limit=_MAX_RUN, cursor=None)
            ready = [job.id for job in reversed(page.jobs) if job.id not in seen]
            if not ready:
                return
            seen.update(ready)
            await self.run_jobs(ready)

    async def run_copies(self, jobs: Sequence[NewJob], copies: TemporaryStore) -> list[Job]:
        """Runs copies of jobs that only an open transaction has, in a store of their own; returns the jobs."""
        own = copy.copy(self._app)
        settings = self._app.settings.replace_values(url=copies.url, transport="none")
        vars(own).update(settings=settings, views=weakref.WeakSet())
        vars(own)["_store"] = copies.keep_store(self._app, own.new_store)
        store = await own.open_store()
        await store.queueing.submit(jobs)
        await self._run_in(own, [job.id for job in jobs])
        return [job for new in jobs if (job := await store.query.get(new.id)) is not None]

    async def _run_in(self, app: Holdfast, job_ids: Sequence[str]) -> None:
        store = await app.open_store()
        runnable = job_ids
        while runnable:
            if running_loop() is None:
                app._run_test_loop(run_once(app, runnable))
            else:
                await run_once(app, runnable)
            jobs = [job for job in await store.query.summaries(job_ids) if job is not None]
            # Jobs that waited for others of the submission may be due now.
            due = [job.id for job in jobs if job.started_at_us is None and job.state in _READY]
            runnable = due if due != runnable else []
        for job_id in job_ids:
            job = await store.query.get(job_id)
            if job is not None and job.task != BATCH_TASK:  # its members have the errors
                self._raise_error_of(job)

    def _raise_error_of(self, job: Job) -> None:
        error = self._errors.pop(job.id, None)
        deferred = job.state is JobState.SCHEDULED and job.reason in DEFERRALS
        if job.state not in (JobState.FAILED, JobState.DEAD) and not deferred:
            return
        if error is None or (isinstance(error, AttemptEnd) and job.state is JobState.DEAD):
            raise JobFailed(job.id, f"job {job.id} is {job.state} ({job.reason}): {job.error}") from error
        if not isinstance(error, AttemptEnd):
            raise error


async def run_once(app: Holdfast, job_ids: Sequence[str]) -> None:
    """Runs one attempt of these jobs with the runner and settler of a worker."""
    store = await app.open_store()
    shared = WorkerState(app, app.settings, "inline")
    invoker = HandlerInvoker(app, app.settings, app._new_test_threads())
    await invoker.open()
    log_writer = LogWriter(shared, store)
    runner = RunnerPool(shared, invoker, log_writer, HandlerLimits(shared, store), StepWriter(shared, store))
    settler = Settler(shared, store, log_writer.flush)
    watching = asyncio.create_task(runner.watch_deadlines())
    try:
        claim = await store.queueing.claim(
            ClaimRequest("inline", {EVERY_QUEUE: len(job_ids)}, limit=len(job_ids), lease_for=_LEASE, ids=job_ids)
        )
        shared.deliver_jobs(claim.jobs, lease_valid_until_of(shared.clock.monotonic(), _LEASE))
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
