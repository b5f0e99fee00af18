"""Children: a running job starts others, and is suspended until they have ended."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.batches import BATCH_TASK, BatchProgress
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import NEVER_US, Condition, Dependency, DependencyInfo, DependencyState
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import Job, JobFilter, JobState, Lease, NewJob, Options, Reason
from holdfast.core.steps import NewStep
from holdfast.core.waits import ChildStatus, Signal, SignalWait
from holdfast.stores.base import Store
from tests.conformance.support import (
    LEASE,
    WORKER,
    ended,
    lose,
    new_job,
    put,
    queues,
    running,
    settle,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)

OPEN, MET, _ = DependencyState


async def start(store: Store, job: Job | Lease, *children: NewJob, worker: str = WORKER) -> list[ChildStatus] | None:
    lease = job.lease if isinstance(job, Job) else job
    return await store.workflow.start_children(lease, children, worker)


async def suspend(store: Store, job: Job) -> JobState | None:
    answer = await settle(store, job, JobState.WAITING, refund=True, reason=Reason.CHILDREN)
    assert answer.accepted
    return answer.state


async def parent_of(store: Store, *children: NewJob) -> Job:
    """A suspended job that waits for these."""
    job = await running(store)
    assert await start(store, job, *children) == [ChildStatus(child.id, JobState.QUEUED) for child in children]
    assert await suspend(store, job) is JobState.WAITING
    return job


async def test_parent_is_due_when_its_child_has_ended(store: Store, clock: ManualClock) -> None:
    child = new_job(payload='{"n":1}')
    parent = await parent_of(store, child)
    found = await stored(store, parent.id)
    assert (found.reason, found.run_at_us) == ("children", NEVER_US)
    waits = await store.workflow.read_waits(parent.id)
    assert waits.dependencies == [DependencyInfo(child.id, Condition.END, OPEN, True)]
    assert (await store.workflow.read_waits(child.id)).dependents == [
        DependencyInfo(parent.id, Condition.END, OPEN, True)
    ]
    (job,) = await take(store)
    assert (job.id, job.payload) == (child.id, '{"n":1}')
    clock.advance(20)
    await settle(store, job, result="42")
    (again,) = await take(store)
    assert (again.id, again.run_at_us, again.attempts) == (parent.id, clock(), 1)
    assert await start(store, again, child) == [ChildStatus(child.id, JobState.SUCCEEDED)]


@pytest.mark.parametrize("how", ["dead", "cancelled", "deleted"])
async def test_any_end_of_a_child_is_one(store: Store, how: str) -> None:
    child = new_job()
    parent = await parent_of(store, child)
    if how == "dead":
        (job,) = await take(store)
        await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom")
    else:
        await (store.admin.cancel if how == "cancelled" else store.admin.delete)([child.id])
    assert await take_ids(store) == [parent.id]


async def test_parent_waits_for_all_children(store: Store) -> None:
    children = [new_job() for _ in range(3)]
    parent = await parent_of(store, *children)
    for job in await take(store):
        assert await state_of(store, parent.id) is JobState.WAITING
        await settle(store, job)
    assert await take_ids(store) == [parent.id]


async def test_child_that_ended_before_the_settlement_makes_the_parent_due(store: Store) -> None:
    child, parent = new_job(), await running(store)
    await start(store, parent, child)
    await store.admin.cancel([child.id])
    assert await suspend(store, parent) is JobState.SCHEDULED
    (again,) = await take(store)
    assert again.id == parent.id
    assert await start(store, again, child) == [ChildStatus(child.id, JobState.CANCELLED)]


async def test_deleted_child_is_not_started_again(store: Store) -> None:
    child = new_job()
    await parent_of(store, child, other := new_job())
    await store.admin.delete([child.id])
    await store.admin.cancel([other.id])
    (again,) = await take(store)
    assert await start(store, again, child, other) == [
        ChildStatus(child.id, None),
        ChildStatus(other.id, JobState.CANCELLED),
    ]
    assert await state_of(store, child.id) is None


async def test_deleted_child_of_another_is_started(store: Store) -> None:
    child, other = new_job(), await running(store)
    await parent_of(store, child)
    await store.admin.delete([child.id])
    assert await start(store, other, child) == [ChildStatus(child.id, JobState.QUEUED)]
    assert await suspend(store, other) is JobState.WAITING


async def test_children_are_started_once(store: Store, clock: ManualClock) -> None:
    child, parent = new_job(), await running(store)
    for _ in range(2):
        assert await start(store, parent, child) == [ChildStatus(child.id, JobState.QUEUED)]
    await lose(store, clock, parent)
    again = next(job for job in await take(store) if job.id == parent.id)
    assert await start(store, again, child) == [ChildStatus(child.id, JobState.RUNNING)]
    assert await suspend(store, again) is JobState.WAITING


async def test_children_under_a_lost_lease_are_refused(store: Store, clock: ManualClock) -> None:
    child, parent = new_job(), await running(store)
    clock.advance(LEASE.total_seconds())
    assert await start(store, parent, child) is None
    await lose(store, clock, parent)
    (again,) = await take(store)
    assert await start(store, parent, child) is None
    assert await start(store, again, child, worker="another") is None
    assert await start(store, Lease(new_id(), 1), child) is None
    assert await state_of(store, child.id) is None


async def test_waiting_for_further_children_replaces_the_first(store: Store) -> None:
    first, second, parent = new_job(), new_job(), await running(store)
    await start(store, parent, first)
    await start(store, parent, second)
    await suspend(store, parent)
    await store.admin.cancel([second.id])
    assert sorted(await take_ids(store)) == sorted([first.id, parent.id])


async def test_ends_of_earlier_children_do_not_count(store: Store) -> None:
    first, second, parent = new_job(), new_job(), await running(store)
    await start(store, parent, first)
    await start(store, parent, second)
    await suspend(store, parent)
    await store.admin.cancel([first.id])
    assert await take_ids(store) == [second.id]
    assert await state_of(store, parent.id) is JobState.WAITING


async def test_child_that_is_awaited_no_more_counts_as_met(store: Store) -> None:
    """Else it would be named among what the parent waits for."""

    async def states(job_id: str) -> dict[str, str]:
        waits = await store.workflow.read_waits(job_id)
        return {each.job_id: each.state for each in (*waits.dependencies, *waits.dependents)}

    first, second, third, parent = new_job(), new_job(), new_job(), await running(store)
    await start(store, parent, first, second)
    assert await states(parent.id) == {first.id: "open", second.id: "open"}
    await start(store, parent, second, third)
    assert await states(parent.id) == {first.id: "met", second.id: "open", third.id: "open"}
    assert [await states(child.id) for child in (first, second)] == [{parent.id: "met"}, {parent.id: "open"}]
    wait = SignalWait(NewStep(parent.lease, "approved", 1, True, None, WORKER), "approved", timedelta(hours=1))
    await store.workflow.receive_signal(wait)
    assert await states(parent.id) == {first.id: "met", second.id: "met", third.id: "met"}
    assert await state_of(store, second.id) is JobState.QUEUED
    await start(store, parent, first)
    assert await states(parent.id) == {first.id: "open", second.id: "met", third.id: "met"}


async def test_end_of_an_earlier_child_is_no_signal(store: Store) -> None:
    child, parent = new_job(), await running(store)
    await start(store, parent, child)
    receipt = await store.workflow.receive_signal(
        SignalWait(NewStep(parent.lease, "approved", 1, True, None, WORKER), "approved", timedelta(hours=1))
    )
    assert receipt.time_left is not None
    await settle(store, parent, JobState.WAITING, refund=True, delay=receipt.time_left)
    await store.admin.cancel([child.id])
    assert await state_of(store, parent.id) is JobState.WAITING
    assert (await store.workflow.send_signal(Signal("s", "approved", "1"))).job_id == parent.id


async def test_deadline_of_a_signal_stays_while_children_are_awaited(store: Store, clock: ManualClock) -> None:
    parent = await running(store)
    wait = SignalWait(NewStep(parent.lease, "approved", 1, True, None, WORKER), "approved", timedelta(seconds=9))
    assert (await store.workflow.receive_signal(wait)).time_left == timedelta(seconds=9)
    await start(store, parent, new_job())
    assert (await store.workflow.send_signal(Signal("s", "other", "1"))).job_id is None
    clock.advance(2)
    assert (await store.workflow.receive_signal(wait)).time_left == timedelta(seconds=7)
    assert (await store.workflow.send_signal(Signal("t", "approved", "1"))).job_id == parent.id


async def test_late_signal_ends_no_wait_for_children(store: Store, clock: ManualClock) -> None:
    child, parent = new_job(), await running(store)
    wait = SignalWait(NewStep(parent.lease, "approved", 1, True, None, WORKER), "approved", timedelta(seconds=9))
    await store.workflow.receive_signal(wait)
    await start(store, parent, child)
    clock.advance(9)
    assert (await store.workflow.receive_signal(wait)).result == '{"timed_out":true}'
    assert await suspend(store, parent) is JobState.WAITING
    await store.admin.cancel([child.id])
    assert await take_ids(store) == [parent.id]


async def test_child_that_was_a_dependency_may_end_in_any_way(store: Store) -> None:
    first = await ended(store, JobState.SUCCEEDED, key="one")
    (parent_id,) = await put(store, new_job(after=(Dependency(first),)))
    (parent,) = await take(store)
    await store.admin.replay([first], force=True)
    assert await start(store, parent, new_job(key="one")) == [ChildStatus(first, JobState.QUEUED)]
    await suspend(store, parent)
    await store.admin.cancel([first])
    assert await take_ids(store) == [parent_id]


async def test_parent_that_waits_for_children_receives_no_signal(store: Store) -> None:
    child = new_job()
    await parent_of(store, child)
    assert (await store.workflow.send_signal(Signal("s", "topic", "1"))).job_id is None


async def test_parent_with_a_deadline_runs_when_it_has_come(store: Store, clock: ManualClock) -> None:
    child, parent = new_job(), await running(store)
    await start(store, parent, child)
    await settle(store, parent, JobState.WAITING, refund=True, delay=timedelta(hours=1))
    assert await take_ids(store) == [child.id]
    clock.advance(3600)
    assert await take_ids(store) == [parent.id]


async def test_cancelled_parent_stays_so(store: Store) -> None:
    child = new_job()
    parent = await parent_of(store, child)
    await store.admin.cancel([parent.id])
    (job,) = await take(store)
    await settle(store, job)
    assert await take_ids(store) == []
    await store.admin.replay([parent.id])
    assert await take_ids(store) == [parent.id]


async def test_end_of_a_child_leaves_its_dead_parent_as_it_is(store: Store, clock: ManualClock) -> None:
    child, parent = new_job(), await running(store, max_attempts=1)
    await start(store, parent, child)
    await lose(store, clock, parent)
    dead = await stored(store, parent.id)
    assert (dead.state, dead.lost_leases) == (JobState.DEAD, 1)
    (job,) = await take(store)
    assert job.id == child.id
    await settle(store, job)
    assert await stored(store, parent.id) == dead


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
async def test_parent_and_child_that_wait_for_each_other_end_together(store: Store, how: str) -> None:
    """The end of the parent ends the child, and the end of the child does not make the parent due."""
    parent = await running(store)
    child = new_job(after=(Dependency(parent.id, Condition.SUCCESS),))
    await put(store, child)
    assert await start(store, parent, child) == [ChildStatus(child.id, JobState.WAITING)]
    assert await suspend(store, parent) is JobState.WAITING
    await (store.admin.cancel if how == "cancelled" else store.admin.delete)([parent.id])
    assert await state_of(store, child.id) is JobState.CANCELLED
    (queue,) = await queues(store)
    assert {state: number for state, number in queue.states.items() if number} == {
        "cancelled": 2 if how == "cancelled" else 1
    }
    assert await take(store) == []


async def test_replayed_child_does_not_suspend_its_parent_again(store: Store) -> None:
    children = [new_job(), new_job()]
    parent = await parent_of(store, *children)
    await store.admin.cancel([children[0].id])
    await store.admin.replay([children[0].id])
    await store.admin.cancel([children[1].id])
    assert parent.id in await take_ids(store)


async def test_parent_does_not_wait_for_itself(store: Store) -> None:
    child, parent = new_job(), await running(store, key="one")
    assert await start(store, parent, new_job(key="one"), child) == [
        ChildStatus(parent.id, JobState.RUNNING),
        ChildStatus(child.id, JobState.QUEUED),
    ]
    waits = await store.workflow.read_waits(parent.id)
    assert (waits.dependencies, waits.dependents) == ([DependencyInfo(child.id, Condition.END, OPEN, True)], [])
    await suspend(store, parent)
    await store.admin.cancel([child.id])
    assert await take_ids(store) == [parent.id]


async def test_child_joins_its_batch(store: Store) -> None:
    batch = new_job(BATCH_TASK, is_batch=True)
    member, child = [new_job(options=Options(batch=batch.id)) for _ in range(2)]
    await put(store, batch, member)
    (parent,) = await take(store)
    for _ in range(2):
        assert await start(store, parent, child) == [ChildStatus(child.id, JobState.QUEUED)]
        assert await store.workflow.read_batch(batch.id) == BatchProgress(2, 0, 0)
    await suspend(store, parent)
    for job_id in (child.id, parent.id):
        (job,) = await take(store)
        assert (job.id, await state_of(store, batch.id)) == (job_id, JobState.WAITING)
        await settle(store, job)
    assert await state_of(store, batch.id) is JobState.SUCCEEDED


async def test_child_waits_for_another_job(store: Store) -> None:
    other, parent = await running(store), await running(store)
    succeeded, cancelled = await ended(store, JobState.SUCCEEDED), await ended(store, JobState.CANCELLED)
    children = [new_job(after=(Dependency(each, Condition.SUCCESS),)) for each in (other.id, cancelled, succeeded)]
    statuses = await start(store, parent, *children)
    assert statuses is not None
    assert [each.state for each in statuses[:2]] == [JobState.WAITING, JobState.CANCELLED]
    await suspend(store, parent)
    for child in (children[2], children[0]):
        (job,) = await take(store)
        assert (job.id, await state_of(store, parent.id)) == (child.id, JobState.WAITING)
        await settle(store, other)
        await settle(store, job)
    assert await take_ids(store) == [parent.id]


async def test_refused_children_leave_their_parent_as_it_is(store: Store, clock: ManualClock) -> None:
    batch, parent = new_job(BATCH_TASK, is_batch=True), await running(store)
    await put(store, batch, member := new_job(options=Options(batch=batch.id)))
    await store.admin.cancel([member.id])
    late, orphan = new_job(options=Options(batch=batch.id)), new_job(after=(Dependency(new_id(), Condition.END),))
    with pytest.raises(Conflict, match=batch.id):
        await start(store, parent, new_job(), late)
    with pytest.raises(Invalid, match="after"):
        await start(store, parent, new_job(), orphan)
    assert await store.query.count(JobFilter()) == 3
    assert (await store.workflow.read_waits(parent.id)).dependencies == []
    await lose(store, clock, parent)
    assert await start(store, parent, late, orphan) is None


async def test_deleted_child_needs_its_batch_no_more(store: Store) -> None:
    batch = new_job(BATCH_TASK, is_batch=True)
    await put(store, batch, new_job(options=Options(batch=batch.id)))
    (parent,) = await take(store)
    child = new_job(options=Options(batch=batch.id))
    await start(store, parent, child)
    await suspend(store, parent)
    await store.admin.delete([child.id, batch.id])
    (again,) = await take(store)
    assert await start(store, again, child) == [ChildStatus(child.id, None)]
    assert await store.query.get(batch.id) is None


async def test_no_children_are_nothing_to_wait_for(store: Store) -> None:
    parent = await running(store)
    assert await start(store, parent) == []
    assert await suspend(store, parent) is JobState.SCHEDULED


async def test_many_children_are_started_together(store: Store) -> None:
    children = [new_job() for _ in range(1000)]
    parent = await parent_of(store, *children)
    answer = await store.admin.cancel([child.id for child in children])
    assert len(answer.changed) == 1000
    assert await take_ids(store) == [parent.id]


async def test_children_are_kept_as_long_as_their_parent_has_not_ended(store: Store, clock: ManualClock) -> None:
    child, parent = new_job(), await running(store)
    await start(store, parent, child, new_job(delay=timedelta(days=30)))
    await suspend(store, parent)
    (job,) = await take(store)
    await settle(store, job)
    await ended(store, JobState.SUCCEEDED)
    clock.advance(100)
    week = {"succeeded": timedelta(seconds=10), "cancelled": timedelta(seconds=10)}
    assert await store.maintenance.prune(week, limit=100) == 1
    assert await states_of(store, [child.id, parent.id]) == [JobState.SUCCEEDED, JobState.WAITING]
    await store.admin.cancel([parent.id])
    clock.advance(100)
    while await store.maintenance.prune(week, limit=100):
        clock.advance(1)  # what was kept is looked at again, but once in an instant
    assert await states_of(store, [child.id, parent.id]) == [None, None]


async def test_retention_of_children_counts_from_the_failure_of_their_parent(store: Store, clock: ManualClock) -> None:
    good, bad, parent = new_job(), new_job(), await running(store)
    await start(store, parent, good, bad)
    await suspend(store, parent)
    for job, state in zip(await take(store, 2), (JobState.SUCCEEDED, JobState.CANCELLED), strict=True):
        await settle(store, job, state, reason=None if state is JobState.SUCCEEDED else Reason.CANCELLED)
    clock.advance(8)
    (job,) = await take(store)
    other = await ended(store, JobState.SUCCEEDED)
    week = {"succeeded": timedelta(seconds=10), "cancelled": timedelta(seconds=10)}
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="no")
    clock.advance(9)
    await store.maintenance.prune(week, limit=100)
    assert await states_of(store, [good.id, bad.id, parent.id, other]) == [
        "succeeded",
        "cancelled",
        "dead",
        "succeeded",
    ]
    await store.admin.replay([parent.id])
    (job,) = await take(store)
    assert [each.state for each in await start(store, job, good, bad) or ()] == ["succeeded", "cancelled"]
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="no")
    clock.advance(11)
    while await store.maintenance.prune(week, limit=100):
        clock.advance(1)
    assert await states_of(store, [good.id, bad.id, parent.id, other]) == [None, None, "dead", None]


async def test_jobs_that_are_children_of_each_other_are_pruned(store: Store, clock: ManualClock) -> None:
    first, second = [await running(store, key=key) for key in ("one", "two")]
    for parent, key in ((first, "two"), (second, "one")):
        await start(store, parent, new_job(key=key))
        await suspend(store, parent)
    await store.admin.cancel([first.id, second.id])
    clock.advance(11)
    while await store.maintenance.prune({"cancelled": timedelta(seconds=10)}, limit=100):
        clock.advance(1)
    assert await states_of(store, [first.id, second.id]) == [None, None]
