"""Any sequence of calls, in any order, against the model: the states agree, every move is legal, nothing is early.

``HOLDFAST_MODEL=storm`` runs for long; ``HOLDFAST_MODEL=EXAMPLESxSTEPS`` (say ``200x80``) for as long as you like.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.lifecycle import Lost, Outcome, Succeeded, decide
from holdfast.core.limits import LimitChange
from holdfast.core.models import (
    MICROSECOND,
    Claim,
    HeartbeatReply,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    Reason,
    ReplayRate,
    Settlement,
    WorkerHeartbeat,
)
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest
from tests.model.model import Model, crash_reason, reachable, seen
from tests.model.strategies import (
    AT_ONCE,
    LIMITED,
    LIMITS,
    OF_A_KEY,
    FiveSeconds,
    edits,
    new_jobs,
    outcomes,
    picks,
    spans,
)
from tests.support.stores import CARRIED, MIGRATED, Home, stores_of

T = TypeVar("T")

EXAMPLES, STEPS = {"quick": (90, 50), "storm": (2000, 100)}.get(os.environ.get("HOLDFAST_MODEL", "quick")) or map(
    int, os.environ["HOLDFAST_MODEL"].split("x")
)

MAX_JOBS = 8  # few, so that each goes through many states
LEASE = timedelta(seconds=30)
QUEUES = ("a", "b")


class StoreMachine(RuleBasedStateMachine):
    """One store and its model; subclassed for each store there is."""

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

    # ── the life of a job ─────────────────────────────────────────────────────────────────────────────────────
    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(jobs=st.lists(new_jobs, min_size=1, max_size=3))
    def submit(self, jobs: list[NewJob]) -> None:
        answers = self.call_family(lambda: self.store.queueing.submit(jobs))
        expected = [self.model.submit(job, self.clock()) for job in jobs]
        assert [(answer.job_id, answer.created, answer.changed) for answer in answers] == expected

    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(payloads=st.lists(st.sampled_from(["{}", "{}", '{"n":1}']), min_size=4, max_size=5))
    def submit_limited(self, payloads: list[str]) -> None:
        self.submit([NewJob(id=new_id(), task="work", payload=each, queue=LIMITED) for each in payloads])

    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(job=new_jobs, span=spans)
    def submit_two_in_turn(self, job: NewJob, span: timedelta) -> None:
        """One that falls due after the next was submitted, though it came first."""
        self.submit([msgspec.structs.replace(job, delay=2 * span, key=None, options=None)])
        self.clock.advance(span.total_seconds())
        self.submit([msgspec.structs.replace(job, id=new_id(), delay=None, key=None, options=None)])
        self.clock.advance(span.total_seconds())

    @precondition(lambda self: self.model.jobs)
    @rule(number=st.integers(0, 10_000))
    def submit_again(self, number: int) -> None:
        job = list(self.model.jobs.values())[number % len(self.model.jobs)]
        plain = NewJob(id=job.new.id, task="other", payload='{"other":1}', queue="b")
        (answer,) = self.call_family(lambda: self.store.queueing.submit([plain]))
        assert (answer.job_id, answer.created) == (job.new.id, False)

    @rule(
        queue=st.sampled_from(QUEUES),
        limit=st.integers(1, 4),
        max_must_start=st.integers(0, 2),
        worker=st.sampled_from(["w1", "w2"]),
    )
    def claim_one_queue(self, queue: str, limit: int, max_must_start: int, worker: str) -> None:
        innocent = self.innocent(queue)
        quarantined = [job for job in self.model.ready(queue, self.clock()) if job.lost_leases >= 2]
        suspected = [job.new.id for job in self.model.ready(queue, self.clock()) if job.lost_leases == 1]
        bounded = {job_id for job_id in [*innocent, *suspected] if self.must_start_now(job_id)}
        claim = self.claimed(worker, {queue: limit}, limit, max_must_start=max_must_start)
        ids = [job.id for job in claim.jobs]
        brought = [job_id for job_id in ids if job_id not in suspected]
        assert len(ids) <= limit
        assert len(bounded & set(ids)) <= max_must_start
        assert self.are_first([job_id for job_id in ids if job_id in suspected], suspected)
        assert self.are_first(brought, innocent)
        if claim.stopped_at_last_attempt:
            assert len(ids) == limit or len(bounded & set(ids)) == max_must_start
            assert self.carried or innocent[len(brought)] in bounded
        else:
            assert len(ids) == limit or set(brought) == set(innocent)
            assert ids or not max_must_start or not suspected
        assert claim.quarantined == bool(quarantined)
        overdue = {job.new.id for job in self.model.overdue(self.clock())}
        ended_meanwhile = [timedelta(0)] if claim.expired else []  # one that was due, too
        assert claim.next_due in (self.next_due([queue]), self.next_due([queue], overdue), *ended_meanwhile)

    @rule(
        capacity=st.fixed_dictionaries({queue: st.integers(0, 3) for queue in QUEUES})
        | st.fixed_dictionaries({EVERY_QUEUE: st.integers(0, 4)}, optional={QUEUES[0]: st.integers(0, 3)}),
        limit=st.integers(1, 6),
    )
    def claim_many_queues(self, capacity: dict[str, int], limit: int) -> None:
        others = [queue for queue in QUEUES if queue not in capacity]
        sharing = {name: others if name == EVERY_QUEUE else [name] for name in capacity}
        ready = {queue: self.innocent(queue) for queue in QUEUES}
        bounded = {job_id for queue in QUEUES for job_id in ready[queue] if self.must_start_now(job_id)}
        claim = self.claimed("w1", capacity, limit, max_must_start=0)
        taken = Counter(job.queue for job in claim.jobs)
        possible = (min(capacity[name], sum(len(ready[each]) for each in sharing[name])) for name in capacity)
        most = min(limit, sum(possible))
        assert sum(taken.values()) == most or (claim.stopped_at_last_attempt and sum(taken.values()) < most)
        assert not bounded & {job.id for job in claim.jobs}
        assert all(sum(taken[each] for each in sharing[name]) <= capacity[name] for name in capacity)
        assert all(self.are_first([job.id for job in claim.jobs if job.queue == each], ready[each]) for each in QUEUES)

    @rule(
        limit=st.integers(1, 5),
        max_must_start=st.sampled_from([0, 1, 5]),
        idle=st.sampled_from([0, 1, 5, 5]),
        worker=st.sampled_from(["w1", "w2"]),
    )
    def claim_limited(self, limit: int, max_must_start: int, idle: int, worker: str) -> None:
        ready = [job for job in self.model.ready(LIMITED, self.clock()) if job.lost_leases < 2]
        running = self.model.running(LIMITED)
        used = Counter(job.new.payload for job in running)
        keys = Counter(job.new.payload for job in ready)
        possible = sum(max(0, min(number, OF_A_KEY - used[key])) for key, number in keys.items())
        claim = self.claimed(worker, {LIMITED: limit}, limit, max_must_start=max_must_start, idle=idle)
        assert len(claim.jobs) == max(0, min(limit, max_must_start, idle, AT_ONCE - len(running), possible))
        for key in keys:
            expected = [job.new.id for job in ready if job.new.payload == key]
            taken = [job.id for job in claim.jobs if job.payload == key]
            assert taken == expected[: len(taken)]

    @rule()
    def claim_limited_alone(self) -> None:
        running = self.model.running(LIMITED)
        used = Counter(job.new.payload for job in running)
        poison = [job for job in self.model.ready(LIMITED, self.clock()) if job.lost_leases >= 2]
        fitting = {job.new.id for job in poison if len(running) < AT_ONCE and used[job.new.payload] < OF_A_KEY}
        claim = self.claimed("w1", {LIMITED: 5}, 5, isolated=True)
        assert len(claim.jobs) == min(1, len(fitting))
        assert {job.id for job in claim.jobs} <= fitting

    @rule(queue=st.sampled_from(QUEUES))
    def claim_alone(self, queue: str) -> None:
        poison = [job.new.id for job in self.model.ready(queue, self.clock()) if job.lost_leases >= 2]
        claim = self.claimed("w1", {queue: 5}, 5, isolated=True)
        assert [job.id for job in claim.jobs] == poison[:1]

    @rule(numbers=picks)
    def claim_delivered(self, numbers: list[int]) -> None:
        if self.carried:  # who names ids makes those that are due ready without a word to the transport
            self.promote(limit=1000)
        ids = self.chosen(numbers)
        jobs = [job for queue in QUEUES for job in self.model.ready(queue, self.clock())]
        claim = self.claimed("w1", dict.fromkeys(QUEUES, 10), 10, only=ids)
        assert {job.id for job in claim.jobs} == {job.new.id for job in jobs if job.lost_leases < 2} & set(ids)
        assert claim.refused == len(ids) - len(claim.jobs)

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

    def are_first(self, taken: list[str], ready: list[str]) -> bool:
        """Whether the right ones of those that were ready were taken. A transport has an order of its own."""
        return set(taken) <= set(ready) if self.carried else taken == ready[: len(taken)]

    def must_start_now(self, job_id: str) -> bool:
        """Whether a claim has to count this job among those that can start at once."""
        job = self.model.jobs[job_id]
        return job.lost_leases > 0 or (job.new.max_attempts is not None and job.attempts + 1 >= job.new.max_attempts)

    def innocent(self, queue: str) -> list[str]:
        return [job.new.id for job in self.model.ready(queue, self.clock()) if job.lost_leases == 0]

    def next_due(self, queues: list[str], ended: Collection[str] = ()) -> timedelta | None:
        """What a claim has to answer once it has promoted what is due."""
        now = self.clock()
        later = [
            job.run_at - now
            for job in self.model.jobs.values()
            if job.new.id not in ended
            and job.new.queue in queues
            and job.state in (JobState.SCHEDULED, JobState.FAILED)
            and job.run_at > now
        ]
        return timedelta(microseconds=min(later)) if later else None

    @precondition(lambda self: self.leases)
    @rule(choices=st.lists(st.tuples(st.integers(0, 10_000), outcomes), min_size=1, max_size=4))
    def settle(self, choices: list[tuple[int, Outcome]]) -> None:
        """By any lease there ever was: current, stale, expired, of a job long gone."""
        settlements = [
            self.decided(self.leases[-1 - number % len(self.leases)], outcome) for number, outcome in choices
        ]
        answers = self.call_family(lambda: self.store.queueing.settle(settlements))
        expected = [self.model.settle(each, self.clock()) for each in settlements]
        assert [answer.accepted for answer in answers] == [accepted for accepted, _ in expected]
        for answer, settlement, (accepted, state) in zip(answers, settlements, expected, strict=True):
            assert (answer.job_id, answer.claims) == (settlement.job_id, settlement.claims)
            assert not accepted or answer.state is state

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 10_000))
    def succeed(self, number: int) -> None:
        """A lone success takes the shortest way through a store."""
        self.settle([(number, Succeeded("1"))])

    @precondition(lambda self: any(lease.claims > 1 for lease in self.alive()))
    @rule(isolated=st.booleans())
    def succeed_by_superseded_leases(self, isolated: bool) -> None:
        stale = [Lease(lease.job_id, lease.claims - 1) for lease in self.alive() if lease.claims > 1]
        stale = stale[:1] if isolated else stale
        settlements = [self.decided(lease, Succeeded("1")) for lease in stale]
        assert not any(answer.accepted for answer in self.call_family(lambda: self.store.queueing.settle(settlements)))

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 10_000), outcome=outcomes)
    def settle_living(self, number: int, outcome: Outcome) -> None:
        alive = self.alive()
        self.settle([(self.leases[::-1].index(alive[number % len(alive)]), outcome)])

    @precondition(lambda self: self.alive())
    @rule(number=st.integers(0, 10_000))
    def cancel_living(self, number: int) -> None:
        alive = self.alive()
        lease = alive[number % len(alive)]
        self.call_family(lambda: self.store.admin.cancel([lease.job_id]))
        assert self.model.cancel(lease.job_id, self.clock())

    @precondition(lambda self: self.alive())
    @rule()
    def crash(self) -> None:
        """Every worker dies, and a sweep recovers its jobs."""
        self.clock.advance(LEASE.total_seconds() + 31)
        self.sweep(limit=100)

    def alive(self) -> list[Lease]:
        return [job.lease for job in self.model.jobs.values() if job.state is JobState.RUNNING]

    def decided(self, lease: Lease, outcome: Outcome) -> Settlement:
        job = self.model.jobs.get(lease.job_id)
        if job is None or job.claims != lease.claims:
            return Settlement(job_id=lease.job_id, claims=lease.claims, state=JobState.SUCCEEDED, result='"stale"')
        settlement = decide(job.as_job(), outcome, FiveSeconds(), random.Random(0))
        assert crash_reason(settlement) == isinstance(outcome, Lost)
        return settlement

    @precondition(lambda self: self.leases)
    @rule(numbers=picks, seconds=st.sampled_from([1, 30, 60]))
    def beat_any(self, numbers: list[int], seconds: int) -> None:
        self.beat(list(dict.fromkeys(self.leases[-1 - number % len(self.leases)] for number in numbers)), seconds)

    @precondition(lambda self: self.alive())
    @rule(late=st.booleans())
    def beat_living(self, late: bool) -> None:
        """All that runs, in time or (a frozen worker wakes) too late."""
        self.clock.advance(61.0 if late else 0.0)
        self.beat(self.alive(), 30)

    def beat(self, leases: list[Lease], seconds: int) -> None:
        until = self.clock() + timedelta(seconds=seconds) // MICROSECOND
        for worker in ("w1", "w2"):
            mine = [lease for lease in leases if self.workers[lease] == worker]
            reply = self.call_family(partial(self.heartbeat, worker, mine, timedelta(seconds=seconds)))
            assert reply.statuses == [self.model.held(lease, self.clock(), until) for lease in mine]

    def heartbeat(self, worker: str, leases: list[Lease], span: timedelta) -> Coroutine[Any, Any, HeartbeatReply]:
        given = WorkerHeartbeat(worker=worker, host="h", pid=1, queues="*", concurrency=1)
        return self.store.queueing.heartbeat(given, leases, lease_for=span)

    @rule(span=spans)
    def advance(self, span: timedelta) -> None:
        self.clock.advance(span.total_seconds())

    @rule(limit=st.integers(1, 5))
    def sweep(self, limit: int) -> None:
        found = self.call_family(lambda: self.store.maintenance.find_expired_leases(limit=limit))
        lost = self.model.expired(self.clock())
        assert {job.id for job in found} <= lost
        assert len(found) == min(limit, len(lost))
        settlements = [decide(job, Lost(), FiveSeconds(), random.Random(0)) for job in found]
        assert all(answer.accepted for answer in self.call_family(lambda: self.store.queueing.settle(settlements)))
        assert all(self.model.settle(each, self.clock())[0] for each in settlements)

    @rule(limit=st.sampled_from([1, 1000]))
    def expire(self, limit: int) -> None:
        overdue = {job.new.id for job in self.model.overdue(self.clock())}
        expired = self.call_family(lambda: self.store.maintenance.expire_waiting(limit=limit))
        assert len(expired) == min(limit, len(overdue))
        assert {each.job_id for each in expired} <= overdue

    @rule(number=st.integers(0, 10_000), changes=edits)
    def edit(self, number: int, changes: JobChanges) -> None:
        self.meet_the_due()
        (job_id,) = self.chosen([number])
        done = self.call_family(lambda: self.store.admin.edit(job_id, changes))
        self.operated([job_id], [job_id] if self.model.edit(job_id, changes, self.clock()) else [], done.changed)

    @rule(limit=st.sampled_from([1, 2, 1000]))
    def promote(self, limit: int) -> None:
        self.meet_the_due()
        due = len(self.model.due(self.clock()))
        assert self.call_family(lambda: self.store.maintenance.promote_due(limit=limit)) == min(limit, due)

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    @rule(numbers=picks)
    def cancel(self, numbers: list[int]) -> None:
        ids = self.chosen(numbers)
        done = self.call_family(lambda: self.store.admin.cancel(ids))
        self.operated(ids, [job_id for job_id in ids if self.model.cancel(job_id, self.clock())], done.changed)

    @rule(numbers=picks, force=st.booleans(), after=st.sampled_from([0, 3]), every=st.sampled_from([0, 0, 2]))
    def replay(self, numbers: list[int], force: bool, after: int, every: int) -> None:
        self.meet_the_due()
        ids = self.chosen(numbers)
        pace = ReplayRate(after=timedelta(seconds=after), every=timedelta(seconds=every))
        done = self.call_family(lambda: self.store.admin.replay(ids, force=force, pace=pace))
        laters = {job_id: (after + turn * every) * 1_000_000 for turn, job_id in enumerate(dict.fromkeys(ids))}
        won = [job_id for job_id in ids if self.model.replay(job_id, self.clock(), laters[job_id], force=force)]
        self.operated(ids, won, done.changed)

    @rule(numbers=picks)
    def delete(self, numbers: list[int]) -> None:
        ids = self.chosen(numbers)
        done = self.call_family(lambda: self.store.admin.delete(ids))
        self.operated(ids, [job_id for job_id in ids if self.model.delete(job_id)], done.changed)

    @staticmethod
    def operated(ids: list[str], won: list[str], changed: list[tuple[str, JobState]]) -> None:
        assert [job_id for job_id, _ in changed] == [job_id for job_id in ids if job_id in won]

    @rule(queue=st.sampled_from([*QUEUES, LIMITED]), paused=st.booleans())
    def pause_or_resume(self, queue: str, paused: bool) -> None:
        self.call_family(lambda: self.store.admin.pause(queue) if paused else self.store.admin.resume(queue))
        self.model.paused = self.model.paused | {queue} if paused else self.model.paused - {queue}

    @rule(keep=st.dictionaries(st.sampled_from(["succeeded", "dead", "cancelled"]), spans), limit=st.integers(1, 5))
    def prune(self, keep: dict[str, timedelta], limit: int) -> None:
        prunable = self.model.prunable(keep, self.clock())
        pruned = self.call_family(lambda: self.store.maintenance.prune(keep, limit=limit))
        assert pruned == min(limit, len(prunable))
        gone = self.model.jobs.keys() - {job.id for job in self.everything()}
        assert gone <= prunable
        assert len(gone) == pruned
        self.model.prune(gone)

    # ── what must hold after every step ───────────────────────────────────────────────────────────────────────
    def everything(self) -> list[Any]:
        return self.call_family(lambda: self.store.query.find(JobFilter(), limit=10_000)).jobs

    def meet_the_due(self) -> None:
        """Whether a due job already stands as queued, and an expired one as ended, is the store's affair: the model
        follows."""
        actual = {job.id: job.state for job in self.everything()}
        for job in self.model.overdue(self.clock()):
            if actual[job.new.id] is JobState.CANCELLED:
                self.model.end_overdue(job, self.clock())
        for job in self.model.due(self.clock()):
            if actual[job.new.id] is JobState.QUEUED:
                job.state = JobState.QUEUED

    @invariant()
    def the_store_agrees_with_the_model(self) -> None:
        self.meet_the_due()
        jobs = {job.id: job for job in self.everything()}
        assert jobs.keys() == self.model.jobs.keys()
        for job_id, job in jobs.items():
            assert seen(job) == self.model.jobs[job_id].seen
            assert reachable(self.states.get(job_id, job.state), job.state)
            assert job.claims >= self.claims.get(job_id, 0)
            assert job.max_attempts is None or job.attempts <= job.max_attempts
        self.states = {job_id: job.state for job_id, job in jobs.items()}
        self.claims |= {job_id: job.claims for job_id, job in jobs.items()}

    @invariant()
    def the_states_sum_to_the_jobs_accepted(self) -> None:
        queues = self.call_family(lambda: self.store.query.queues(recent=timedelta(minutes=5), max_count=10_000))
        assert sum(sum(queue.states.values()) for queue in queues) == self.model.accepted - self.model.removed
        assert {queue.name for queue in queues if queue.paused} == self.model.paused

    @invariant()
    def every_unsuccessful_attempt_is_on_record(self) -> None:
        for job in list(self.model.jobs.values())[-3:]:
            records = self.call_family(lambda job_id=job.new.id: self.store.query.attempts(job_id))
            claims = [record.claims for record in records]
            assert claims == sorted(set(claims))
            assert job.counted <= set(claims) <= job.counted | job.given_back
            assert all(record.reason in set(Reason) for record in records)


def _test_case(name: str, home: Home) -> type:
    machine = type(f"{name}_machine", (StoreMachine,), {"home": staticmethod(home), "carried": name in CARRIED})
    case: type = machine.TestCase  # type: ignore[attr-defined]  # Hypothesis makes it
    case.settings = settings(  # type: ignore[attr-defined]  # Hypothesis reads it
        max_examples=EXAMPLES if name == "sqlite" else EXAMPLES // 3,  # a server's schema for each costs more
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    case.pytestmark = [pytest.mark.timeout(3600)]  # type: ignore[attr-defined]  # shrinking a failure takes its time
    return case


for _name in stores_of("test_model", older=False):
    globals()[f"Test_{_name}"] = _test_case(_name, MIGRATED[_name])
