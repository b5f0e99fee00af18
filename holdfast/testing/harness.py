"""Harness: manual time around real workers; only the clock differs from production."""

from __future__ import annotations

import asyncio
import copy
import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.app import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.errors import HoldfastError
from holdfast.core.models import JobFilter, JobState, NewJob, Submitted, to_datetime, to_microseconds
from holdfast.core.validation import check_span, parse_instant
from holdfast.stores.base import Store
from holdfast.stores.external_tx import ExternalTransactions
from holdfast.tasks import CURRENT
from holdfast.testing.inline import override_store
from holdfast.testing.store_probe import Activity, CallBarrier, WatchedStore
from holdfast.testing.temporary_stores import TemporaryStore
from holdfast.worker.context import LeasedJob
from holdfast.worker.worker import Worker

_POLL = 0.001  # real seconds between checks of a handler that is busy in real time
_ENDING = 0.1  # real seconds in which a worker without work has to end


class NotIdle(AssertionError):
    """``run_until_idle`` reached its limit, or a handler that waits for something other than time."""


class CountedTransactions(ExternalTransactions):
    """Counts the submissions in callers' transactions."""

    submissions = 0

    async def submit(self, connection: object, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Submits on ``connection``."""
        self.submissions += 1
        return await super().submit(connection, jobs)


class TestWorker:
    """A worker of a harness, with its own connection, like another process."""

    __test__ = False  # keeps pytest from collecting it

    def __init__(self, app: Holdfast, activity: Activity, *, drain: bool = False) -> None:
        self._barrier = CallBarrier()
        self._app = own = copy.copy(app)
        vars(own).update(_store=None, views=weakref.WeakSet(), new_store=self._new_store)
        self._activity = activity
        self.worker = Worker(own, settings=own.settings, drain=drain)
        self.running = asyncio.create_task(self._run(), name=f"harness-{self.worker.id}")

    def _new_store(self, call_deadline: float | None = None) -> Store:
        return WatchedStore(Holdfast.new_store(self._app, call_deadline), self._activity, self._barrier, None)

    async def _run(self) -> None:
        try:
            await self.worker.run()
        finally:
            await self._app.close()

    @property
    def frozen(self) -> bool:
        """Returns True if its store calls are held up."""
        return self._barrier.frozen

    def freeze(self) -> None:
        """Holds up all its store calls: to other workers it looks dead."""
        self._barrier.frozen = True

    def cut_off(self, *verbs: str) -> None:
        """Fails its store calls of these verbs (none given: every call) with Unavailable."""
        self._barrier.refused = (lambda verb: verb in verbs) if verbs else (lambda _: True)

    def thaw(self) -> None:
        """Ends a freeze or a cut-off."""
        self._barrier.open()

    @property
    def starting(self) -> bool:
        """Returns True if it has not begun to fetch yet."""
        return not self.running.done() and not hasattr(self.worker, "fetcher")

    @property
    def ending(self) -> bool:
        """Returns True if it has stopped and only cleans up, which takes no manual time."""
        shared = self.worker.shared
        return shared.stopping.is_set() and not shared.busy and not self.running.done() and not self.frozen

    @property
    def running_jobs(self) -> list[LeasedJob]:
        """Returns the jobs whose handlers run."""
        return list(self.worker.shared.running)

    @property
    def idle_until(self) -> float | None:
        """Returns the time at which its next job is due (inf: none is scheduled); None while it has work."""
        shared = self.worker.shared
        return None if self.starting or shared.claimed or shared.unsettled else self.worker.fetcher.idle_until

    @property
    def next_tick(self) -> float:
        """Returns the time at which the next schedule known to this worker is due; inf: none."""
        return math.inf if self.starting else self.worker.ticker.next_tick


class Harness:
    """An application with a private store, a clock that the test moves, and real workers.

        async with Harness(app) as harness:
            job = await send_email.enqueue("a@b.c")
            await harness.run_until_idle()
            assert await job.state() == "succeeded"

    A handler that takes time should sleep on ``harness.clock``. For one that is busy in real time (a thread, a process,
    ``asyncio.sleep``) the harness waits ``patience`` real seconds, once; then manual time moves on. Further arguments
    are settings: ``Harness(app, concurrency=1)``. Time begins at ``start``, or now. The store is a new SQLite file or,
    with ``url``, a new one on that database; it is removed in the end, and a ``TemporaryStore`` is emptied.
    """

    def __init__(
        self,
        app: Holdfast,
        *,
        patience: float = 1.0,
        url: str | TemporaryStore | None = None,
        start: datetime | None = None,
        **settings: Any,
    ) -> None:
        self.app = app
        self._url = url
        self.clock = ManualClock(to_microseconds(parse_instant(start or datetime.now(UTC), "start")))
        self._patience = patience
        self._settings = settings
        self._override = ExitStack()
        self._entered = False
        self._workers: list[TestWorker] = []
        self._given_up: set[LeasedJob] = set()

    def private_store(self) -> AbstractContextManager[object]:
        """Inside, the application has the private store and the clock, before and after the harness is entered too."""
        self._activity = Activity()
        self._transactions = CountedTransactions(self.app.open_store, self.app._await_or_block)
        others = {
            "clock": self.clock,
            "now": self.clock,
            "new_store": self._new_store,
            "external_tx": self._transactions,
        }
        return override_store(self.app, self._settings, url=self._url, **others)

    async def __aenter__(self) -> Harness:
        if self.app.now is not self.clock:
            self._override.enter_context(self.private_store())
        self._activity.home = asyncio.get_running_loop()
        self._workers = []
        await self.app.open_store()
        self._entered = True
        return self

    def _new_store(self, call_deadline: float | None = None) -> Store:
        return WatchedStore(
            Holdfast.new_store(self.app, call_deadline), self._activity, CallBarrier(), self._wait_limit
        )

    def _wait_limit(self) -> float | None:
        """Returns the real seconds for which the test may wait for a job; None: no limit, since work is under way."""
        if self._activity.movers or self._busy() or any(each.starting for each in self._workers):
            return None
        return self._patience if self._workers else _POLL

    async def __aexit__(self, *failure: object) -> None:
        self._entered = False
        try:
            for each in self._workers:
                each.thaw()
                await self._end(each)
            await self.app.close()
        finally:
            self._override.close()

    async def _end(self, test_worker: TestWorker) -> None:
        """Stops a worker at once. Its error, if any, was raised when time was moved, and is ignored here."""
        while not test_worker.running.done():
            await self._wait_for_calls()
            test_worker.worker.stop("the test is over")
            await self._wait_for_calls()
            if not test_worker.running.done():
                self.clock.advance(self.clock.next_wake() or _POLL)
                await asyncio.wait([test_worker.running], timeout=_POLL)
        await asyncio.gather(test_worker.running, return_exceptions=True)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def now(self) -> datetime:
        """Returns the current time of the store and the workers."""
        return to_datetime(self.clock())

    async def run_until_idle(self, *, limit: float | timedelta | str = timedelta(days=400)) -> None:
        """Runs all jobs, each at its own instant, until none is left.

        NotIdle after ``limit`` of manual time, or if the remaining handlers wait for something other than time.
        """
        with self._moving():
            await self._run_until_idle(check_span(limit, "limit"))

    async def _run_until_idle(self, limit: timedelta) -> None:
        deadline = self.clock.monotonic() + limit.total_seconds()
        hopeless_at = math.inf
        self._ensure_worker()
        while True:
            await self._wait_until_idle()
            pause = await self._pause()
            if await self._has_begun_calls():
                continue
            if pause is None:
                return
            if self.clock.monotonic() + pause > deadline:
                raise NotIdle(f"not idle after {limit}: {await self._left()}")
            if not self._is_stuck():
                hopeless_at = math.inf
            elif hopeless_at == math.inf:  # a cancellation may still end it
                hopeless_at = self.clock.monotonic() + 2 * self.app.settings.heartbeat.total_seconds()
            elif self.clock.monotonic() > hopeless_at:
                raise NotIdle(f"a handler waits for something that no time will bring: {await self._left()}")
            self.clock.advance(self._until_tick(pause) or pause)

    async def advance(self, span: float | timedelta | str) -> None:
        """Moves time by ``span`` (seconds, a timedelta or text like ``5m``); runs each job at its due time."""
        with self._moving():
            await self._advance(check_span(span, "span"))

    async def _advance(self, span: timedelta) -> None:
        target = self.clock() + round(span.total_seconds() * 1e6)
        settings = self.app.settings
        heard_at = self.clock.monotonic() + (settings.heartbeat + settings.poll).total_seconds()
        self._ensure_worker()
        while True:
            await self._wait_until_idle()
            left = (target - self.clock()) / 1e6
            if left <= 0:
                return
            pause = self._until_tick(await self._pause())
            if await self._has_begun_calls():
                continue
            if self.clock.monotonic() < heard_at:  # workers may have news to hear, before idle time can be skipped
                pause = self._next_wake()
            self.clock.advance(left if pause is None else min(pause, left))

    async def _wait_until_idle(self) -> None:
        """Returns when nothing more can happen before time moves."""
        while True:
            await self._wait_for_calls()
            self._raise_failures()
            if any(each.starting for each in self._workers):  # lifespans and child processes take real time
                await asyncio.sleep(_POLL)
                continue
            if ending := [each.running for each in self._workers if each.ending]:
                await asyncio.wait(ending, timeout=_ENDING, return_when=asyncio.FIRST_COMPLETED)
            if not await self._seen_progress():
                return

    async def _wait_for_calls(self) -> None:
        await self._activity.wait_idle()

    async def _has_begun_calls(self) -> bool:
        """Returns True if a worker was woken while the store counted: time must not move during its calls."""
        before = self._activity.count
        await self._wait_for_calls()
        return self._activity.count != before

    async def _seen_progress(self) -> bool:
        """Waits in real time for handlers that do not sleep on the clock; returns True if one made progress."""
        busy = set(self._busy()) - self._given_up
        before, polls = self._activity.count, 0
        while busy and busy <= set(self._busy()) and self._activity.count == before:
            if polls * _POLL >= self._patience:  # polls, not a clock: a stalled machine must not use up the patience
                self._given_up |= busy
                return False
            await asyncio.sleep(_POLL)
            polls += 1
        return bool(busy)

    def _busy(self) -> list[LeasedJob]:
        running = [leased for each in self._workers for leased in each.running_jobs]
        return [
            job for job in running if job.runner is None or not self.clock.is_sleeping(job.runner, CURRENT, job.context)
        ]

    def _is_stuck(self) -> bool:
        """Returns True if all remaining handlers wait neither for time nor for a deadline."""
        running = sum(len(each.running_jobs) for each in self._workers)
        claimed = sum(len(each.worker.shared.claimed) for each in self._workers)
        hopeless = [job for job in self._busy() if job.timeout is None]
        return bool(running) and len(hopeless) == running == claimed and not any(each.frozen for each in self._workers)

    async def _pause(self) -> float | None:
        """Returns the seconds until something may happen; None if nothing is left to run."""
        working = [each for each in self._workers if not each.running.done()]
        if not working:
            return None
        running = await self.app.count(JobFilter(states=(JobState.RUNNING,)))
        at_rest = [each.idle_until for each in working if not each.frozen]
        if running or None in at_rest or any(each.frozen for each in working):
            return self._next_wake()
        due = min(until for until in at_rest if until is not None) - self.clock.monotonic()
        return due if 0 < due < math.inf else None

    def _until_tick(self, pause: float | None) -> float | None:
        """Shortens the pause to the next tick of a schedule. Schedules alone do not prevent idleness."""
        ticks = [each.next_tick for each in self._workers if not each.running.done() and not each.frozen]
        left = min(ticks, default=math.inf) - self.clock.monotonic()
        if left == math.inf or (pause is not None and pause < left):
            return pause
        return left if left > 0 else self._next_wake()

    def _next_wake(self) -> float | None:
        """Returns the seconds until the next sleeper wakes; a moment while a worker starts or ends in real time."""
        pause = self.clock.next_wake()
        return _POLL if pause is None and any(not each.running.done() for each in self._workers) else pause

    async def _left(self) -> str:
        """Describes the jobs that have not ended."""
        states = tuple(state for state in JobState if state not in ("succeeded", "dead", "cancelled"))
        page = await self.app.find(JobFilter(states=states), limit=10)
        shown = [f"{job.task} {job.id} {job.state}, attempt {job.attempts}" for job in page.jobs]
        return "; ".join([*shown, *(["and more"] if page.cursor else [])]) or "no job is left"

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────
    async def start(self, *, drain: bool = False, **settings: Any) -> TestWorker:
        """Starts a further worker. The first starts by itself when time is first moved."""
        app = self.app
        if settings:
            app = copy.copy(app)
            vars(app).update(settings=app.settings.replace_values(**settings))
        with self._moving():
            test_worker = TestWorker(app, self._activity, drain=drain)
            self._workers.append(test_worker)
            await self._wait_until_idle()
        return test_worker

    def _moving(self) -> AbstractContextManager[None]:
        """Marks that the test moves time; HoldfastError outside ``async with`` of the harness."""
        if not self._entered:
            raise HoldfastError("the harness is not open; enter it first: async with testing.Harness(app) as harness")
        if self._transactions.submissions:  # their commits notify by the server only, in real time
            self._activity.notifications.notify_kinds(frozenset({"queue"}))
        return self._activity.moving_time()

    @property
    def workers(self) -> list[Worker]:
        """Returns the started workers, in that order."""
        return [each.worker for each in self._workers]

    def _ensure_worker(self) -> None:
        if not self._workers:
            self._workers.append(TestWorker(self.app, self._activity))

    def _raise_failures(self) -> None:
        """Raises the error of a worker that has failed."""
        for each in self._workers:
            if each.running.done():
                each.running.result()
