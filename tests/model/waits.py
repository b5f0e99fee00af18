"""The model's part of what jobs wait for: other jobs, signals and children."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.dependencies import NEVER_US, Condition, DependencyState, describe_failed_dependency
from holdfast.core.models import MICROSECOND, TERMINAL, JobState, Lease, NewJob, Step
from holdfast.core.waits import TIMED_OUT, ChildStatus, JobWaits, Signal, SignalReceipt, SignalWait, signal_result
from tests.model.model_job import ModelDependency, ModelJob, ModelReceiver

OPEN, MET, FAILED = DependencyState


class Submit(Protocol):
    """Submission of a job to the model; returns the id that is answered."""

    def __call__(self, new: NewJob, now: int) -> tuple[str, bool, bool]: ...


@dataclass
class ModelSignal:
    """A signal that was sent. ``job_id``: its receiver; None while it is kept."""

    signal: Signal
    sent_at: int
    job_id: str | None = None


class Waits:
    """Dependencies, signals and children of the model's jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, ModelJob] = {}
        self.signals: dict[str, ModelSignal] = {}
        self.ends: list[tuple[str, str]] = []  # jobs whose ends are to be decided, with the word for how

    # ── dependencies ──────────────────────────────────────────────────────────────────────────────────────────
    def add_dependencies(self, job: ModelJob, answered: dict[str, str], now: int) -> None:
        """Makes a job that was just submitted wait. ``answered``: ids in place of those of its batch."""
        failures = set()
        for each in job.new.after:
            job_id = answered.get(each.job_id, each.job_id)
            if job_id not in job.dependencies:
                other = self.jobs[job_id].state if job_id in self.jobs else None  # it has left its key
                state = MET if other is None else resolve(each.on, other)
                job.dependencies[job_id] = ModelDependency(job_id, each.on, state)
                if job.dependencies[job_id].state is FAILED:
                    failures.add(describe_failed_dependency(job_id, other))
        if failures:
            job.run_at = NEVER_US
            cancel_waiter(job, failures, now)
        elif job.has_open_waits:
            wait_for_dependencies(job)
        else:
            job.state, job.run_at = JobState.SCHEDULED, now

    def resolve_ends(self, now: int, deleted: Iterable[str] = ()) -> None:
        """Decides the dependencies on jobs that have ended, level by level. ``deleted``: jobs of the same deletion."""
        both = {"cancelled", "deleted"}
        cancelled: set[str] = set()
        while self.ends:
            hows = dict(self.ends)
            self.ends = []
            for job in self.jobs.values():
                ended = [each for job_id, each in job.dependencies.items() if job_id in hows and each.state is OPEN]
                failures: set[str] = set()
                for each in ended:
                    each.state = resolve(each.on, hows[each.job_id])
                    words = both if each.job_id in deleted else {hows[each.job_id]}
                    if each.state is FAILED:
                        failures |= {describe_failed_dependency(each.job_id, word) for word in words}
                if job.state is JobState.WAITING and failures:
                    cancel_waiter(job, failures, now)
                    cancelled.add(job.new.id)
                    self.ends.append((job.new.id, "cancelled"))
                elif job.new.id in cancelled:
                    job.errors |= failures  # a store that takes the levels in another order names one of these
                elif job.state is JobState.WAITING and not job.has_open_waits:
                    job.state, job.run_at, job.by_dependency = JobState.SCHEDULED, now, False

    def renew_waits(self, replayed: Sequence[str]) -> None:
        """Applies replays to what waits for the jobs, and to what they wait for themselves."""
        revived = self._revive(replayed)
        for job in [self.jobs[job_id] for job_id in replayed]:
            for each in job.dependencies.values():
                if not job.started and each.state is not MET:
                    other = self.jobs.get(each.job_id)
                    each.state = MET if other is None or other.state in TERMINAL else OPEN
            if not job.started and job.has_open_waits:
                wait_for_dependencies(job)
        self._reopen([*replayed, *revived])

    def _revive(self, replayed: Sequence[str]) -> list[str]:
        """Makes jobs wait again that dependencies on replayed jobs have cancelled; returns them."""
        revived: list[str] = []
        level = list(replayed)
        while level:
            waiters = self._reopen(level)
            level = []
            for job in waiters:
                failed = any(each.state is FAILED for each in job.dependencies.values())
                if job.state is JobState.CANCELLED and not failed:
                    wait_for_dependencies(job)
                    job.error, job.expires_at = None, None
                    level.append(job.new.id)
            revived += level
        return revived

    def _reopen(self, job_ids: Sequence[str]) -> list[ModelJob]:
        """Opens the dependencies on these jobs; returns the jobs that have them."""
        found = []
        for job in self.jobs.values():
            is_cancelled = job.state is JobState.CANCELLED and job.by_dependency and job.new.unique is None
            if job.started or not (job.state is JobState.WAITING or is_cancelled):
                continue
            again = [each for job_id, each in job.dependencies.items() if job_id in job_ids]
            for each in again:
                each.state = OPEN
            found += [job] if again else []
        return found

    def is_awaited(self, job_id: str) -> bool:
        """True if a job that has not ended waits, or waited, for this one."""
        return any(job_id in job.dependencies and job.state not in TERMINAL for job in self.jobs.values())

    def is_read_again(self, job_id: str, pruned: Set[str], since: int) -> bool:
        """True if the replay of a parent that ended without success after an instant reads how this child ended."""
        unsuccessful = (JobState.DEAD, JobState.CANCELLED)
        parents = [job for other, job in self.jobs.items() if other not in pruned and job.state in unsuccessful]
        parents = [job for job in parents if job.ended_at > since]
        return any(job_id in job.dependencies and job.dependencies[job_id].wait for job in parents)

    def comes_back(self, job_id: str, pruned: Set[str]) -> bool:
        """True if the replay of a failed job makes this one wait again, which it has cancelled."""
        job = self.jobs[job_id]
        failed = {other_id for other_id, each in job.dependencies.items() if each.state is FAILED}
        is_cancelled = job.state is JobState.CANCELLED and job.by_dependency
        return is_cancelled and not failed.isdisjoint(self.jobs.keys() - pruned)

    def has_open_dependents(self, job_id: str) -> bool:
        """True if the end of this job resolves a dependency."""
        return any(
            each.state is OPEN for job in self.jobs.values() if (each := job.dependencies.get(job_id)) is not None
        )

    # ── signals ───────────────────────────────────────────────────────────────────────────────────────────────
    def holder(self, lease: Lease, worker: str | None, now: int) -> ModelJob | None:
        """The job that runs under this lease."""
        job = self.jobs.get(lease.job_id)
        has_lease = job is not None and job.state is JobState.RUNNING and job.claims == lease.claims
        if job is None or not has_lease or job.lease_until <= now or worker not in (None, job.worker):
            return None
        return job

    def receive(self, wait: SignalWait, now: int) -> SignalReceipt:
        step = wait.step
        job = self.holder(step.lease, step.worker, now)
        if job is None:
            return SignalReceipt(has_lease=False)
        if step.name in job.steps:
            return SignalReceipt(result=job.steps[step.name].result)
        earlier = job.receiver if job.receiver is not None and job.receiver.step == step.name else None
        place = ModelReceiver(wait.topic, step.name, step.number, job.claims, now, now + wait.timeout // MICROSECOND)
        kept = next((each for each in self.signals.values() if is_kept(each, wait.topic)), None)
        if kept is not None:
            kept.job_id = job.new.id
            return self._record(job, place, signal_result(kept.signal.value), now)
        if earlier is not None:
            place.since, place.until = earlier.since, earlier.until
        if place.until <= now:
            return self._record(job, place, TIMED_OUT, now)
        job.receiver, job.wait = place, job.wait + 1
        return SignalReceipt(time_left=(place.until - now) * MICROSECOND)

    @staticmethod
    def _record(job: ModelJob, place: ModelReceiver, result: str, now: int) -> SignalReceipt:
        job.steps[place.step] = Step(place.step, place.number, True, place.claims, now, result)
        if job.receiver is not None and job.receiver.step == place.step:
            job.receiver = None
        return SignalReceipt(result=result)

    def receivers(self, topic: str) -> list[str]:
        """The jobs that have waited longest for a signal of a topic: more than one where they began together."""
        places = {
            job_id: job.receiver.since
            for job_id, job in self.jobs.items()
            if job.receiver is not None
            and job.receiver.topic == topic
            and job.is_receiver
            and job.state in (JobState.RUNNING, JobState.WAITING)
        }
        return [job_id for job_id, since in places.items() if since == min(places.values())]

    def send(self, signal: Signal, job_id: str | None, now: int) -> None:
        """Notes that the store has given a new signal to this job, or has kept it."""
        self.signals[signal.id] = ModelSignal(signal, now, job_id)
        if job_id is None:
            return
        job = self.jobs[job_id]
        assert job.receiver is not None
        self._record(job, job.receiver, signal_result(signal.value), now)
        if job.state is JobState.WAITING:
            job.state, job.run_at = JobState.SCHEDULED, now

    def kept(self, topic: str | None = None) -> list[ModelSignal]:
        """Signals that no job has received, the oldest first."""
        return [each for each in self.signals.values() if is_kept(each, topic)]

    # ── children ──────────────────────────────────────────────────────────────────────────────────────────────
    def start_children(
        self, lease: Lease, children: Sequence[NewJob], worker: str, now: int, submit: Submit
    ) -> list[ChildStatus] | None:
        job = self.holder(lease, worker, now)
        if job is None:
            return None
        known = {job_id: job_id for job_id, each in job.dependencies.items() if each.wait} | job.stand_ins
        ids = [known.get(child.id) or submit(child, now)[0] for child in children]
        pairs = [(child.id, job_id) for child, job_id in zip(children, ids, strict=True)]
        held = [(child, other) for child, other in pairs if other not in (child, lease.job_id)]
        job.stand_ins |= {child: other for child, other in held if other in self.jobs}
        job.wait += 1
        if job.receiver is not None:
            job.receiver.claims = 0
        statuses = []
        for job_id in ids:
            other = self.jobs.get(job_id)
            if other is not None and job_id != lease.job_id:  # a child may have the job's own key
                state = resolve(Condition.END, other.state)
                job.dependencies[job_id] = ModelDependency(job_id, Condition.END, state, job.wait)
            statuses.append(ChildStatus(job_id, None if other is None else other.state))
        return statuses

    def waits_of(self, job_id: str) -> JobWaits:
        """Returns the waits that a store must show of a job."""
        job = self.jobs[job_id]
        is_receiver = job.is_receiver and job.state in (JobState.RUNNING, JobState.WAITING)
        return JobWaits(
            job.receiver.info if is_receiver and job.receiver is not None else None,
            [job.dependencies[other_id].info(other_id, job) for other_id in sorted(job.dependencies)],
            [
                other.dependencies[job_id].info(other_id, other)
                for other_id, other in sorted(self.jobs.items())
                if job_id in other.dependencies
            ],
        )


def resolve(on: Condition, how: str) -> DependencyState:
    """State of a dependency on a job that is in a state, or was deleted before its end."""
    if how not in {*TERMINAL, "deleted"}:
        return OPEN
    return MET if on is Condition.END or (on is Condition.SUCCESS) == (how == "succeeded") else FAILED


def cancel_waiter(job: ModelJob, failures: set[str], now: int) -> None:
    """Ends a job that waits, because of one of these failures."""
    job.state, job.ended_at, job.by_dependency = JobState.CANCELLED, now, True
    job.errors, job.error = frozenset(failures), min(failures)


def wait_for_dependencies(job: ModelJob) -> None:
    job.state, job.run_at, job.by_dependency = JobState.WAITING, NEVER_US, True


def is_kept(sent: ModelSignal, topic: str | None) -> bool:
    return sent.job_id is None and topic in (None, sent.signal.topic)
