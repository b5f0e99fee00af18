"""State shared by the services of one worker: its claimed jobs, and the events that wake services.

A job is in ``claimed`` from its claim until the store has answered its settlement. Within that time it passes through
``buffer`` (claimed), ``running`` (its handler runs) and ``unsettled`` (the settler has not written its settlement).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from holdfast.app import Holdfast
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, StoreReplaced
from holdfast.core.events import Event, Events, JobSucceeded, StoreTrouble
from holdfast.core.lifecycle import Failed, Lost, Outcome, decide, is_last_attempt
from holdfast.core.metric_events import SettlementsWritten
from holdfast.core.models import Job, JobState, Lease, Reason, Settlement
from holdfast.settings.settings import Settings
from holdfast.tasks import Context
from holdfast.worker.policy import backoff_of
from holdfast.worker.reporting import dlq_key_of, emit_lease_lost, emit_success, measure_settled

if TYPE_CHECKING:
    from holdfast.telemetry.spans import Execution

BATCH_SIZE = 1000
"""A full batch: the most jobs of one claim, and the settlements at which the settler writes at once."""


_SAFE_LEASE_FRACTION = 0.8
"""Fraction of a lease after which a job that could not be renewed is given up. The rest is a safety margin."""


class StopReason(StrEnum):
    """Why a running handler is being stopped."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    LOST = "lost"
    RELEASE = "release"


def lease_valid_until_of(renewed_at: float, lease_for: timedelta) -> float:
    """Returns the clock reading until which a lease surely holds. ``renewed_at``: reading just before the claim or the
    heartbeat was sent; the lease began later."""
    return renewed_at + lease_for.total_seconds() * _SAFE_LEASE_FRACTION


class LeasedJob:
    """A claimed job: one lease, from its claim until the store has answered its settlement."""

    __slots__ = (
        "context",
        "deadline",
        "is_last_attempt",
        "job",
        "lease",
        "runner",
        "lease_valid_until",
        "seconds",
        "settlement",
        "span",
        "started",
        "stop_reason",
        "timeout",
    )

    settlement: Settlement

    def __init__(self, job: Job, lease_valid_until: float) -> None:
        self.job = job
        self.lease = job.lease
        self.lease_valid_until = lease_valid_until
        """Clock reading after which the lease may have ended without the worker noticing, as in a frozen process."""
        self.is_last_attempt = is_last_attempt(job)
        """True if a crash would use up the attempts of the job."""
        self.started: float | None = None
        self.context: Context | None = None
        self.runner: asyncio.Task[None] | None = None
        self.stop_reason: StopReason | None = None
        self.timeout: float | None = None
        self.deadline = math.inf
        self.span: Execution | None = None
        self.seconds = 0.0

    @property
    def has_called_complete(self) -> bool:
        """Returns True if the handler may have completed the job in its own transaction."""
        return self.context is not None and self.context.has_called_complete

    def timeout_outcome(self) -> Outcome:
        """Returns the outcome of a job whose handler exceeds its timeout."""
        return Failed(error=f"timeout: still running after {self.timeout:g} s", reason=Reason.TIMEOUT)

    def interrupt_handler(self, stop_reason: StopReason) -> None:
        """Stops the handler. The first reason is kept: it decides the outcome of the job."""
        if self.stop_reason is None and self.context is not None and self.runner is not None:
            self.stop_reason = stop_reason
            self.context.cancel()
            self.runner.cancel()


