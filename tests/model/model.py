"""A queue in memory: what every store must agree with after each step. Uses the product's own state table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec

from holdfast.core.job_changes import EDITABLE, JobChanges
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE, TRANSITIONS
from holdfast.core.models import MICROSECOND, TERMINAL, Job, JobState, Lease, LeaseStatus, NewJob, Reason, Settlement

EXPIRED = "expired: no worker began it in time"
AGAIN = frozenset({JobState.FAILED, JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING})
"""Where a settlement lets a job run again: a cancelling job ends instead."""


@dataclass
class ModelJob:
    """What is known of one job."""

    new: NewJob
    seq: int
    state: JobState
    run_at: int
    claims: int = 0
    attempts: int = 0
    lost_leases: int = 0
    cancelling: bool = False
    error: str | None = None
    worker: str | None = None
    lease_until: int = 0
    ended_at: int = 0
    expires_at: int | None = None
    started: bool = False
    counted: set[int] = field(default_factory=set)  # claims of attempts that counted and did not succeed
    given_back: set[int] = field(default_factory=set)  # claims of attempts that were refunded

    @property
    def order(self) -> tuple[int, int, int]:
        """Higher priority, earlier eligible time, submission order."""
        return (-self.new.priority, self.run_at, self.seq)

    @property
    def lease(self) -> Lease:
        return Lease(self.new.id, self.claims)

    @property
    def seen(self) -> tuple[object, ...]:
        """Fields that the store must show of the job."""
        edited = (self.new.queue, self.new.priority, self.new.payload, self.expires_at)
        ran = (self.state, self.claims, self.attempts, self.lost_leases, self.run_at, self.cancelling, self.error)
        return (*ran, self.new.key, *edited)

    def as_job(self) -> Job:
        """The job as ``decide`` wants it."""
        new = self.new
        return Job(
            id=new.id,
            task=new.task,
            queue=new.queue,
            payload=new.payload,
            claims=self.claims,
            attempts=self.attempts,
            max_attempts=new.max_attempts,
            priority=new.priority,
            lost_leases=self.lost_leases,
            run_at_us=self.run_at,
            created_at_us=0,
            worker=self.worker,
            cancelling=self.cancelling,
        )


class Model:
    """All jobs, keys and paused queues; time is handed in."""

    def __init__(self) -> None:
        self.jobs: dict[str, ModelJob] = {}
        self.keys: dict[str, tuple[str, int]] = {}
        self.paused: set[str] = set()
        self.accepted = 0
        self.removed = 0

    # ── submit ────────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, new: NewJob, now: int) -> tuple[str, bool, bool]:
        """The id that is answered, whether this call created it, and whether it changed it."""
        if new.key is not None:
            owner, keep_until = self.keys.get(new.key, ("", 0))
            if owner in self.jobs or keep_until > now:
                return owner, False, False
        if new.id in self.jobs:
            return new.id, False, False
        holder = self.holder(new, now)
        if holder is not None:
            return holder, False, self._apply_conflict(new, holder, now)
        run_at = now if new.delay is None else now + new.delay // MICROSECOND
        self.accepted += 1
        state = JobState.QUEUED if run_at <= now else JobState.SCHEDULED
        self.jobs[new.id] = ModelJob(new, self.accepted, state, run_at, expires_at=expiry(new, now))
        if new.key is not None:
            self.keys[new.key] = (new.id, 0 if new.key_for is None else now + new.key_for // MICROSECOND)
        self._take_unique(new, now)
        return new.id, True, False

    def holder(self, new: NewJob, now: int) -> str | None:
        """The other job that has the unique key of this one."""
        if new.unique is None:
            return None
        owner, keep_until = self.keys.get(new.unique.key, ("", 0))
        held = owner in self.jobs and self.jobs[owner].state in new.unique.states
        return owner if owner != new.id and (held or keep_until > now) else None

    def _take_unique(self, new: NewJob, now: int) -> None:
        if new.unique is not None:
            window = new.unique.window_us
            self.keys[new.unique.key] = (new.id, 0 if window is None else now + window)

    def _apply_conflict(self, new: NewJob, holder: str, now: int) -> bool:
        policy = new.unique.on_conflict if new.unique is not None else "keep"
        job = self.jobs.get(holder)
        if policy == "keep" or job is None or job.state not in AGAIN - {JobState.WAITING}:
            return False
        job.run_at = now if new.delay is None else now + new.delay // MICROSECOND
        job.state = JobState.QUEUED if job.run_at <= now else JobState.SCHEDULED
        job.expires_at = expiry(new, now)
        if policy == "replace":
            job.new = msgspec.structs.replace(job.new, payload=new.payload, priority=new.priority)
        return True

    # ── claim ─────────────────────────────────────────────────────────────────────────────────────────────────
    def due(self, now: int) -> list[ModelJob]:
        """Jobs a claim or a promotion may make ready."""
        return [
            job
            for job in self.jobs.values()
            if job.state in (JobState.SCHEDULED, JobState.FAILED) and job.run_at <= now
        ]

    def overdue(self, now: int) -> list[ModelJob]:
        """Jobs that may never be started any more, and end soon."""
        return [
            job
            for job in self.jobs.values()
            if job.state in AGAIN and not job.started and job.expires_at is not None and job.expires_at <= now
        ]

    def end_overdue(self, job: ModelJob, now: int) -> None:
        """Note that the store has ended this job."""
        job.state, job.ended_at, job.lost_leases, job.error = JobState.CANCELLED, now, 0, job.error or EXPIRED

    def ready(self, queue: str, now: int) -> list[ModelJob]:
        """What a claim of this queue may take, in the order it must be taken."""
        if queue in self.paused:
            return []
        due = {job.new.id for job in self.due(now)}
        overdue = {job.new.id for job in self.overdue(now)}
        jobs = [job for job in self.jobs.values() if job.new.id not in overdue]
        mine = [job for job in jobs if job.new.queue == queue and (job.state is JobState.QUEUED or job.new.id in due)]
        return sorted(mine, key=lambda job: job.order)

    def running(self, queue: str) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.new.queue == queue and job.state is JobState.RUNNING]

    def claimed(self, job_id: str, worker: str, lease_until: int) -> ModelJob:
        """Note that the store has delivered this job."""
        job = self.jobs[job_id]
        job.state, job.worker, job.lease_until = JobState.RUNNING, worker, lease_until
        job.claims += 1
        job.attempts += 1
        job.started = True
        return job

    # ── settle ────────────────────────────────────────────────────────────────────────────────────────────────
    def settle(self, settlement: Settlement, now: int) -> tuple[bool, JobState | None]:
        """Whether the guard holds, and the state that stands after."""
        job = self.jobs.get(settlement.job_id)
        if job is None:
            return False, None
        held = job.state is JobState.RUNNING and job.claims == settlement.claims
        if not held or (job.lease_until <= now) != settlement.lease_expired:
            return False, job.state
        assert settlement.state in TRANSITIONS[JobState.RUNNING]
        state = settlement.state
        if job.cancelling and state in AGAIN:
            state = JobState.CANCELLED
        job.error = None if state is JobState.SUCCEEDED else settlement.error or job.error
        self._note(job, settlement, state)
        if settlement.delay is not None:
            job.run_at = now + settlement.delay // MICROSECOND
        job.state, job.cancelling = state, False
        if state in TERMINAL:
            job.ended_at = now
        return True, state

    @staticmethod
    def _note(job: ModelJob, settlement: Settlement, state: JobState) -> None:
        if not settlement.refund:  # a job given back is as suspect as it was
            job.lost_leases = job.lost_leases + 1 if settlement.lease_expired else 0
        if settlement.refund:
            job.attempts -= 1
            job.given_back.add(job.claims)
        elif state is not JobState.SUCCEEDED:
            job.counted.add(job.claims)

    def held(self, lease: Lease, now: int, extend_to: int) -> LeaseStatus:
        """What a beat answers for this lease; extends it where it lives."""
        job = self.jobs.get(lease.job_id)
        if job is None or job.state is not JobState.RUNNING or job.claims != lease.claims or job.lease_until <= now:
            return LeaseStatus.LOST
        job.lease_until = extend_to
        return LeaseStatus.CANCEL if job.cancelling else LeaseStatus.HELD

    def expired(self, now: int) -> set[str]:
        return {id_ for id_, job in self.jobs.items() if job.state is JobState.RUNNING and job.lease_until <= now}

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    def cancel(self, job_id: str, now: int) -> bool:
        job = self.jobs.get(job_id)
        if job is None or job.state not in CANCELLABLE:
            return False
        if job.state is JobState.RUNNING:
            job.cancelling = True
        else:
            job.state, job.ended_at, job.lost_leases, job.error = JobState.CANCELLED, now, 0, job.error or "cancelled"
        return True

    def replay(self, job_id: str, now: int, later: int, *, force: bool) -> bool:
        job = self.jobs.get(job_id)
        if job is None or not (job.state in REPLAYABLE or (force and job.state is JobState.SUCCEEDED)):
            return False
        if self.holder(job.new, now) is not None:
            return False
        self._take_unique(job.new, now)
        job.state = JobState.SCHEDULED if later else JobState.QUEUED
        job.attempts, job.lost_leases, job.error, job.run_at, job.expires_at = 0, 0, None, now + later, None
        return True

    def edit(self, job_id: str, changes: JobChanges, now: int) -> bool:
        job = self.jobs.get(job_id)
        if job is None or job.state not in EDITABLE:
            return False
        if job.started and changes.has_expiry and expiry(changes, now) is not None:
            return False
        names = ("queue", "priority", "payload")
        given = {name: value for name in names if (value := getattr(changes, name)) is not None}
        job.new = msgspec.structs.replace(job.new, **given)
        if changes.delay is not None:
            job.run_at = now + changes.delay // MICROSECOND
            job.state = JobState.QUEUED if job.run_at <= now else JobState.SCHEDULED
        if changes.has_expiry:
            job.expires_at = expiry(changes, now)
        return True

    def delete(self, job_id: str) -> bool:
        job = self.jobs.get(job_id)
        if job is None or job.state not in DELETABLE:
            return False
        self._remove(job_id)
        for key in [key for key, (owner, _) in self.keys.items() if owner == job_id]:
            del self.keys[key]
        return True

    def prunable(self, keep: dict[str, timedelta], now: int) -> set[str]:
        """What ended longer ago than its state is kept."""
        return {
            job_id
            for job_id, job in self.jobs.items()
            if job.state in TERMINAL
            and job.state.value in keep
            and job.ended_at <= now - keep[job.state.value] // MICROSECOND
        }

    def prune(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._remove(job_id)

    def _remove(self, job_id: str) -> None:
        del self.jobs[job_id]
        self.removed += 1


def expiry(given: NewJob | JobChanges, now: int) -> int | None:
    """The instant by which a job must be started."""
    return None if given.expires_in is None else now + given.expires_in // MICROSECOND


def reachable(before: JobState, after: JobState) -> bool:
    """Whether one call may take a job there: a claim passes through ``queued`` on its way to ``running``."""
    if before is after or after in TRANSITIONS[before]:
        return True
    return after is JobState.RUNNING and JobState.QUEUED in TRANSITIONS[before] and before not in TERMINAL


def crash_reason(settlement: Settlement) -> bool:
    """Whether the settlement is the remedy for a lost lease."""
    return settlement.lease_expired and settlement.reason in (Reason.CRASHED, Reason.CANCELLED)


def seen(job: Job) -> tuple[object, ...]:
    """Fields that the store shows of a job, as ``ModelJob.seen``."""
    ran = (job.state, job.claims, job.attempts, job.lost_leases, job.run_at_us, job.cancelling, job.error)
    return (*ran, job.key, job.queue, job.priority, job.payload, job.expires_at_us)
