"""State shared by the services of one worker: the jobs in hand, and wake-ups between services. No service imports
another.

Every job this worker holds a lease on is in ``held`` from its claim until its settlement was answered. On its way it
waits in ``buffer``, is in ``running`` while its handler runs, and then its settlement waits in ``outcomes``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from holdfast.app import Holdfast
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, StoreReplaced
from holdfast.core.events import BatchSettled, Event, Events, JobSucceeded, StoreTrouble
from holdfast.core.lifecycle import Failed, Outcome, budget_spent, decide
from holdfast.core.models import Job, JobState, Lease, Settlement
from holdfast.settings.settings import Settings
from holdfast.tasks import Context
from holdfast.worker.policy import backoff_of
from holdfast.worker.reporting import dead_letter_key, emit_lease_lost, emit_success, measure_settled

if TYPE_CHECKING:
    from holdfast.telemetry.spans import Execution

FULL = 500
"""Settlements that are written without waiting for more, and jobs one claim takes at most."""


FENCE = 0.8
"""Of a lease: what is older without a renewal is neither begun nor kept, for another worker may have it by now."""


class StopReason(StrEnum):
    """Why a running handler is being stopped."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    LOST = "lost"
    RELEASE = "release"


class TaskRun:
    """A job in hand: one lease from its claim until its settlement was answered."""

    __slots__ = (
        "context",
        "deadline",
        "is_last",
        "job",
        "lease",
        "runner",
        "seconds",
        "settlement",
        "since",
        "span",
        "started",
        "why",
    )

    settlement: Settlement

    def __init__(self, job: Job, since: float) -> None:
        """``since``: the clock's reading when the lease surely had not begun."""
        self.job = job
        self.lease = job.lease
        self.since = since
        self.is_last = budget_spent(job)
        """Whether a crash would use up its attempts."""
        self.started: float | None = None
        self.context: Context | None = None
        self.runner: asyncio.Task[None] | None = None
        self.why: StopReason | None = None
        self.deadline: float | None = None
        self.span: Execution | None = None
        self.seconds = 0.0

    @property
    def completing(self) -> bool:
        """Returns True if its handler may have ended the job itself."""
        return self.context is not None and self.context.completing

    def interrupt_run(self, why: StopReason) -> None:
        """Stop the handler. The first reason stays: it decides the outcome of the job."""
        if self.why is None and self.context is not None and self.runner is not None:
            self.why = why
            self.context.cancel()
            self.runner.cancel()


