"""Rules of what jobs wait for: other jobs, signals and children."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from holdfast.core.dependencies import NEVER_US, Condition, Dependency
from holdfast.core.errors import Invalid
from holdfast.core.ids import new_id
from holdfast.core.lifecycle import Outcome, Suspended
from holdfast.core.models import TERMINAL, JobState, Lease, NewJob, Reason, Step
from holdfast.core.steps import NewStep
from holdfast.core.waits import (
    SIGNAL_RETENTION,
    JobWaits,
    KeptSignal,
    SentSignal,
    Signal,
    SignalReceipt,
    SignalWait,
    signal_result,
)
from tests.model.machine import MAX_JOBS, QUEUES, Machine
from tests.model.model_job import ModelJob
from tests.model.strategies import LIMITED, conditions, new_jobs, outcomes, picks, step_names, timeouts

numbers = st.integers(0, 10_000)
delays = st.none() | st.just(timedelta(seconds=45))
dependencies = st.lists(st.tuples(numbers, conditions), max_size=3)


class WaitRules(Machine):
    """Rules of dependencies, signals and children."""

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[str, list[NewJob]] = {}  # by parent
        self.received: set[str] = set()  # results of signals in steps that were seen

    # ── dependencies ──────────────────────────────────────────────────────────────────────────────────────────
    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(jobs=st.lists(st.tuples(new_jobs, dependencies), min_size=1, max_size=4))
    def submit_after(self, jobs: list[tuple[NewJob, list[tuple[int, Condition]]]]) -> None:
        """Jobs that wait for stored ones, and for earlier ones of their batch."""
        batch: list[NewJob] = []
        for job, chosen in jobs:
            ids = [*[each.id for each in reversed(batch)], *reversed(self.model.jobs)]
            after = {ids[number % len(ids)]: on for number, on in chosen if ids}
            batch.append(waiting(job, after))
        self.submit_batch(batch)

    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(on=conditions, last=conditions, number=numbers)
    def submit_chain(self, on: Condition, last: Condition, number: int) -> None:
        """Three jobs one behind the other, the first behind a stored one."""
        stored = list(self.model.jobs)
        jobs = [NewJob(id=new_id(), task="work", payload="{}", queue="a") for _ in range(3)]
        after = [{stored[number % len(stored)]: Condition.END} if stored else {}, {jobs[0].id: on}, {jobs[1].id: last}]
        self.submit_batch([waiting(job, each) for job, each in zip(jobs, after, strict=True)])

    @rule(job=new_jobs, number=numbers)
    def submit_after_missing(self, job: NewJob, number: int) -> None:
        """Nothing of a batch is stored if a job waits for one that is not there, for a later one, or for itself."""
        job = msgspec.structs.replace(job, key=None, options=None)  # one that is answered with another may pass
        first, later = (NewJob(id=new_id(), task="work", payload="{}") for _ in range(2))
        missing = (new_id(), later.id, job.id)[number % 3]
        batch = [first, waiting(job, {first.id: Condition.END, missing: Condition.END}), later]
        with pytest.raises(Invalid, match=missing):
            self.call_family(lambda: self.store.queueing.submit(batch))

    def awaited(self) -> list[ModelJob]:
        """Jobs whose ends resolve dependencies."""
        return [job for job_id, job in self.model.jobs.items() if self.model.has_open_dependents(job_id)]

    @precondition(lambda self: self.awaited())
    @rule(number=numbers, outcome=outcomes)
    def run_awaited(self, number: int, outcome: Outcome) -> None:
        """Settles a job for which others wait, and takes it first if it is ready."""
        job = chosen_of(self.awaited(), number)
        if job.state is not JobState.RUNNING:
            self.end_awaited()
            self.promote_all()
            self.claimed("w2", dict.fromkeys(QUEUES, 10), 10, ids=[job.new.id])
            self.the_store_agrees_with_the_model()
        if job.state is JobState.RUNNING:
            self.settle_all([self.decided(job.lease, outcome)])

    @precondition(lambda self: self.awaited())
    @rule(number=numbers, verb=st.sampled_from(["cancel", "delete"]), both=st.booleans())
    def end_awaited_job(self, number: int, verb: str, both: bool) -> None:
        """Cancels or deletes a job for which others wait, and perhaps one of those with it."""
        job_id = chosen_of(self.awaited(), number).new.id
        waiters = [each.new.id for each in self.model.jobs.values() if job_id in each.dependencies]
        ids = list(dict.fromkeys([job_id, *waiters[: int(both)]][:: 1 if number % 2 else -1]))
        done = self.call_family(lambda: getattr(self.store.admin, verb)(ids))
        won = getattr(self.model, verb)(ids, self.clock())
        self.model.resolve_ends(self.clock())
        assert [each for each, _ in done.changed] == won

    def revivable(self) -> list[ModelJob]:
        """Jobs that have ended, and for which jobs waited that no worker has taken."""
        waiters = [job for job in self.model.jobs.values() if not job.started]
        awaited = {job_id for job in waiters for job_id in job.dependencies}
        return [job for job_id, job in self.model.jobs.items() if job_id in awaited and job.state in TERMINAL]

    @precondition(lambda self: self.revivable())
    @rule(picked=picks)
    def replay_awaited(self, picked: list[int]) -> None:
        self.meet_the_due()
        ids = list(dict.fromkeys(chosen_of(self.revivable(), number).new.id for number in picked))
        done = self.call_family(lambda: self.store.admin.replay(ids, force=True))
        assert [each for each, _ in done.changed] == self.model.replay(dict.fromkeys(ids, 0), self.clock(), force=True)

    @precondition(lambda self: any(job.state in TERMINAL for job in self.model.jobs.values()))
    @rule()
    def prune_ended(self) -> None:
        """Deletes each ended job that none waits for and no replay brings back, in as many calls as it takes."""
        self.clock.advance(1)
        prunable = self.model.prunable(dict.fromkeys(TERMINAL, timedelta(0)), self.clock())
        while self.call_family(lambda: self.store.maintenance.prune(dict.fromkeys(TERMINAL, timedelta(0)), limit=1000)):
            self.clock.advance(1)
        assert self.model.jobs.keys() - {job.id for job in self.everything()} == prunable
        self.model.prune(prunable)

    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(number=st.integers(1, 2), max_attempts=st.sampled_from([1, 3, None]))
    def begin(self, number: int, max_attempts: int | None) -> None:
        """Jobs that a worker takes at once, if their queue is open."""
        jobs = [
            NewJob(id=new_id(), task="work", payload="{}", queue="b", max_attempts=max_attempts) for _ in range(number)
        ]
        self.submit_batch(jobs)
        self.the_store_agrees_with_the_model()
        self.end_awaited()
        self.promote_all()
        self.claimed("w1", {"b": 10}, 10, ids=[job.id for job in jobs])

    @precondition(lambda self: any(self.model.ready(queue, self.clock()) for queue in (*QUEUES, LIMITED)))
    @rule(limit=st.integers(1, 4), worker=st.sampled_from(["w1", "w2"]))
    def take(self, limit: int, worker: str) -> None:
        """Jobs of all queues."""
        self.end_awaited()
        self.claimed(worker, dict.fromkeys([*QUEUES, LIMITED], limit), limit)

    # ── signals ───────────────────────────────────────────────────────────────────────────────────────────────
    @rule(topic=st.sampled_from("xy"), again=st.none() | numbers)
    def send_signal(self, topic: str, again: int | None) -> None:
        """A new signal, or one with an id that was used before."""
        known = list(self.model.signals)
        signal_id = f"s{len(known)}-{self.clock()}" if again is None or not known else chosen_of(known, again)
        signal = Signal(signal_id, topic, f'"{signal_id} {topic}"')
        self.meet_the_due()
        answer = self.call_family(lambda: self.store.workflow.send_signal(signal))
        if signal_id in self.model.signals:
            assert answer == SentSignal(False, self.model.signals[signal_id].job_id)
            return
        assert answer.is_new
        receivers = self.model.receivers(topic)
        assert answer.job_id in receivers or (answer.job_id is None and not receivers)
        self.model.send(signal, answer.job_id, self.clock())

    def receive(self, lease: Lease, name: str, timeout: timedelta, worker: str | None) -> SignalReceipt:
        step = NewStep(lease, name, 2 if "#" in name else 1, True, None, worker)
        wait = SignalWait(step, name[0], timeout)
        receipt = self.call_family(lambda: self.store.workflow.receive_signal(wait))
        expected = self.model.receive(wait, self.clock())
        assert receipt == expected, f"{receipt} instead of {expected}"
        return receipt

    @precondition(lambda self: self.leases)
    @rule(number=numbers, name=step_names, timeout=timeouts, worker=st.sampled_from(["w1", "w2", None]))
    def receive_by_any(self, number: int, name: str, timeout: timedelta, worker: str | None) -> None:
        self.receive(self.leases[-1 - number % len(self.leases)], name, timeout, worker)

    @precondition(lambda self: self.alive())
    @rule(number=numbers, name=step_names, timeout=timeouts, suspends=st.booleans(), meanwhile=st.booleans())
    def receive_signal(self, number: int, name: str, timeout: timedelta, suspends: bool, meanwhile: bool) -> None:
        """As a worker does it: a job that has to wait is suspended with the time that is left."""
        lease = chosen_of(self.alive(), number)
        receipt = self.receive(lease, name, timeout, self.workers[lease])
        if receipt.time_left is not None and suspends:
            if meanwhile:
                self.send_signal(name[0], None)
            self.settle_all([self.decided(lease, Suspended(Reason.SIGNAL, receipt.time_left))])

    @precondition(lambda self: self.deadlines())
    @rule()
    def advance_to_deadline(self) -> None:
        self.clock.advance((min(self.deadlines()) - self.clock()) / 1_000_000)

    def deadlines(self) -> list[int]:
        """Future deadlines of suspended jobs."""
        jobs = self.model.jobs.values()
        return [job.run_at for job in jobs if job.state is JobState.WAITING and self.clock() < job.run_at < NEVER_US]

    @precondition(lambda self: len(self.model.signals) > 5)
    @rule()
    def forget_signals(self) -> None:
        """All of them are so old that they are pruned."""
        self.clock.advance(SIGNAL_RETENTION.total_seconds() + 1)
        self.call_family(lambda: self.store.maintenance.prune({}, limit=1000))
        self.model.signals.clear()

    # ── children ──────────────────────────────────────────────────────────────────────────────────────────────
    def start(self, lease: Lease, children: Sequence[NewJob], worker: str) -> bool:
        """True if one of the children has not ended."""
        started = self.call_family(lambda: self.store.workflow.start_children(lease, children, worker))
        expected = self.model.start_children(lease, children, worker, self.clock(), self.model.submit)
        assert started == expected, f"{started} instead of {expected}"
        return any(each.state is not None and each.state not in TERMINAL for each in started or ())

    def children_of(self, lease: Lease, new: list[NewJob], again: list[int]) -> list[NewJob]:
        """Children that the job has started before, and new ones."""
        known = self.children.setdefault(lease.job_id, [])
        chosen = [*dict.fromkeys(chosen_of(known, number).id for number in again if known)]
        room = max(0, MAX_JOBS - len(self.model.jobs))
        children = [*[child for child in known if child.id in chosen], *new[:room]]
        known += new[:room]
        return children

    @precondition(lambda self: self.leases)
    @rule(number=numbers, jobs=st.lists(new_jobs, max_size=2), again=picks, worker=st.sampled_from(["w1", "w2"]))
    def start_children_by_any(self, number: int, jobs: list[NewJob], again: list[int], worker: str) -> None:
        lease = self.leases[-1 - number % len(self.leases)]
        self.start(lease, self.children_of(lease, jobs, again), worker)

    @precondition(lambda self: self.alive())
    @rule(number=numbers, jobs=st.lists(new_jobs, max_size=3), again=picks, suspends=st.booleans())
    def start_children(self, number: int, jobs: list[NewJob], again: list[int], suspends: bool) -> None:
        """As a worker does it: a job with children that have not ended is suspended."""
        lease = chosen_of(self.alive(), number)
        if self.start(lease, self.children_of(lease, jobs, again), self.workers[lease]) and suspends:
            self.settle_all([self.decided(lease, Suspended(Reason.CHILDREN))])

    @precondition(lambda self: self.alive())
    @rule(
        number=numbers,
        waits=st.lists(st.sampled_from(["x", "y", "new", "known"]), min_size=2, max_size=3),
        delay=delays,
    )
    def wait_in_turn(self, number: int, waits: list[str], delay: timedelta | None) -> None:
        """Each wait takes the place of the one before it."""
        lease = chosen_of(self.alive(), number)
        for wait in waits:
            if wait in "xy":
                self.receive(lease, wait, timedelta(seconds=45), self.workers[lease])
            else:
                new = [NewJob(id=new_id(), task="work", payload="{}", queue="a")] if wait == "new" else []
                self.start(lease, self.children_of(lease, new, [] if new else [0, 1]), self.workers[lease])
        self.settle_all([self.decided(lease, Suspended(Reason.CHILDREN, delay))])

    # ── what must hold after every step ───────────────────────────────────────────────────────────────────────
    @invariant()
    def the_waits_agree_with_the_model(self) -> None:
        waits, steps, kept = self.call_family(self.read_waits)
        for job_id, found in waits.items():
            expected = self.model.waits_of(job_id)
            assert found == expected, f"{job_id}: {found} instead of {expected}"
        assert steps == {job_id: recorded(job) for job_id, job in self.model.jobs.items() if job_id in steps}
        for topic, signals in kept.items():
            assert signals == [
                KeptSignal(each.signal.id, each.signal.topic, each.signal.value, each.sent_at)
                for each in self.model.kept(topic)
            ]
        self.check_signals([step.result for each in steps.values() for step in each], kept[None])

    async def read_waits(self) -> tuple[dict[str, JobWaits], dict[str, list[Step]], dict[str | None, list[KeptSignal]]]:
        workflow, jobs = self.store.workflow, self.model.jobs
        some = {job_id for job_id, job in jobs.items() if job.wait} | {*list(jobs)[-1:]}  # each read takes its time
        some |= {each for job_id, job in jobs.items() if job.dependencies for each in (job_id, *job.dependencies)}
        waits = {job_id: await workflow.read_waits(job_id) for job_id in jobs if job_id in some}
        steps = {job_id: await workflow.read_steps(job_id) for job_id, job in jobs.items() if job.wait or job.steps}
        topics = (None, "x", "y") if self.model.signals else (None,)
        return waits, steps, {topic: await workflow.read_signals(topic) for topic in topics}

    def check_signals(self, results: list[str | None], kept: list[KeptSignal]) -> None:
        """Each signal is received once, or kept, or went with the job that had received it."""
        received = [result for result in results if result is not None and result.startswith('{"signal"')]
        unreceived = {signal_result(each.value) for each in kept}
        assert len(received) == len(set(received))
        self.received |= set(received)
        assert not self.received & unreceived
        sent = {signal_result(each.signal.value) for each in self.model.signals.values()}
        assert sent <= self.received | unreceived


def waiting(job: NewJob, after: dict[str, Condition]) -> NewJob:
    """The job, behind others. The contract says nothing of one that would replace the holder of its unique key."""
    if not after:
        return job
    if job.options is not None and job.unique is not None:
        unique = msgspec.structs.replace(job.unique, on_conflict="keep")
        job = msgspec.structs.replace(job, options=msgspec.structs.replace(job.options, unique=unique))
    return msgspec.structs.replace(job, delay=None, after=tuple(Dependency(job_id, on) for job_id, on in after.items()))


def recorded(job: ModelJob) -> list[Step]:
    return sorted(job.steps.values(), key=lambda step: (step.number, step.name))


def chosen_of(items: Sequence[object], number: int) -> object:
    return items[number % len(items)]
