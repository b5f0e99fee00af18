"""Steps of a job: stored under its lease and no other, kept as long as the job."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import Job, JobFilter, JobState, Lease, Step
from holdfast.core.steps import CHILDREN, NewStep
from holdfast.stores.base import Store
from tests.conformance.support import LEASE, ended, failing, lose, new_job, put, running, settle, take


def step(job: Job | Lease, name: str, number: int = 1, result: str | None = "1", *, is_ordered: bool = True) -> NewStep:
    return NewStep(job.lease if isinstance(job, Job) else job, name, number, is_ordered, result)


async def names_of(store: Store, job_id: str) -> list[str]:
    return [each.name for each in await store.workflow.read_steps(job_id)]


async def test_step_is_kept_as_it_ended(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(5)
    steps = [
        step(job, "größer als\nerwartet =1", 2, '{"a":"ü\\u0000"}'),
        step(job, "nothing", 1, None, is_ordered=False),
        step(job, "empty", 3, '""'),
    ]
    assert await store.workflow.save_steps(steps) == [True] * 3
    assert await store.workflow.read_steps(job.id) == [
        Step("nothing", 1, False, job.claims, clock(), None),
        Step("größer als\nerwartet =1", 2, True, job.claims, clock(), '{"a":"ü\\u0000"}'),
        Step("empty", 3, True, job.claims, clock(), '""'),
    ]


async def test_steps_of_many_jobs_are_kept_together(store: Store) -> None:
    jobs = [await running(store) for _ in range(3)]
    answers = await store.workflow.save_steps([step(job, f"s{n}", n) for n in range(150) for job in jobs])
    assert answers == [True] * 450
    for job in jobs:
        assert await names_of(store, job.id) == [f"s{n}" for n in range(150)]
    assert await store.workflow.save_steps([]) == []


async def test_step_that_is_there_stays(store: Store) -> None:
    job = await running(store)
    assert await store.workflow.save_steps([step(job, "charge", 1, "1")]) == [True]
    assert await store.workflow.save_steps([step(job, "charge", 2, "2"), step(job, "ship", 2)]) == [True, True]
    first, second = await store.workflow.read_steps(job.id)
    assert (first.number, first.result, second.name) == (1, "1", "ship")


async def test_step_under_another_lease_is_refused(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await lose(store, clock, job)
    assert await store.workflow.save_steps([step(job, "late")]) == [False]
    (again,) = await take(store)
    answers = await store.workflow.save_steps([step(job, "late"), step(again, "now"), step(Lease(new_id(), 1), "no")])
    assert answers == [False, True, False]
    assert await names_of(store, job.id) == ["now"]


async def test_step_after_the_end_of_the_lease_is_refused(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(LEASE.total_seconds())
    assert await store.workflow.save_steps([step(job, "late")]) == [False]


async def test_step_after_the_settlement_is_refused(store: Store) -> None:
    job = await running(store)
    await settle(store, job)
    assert await store.workflow.save_steps([step(job, "late")]) == [False]
    assert await names_of(store, job.id) == []


async def test_steps_survive_failure_release_loss_and_replay(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.workflow.save_steps([step(job, "one", 1)])
    await store.queueing.settle([failing(job, delay=timedelta(0))])
    (job,) = await take(store)
    await store.workflow.save_steps([step(job, "two", 2)])
    await settle(store, job, JobState.QUEUED, refund=True)
    (job,) = await take(store)
    await store.workflow.save_steps([step(job, "three", 3)])
    await lose(store, clock, job)
    (job,) = await take(store)
    await settle(store, job, JobState.DEAD)
    await store.admin.replay([job.id])
    (job,) = await take(store)
    assert [each.claims for each in await store.workflow.read_steps(job.id)] == sorted(
        {each.claims for each in await store.workflow.read_steps(job.id)}
    )
    assert await names_of(store, job.id) == ["one", "two", "three"]


async def test_steps_go_with_their_job(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job())
    (job,) = await take(store)
    await store.workflow.save_steps([step(job, "one")])
    await settle(store, job)
    other = await ended(store, JobState.SUCCEEDED)
    await store.admin.delete([job_id])
    assert await names_of(store, job_id) == []
    await put(store, new_job(id=job_id, has_client_id=True))
    assert await names_of(store, job_id) == []  # a new life of the id
    (job,) = await take(store)
    await store.workflow.save_steps([step(job, "one")])
    await settle(store, job)
    clock.advance(60)
    await store.maintenance.prune({JobState.SUCCEEDED: timedelta(seconds=1)}, limit=10)
    assert await store.query.count(JobFilter()) == 0
    assert await names_of(store, job_id) == await names_of(store, other) == []


async def test_unknown_job_has_no_steps(store: Store) -> None:
    assert await store.workflow.read_steps(new_id()) == await store.workflow.read_steps("no-id") == []


async def test_step_of_another_worker_under_the_same_number_of_claims_is_refused(store: Store) -> None:
    """After a failover a number may return."""
    job = await running(store)
    other = NewStep(job.lease, "charge", 1, True, "1", "other")
    owner = NewStep(job.lease, "charge", 1, True, "2", job.worker)
    assert await store.workflow.save_steps([other, owner]) == [False, True]
    assert [each.result for each in await store.workflow.read_steps(job.id)] == ["2"]


async def test_frozen_owner_adds_no_step_while_the_job_is_taken_over(store: Store, clock: ManualClock) -> None:
    """Whatever the order of the two, what the new owner reads holds every step that was accepted."""
    for _ in range(10):
        job = await running(store)
        clock.advance(LEASE.total_seconds() - 1e-6)

        async def take_over(old: Job = job) -> list[str]:
            clock.advance(1e-6)
            await store.queueing.settle([failing(old, lease_expired=True, delay=timedelta(0))])
            taken = [each for each in await take(store) if each.id == old.id]
            seen = await names_of(store, old.id)
            await settle(store, taken[0])
            return seen

        kept, seen = await asyncio.gather(store.workflow.save_steps([step(job, "charge")]), take_over())
        assert kept == [bool(seen)]


async def test_value_replaces_an_earlier_one_of_its_name(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.workflow.save_steps([step(job, "charge"), step(job, "#state", 0, '"one"', is_ordered=False)])
    clock.advance(5)
    values = [step(job, "#state", 0, '"two"', is_ordered=False), step(job, "#other", 0, None, is_ordered=False)]
    assert await store.workflow.save_steps(values) == [True, True]
    assert await store.workflow.read_steps(job.id) == [
        Step("#other", 0, False, job.claims, clock(), None),
        Step("#state", 0, False, job.claims, clock(), '"two"'),
        Step("charge", 1, True, job.claims, clock() - 5_000_000, "1"),
    ]


async def test_value_under_a_lost_lease_is_refused(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.workflow.save_steps([step(job, "#state", 0, "1")])
    await lose(store, clock, job)
    assert await store.workflow.save_steps([step(job, "#state", 0, "2")]) == [False]
    (again,) = await take(store)
    assert await store.workflow.save_steps([step(again, "#state", 0, "3")]) == [True]
    assert [(each.claims, each.result) for each in await store.workflow.read_steps(job.id)] == [(2, "3")]


async def test_replay_from_a_step_forgets_it_and_those_behind_it(store: Store) -> None:
    first, second = await running(store), await running(store)
    for job in (first, second):
        steps = [step(job, "reserve", 1), step(job, "charge", 2), step(job, "ship", 3)]
        await store.workflow.save_steps([*steps, step(job, "#state", 0), step(job, CHILDREN, 0)])
        await settle(store, job, JobState.DEAD)
    await store.admin.replay([first.id], from_step=2)
    assert await names_of(store, first.id) == ["#state", "reserve"]
    assert await names_of(store, second.id) == [CHILDREN, "#state", "reserve", "charge", "ship"]


async def test_refused_replay_forgets_no_step(store: Store) -> None:
    job = await running(store)
    await store.workflow.save_steps([step(job, "charge")])
    await settle(store, job)
    assert (await store.admin.replay([job.id], from_step=1)).changed == []
    assert await names_of(store, job.id) == ["charge"]
