"""Any sequence of calls, in any order, against the model: the states agree, every move is legal, nothing is early.

``HOLDFAST_MODEL=storm`` runs for long; ``HOLDFAST_MODEL=EXAMPLESxSTEPS`` (say ``200x80``) for as long as you like.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from holdfast.core.dependencies import Condition
from holdfast.core.ids import new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.lifecycle import Succeeded
from holdfast.core.models import MICROSECOND, Lease, NewJob
from holdfast.core.workers import HeartbeatReply, WorkerHeartbeat
from tests.model.claim_rules import ClaimRules
from tests.model.life_rules import LifeRules
from tests.model.machine import MAX_JOBS, QUEUES, Machine
from tests.model.strategies import LIMITED, conditions, edits, new_jobs, picks, spans
from tests.model.wait_rules import WaitRules
from tests.support.stores import CARRIED, MIGRATED, Home, stores_of

EXAMPLES, STEPS = {"quick": (30, 50), "storm": (2000, 100)}.get(os.environ.get("HOLDFAST_MODEL", "quick")) or map(
    int, os.environ["HOLDFAST_MODEL"].split("x")
)


class StoreMachine(ClaimRules, LifeRules, WaitRules):
    """All rules; subclassed for each store there is."""

    # ── the life of a job ─────────────────────────────────────────────────────────────────────────────────────
    @precondition(lambda self: len(self.model.jobs) < MAX_JOBS)
    @rule(jobs=st.lists(new_jobs, min_size=1, max_size=3))
    def submit(self, jobs: list[NewJob]) -> None:
        self.submit_batch(jobs)

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

    @rule(number=st.integers(0, 10_000), changes=edits)
    def edit(self, number: int, changes: JobChanges) -> None:
        self.meet_the_due()
        (job_id,) = self.chosen([number])
        done = self.call_family(lambda: self.store.admin.edit(job_id, changes))
        self.operated([job_id], [job_id] if self.model.edit(job_id, changes, self.clock()) else [], done.changed)

    # ── operators ─────────────────────────────────────────────────────────────────────────────────────────────
    @rule(queue=st.sampled_from([*QUEUES, LIMITED]), paused=st.booleans())
    def pause_or_resume(self, queue: str, paused: bool) -> None:
        self.call_family(lambda: self.store.admin.pause(queue) if paused else self.store.admin.resume(queue))
        self.model.paused = self.model.paused | {queue} if paused else self.model.paused - {queue}

    @rule(keep=st.dictionaries(st.sampled_from(["succeeded", "dead", "cancelled"]), spans), limit=st.integers(1, 5))
    def prune(self, keep: dict[str, timedelta], limit: int) -> None:
        prunable = self.model.prunable(keep, self.clock())
        self.were_kept = self.were_kept or any(self.model.is_kept(job_id) for job_id in self.model.jobs)
        pruned = self.call_family(lambda: self.store.maintenance.prune(keep, limit=limit))
        assert pruned <= min(limit, len(prunable))
        assert pruned == min(limit, len(prunable)) or self.were_kept
        gone = self.model.jobs.keys() - {job.id for job in self.everything()}
        assert gone <= prunable
        assert len(gone) == pruned
        self.model.prune(gone)


class WaitMachine(LifeRules, WaitRules):
    """Fewer rules: most jobs wait for something, or run."""

    @initialize(number=st.integers(1, 2), on=conditions, last=conditions)
    def begin_with_jobs(self, number: int, on: Condition, last: Condition) -> None:
        self.begin(number, None)
        self.submit_chain(on, last, 0)


def _test_case(name: str, home: Home, rules: type[Machine]) -> type:
    machine = type(f"{name}_{rules.__name__}", (rules,), {"home": staticmethod(home), "carried": name in CARRIED})
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
    globals()[f"Test_{_name}"] = _test_case(_name, MIGRATED[_name], StoreMachine)
    if _name != "postgres_list":  # on the other transport alone: they know nothing of waits
        globals()[f"Test_{_name}_waits"] = _test_case(_name, MIGRATED[_name], WaitMachine)
