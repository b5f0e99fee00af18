"""Claims in every form, each checked against the jobs that the model has ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import rule

from holdfast.core.dependencies import NEVER_US
from holdfast.stores.base import EVERY_QUEUE
from tests.model.machine import QUEUES, Machine
from tests.model.model import DELAYED
from tests.model.strategies import AT_ONCE, LIMITED, OF_A_KEY, picks


class ClaimRules(Machine):
    """Rules of claims."""

    @rule(
        queue=st.sampled_from(QUEUES),
        limit=st.integers(1, 4),
        max_must_start=st.integers(0, 2),
        worker=st.sampled_from(["w1", "w2"]),
    )
    def claim_one_queue(self, queue: str, limit: int, max_must_start: int, worker: str) -> None:
        self.end_awaited()
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
        assert claim.has_quarantined == bool(quarantined)
        overdue = {job.new.id for job in self.model.overdue(self.clock())}
        # One that was due, too: a transport looks again a little later, as if others had locked it.
        ended_meanwhile = [timedelta(0), timedelta(seconds=0.2)] if claim.expired else []
        assert claim.next_due in (self.next_due([queue]), self.next_due([queue], overdue), *ended_meanwhile)

    @rule(
        capacity=st.fixed_dictionaries({queue: st.integers(0, 3) for queue in QUEUES})
        | st.fixed_dictionaries({EVERY_QUEUE: st.integers(0, 4)}, optional={QUEUES[0]: st.integers(0, 3)}),
        limit=st.integers(1, 6),
    )
    def claim_many_queues(self, capacity: dict[str, int], limit: int) -> None:
        self.end_awaited()
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
        free_runners=st.sampled_from([0, 1, 5, 5]),
        worker=st.sampled_from(["w1", "w2"]),
    )
    def claim_limited(self, limit: int, max_must_start: int, free_runners: int, worker: str) -> None:
        self.end_awaited()
        ready = [job for job in self.model.ready(LIMITED, self.clock()) if job.lost_leases < 2]
        running = self.model.running(LIMITED)
        used = Counter(job.new.payload for job in running)
        keys = Counter(job.new.payload for job in ready)
        possible = sum(max(0, min(number, OF_A_KEY - used[key])) for key, number in keys.items())
        claim = self.claimed(worker, {LIMITED: limit}, limit, max_must_start=max_must_start, free_runners=free_runners)
        assert len(claim.jobs) == max(0, min(limit, max_must_start, free_runners, AT_ONCE - len(running), possible))
        for key in keys:
            expected = [job.new.id for job in ready if job.new.payload == key]
            taken = [job.id for job in claim.jobs if job.payload == key]
            assert taken == expected[: len(taken)]

    @rule()
    def claim_limited_alone(self) -> None:
        self.end_awaited()
        running = self.model.running(LIMITED)
        used = Counter(job.new.payload for job in running)
        poison = [job for job in self.model.ready(LIMITED, self.clock()) if job.lost_leases >= 2]
        fitting = {job.new.id for job in poison if len(running) < AT_ONCE and used[job.new.payload] < OF_A_KEY}
        claim = self.claimed("w1", {LIMITED: 5}, 5, isolated=True)
        assert len(claim.jobs) == min(1, len(fitting))
        assert {job.id for job in claim.jobs} <= fitting

    @rule(queue=st.sampled_from(QUEUES))
    def claim_alone(self, queue: str) -> None:
        self.end_awaited()
        poison = [job.new.id for job in self.model.ready(queue, self.clock()) if job.lost_leases >= 2]
        claim = self.claimed("w1", {queue: 5}, 5, isolated=True)
        assert [job.id for job in claim.jobs] == poison[:1]

    @rule(numbers=picks)
    def claim_ids(self, numbers: list[int]) -> None:
        self.end_awaited()
        self.promote_all()
        ids = self.chosen(numbers)
        jobs = [job for queue in QUEUES for job in self.model.ready(queue, self.clock())]
        claim = self.claimed("w1", dict.fromkeys(QUEUES, 10), 10, ids=ids)
        assert {job.id for job in claim.jobs} == {job.new.id for job in jobs if job.lost_leases < 2} & set(ids)
        assert claim.refused == len(ids) - len(claim.jobs)

    def are_first(self, taken: list[str], ready: list[str]) -> bool:
        """Returns True if the first ready jobs were taken. A transport has an order of its own."""
        return set(taken) <= set(ready) if self.carried else taken == ready[: len(taken)]

    def must_start_now(self, job_id: str) -> bool:
        """Returns True if a claim counts this job among those that must start at once."""
        job = self.model.jobs[job_id]
        return job.lost_leases > 0 or (job.new.max_attempts is not None and job.attempts + 1 >= job.new.max_attempts)

    def innocent(self, queue: str) -> list[str]:
        return [job.new.id for job in self.model.ready(queue, self.clock()) if job.lost_leases == 0]

    def next_due(self, queues: list[str], ended: Collection[str] = ()) -> timedelta | None:
        """Checks the answer of a claim that has promoted due jobs."""
        now = self.clock()
        later = [
            job.run_at - now
            for job in self.model.jobs.values()
            if job.new.id not in ended
            and job.new.queue in queues
            and job.state in DELAYED
            and now < job.run_at < NEVER_US
        ]
        return timedelta(microseconds=min(later)) if later else None
