"""The whole system from outside: its queues, statistics, history and workers, and the checks of its store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from holdfast.app.handle import looked_at
from holdfast.app.sync import requires_loop
from holdfast.core.error_groups import MAX_READ, ErrorGroup, group_failed_jobs
from holdfast.core.history import History, choose_interval
from holdfast.core.models import MICROSECOND, Finding, QueueInfo
from holdfast.core.stats import JobStats
from holdfast.core.validation import check_span
from holdfast.core.workers import WorkerInfo
from holdfast.stores.base import Store


class _Opened(Protocol):
    """The application that the methods belong to."""

    async def open_store(self) -> Store: ...


class OverviewMethods:
    """Methods of an application for a view of the whole."""

    @requires_loop
    async def queues(self: _Opened, *, minutes: int = 5, most: int = 10_000) -> list[QueueInfo]:
        """Every queue with its counts, and how many of its jobs ended a second in the last minutes.

        Of each state at most so many jobs are looked at, of ended ones the latest of all queues together: ``at_least``
        names the states of which there may be more."""
        recent, bound = looked_at(minutes, most)
        return await (await self.open_store()).query.queues(recent=recent, max_count=bound)

    @requires_loop
    async def stats(self: _Opened, *, minutes: int = 5, most: int = 10_000) -> JobStats:
        """Counts jobs by queue, state, worker and attempts, and to which of them something happened in the last
        minutes; of each kind at most so many jobs are looked at, however many there are.
        """
        recent, bound = looked_at(minutes, most)
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
    async def find_error_groups(self: _Opened, allows: Callable[[str], bool] = lambda queue: True) -> list[ErrorGroup]:
        """Groups of dead jobs, and of jobs that wait for their next attempt, by error; the latest failure first.

        Of each kind the 10,000 jobs are grouped that failed last (Redis: those that wait, within the last hour).
        ``allows``: which queues count."""
        found = await (await self.open_store()).query.failed_jobs(MAX_READ)
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
