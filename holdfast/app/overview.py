"""The whole system from outside: its queues, statistics, history and workers, and the checks of its store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import msgspec
from msgspec.structs import replace

from holdfast.app.handle import check_count_bounds
from holdfast.core.encryption import key_id_of
from holdfast.core.error_groups import MAX_READ, ErrorGroup, FailedJob, group_failed_jobs
from holdfast.core.errors import Invalid
from holdfast.core.history import History, choose_interval
from holdfast.core.models import MICROSECOND, NOT_STARTED, Finding, Job, JobFilter, JobState, QueueInfo
from holdfast.core.portal import requires_loop
from holdfast.core.stats import JobStats
from holdfast.core.validation import check_span
from holdfast.core.waits import MAX_SIGNALS, step_value
from holdfast.core.workers import WorkerInfo
from holdfast.stores.base import Store
from holdfast.stores.common.searches import iterate_jobs
from holdfast.stores.encrypted_store import READABLE_TASKS
from holdfast.tasks.saved_values import started_children

_PAGE = 100


class _Opened(Protocol):
    """The application that the methods belong to."""

    async def open_store(self) -> Store: ...

    def _new_bare_store(self) -> Store: ...


class KeyUse(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of what needs one encryption key. ``jobs``: those that have not ended, ``dead``: dead ones.

    ``schedules``, ``signals``: those whose own payload or value is encrypted with it. ``key_id``: None for what is
    stored in the clear.
    """

    key_id: str | None
    jobs: int = 0
    dead: int = 0
    schedules: int = 0
    signals: int = 0


class OverviewMethods:
    """Methods of an application for a view of the whole."""

    @requires_loop
    async def queues(self: _Opened, *, minutes: int = 5, most: int = 10_000) -> list[QueueInfo]:
        """Every queue with its counts, and how many of its jobs ended a second in the last minutes.

        Of each state at most so many jobs are looked at, of ended ones the latest of all queues together: ``at_least``
        names the states of which there may be more."""
        recent, bound = check_count_bounds(minutes, most)
        return await (await self.open_store()).query.queues(recent=recent, max_count=bound)

    @requires_loop
    async def stats(self: _Opened, *, minutes: int = 5, most: int = 10_000) -> JobStats:
        """Counts jobs by queue, state, worker and attempts, and to which of them something happened in the last
        minutes; of each kind at most so many jobs are looked at, however many there are.
        """
        recent, bound = check_count_bounds(minutes, most)
        return await (await self.open_store()).query.stats(recent=recent, max_count=bound)

    @requires_loop
    async def read_history(self: _Opened, since: float | timedelta | str = "1h") -> History:
        """Counts of jobs that ended within this span until now, by minute, and beyond 6 hours by hour; up to 31 days.
        Sweeps count what ended more than 40 seconds ago, once a minute."""
        span, store = check_span(since, "since"), await self.open_store()
        interval, now_us = choose_interval(span), await store.health.server_time_us()
        since_us = now_us - span // MICROSECOND
        return History(interval, since_us, now_us, await store.query.read_history(since_us, interval))

    @requires_loop
    async def count_encryption_keys(self: _Opened) -> list[KeyUse]:
        """Counts what needs each encryption key: when nothing does, the key may be removed. Needs no key itself.

        Reads every job that has not ended or is dead, with its steps and the results of children among 1,000 of its
        dependencies, and the 10,000 oldest signals. Jobs that have succeeded or were cancelled do not count otherwise:
        without the key they cannot be read or replayed any more.
        """
        store = self._new_bare_store()
        await store.open()
        try:
            signals = await store.workflow.read_signals(limit=MAX_SIGNALS)
            counted = {
                "jobs": await _count_keys_of_jobs(store, (*NOT_STARTED, JobState.RUNNING)),
                "dead": await _count_keys_of_jobs(store, (JobState.DEAD,)),
                "schedules": await _count_of_schedules(store),
                "signals": Counter(key_id_of(signal.value) for signal in signals),
            }
        finally:
            await store.close()
        key_ids = sorted({key_id for uses in counted.values() for key_id in uses}, key=lambda key_id: key_id or "")
        return [KeyUse(key_id=key_id, **{field: uses[key_id] for field, uses in counted.items()}) for key_id in key_ids]

    @requires_loop
    async def find_error_groups(
        self: _Opened, allows: Callable[[str], bool] = lambda queue: True, *, where: JobFilter | None = None
    ) -> list[ErrorGroup]:
        """Groups of dead jobs, and of jobs that wait for their next attempt, by error; the latest failure first.

        Of each kind the 10,000 jobs are grouped that failed last (Redis: those that wait, within the last hour).
        ``allows``: which queues count. ``where``: all failed jobs that match are grouped, however many."""
        store = await self.open_store()
        found = await store.query.failed_jobs(MAX_READ) if where is None else await _failed_jobs(store, where)
        return group_failed_jobs(found, allows)

    @requires_loop
    async def workers(self: _Opened) -> list[WorkerInfo]:
        """Every registered worker process."""
        return await (await self.open_store()).query.workers()

    @requires_loop
    async def doctor(self: _Opened) -> list[Finding]:
        """Returns the findings of the store about itself."""
        return await (await self.open_store()).health.doctor()

    @requires_loop
    async def repair(self: _Opened) -> list[Finding]:
        """Repair the store as far as that loses no job; returns the repairs."""
        return await (await self.open_store()).health.repair()


async def _count_keys_of_jobs(store: Store, states: tuple[JobState, ...]) -> Counter[str | None]:
    """Returns the number of jobs in these states that need each key, for their payload, a step or a child's result."""
    counted: Counter[str | None] = Counter()
    async for job in iterate_jobs(store, JobFilter(states=states), page_size=_PAGE):
        counted.update(await _key_ids_of(store, job))
    return counted


async def _key_ids_of(store: Store, job: Job) -> set[str | None]:
    if job.task in READABLE_TASKS:
        return set()
    has_steps = job.claims > 0 or job.options_or_default.forks is not None
    steps = await store.workflow.read_steps(job.id) if has_steps else []
    texts = [step_value(step.result) for step in steps if step.result is not None]
    if started_children(steps).keys() - {step.name for step in steps}:  # the job has not recorded what they came to
        waits = await store.workflow.read_waits(job.id)
        ids = [each.job_id for each in waits.dependencies if each.is_child]
        texts += [child.result or "" for child_id in ids if (child := await store.query.get(child_id)) is not None]
    return {key_id_of(job.payload), *({key_id_of(text) for text in texts} - {None})}


async def _count_of_schedules(store: Store) -> Counter[str | None]:
    counted: Counter[str | None] = Counter()
    after = ""
    while page := await store.schedules.read_schedules(after=after, limit=_PAGE):
        counted.update(key_id_of(each.job.payload) for each in page if each.job.task not in READABLE_TASKS)
        after = page[-1].name
    return counted


async def _failed_jobs(store: Store, where: JobFilter) -> list[FailedJob]:
    states = tuple(each for each in (JobState.DEAD, JobState.FAILED) if each in (where.states or JobState))
    if not states:
        raise Invalid("where.states", where.states, "name dead or failed: other jobs have no error")
    found = iterate_jobs(store, replace(where, states=states))
    return [_failed_job(job) async for job in found if job.error_group is not None]


def _failed_job(job: Job) -> FailedJob:
    at_us = job.ended_at_us or job.started_at_us or job.created_at_us
    return FailedJob(job.id, job.queue, job.task, job.error_group or "", job.state is JobState.DEAD, at_us)
