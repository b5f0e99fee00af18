"""Suspects: a job whose last lease was lost may have killed its process, and must not take neighbours with it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.limited import job_of, limit
from tests.conformance.support import (
    Opener,
    claim,
    failing,
    lose,
    lose_all,
    new_job,
    put,
    running,
    settle,
    take,
    take_ids,
)


async def test_a_suspect_is_delivered_only_where_suspects_are_welcome(store: Store, clock: ManualClock) -> None:
    suspect = await running(store)
    await lose(store, clock, suspect)
    innocent, second = await put(store, new_job(), new_job())

    assert await take_ids(store, 1, max_must_start=0) == [innocent]
    assert await take_ids(store, max_must_start=0) == [second]
    assert await take_ids(store, max_must_start=1) == [suspect.id]


async def test_no_more_suspects_than_are_welcome(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job() for _ in range(5)])
    await take(store)
    await lose_all(store, clock)
    await put(store, *[new_job() for _ in range(3)])

    jobs = await take(store, max_must_start=2)

    assert sorted(job.lost_leases for job in jobs) == [0, 0, 0, 1, 1]


async def test_a_suspect_too_many_is_passed_over_among_given_ids(store: Store, clock: ManualClock) -> None:
    suspects = await put(store, *[new_job(priority=100) for _ in range(3)])
    await take(store)
    await lose_all(store, clock)
    innocents = await put(store, *[new_job() for _ in range(3)])

    brought = await claim(store, ids=[*suspects, *innocents], capacity={"default": 3}, max_must_start=1)

    assert [job.id for job in brought.jobs] == [suspects[0], *innocents[:2]]
    assert not brought.stopped_at_last_attempt


async def test_limits_hold_beside_a_suspect(store: Store, clock: ManualClock) -> None:
    suspect = await running(store)
    await lose(store, clock, suspect)
    await limit(store, task="limited", concurrency=1)
    limited = await put(store, *[new_job("limited") for _ in range(3)])
    taken = await take_ids(store, 9, max_must_start=1)
    taken += await take_ids(store, 9, max_must_start=1)
    assert sorted(taken) == sorted([suspect.id, limited[0]])


async def test_last_attempt_beside_a_suspect_ends_the_claim_of_its_queue_alone(
    store: Store, clock: ManualClock
) -> None:
    suspect = await running(store, queue="a")
    await lose(store, clock, suspect)
    await put(store, new_job(queue="a", max_attempts=1))
    others = await put(store, *[new_job(queue="b") for _ in range(3)])
    taken = await take_ids(store, 9, {"a": 9, "b": 9}, max_must_start=1)
    assert sorted(taken) == sorted([suspect.id, *others])


async def test_isolated_claim_leaves_a_paused_queue(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job(queue=queue, max_attempts=9) for queue in ("a", "b")])
    for _ in range(2):
        assert len(await take(store, 9, {"a": 9, "b": 9}, max_must_start=9)) == 2
        await lose_all(store, clock)
        clock.advance(1)
    await store.admin.pause("a")
    assert await take_ids(store, 9, {"a": 9, "b": 9}, isolated=True) == ids[1:]
    assert await take_ids(store, 9, {"a": 9, "b": 9}, isolated=True) == []


@pytest.mark.parametrize("limited", [False, True])
async def test_isolated_claim_leaves_a_queue_without_free_slots(
    store: Store, clock: ManualClock, limited: bool
) -> None:
    for queue in ("a", "b") if limited else ():
        await limit(store, queue, queue=queue, concurrency=9)
    (poison,) = await put(store, new_job(queue="a"))
    for _ in range(2):
        assert await take_ids(store, 9, {"a": 9}, max_must_start=9) == [poison]
        await lose_all(store, clock)
    await put(store, new_job(queue="b"))
    assert await take(store, 9, {"a": 0, "b": 9}, isolated=True) == []
    assert await take_ids(store, 9, {"a": 1, "b": 9}, isolated=True) == [poison]


async def test_suspects_count_towards_limit_and_wants(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job(priority=100) for _ in range(5)])
    await take(store)
    await lose_all(store, clock)
    await put(store, *[new_job() for _ in range(5)])

    assert len(await take(store, 3, {"default": 9}, max_must_start=2)) == 3
    assert len(await take(store, 9, {"default": 2}, max_must_start=2)) == 2


@pytest.mark.parametrize("limit", [2, 3, 9])
async def test_suspect_keeps_its_place_among_priorities(
    store: Store, clock: ManualClock, carried: bool, limit: int
) -> None:
    if carried:
        return  # in the order of arrival
    suspect = await running(store, priority=0)
    await lose(store, clock, suspect)
    low, high = await put(store, new_job(priority=-1), new_job(priority=1))

    assert await take_ids(store, limit, max_must_start=1) == [high, suspect.id, low][:limit]


async def test_suspects_are_spread_among_many_priorities(store: Store, clock: ManualClock, carried: bool) -> None:
    if carried:
        return  # in the order of arrival
    suspects = await put(store, *[new_job(priority=priority) for priority in (3, 1, -1)])
    await take(store)
    await lose_all(store, clock)
    others = await put(store, *[new_job(priority=priority) for priority in (2, 0, -2)])

    assert await take_ids(store, 4, max_must_start=9) == [suspects[0], others[0], suspects[1], others[1]]
    assert await take_ids(store, 4, max_must_start=9) == [suspects[2], others[2]]


@pytest.mark.parametrize("wildcard", [False, True])
async def test_no_more_suspects_than_the_limit_leaves(
    store: Store, opener: Opener, clock: ManualClock, wildcard: bool
) -> None:
    await put(store, *[new_job(queue="q39") for _ in range(3)])
    await take(store, capacity={"q39": 3})
    await lose_all(store, clock)
    other = await opener()
    await other.queueing.submit([new_job(queue="q00")])  # the queue it knows of, and looks into first

    capacity = {EVERY_QUEUE: 2} if wildcard else {f"q{number:02}": 2 for number in range(40)}
    jobs = await take(other, 2, capacity, max_must_start=2)

    assert len(jobs) == 2
    assert await other.query.count(JobFilter(states=(JobState.RUNNING,))) == 2


async def test_the_star_treats_suspects_alike(store: Store, clock: ManualClock) -> None:
    suspect = await running(store, queue="a")
    await lose(store, clock, suspect)
    (innocent,) = await put(store, new_job(queue="b"))

    assert await take_ids(store, capacity={EVERY_QUEUE: 9}, max_must_start=0) == [innocent]
    assert await take_ids(store, capacity={EVERY_QUEUE: 9}, max_must_start=1) == [suspect.id]


async def test_job_that_lost_two_leases_is_claimed_alone(store: Store, clock: ManualClock) -> None:
    poison = await running(store)
    await lose(store, clock, poison)
    (poison,) = await take(store, max_must_start=1)
    assert poison.lost_leases == 1
    await lose(store, clock, poison)
    (innocent,) = await put(store)

    beside = await claim(store, max_must_start=5)
    assert [job.id for job in beside.jobs] == [innocent]
    assert beside.has_quarantined

    (other,) = await put(store)
    isolated = await claim(store, isolated=True)
    assert [(job.id, job.lost_leases) for job in isolated.jobs] == [(poison.id, 2)]
    assert await take_ids(store) == [other]


async def test_alone_is_exactly_one(store: Store, clock: ManualClock) -> None:
    ids = await put(store, new_job(), new_job())
    for _ in range(2):
        assert sorted(await take_ids(store, max_must_start=2)) == sorted(ids)
        await lose_all(store, clock)

    (first,) = await take_ids(store, isolated=True)
    (second,) = await take_ids(store, isolated=True)

    assert sorted([first, second]) == sorted(ids)
    assert await take(store, isolated=True) == []


async def test_alone_takes_no_ordinary_job(store: Store, clock: ManualClock) -> None:
    suspect = await running(store)
    await lose(store, clock, suspect)
    await put(store)

    assert await take(store, isolated=True) == []


async def test_nothing_is_quarantined_without_two_losses(store: Store, clock: ManualClock) -> None:
    suspect = await running(store)
    await lose(store, clock, suspect)

    assert not (await claim(store)).has_quarantined


async def test_an_attempt_that_ends_by_itself_clears_the_suspicion(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await lose(store, clock, job)
    (job,) = await take(store, max_must_start=1)
    await store.queueing.settle([failing(job)])

    (job,) = await take(store)
    assert job.lost_leases == 0
    await settle(store, job)


async def test_blocked_quarantined_jobs_hide_none_behind_them(store: Store, clock: ManualClock) -> None:
    """However many of one key, and of several."""
    await limit(store, by="args.tenant", concurrency=1000)
    paused = [1] * 205 + list(range(100, 130))
    await put(store, *[job_of(tenant) for tenant in paused])
    (free,) = await put(store, job_of(2))
    for _ in range(2):
        assert len(await take(store, 1000)) == len(paused) + 1
        await lose_all(store, clock)
    await store.limits.pause_buckets([f"mail={tenant}" for tenant in set(paused)], timedelta(hours=1))
    assert await take_ids(store, 1, isolated=True) == [free]
    assert await take(store, 1, isolated=True) == []


async def test_quarantined_jobs_of_a_full_task_hide_none_behind_them(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=1000)
    await limit(store, "slow", task="slow", concurrency=120)
    await put(store, *[job_of(tenant, task="slow") for tenant in range(110)])
    (free,) = await put(store, job_of(1))
    for _ in range(2):
        assert len(await take(store, 1000)) == 111
        await lose_all(store, clock)
    await limit(store, "slow", task="slow", concurrency=1, revision=(await store.limits.read_limits())[1].revision)
    await put(store, job_of(1, task="slow"))
    assert len(await take(store, 1000)) == 1
    assert await take_ids(store, 1, isolated=True) == [free]