class WorkerContext:
    """The state of one worker process. Used from its event loop; the heartbeat reads ``held`` from its own thread."""

    def __init__(self, app: Holdfast, settings: Settings, worker_id: str) -> None:
        self.app = app
        self.settings = settings
        self.worker_id = worker_id
        self.clock: Clock = app.clock
        self.events: Events = app.events
        self.rng = random.Random()
        self.held: dict[Lease, TaskRun] = {}
        self.buffer: deque[TaskRun] = deque()
        self.running: set[TaskRun] = set()
        self.in_flight: Counter[str] = Counter()  # buffered and running jobs by queue
        self.outcomes: list[TaskRun] = []
        self.last_attempts = 0  # jobs in ``held`` that a crash would end
        self.urgent = False  # ``outcomes`` has one that is to be written at once
        self.idle_runners: deque[asyncio.Future[None]] = deque()
        self.may_fetch = asyncio.Event()  # the fetcher may fetch again
        self.settling = asyncio.Event()  # there is something to settle
        self.full = asyncio.Event()  # settle now
        self.stopping = asyncio.Event()
        self.low_mark = 0
        self.finished = 0
        self.succeeded = 0
        self.failed = 0
        self.released = 0
        self.renewed_at = 0.0  # the clock's reading before the latest beat that was answered
        self.heard_at = time.monotonic()  # when the event loop last answered the heartbeat, in real time
        self.fetched_at: float | None = None  # the clock's reading when the latest claim was answered
        self.is_full = False  # the fetcher has no room for more
        self.wakes_on_time = False  # the fetcher sleeps exactly until the next job of any queue falls due

    # ── jobs come in ──────────────────────────────────────────────────────────────────────────────────────────
    def deliver_jobs(self, jobs: Sequence[Job], since: float) -> None:
        """Take claimed jobs in hand and wake a runner for them. Suspects go first: they must start at once."""
        for job in jobs:
            run = TaskRun(job, since)
            self.held[run.lease] = run
            self.last_attempts += run.is_last
            self.in_flight[job.queue] += 1
            if job.lost_leases:
                self.buffer.appendleft(run)
            else:
                self.buffer.append(run)
        self.wake_runners()

    def wake_runners(self) -> None:
        """Wake two runners, if jobs wait for one. Each does the same where its handler waits for something: then all
        are awake within a few turns of the loop. While handlers wait for nothing, more runners would only keep the
        fetcher and the settler from the loop."""
        for _ in range(min(2, len(self.buffer), len(self.idle_runners))):
            runner = self.idle_runners.popleft()
            if not runner.done():
                runner.set_result(None)

    @property
    def busy(self) -> bool:
        """Returns True if any handler runs or waits to."""
        return bool(self.running or self.buffer)

    # ── jobs go out ───────────────────────────────────────────────────────────────────────────────────────────
    def settle(self, run: TaskRun, outcome: Outcome) -> None:
        """Decide the job's settlement and leave it for the settler."""
        job = run.job
        # Only a failure asks for the policy, which takes a while to find.
        backoff = backoff_of(job, self.app, self.settings) if type(outcome) is Failed else self.settings.retry
        run.settlement = decide(job, outcome, backoff, self.rng)
        if run.span is not None:
            run.span.record_settlement(run.settlement, outcome)
        self.in_flight[job.queue] -= 1
        self.finished += 1
        outcomes = self.outcomes
        outcomes.append(run)
        if len(outcomes) == 1:
            self.settling.set()
        if run.is_last or not self.settings.prefetch:
            self.urgent = True
            self.full.set()
        elif len(outcomes) >= FULL or not (self.running or self.buffer):
            self.full.set()
        if len(self.buffer) <= self.low_mark:
            self.may_fetch.set()

    def is_stale(self, run: TaskRun, now: float) -> bool:
        """Returns True if its lease may have run out unseen: a process that was frozen must not start what it had
        buffered.
        """
        return now - max(run.since, self.renewed_at) > self.settings.lease.total_seconds() * FENCE

    def untrack_run(self, run: TaskRun) -> None:
        """Ends the hold on a job."""
        known = self.held.pop(run.lease, None) is not None
        self.make_room(known and run.is_last)

    def make_room(self, last_attempts: int) -> None:
        """Tells a fetcher that waits for it of jobs that left ``held``, so many of them on their last attempt."""
        self.last_attempts -= last_attempts
        if last_attempts or not self.held or not self.settings.prefetch:
            self.may_fetch.set()

    def discard_run(self, run: TaskRun) -> None:
        """Drops a job that another worker has now, without an event."""
        self.untrack_run(run)
        if run.span is not None:
            run.span.end_span("lost")
        self.in_flight[run.job.queue] -= 1
        self.may_fetch.set()
        if not self.busy:
            self.full.set()

    def tx_completed(self, run: TaskRun) -> None:
        """Its handler's own transaction has ended the job."""
        if run.span is not None:
            run.span.end_span(JobState.SUCCEEDED)
        self.discard_run(run)
        self.finished += 1
        self.succeeded += 1
        if self.events.has_subscriber(JobSucceeded):
            self.emit_success(run)
        if self.events.has_subscriber(BatchSettled):
            measure_settled(self.events, 1, [(run.job.task, run.seconds)])

    def emit_success(self, run: TaskRun) -> None:
        """Tell observers that the job has succeeded."""
        emit_success(self.events, run.job, run.seconds)

    def drop_run(self, run: TaskRun) -> None:
        """Drops a job whose lease was lost at work, with an event."""
        emit_lease_lost(self.events, run.job, self.worker_id)
        self.discard_run(run)

    def dead_letter_key(self, job: Job) -> str | None:
        """The key under which the transport lists the job if it is dead; None where there is no transport."""
        return dead_letter_key(self.settings, job.queue)

    # ── interruptions ─────────────────────────────────────────────────────────────────────────────────────────
    def interrupt_run(self, lease: Lease, why: StopReason) -> TaskRun | None:
        """Stop the job where it stands. The answer is one that had not started: it will not."""
        run = self.held.get(lease)
        if run is None:
            return None
        if run in self.running:
            run.interrupt_run(why)
            return None
        if run in self.buffer:
            self.buffer.remove(run)
            return run
        return None  # its settlement is on the way

    def emit(self, event: Event) -> None:
        """Tell observers."""
        self.events.emit(event)


_FIRST, _MOST = 0.1, 5.0  # seconds


class RetryDelay:
    """The waits of one loop between failures: doubled, capped, with full jitter."""

    def __init__(self, shared: WorkerContext, service: str) -> None:
        self._shared = shared
        self._service = service
        self._failures = 0

    def reset(self) -> None:
        """The store has answered."""
        self._failures = 0

    async def wait_after(self, error: HoldfastError) -> None:
        """Tell of the failure and wait; a stopping worker does not wait long. Raises ``StoreReplaced`` again."""
        if isinstance(error, StoreReplaced):
            raise error
        shared = self._shared
        most = min(_MOST, _FIRST * 2 ** min(self._failures, 10))
        self._failures += 1
        pause = _FIRST / 2 + shared.rng.uniform(0, most)
        shared.emit(StoreTrouble(service=self._service, error=str(error), retry_in=round(pause, 3)))
        await shared.clock.run_bounded(shared.stopping.wait(), pause)
        if shared.stopping.is_set():
            await shared.clock.sleep(_FIRST)
