"""Uniqueness: one job at a time does a piece of work; what another submission of it makes of that job."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Dependency
from holdfast.core.models import JobFilter, JobState, NewJob, Options
from holdfast.core.unique import Unique
from holdfast.stores.base import Store
from tests.conformance.support import Opener, Submitted, failing, lose, new_job, put, settle, state_of, stored, take

DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)
UNSTARTED = Unique("unstarted")
ACTIVE = Unique("active")
WINDOW = Unique("10m")
LARGE = '{"n":"%s"}' % ("x" * 5000)


def unique_job(policy: Unique = ACTIVE, **fields: Any) -> NewJob:
    return policy.bind(new_job(**fields))


async def submit(store: Store, policy: Unique = ACTIVE, **fields: Any) -> Submitted:
    (answer,) = await store.queueing.submit([unique_job(policy, **fields)])
    return answer


def replacing(during: str = "active") -> Unique:
    return Unique(during, by=["task", "queue"], on_conflict="replace")


def rescheduling(during: str = "active") -> Unique:
    return Unique(during, by=["task", "queue"], on_conflict="reschedule")


# ── while it waits, while it is active, within a window ─────────────────────────────────────────────────────────────
@pytest.mark.parametrize("delay", [None, DAY])
@pytest.mark.parametrize("policy", [UNSTARTED, ACTIVE, WINDOW])
async def test_same_work_is_stored_once(store: Store, policy: Unique, delay: timedelta | None) -> None:
    first = await submit(store, policy, delay=delay)

    assert first.created
    assert await submit(store, policy) == Submitted(first.job_id, False)
    assert (await submit(store, policy, payload='{"n":2}')).created
    assert await store.query.count(JobFilter()) == 2
    assert (await stored(store, first.job_id)).key is None


async def test_waiting_ends_with_the_start_and_active_with_the_end(store: Store) -> None:
    waiting = await submit(store, UNSTARTED, queue="w")
    active = await submit(store, ACTIVE, queue="a")
    window = await submit(store, WINDOW, queue="t")
    jobs = await take(store, 10, {"w": 1, "a": 1, "t": 1})
    assert {job.id for job in jobs} == {waiting.job_id, active.job_id, window.job_id}

    assert (await submit(store, UNSTARTED, queue="w")).created
    assert await submit(store, ACTIVE, queue="a") == Submitted(active.job_id, False)
    for job in jobs:
        assert (await settle(store, job)).accepted
    assert (await submit(store, ACTIVE, queue="a")).created
    assert await submit(store, WINDOW, queue="t") == Submitted(window.job_id, False)


@pytest.mark.parametrize("policy", [UNSTARTED, ACTIVE])
async def test_job_that_waits_for_a_retry_holds_its_key(store: Store, policy: Unique) -> None:
    first = await submit(store, policy)
    (job,) = await take(store, 1)
    await store.queueing.settle([failing(job, delay=DAY)])

    assert await state_of(store, first.job_id) is JobState.FAILED
    assert await submit(store, policy) == Submitted(first.job_id, False)


@pytest.mark.parametrize("policy", [UNSTARTED, ACTIVE])
async def test_lost_job_holds_its_key_again(store: Store, clock: ManualClock, policy: Unique) -> None:
    first = await submit(store, policy)
    (job,) = await take(store, 1)
    await lose(store, clock, job)

    assert await submit(store, policy) == Submitted(first.job_id, False)


@pytest.mark.parametrize("policy", [UNSTARTED, ACTIVE])
async def test_cancelled_or_deleted_job_frees_its_key(store: Store, policy: Unique) -> None:
    first = await submit(store, policy)
    await store.admin.cancel([first.job_id])
    second = await submit(store, policy)
    assert second.created
    await store.admin.delete([second.job_id])
    assert (await submit(store, policy)).created


async def test_window_lasts_from_the_submission_whatever_becomes_of_the_job(store: Store, clock: ManualClock) -> None:
    first = await submit(store, WINDOW)
    (job,) = await take(store, 1)
    await settle(store, job)
    await store.maintenance.prune({"succeeded": timedelta(0)}, limit=100)
    clock.advance(599)
    assert await submit(store, WINDOW) == Submitted(first.job_id, False)
    clock.advance(2)
    assert (await submit(store, WINDOW)).created


async def test_pruned_job_leaves_no_key(store: Store, clock: ManualClock) -> None:
    for policy in (UNSTARTED, ACTIVE, WINDOW):
        await submit(store, policy, task=f"t{policy.during}")
    for job in await take(store, 3):
        await settle(store, job)
    clock.advance(3600)
    for _ in range(2):
        await store.maintenance.prune({"succeeded": timedelta(0)}, limit=100)
    for policy in (UNSTARTED, ACTIVE, WINDOW):
        key = unique_job(policy, task=f"t{policy.during}").unique
        assert key is not None
        assert await store.query.by_key(key.key) is None


# ── many at once ────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_64_callers_store_one_job(opener: Opener) -> None:
    stores = [await opener() for _ in range(4)]
    calls = [submit(stores[number % 4], ACTIVE) for number in range(64)]

    answers = await asyncio.gather(*calls)

    assert sum(answer.created for answer in answers) == 1
    assert len({answer.job_id for answer in answers}) == 1
    assert await stores[0].query.count(JobFilter()) == 1


async def test_batches_in_opposite_orders_do_not_stop_each_other(opener: Opener) -> None:
    stores = [await opener(), await opener()]
    payloads = [f'{{"n":{number}}}' for number in range(50)]
    for _ in range(5):
        batches = [[unique_job(payload=each) for each in order] for order in (payloads, payloads[::-1])]
        await asyncio.gather(*[store.queueing.submit(batch) for store, batch in zip(stores, batches, strict=True)])
    assert await stores[0].query.count(JobFilter()) == 50


async def test_batch_stores_the_same_work_once(store: Store) -> None:
    jobs = [
        unique_job(),
        new_job(),
        unique_job(),
        unique_job(payload='{"n":2}', delay=DAY),
        unique_job(options=Options(tags=("a",))),
    ]

    answers = await store.queueing.submit(jobs)

    first = jobs[0].id
    assert answers == [
        Submitted(first, True),
        Submitted(jobs[1].id, True),
        Submitted(first, False),
        Submitted(jobs[3].id, True),
        Submitted(first, False),
    ]
    assert await store.query.count(JobFilter()) == 3
    assert await store.health.doctor()


async def test_submission_repeated_by_its_id_is_known(store: Store) -> None:
    job = unique_job()
    await store.queueing.submit([job])
    assert await store.queueing.submit([job]) == [Submitted(job.id, False)]
    (claimed,) = await take(store, 1)
    await settle(store, claimed)
    second = await submit(store)
    assert second.created
    assert await store.queueing.submit([job]) == [Submitted(job.id, False)]
    assert await submit(store) == Submitted(second.job_id, False)


async def test_first_of_a_batch_is_stored_though_its_key_comes_last(store: Store) -> None:
    jobs = [unique_job(key="k2"), unique_job(key="k1"), unique_job(), unique_job(key="k2")]

    answers = await store.queueing.submit(jobs)

    first = jobs[0].id
    assert answers == [Submitted(first, True), *[Submitted(first, False)] * 3]
    assert await store.query.by_key("k1") is None


# ── with an idempotency key ─────────────────────────────────────────────────────────────────────────────────────────
async def test_idempotency_key_is_asked_first_and_is_left_free_by_a_conflict(store: Store) -> None:
    first = await submit(store, key="k1")
    assert (await stored(store, first.job_id)).key == "k1"
    assert await submit(store, key="k1", payload='{"n":2}') == Submitted(first.job_id, False)
    assert await submit(store, key="k2") == Submitted(first.job_id, False)
    assert await store.query.by_key("k2") is None
    (job,) = await take(store, 1)
    await settle(store, job)
    assert await submit(store, key="k1") == Submitted(first.job_id, False)
    assert (await submit(store, key="k2")).created
    await store.admin.delete([first.job_id])
    assert await store.query.by_key("k1") is None


# ── replace and reschedule ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("payload", ['{"n":2}', LARGE])
async def test_replace_changes_the_waiting_job(store: Store, clock: ManualClock, payload: str) -> None:
    first = await submit(store, replacing(), payload=LARGE, delay=DAY, options=Options(tags=("t",)))
    before = await stored(store, first.job_id)

    answer = await submit(store, replacing(), payload=payload, priority=5, max_attempts=1)

    assert answer == Submitted(first.job_id, False, changed=True)
    after = await stored(store, first.job_id)
    assert (after.payload, after.priority, after.max_attempts) == (payload, 5, 5)
    assert (after.state, after.created_at_us, after.options_or_default.tags) == (
        JobState.QUEUED,
        before.created_at_us,
        ("t",),
    )
    (job,) = await take(store, 2)
    assert (job.id, job.payload, job.attempts) == (first.job_id, payload, 1)
    assert (await settle(store, job)).accepted


async def test_reschedule_moves_the_time_alone(store: Store, clock: ManualClock) -> None:
    policy = rescheduling()
    first = await submit(store, policy, payload='{"n":1}', delay=MINUTE, priority=3)
    for _ in range(5):
        clock.advance(50)
        assert await take(store, 1) == []
        answer = await submit(store, policy, payload='{"n":2}', delay=MINUTE)
        assert answer == Submitted(first.job_id, False, changed=True)
    clock.advance(61)
    (job,) = await take(store, 2)
    assert (job.id, job.payload, job.priority) == (first.job_id, '{"n":1}', 3)


@pytest.mark.parametrize("policy", [replacing(), rescheduling()], ids=("replace", "reschedule"))
async def test_submission_that_waits_for_a_job_leaves_the_holder_as_it_is(store: Store, policy: Unique) -> None:
    (other,) = await put(store, new_job(delay=DAY))
    first = await submit(store, policy, delay=MINUTE, priority=3)
    before = await stored(store, first.job_id)

    answer = await submit(store, policy, payload='{"n":2}', after=(Dependency(other),))

    assert answer == Submitted(first.job_id, False)
    assert await stored(store, first.job_id) == before


async def test_ready_job_can_be_put_off_and_brought_back(store: Store, clock: ManualClock) -> None:
    first = await submit(store, rescheduling())
    other = (await put(store, new_job(queue="default")))[0]
    await submit(store, rescheduling(), delay=MINUTE)
    assert await state_of(store, first.job_id) is JobState.SCHEDULED
    assert [job.id for job in await take(store, 5)] == [other]
    await submit(store, rescheduling())
    assert [job.id for job in await take(store, 5)] == [first.job_id]
    assert await take(store, 5) == []


async def test_replace_moves_a_job_before_others_of_less_priority(store: Store, carried: bool) -> None:
    first = await submit(store, replacing())
    others = await put(store, *[new_job(priority=1) for _ in range(3)])
    taken = await take(store, 1)
    await submit(store, replacing(), priority=2)
    taken += await take(store, 1)
    taken += await take(store, 5)
    order = [others[0], first.job_id, *others[1:]]
    ids = [job.id for job in taken]
    assert set(ids) == set(order) if carried else ids == order


async def test_running_job_is_not_changed(store: Store) -> None:
    first = await submit(store, replacing(), payload='{"n":1}')
    (job,) = await take(store, 1)
    assert await submit(store, replacing(), payload='{"n":2}') == Submitted(first.job_id, False)
    assert (await stored(store, first.job_id)).payload == '{"n":1}'
    assert (await settle(store, job)).accepted


async def test_retry_is_brought_forward(store: Store) -> None:
    first = await submit(store, replacing())
    (job,) = await take(store, 1)
    await store.queueing.settle([failing(job, delay=DAY)])
    answer = await submit(store, replacing(), payload='{"n":2}')
    assert answer == Submitted(first.job_id, False, changed=True)
    (again,) = await take(store, 1)
    assert (again.attempts, again.payload) == (2, '{"n":2}')


@pytest.mark.parametrize("delays", [(None, DAY), (DAY, None), (DAY, MINUTE), (None, None)])
async def test_conflict_within_a_batch(
    store: Store, clock: ManualClock, delays: tuple[timedelta | None, timedelta | None]
) -> None:
    jobs = [unique_job(replacing(), payload=f'{{"n":{n}}}', delay=delay) for n, delay in enumerate(delays)]

    answers = await store.queueing.submit([*jobs, new_job(priority=-1)])

    assert answers[:2] == [Submitted(jobs[0].id, True), Submitted(jobs[0].id, False, changed=True)]
    assert await store.query.count(JobFilter()) == 2
    if delays[1] is not None:
        assert len(await take(store, 5)) == 1
        clock.advance(delays[1].total_seconds() + 1)
        assert [(job.id, job.payload) for job in await take(store, 5)] == [(jobs[0].id, '{"n":1}')]
    else:
        assert [job.id for job in await take(store, 5)] == [jobs[0].id, answers[2].job_id]
    assert await take(store, 5) == []


# ── replay ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("policy", [UNSTARTED, ACTIVE, WINDOW])
async def test_replay_is_refused_while_another_job_holds_the_key(
    store: Store, clock: ManualClock, policy: Unique
) -> None:
    first = await submit(store, policy)
    await store.admin.cancel([first.job_id])
    clock.advance(601)
    second = await submit(store, policy)
    other = await submit(store, policy, payload='{"n":2}')
    await store.admin.cancel([other.job_id])

    answer = await store.admin.replay([first.job_id, other.job_id])

    assert answer.changed == [(other.job_id, JobState.QUEUED)]
    assert answer.refused == [(first.job_id, JobState.CANCELLED)]
    await store.admin.cancel([second.job_id])
    clock.advance(601)
    assert (await store.admin.replay([first.job_id])).changed == [(first.job_id, JobState.QUEUED)]
    assert await submit(store, policy) == Submitted(first.job_id, False)


async def test_replay_of_two_jobs_of_one_key_takes_one(store: Store) -> None:
    ids = []
    for _ in range(2):
        ids.append((await submit(store)).job_id)
        await store.admin.cancel([ids[-1]])

    answer = await store.admin.replay(ids[::-1])  # in the order in which they are named

    assert (answer.changed, answer.refused) == ([(ids[1], JobState.QUEUED)], [(ids[0], JobState.CANCELLED)])