class WorkerState:
    """The state of one worker process, used from its event loop.

    Its heartbeat thread reads ``claimed`` and ``running`` too, and writes ``heartbeat_at`` and ``lease_valid_until`` of
    claimed jobs; the thread of its metrics only reads.
    """

    def __init__(self, app: Holdfast, settings: Settings, worker_id: str) -> None:
        self.app = app
        self.apply_settings(settings)
        self.worker_id = worker_id
        self.clock: Clock = app.clock
        self.events: Events = app.events
        self.rng = random.Random()
        self.claimed: dict[Lease, LeasedJob] = {}
        self.buffer: deque[LeasedJob] = deque()
        self.running: set[LeasedJob] = set()
        self.in_flight: Counter[str] = Counter()  # buffered and running jobs by queue
        self.unsettled: list[LeasedJob] = []
        self.last_attempts = 0  # jobs in ``claimed`` on their last attempt
        self.has_urgent_settlement = False  # the settler must not wait for a full batch
        self.runner_wakeups: deque[asyncio.Future[None]] = deque()  # each wakes one idle runner
        self.may_fetch = asyncio.Event()  # there may be room for another claim
        self.has_unsettled = asyncio.Event()  # ``unsettled`` is not empty
        self.flush_now = asyncio.Event()  # the settler must write now
        self.idle = asyncio.Event()  # set when the last running or buffered job ends; waiters clear it
        self.stopping = asyncio.Event()
        self.low_watermark = 0  # buffered jobs at which the fetcher claims again
        self.finished = 0
        self.succeeded = 0
        self.failed = 0
        self.released = 0
        self.active_faults = 0  # injected on purpose
        self.heartbeat_at: float | None = None  # clock reading before the latest heartbeat that was answered
        self.loop_answered_at = time.monotonic()  # real time at which the event loop last ran
        self.fetched_at: float | None = None  # clock reading at the answer to the latest claim
        self.is_at_capacity = False  # the fetcher has no free slot
        self.wakes_on_time = False  # the fetcher sleeps exactly until the next job of any queue falls due

    def apply_settings(self, settings: Settings) -> None:
        """Uses these settings from now on."""
        self.settings = settings

    # ── jobs come in ──────────────────────────────────────────────────────────────────────────────────────────
    def deliver_jobs(self, jobs: Sequence[Job], lease_valid_until: float) -> None:
        """Buffers claimed jobs and wakes runners for them. Suspects go first."""
        suspects: list[LeasedJob] = []
        for job in jobs:
            leased = LeasedJob(job, lease_valid_until)
            self.claimed[leased.lease] = leased
            self.last_attempts += leased.is_last_attempt
            self.in_flight[job.queue] += 1
            (suspects if job.lost_leases else self.buffer).append(leased)
        self.buffer.extendleft(reversed(suspects))
        self.wake_runners()

    def wake_runners(self) -> None:
        """Wakes up to two idle runners if jobs are buffered. A runner does so again each time its handler awaits
        something, so all wake within a few iterations of the loop. While handlers never await, more runners would only
        starve the fetcher and the settler."""
        for _ in range(min(2, len(self.buffer), len(self.runner_wakeups))):
            wakeup = self.runner_wakeups.popleft()
            if not wakeup.done():
                wakeup.set_result(None)

    @property
    def busy(self) -> bool:
        """Returns True if a job is running or buffered."""
        return bool(self.running or self.buffer)

    def outcome_if_over(self, lease: Lease) -> Outcome | None:
        """Returns the outcome of an attempt that is over; None while its handler runs in time, under a lease that
        surely holds. Threads of handlers ask too."""
        leased, now = self.claimed.get(lease), self.clock.monotonic()
        if leased not in self.running or leased.stop_reason is StopReason.LOST or now > leased.lease_valid_until:
            return Lost()
        return leased.timeout_outcome() if now >= leased.deadline else None

    # ── jobs go out ───────────────────────────────────────────────────────────────────────────────────────────
    def queue_settlement(self, leased: LeasedJob, outcome: Outcome) -> None:
        """Decides the settlement of the job and queues it for the settler."""
        job = leased.job
        # Only a failure needs the retry policy; looking it up takes time.
        backoff = backoff_of(job, self.app, self.settings) if type(outcome) is Failed else self.settings.retry
        leased.settlement = decide(job, outcome, backoff, self.rng)
        if leased.span is not None:
            leased.span.record_settlement(leased.settlement, outcome)
        self.in_flight[job.queue] -= 1
        self.finished += 1
        unsettled = self.unsettled
        unsettled.append(leased)
        if len(unsettled) == 1:
            self.has_unsettled.set()
        if leased.is_last_attempt or not self.settings.prefetch:
            self.has_urgent_settlement = True
            self.flush_now.set()
        elif len(unsettled) >= BATCH_SIZE or not (self.running or self.buffer):
            self.flush_now.set()
        if not (self.running or self.buffer):
            self.idle.set()
        if len(self.buffer) <= self.low_watermark:
            self.may_fetch.set()

    def remove_claimed(self, leased: LeasedJob) -> None:
        """Removes a job from ``claimed``."""
        known = self.claimed.pop(leased.lease, None) is not None
        self.wake_fetcher(known and leased.is_last_attempt)

    def wake_fetcher(self, last_attempts: int) -> None:
        """Wakes the fetcher after jobs have left ``claimed``. ``last_attempts``: their number on a last attempt."""
        self.last_attempts -= last_attempts
        if last_attempts or not self.claimed or not self.settings.prefetch:
            self.may_fetch.set()

    def abandon_job(self, leased: LeasedJob) -> None:
        """Stops tracking a job that has no outcome to settle; emits no event."""
        self.remove_claimed(leased)
        if leased.span is not None:
            leased.span.end_span("lost")
        self.in_flight[leased.job.queue] -= 1
        self.may_fetch.set()
        if not self.busy:
            self.flush_now.set()
            self.idle.set()

    def tx_completed(self, leased: LeasedJob) -> None:
        """Records a job that the handler's own transaction has completed."""
        if leased.span is not None:
            leased.span.end_span(JobState.SUCCEEDED)
        self.abandon_job(leased)
        self.finished += 1
        self.succeeded += 1
        if self.events.has_subscriber(JobSucceeded):
            self.emit_success(leased)
        if self.events.has_subscriber(SettlementsWritten):
            measure_settled(self.events, 1, [(leased.job.task, leased.seconds)])

    def emit_success(self, leased: LeasedJob) -> None:
        """Emits ``JobSucceeded``."""
        emit_success(self.events, leased.job, leased.seconds)

    def report_lost_job(self, leased: LeasedJob) -> None:
        """Emits ``LeaseLostEvent`` for a job whose lease was lost while it ran, and abandons it."""
        emit_lease_lost(self.events, leased.job, self.worker_id)
        self.abandon_job(leased)

    def dlq_key(self, job: Job) -> str | None:
        """Returns the key of the transport's list of dead letters of this job's queue; None without a transport."""
        return dlq_key_of(self.settings, job.queue)

    # ── interruptions ─────────────────────────────────────────────────────────────────────────────────────────
    def interrupt_job(self, lease: Lease, stop_reason: StopReason) -> LeasedJob | None:
        """Stops a claimed job. Returns it if it was still buffered: the caller must settle or abandon it."""
        leased = self.claimed.get(lease)
        if leased in self.running:
            leased.interrupt_handler(stop_reason)
        elif leased is not None and leased in self.buffer:
            self.buffer.remove(leased)
            return leased
        return None  # if it does not run either, its settlement is being written

    def emit(self, event: Event) -> None:
        """Emits an event to its subscribers."""
        self.events.emit(event)


_MIN_PAUSE, _MAX_PAUSE = 0.1, 5.0  # seconds


class StoreBackoff:
    """Backoff of one service after store errors: exponential, capped, with full jitter."""

    def __init__(self, shared: WorkerState, service: str) -> None:
        self._shared = shared
        self._service = service
        self._failures = 0

    def reset(self) -> None:
        """Resets the backoff: the store has answered."""
        self._failures = 0

    async def wait_after(self, error: HoldfastError) -> None:
        """Emits ``StoreTrouble`` and waits; a stopping worker waits only briefly. Raises ``StoreReplaced`` again."""
        if isinstance(error, StoreReplaced):
            raise error
        shared = self._shared
        longest = min(_MAX_PAUSE, _MIN_PAUSE * 2 ** min(self._failures, 10))
        self._failures += 1
        pause = _MIN_PAUSE / 2 + shared.rng.uniform(0, longest)
        shared.emit(StoreTrouble(service=self._service, error=str(error), retry_in=round(pause, 3)))
        await shared.clock.run_bounded(shared.stopping.wait(), pause)
        if shared.stopping.is_set():
            await shared.clock.sleep(_MIN_PAUSE)
