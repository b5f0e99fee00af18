"""The ticker: submits the jobs of schedules whose tick has come. Any number of workers run one.

Exactly one of them moves a schedule to its next tick: the store compares the schedule's revision, and submits the jobs
of its ticks in the same transaction.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from holdfast.app.limits import LimitManager, merge_limits
from holdfast.app.schedules import ScheduleManager
from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import ScheduleFired, StoreTrouble
from holdfast.core.fault_points import fault_point
from holdfast.core.limits import Limit
from holdfast.core.models import NOT_STARTED, TERMINAL, NewJob, to_datetime
from holdfast.core.schedule import DueTicks, Overlap, Schedule, ScheduleChange, due_ticks, tick_job
from holdfast.stores.base import Store
from holdfast.worker.context import StoreBackoff, WorkerState

_BATCH = 100  # schedules read at once
_CANCEL_BATCH = 1000  # superseded jobs cancelled at once


class Ticker:
    """Fires schedules at their ticks."""

    def __init__(self, shared: WorkerState, store: Store, declared: Mapping[str, Schedule]) -> None:
        self._shared = shared
        self._store = store
        self._declared = declared
        self._backoff = StoreBackoff(shared, "ticker")
        self._written_limits: Mapping[str, Limit] | None = None
        self._schedules_written = False
        self._refused: set[str] = set()  # schedules that cannot be fired: they are due, and come first
        self._superseded: set[str] = set()  # jobs to be cancelled, since the next one of their schedule is stored
        self._cancelling: asyncio.Task[None] | None = None
        self.next_tick = math.inf
        """The clock's reading when the next schedule is due, as far as this worker knows."""

    async def write_declared(self) -> None:
        """Reconciles limits and schedules before the first claim, again until it succeeds; limits also after changes of
        the settings."""
        app, settings = self._shared.app, self._shared.settings
        if self._written_limits != settings.limits:
            await LimitManager(app).reconcile(merge_limits(app.declared_limits, settings))
            self._written_limits = settings.limits
        if not self._schedules_written and settings.role != "follower":
            await ScheduleManager(app).reconcile(self._declared)
            self._schedules_written = True

    async def run(self) -> None:
        """Wakes at the next tick, and every poll: other programs may have added an earlier one."""
        try:
            await self._run()
        finally:
            if self._cancelling is not None:
                self._cancelling.cancel()

    async def _run(self) -> None:
        shared = self._shared
        while True:
            if shared.settings.role == "follower":
                await shared.clock.sleep(shared.settings.sweep.total_seconds())
                continue
            try:
                pause = await self._fire_due()
            except HoldfastError as error:
                await self._backoff.wait_after(error)
            else:
                self._backoff.reset()
                await shared.clock.sleep(pause)

    async def _fire_due(self) -> float:
        """Fires what is due; returns the seconds to sleep."""
        await self.write_declared()
        self._begin_to_cancel()
        longest = self._shared.settings.poll.total_seconds()
        limit = _BATCH + len(self._refused)
        due = await self._store.schedules.due_schedules(limit=limit)
        fired = {schedule.name for schedule in due.schedules if await self._try_fire(schedule, due.now_us)}
        refused, self._refused = self._refused, {schedule.name for schedule in due.schedules} - fired
        hides_others = len(due.schedules) == limit and not refused >= self._refused
        if fired or hides_others:  # what was fired has a next tick, which may have come too
            return 0.0
        left = math.inf if due.next_us is None else max(0.0, (due.next_us - due.now_us) / 1e6)
        self.next_tick = self._shared.clock.monotonic() + left
        return min(longest, left)

    async def _try_fire(self, schedule: Schedule, now_us: int) -> bool:
        """Fires one schedule. One that cannot be fired is reported, and holds up no other."""
        try:
            return await self._fire(schedule, now_us)
        except HoldfastError as error:
            if isinstance(error, Unavailable) and error.affects_all:
                raise
            text = f"schedule {schedule.name} cannot be run: {error}"
            pause = self._shared.settings.poll.total_seconds()
            self._shared.emit(StoreTrouble(service="ticker", error=text, retry_in=pause))
            return False

    async def _fire(self, schedule: Schedule, now_us: int) -> bool:
        due = due_ticks(schedule, now_us)
        may_run, previous = await self._check_overlap(schedule, due)
        run = due.run if may_run else []
        jobs = [tick_job(schedule, tick) for tick in run]
        changed = replace(
            schedule,
            next_us=due.next_us,
            runs=schedule.runs + len(run),
            missed=schedule.missed + due.missed,
            skipped=schedule.skipped + len(due.run) - len(run),
            last_us=run[-1] if run else schedule.last_us,
            last_job=jobs[-1].id if jobs else schedule.last_job,
        )
        if not changed.has_runs_left:
            changed = replace(changed, next_us=None)
        fault_point("tick.before_write")
        revision = await self._store.schedules.write_schedule(ScheduleChange(changed, schedule.revision, jobs))
        if revision is None:
            return False  # another worker's ticker fired it, or an operator changed it: the next read sees it
        fault_point("tick.after_write")
        if jobs and schedule.job.unique is not None:
            jobs = await self._recount_unique(replace(changed, revision=revision, next_us=due.next_us), schedule, jobs)
        if jobs and previous is not None:
            self._superseded.add(previous)
        self._shared.emit(
            ScheduleFired(
                schedule=schedule.name,
                task=schedule.job.task,
                tick=to_datetime((due.run or [schedule.next_us or now_us])[-1]),
                job_ids=[job.id for job in jobs],
                late=max(0.0, (now_us - run[-1]) / 1e6) if run else 0.0,
                missed=due.missed,
                skipped=len(due.run) - len(jobs),
            )
        )
        self._begin_to_cancel()
        return True

    async def _recount_unique(self, written: Schedule, before: Schedule, jobs: Sequence[NewJob]) -> list[NewJob]:
        """Counts runs whose job was kept out by its unique key as skipped; returns the jobs that were stored."""
        found = await self._store.query.summaries([job.id for job in jobs])
        stored = [job for job, known in zip(jobs, found, strict=True) if known is not None]
        kept_out = len(jobs) - len(stored)
        if kept_out and written.job.unique is not None:
            holder = await self._store.query.by_key(written.job.unique.key)
            changed = replace(
                written,
                runs=written.runs - kept_out,
                skipped=written.skipped + kept_out,
                last_us=written.last_us if stored else before.last_us,
                last_job=before.last_job if holder is None else holder.id,
            )
            await self._store.schedules.write_schedule(ScheduleChange(changed, written.revision))
        return stored

    async def _check_overlap(self, schedule: Schedule, due: DueTicks) -> tuple[bool, str | None]:
        """Returns whether the policy for overlaps lets the tick run, and the job to cancel once its own is stored."""
        if schedule.overlap is Overlap.ALLOW or schedule.last_job is None or not due.run:
            return True, None
        (previous,) = await self._store.query.summaries([schedule.last_job])
        if previous is None or previous.state in TERMINAL:
            return True, None
        if schedule.overlap is Overlap.CANCEL_PREVIOUS:
            return True, previous.id
        return schedule.overlap is Overlap.QUEUE_ONE and previous.state not in NOT_STARTED, None

    def _begin_to_cancel(self) -> None:
        """Cancels superseded jobs in a task of its own: one whose row is locked holds up no tick."""
        if self._superseded and (self._cancelling is None or self._cancelling.done()):
            self._cancelling = asyncio.create_task(self.cancel_superseded(), name="holdfast-superseded")

    async def cancel_superseded(self) -> None:
        """Cancels jobs whose successor is stored. Those of a call that failed are tried again after the next read."""
        while jobs := sorted(self._superseded)[:_CANCEL_BATCH]:
            try:
                await self._store.admin.cancel(jobs, limit=_CANCEL_BATCH)
            except HoldfastError as error:
                pause = self._shared.settings.poll.total_seconds()
                text = f"superseded jobs cannot be cancelled: {error}"
                self._shared.emit(StoreTrouble(service="ticker", error=text, retry_in=pause))
                return
            self._superseded.difference_update(jobs)
