"""Rules of the life of a job after its submission: settlements, lost leases, time, and operators."""

from __future__ import annotations

import random
from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from holdfast.core.lifecycle import Lost, Outcome, decide
from holdfast.core.models import ReplayRate
from tests.model.machine import LEASE, Machine
from tests.model.strategies import FiveSeconds, outcomes, picks, spans


class LifeRules(Machine):
    """Settlements, lost leases, time, and operators."""

    @precondition(lambda self: self.leases)
    @rule(choices=st.lists(st.tuples(st.integers(0, 10_000), outcomes), min_size=1, max_size=4))
    def settle(self, choices: list[tuple[int, Outcome]]) -> None:
        """By any lease there ever was: current, stale, expired, of a job long gone."""
        settlements = [
            self.decided(self.leases[-1 - number % len(self.leases)], outcome) for number, outcome in choices
        ]
        self.settle_all(settlements)

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
        assert self.model.cancel([lease.job_id], self.clock())

    @precondition(lambda self: self.alive())
    @rule()
    def crash(self) -> None:
        """Every worker dies, and a sweep recovers its jobs."""
        self.clock.advance(LEASE.total_seconds() + 31)
        self.sweep(limit=100)

    @rule(span=spans)
    def advance(self, span: timedelta) -> None:
        self.clock.advance(span.total_seconds())

    @rule(limit=st.integers(1, 5))
    def sweep(self, limit: int) -> None:
        found = self.call_family(lambda: self.store.maintenance.find_expired_leases(limit=limit))
        lost = self.model.expired(self.clock())
        assert {job.id for job in found} <= lost
        assert len(found) == min(limit, len(lost))
        self.settle_all([decide(job, Lost(), FiveSeconds(), random.Random(0)) for job in found])

    @rule(numbers=picks)
    def cancel(self, numbers: list[int]) -> None:
        ids = self.chosen(numbers)
        done = self.call_family(lambda: self.store.admin.cancel(ids))
        self.operated(ids, self.model.cancel(ids, self.clock()), done.changed)
        self.model.resolve_ends(self.clock())

    @rule(numbers=picks, force=st.booleans(), after=st.sampled_from([0, 3]), every=st.sampled_from([0, 0, 2]))
    def replay(self, numbers: list[int], force: bool, after: int, every: int) -> None:
        self.meet_the_due()
        ids = self.chosen(numbers)
        pace = ReplayRate(after=timedelta(seconds=after), every=timedelta(seconds=every))
        done = self.call_family(lambda: self.store.admin.replay(ids, force=force, pace=pace))
        laters = {job_id: (after + turn * every) * 1_000_000 for turn, job_id in enumerate(dict.fromkeys(ids))}
        self.operated(ids, self.model.replay(laters, self.clock(), force=force), done.changed)

    @rule(numbers=picks)
    def delete(self, numbers: list[int]) -> None:
        ids = self.chosen(numbers)
        done = self.call_family(lambda: self.store.admin.delete(ids))
        self.operated(ids, self.model.delete(ids, self.clock()), done.changed)

    @rule(limit=st.sampled_from([1, 1000]))
    def expire(self, limit: int) -> None:
        """Ends expired jobs. The end of one may end another one that has expired too."""
        overdue = {job.new.id: job for job in self.model.overdue(self.clock())}
        free = [job for job in overdue.values() if not overdue.keys() & job.dependencies]
        expired = self.call_family(lambda: self.store.maintenance.expire_unstarted(limit=limit))
        assert min(limit, len(free)) <= len(expired) <= min(limit, len(overdue))
        assert {each.job_id for each in expired} <= overdue.keys()

    @rule(limit=st.sampled_from([1, 2, 1000]))
    def promote(self, limit: int) -> None:
        self.meet_the_due()
        due = len(self.model.due(self.clock()))
        assert self.call_family(lambda: self.store.maintenance.promote_due(limit=limit)) == min(limit, due)
