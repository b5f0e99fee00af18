"""A queue in memory: what every store must agree with after each step. Uses the product's own state table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import timedelta

import msgspec

from holdfast.core.dependencies import NEVER_US
from holdfast.core.job_changes import EDITABLE, JobChanges
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE, TRANSITIONS
from holdfast.core.models import MICROSECOND, TERMINAL, JobState, Lease, NewJob, Reason, Settlement
from holdfast.core.workers import LeaseStatus
from tests.model.model_job import ModelJob
from tests.model.waits import Waits

EXPIRED = "expired: no worker began it in time"
AGAIN = frozenset({JobState.FAILED, JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING})
"""Where a settlement lets a job run again: a cancelling job ends instead."""
DELAYED = frozenset({JobState.FAILED, JobState.SCHEDULED, JobState.WAITING})
"""States of a job that becomes ready at its ``run_at``."""


class Model(Waits):
    """All jobs, keys and paused queues; time is handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, tuple[str, int]] = {}
        self.paused: set[str] = set()
        self.accepted = 0
        self.removed = 0

    # ── submit ────────────────────────────────────────────────────────────────────────────────────────────────
    def submit_batch(self, jobs: Sequence[NewJob], now: int) -> list[tuple[str, bool, bool]]:
        answered: dict[str, str] = {}
        answers = []
        for new in jobs:
            answers.append(self.submit(new, now))
            answered[new.id], created, _ = answers[-1]
            if new.after and created:
                self.add_dependencies(self.jobs[new.id], answered, now)
        return answers

    def submit(self, new: NewJob, now: int) -> tuple[str, bool, bool]:
        """The id that is answered, whether this call created it, and whether it changed it."""
        if new.key is not None:
            owner, keep_until = self.keys.get(new.key, ("", 0))
            if owner in self.jobs or keep_until > now:
                return owner, False, False
        if new.id in self.jobs:
            return new.id, False, False
        holder = self.unique_holder(new, now)
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

    def unique_holder(self, new: NewJob, now: int) -> str | None:
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
        return [job for job in self.jobs.values() if job.state in DELAYED and job.run_at <= now]

    def overdue(self, now: int) -> list[ModelJob]:
        """Jobs that may never be started any more, and end soon."""
        return [
            job
            for job in self.jobs.values()
            if job.state in AGAIN and not job.started and job.expires_at is not None and job.expires_at <= now
        ]

    def end_expired(self, job: ModelJob, now: int) -> None:
        """Note that the store has ended this job."""
        self._cancel(job, job.error or EXPIRED, now)

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
        if state is JobState.WAITING and not job.has_open_waits:
            state, job.run_at = JobState.SCHEDULED, now
        elif settlement.delay is not None:
            job.run_at = now + settlement.delay // MICROSECOND
        elif state is JobState.WAITING:
            job.run_at = NEVER_US
        job.state, job.cancelling, job.by_dependency = state, False, False
        if state is JobState.FAILED and settlement.priority is not None:
            job.new = msgspec.structs.replace(job.new, priority=settlement.priority)
        if state in TERMINAL:
            job.ended_at = now
            self.ends.append((job.new.id, state))
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
    def cancel(self, job_ids: Iterable[str], now: int) -> list[str]:
        return [job_id for job_id in job_ids if self._cancel_one(job_id, now)]

    def _cancel_one(self, job_id: str, now: int) -> bool:
        job = self.jobs.get(job_id)
        if job is None or job.state not in CANCELLABLE:
            return False
        if job.state is JobState.RUNNING:
            job.cancelling = True
        else:
            self._cancel(job, job.error or "cancelled", now)
        return True

    def _cancel(self, job: ModelJob, error: str, now: int) -> None:
        job.state, job.ended_at, job.lost_leases, job.error = JobState.CANCELLED, now, 0, error
        job.by_dependency = False
        self.ends.append((job.new.id, "cancelled"))

    def replay(self, laters: Mapping[str, int], now: int, *, force: bool) -> list[str]:
        """``laters``: the jobs in their order, each with the time until it is to run."""
        replayed = [job_id for job_id, later in laters.items() if self._replay_one(job_id, now, later, force=force)]
        self.renew_waits(replayed)
        return replayed

    def _replay_one(self, job_id: str, now: int, later: int, *, force: bool) -> bool:
        job = self.jobs.get(job_id)
        if job is None or not (job.state in REPLAYABLE or (force and job.state is JobState.SUCCEEDED)):
            return False
        if self.unique_holder(job.new, now) is not None:
            return False
        self._take_unique(job.new, now)
        job.state = JobState.SCHEDULED if later else JobState.QUEUED
        job.attempts, job.lost_leases, job.error, job.run_at, job.expires_at = 0, 0, None, now + later, None
        job.by_dependency = False
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
        if changes.delay is not None and job.state is not JobState.WAITING:
            job.run_at = now + changes.delay // MICROSECOND
            job.state = JobState.QUEUED if job.run_at <= now else JobState.SCHEDULED
        if changes.has_expiry:
            job.expires_at = expiry(changes, now)
        return True

    def delete(self, job_ids: Sequence[str], now: int) -> list[str]:
        """Deletes all together: a job that waited for two of them may name either as the reason of its end."""
        deleted = [each for each in dict.fromkeys(job_ids) if each in self.jobs and self.jobs[each].state in DELETABLE]
        self.ends += [(each, "deleted") for each in deleted if self.jobs[each].state not in TERMINAL]
        self.resolve_ends(now, job_ids)
        for job_id in deleted:
            self._remove(job_id)
            for key in [key for key, (owner, _) in self.keys.items() if owner == job_id]:
                del self.keys[key]
        return deleted

    def prunable(self, keep: dict[str, timedelta], now: int) -> set[str]:
        """Jobs that ended longer ago than their state is kept, in as many rounds as it takes."""
        since = {state: now - span // MICROSECOND for state, span in keep.items()}
        old = {
            job_id: since[job.state.value]
            for job_id, job in self.jobs.items()
            if job.state in TERMINAL and job.ended_at <= since.get(job.state.value, -1)
        }
        pruned: set[str] = set()
        while more := {each for each in old.keys() - pruned if not self.is_kept(each, pruned, old[each])}:
            pruned |= more
        return pruned

    def is_kept(self, job_id: str, pruned: Set[str] = frozenset(), since: int = 0) -> bool:
        """True if it is not pruned, though its retention began before ``since``."""
        return self.is_awaited(job_id) or self.is_read_again(job_id, pruned, since) or self.comes_back(job_id, pruned)

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
