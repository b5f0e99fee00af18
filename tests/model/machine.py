"""A store beside its model: the calls and checks that all rules share."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.lifecycle import Lost, Outcome, decide
from holdfast.core.limits import LimitChange
from holdfast.core.models import MICROSECOND, Claim, Job, JobFilter, JobState, Lease, NewJob, Reason, Settlement
from holdfast.stores.base import ClaimRequest
from tests.model.model import Model, crash_reason, reachable
from tests.model.model_job import seen
from tests.model.strategies import LIMITS, FiveSeconds
from tests.support.stores import Home

T = TypeVar("T")

MAX_JOBS = 8  # few, so that each goes through many states
LEASE = timedelta(seconds=30)
QUEUES = ("a", "b")
RETRY_PRIORITIES = (None, 1, -1)


class Machine(RuleBasedStateMachine):
    """A store beside its model."""

    home: Home
    carried: bool

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = Model()
        self.lent = ExitStack()
        folder = Path(self.lent.enter_context(tempfile.TemporaryDirectory()))
        self.store = Holdfast(self.lent.enter_context(type(self).home(folder)), now=self.clock).new_store()
        self.call(self.store.open())
        for limit in LIMITS:
            assert self.call_family(lambda limit=limit: self.store.limits.write_limit(LimitChange(limit, 0)))
        self.states: dict[str, JobState] = {}
        self.claims: dict[str, int] = {}
        self.leases: list[Lease] = []  # every lease there ever was
        self.workers: dict[Lease, str] = {}  # whose they were
        self.were_kept = False  # a job may have been kept for the sake of another: a store looks at it later

    def teardown(self) -> None:
        self.call(self.store.close())
        self.lent.close()

    def call(self, call: Coroutine[Any, Any, T]) -> T:
        return self.store.blocking(call)

    def call_family(self, verb: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Calls a verb of a family, which the store gives inside its event loop alone."""

        async def run() -> T:
            return await verb()

        return self.call(run())

    def chosen(self, numbers: list[int]) -> list[str]:
        """Some of the jobs there are, and one that never was."""
        ids = [*self.model.jobs, "00000000-0000-7000-8000-000000000000"]
        return list(dict.fromkeys(ids[number % len(ids)] for number in numbers))

    def submit_batch(self, jobs: Sequence[NewJob]) -> None:
        answers = self.call_family(lambda: self.store.queueing.submit(jobs))
        expected = self.model.submit_batch(jobs, self.clock())
        assert [(answer.job_id, answer.created, answer.changed) for answer in answers] == expected

    def settle_all(self, settlements: Sequence[Settlement]) -> None:
        answers = self.call_family(lambda: self.store.queueing.settle(settlements))
        expected = [self.model.settle(each, self.clock()) for each in settlements]
        self.model.resolve_ends(self.clock())
        assert [answer.accepted for answer in answers] == [accepted for accepted, _ in expected]
        for answer, settlement, (accepted, state) in zip(answers, settlements, expected, strict=True):
            assert (answer.job_id, answer.claims) == (settlement.job_id, settlement.claims)
            assert not accepted or answer.state is state

    def alive(self) -> list[Lease]:
        return [job.lease for job in self.model.jobs.values() if job.state is JobState.RUNNING]

    def decided(self, lease: Lease, outcome: Outcome) -> Settlement:
        job = self.model.jobs.get(lease.job_id)
        if job is None or job.claims != lease.claims:
            return Settlement(job_id=lease.job_id, claims=lease.claims, state=JobState.SUCCEEDED, result='"stale"')
        policy = FiveSeconds(priority=RETRY_PRIORITIES[job.claims % len(RETRY_PRIORITIES)])
        settlement = decide(job.as_job(), outcome, policy, random.Random(0))
        assert crash_reason(settlement) == isinstance(outcome, Lost)
        return settlement

    def promote_all(self) -> None:
        if self.carried:  # a claim of ids makes those that are due ready without a word to the transport
            self.call_family(lambda: self.store.maintenance.promote_due(limit=1000))
            self.meet_the_due()

    def end_awaited(self) -> None:
        """Expires jobs whose ends make further ones ready: a claim would meet those already."""
        if any(self.model.has_open_dependents(job.new.id) for job in self.model.overdue(self.clock())):
            self.call_family(lambda: self.store.maintenance.expire_unstarted(limit=1000))
            self.meet_the_due()

    def claimed(self, worker: str, capacity: dict[str, int], limit: int, **options: Any) -> Claim:
        """Claim, and check what holds for every delivery."""
        now = self.clock()
        before = {job_id: (job.claims, job.attempts) for job_id, job in self.model.jobs.items()}
        claim = self.call_family(
            lambda: self.store.queueing.claim(ClaimRequest(worker, capacity, limit=limit, lease_for=LEASE, **options))
        )
        overdue = {job.new.id for job in self.model.overdue(now)}
        assert {each.job_id for each in claim.expired} <= overdue
        assert not overdue & {job.id for job in claim.jobs}, "expired"
        for job in claim.jobs:
            kept = self.model.jobs[job.id]
            assert kept.state is not JobState.RUNNING, "two live leases"
            assert kept.run_at <= now, "early"
            assert kept.new.queue not in self.model.paused
            assert (job.claims, job.attempts) == (before[job.id][0] + 1, before[job.id][1] + 1)
            assert (job.lost_leases, job.run_at_us, job.priority) == (kept.lost_leases, kept.run_at, kept.new.priority)
            self.model.claimed(job.id, worker, now + LEASE // MICROSECOND)
            self.leases.append(job.lease)
            self.workers[job.lease] = worker
        return claim

    @staticmethod
    def operated(ids: list[str], won: list[str], changed: list[tuple[str, JobState]]) -> None:
        assert [job_id for job_id, _ in changed] == [job_id for job_id in ids if job_id in won]

    # ── what must hold after every step ───────────────────────────────────────────────────────────────────────
    def everything(self) -> list[Job]:
        return self.call_family(lambda: self.store.query.find(JobFilter(), limit=10_000)).jobs

    def meet_the_due(self) -> None:
        """Takes from the store what it may do earlier or later: make due jobs ready, end expired ones, and choose
        which of several failed dependencies it names."""
        actual = {job.id: job for job in self.everything()}
        for job in self.model.overdue(self.clock()):
            if actual[job.new.id].reason == Reason.EXPIRED:
                self.model.end_expired(job, self.clock())
        self.model.resolve_ends(self.clock())
        for job in self.model.due(self.clock()):
            if actual[job.new.id].state is JobState.QUEUED:
                job.state = JobState.QUEUED
        for job_id, job in self.model.jobs.items():
            error = actual[job_id].error if job_id in actual else None
            if job.by_dependency and job.state is JobState.CANCELLED and error in job.errors:
                job.error = error

    @invariant()
    def the_store_agrees_with_the_model(self) -> None:
        self.meet_the_due()
        jobs = {job.id: job for job in self.everything()}
        assert jobs.keys() == self.model.jobs.keys()
        for job_id, job in jobs.items():
            expected = self.model.jobs[job_id].seen
            assert seen(job) == expected, f"{job_id}: {seen(job)} instead of {expected}"
            assert reachable(self.states.get(job_id, job.state), job.state)
            assert job.claims >= self.claims.get(job_id, 0)
            assert job.max_attempts is None or job.attempts <= job.max_attempts
        self.states = {job_id: job.state for job_id, job in jobs.items()}
        self.claims |= {job_id: job.claims for job_id, job in jobs.items()}
        self.check_counts()

    def check_counts(self) -> None:
        queues = self.call_family(lambda: self.store.query.queues(recent=timedelta(minutes=5), max_count=10_000))
        counted = {(queue.name, state): number for queue in queues for state, number in queue.states.items() if number}
        assert counted == Counter((job.new.queue, job.state) for job in self.model.jobs.values())
        assert sum(counted.values()) == self.model.accepted - self.model.removed
        assert {queue.name for queue in queues if queue.paused} == self.model.paused

    @invariant()
    def every_unsuccessful_attempt_is_on_record(self) -> None:
        for job in list(self.model.jobs.values())[-3:]:
            records = self.call_family(lambda job_id=job.new.id: self.store.query.attempts(job_id))
            claims = [record.claims for record in records]
            assert claims == sorted(set(claims))
            assert job.counted <= set(claims) <= job.counted | job.given_back
            assert all(record.reason in set(Reason) for record in records)
