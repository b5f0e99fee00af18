"""Heavy jobs under limits: they are not overtaken without end; on every store, in virtual time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import Job, NewJob
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.limited import end, job_of, limit, tenants
from tests.conformance.support import claim, new_job, put, take, take_ids


def weighing(tenant: object, weight: int, **fields: Any) -> NewJob:
    return new_job(payload=f'{{"tenant":"{tenant}","weight":{weight}}}', **fields)


async def starts_before(store: Store, heavy: str, taken: list[Job], clock: ManualClock | None = None) -> int:
    """Jobs that start before the heavy one while one job after the other ends; 100 if it does not start."""
    number = len(taken)
    while number < 100 and heavy not in [job.id for job in taken]:
        if taken:
            await end(store, taken.pop(0))
        if clock is not None:
            clock.advance(0.1)
        started = await take(store, 9)
        taken += started
        number += len(started)
    return number


async def test_heavy_job_waits_for_running_jobs_only(store: Store) -> None:
    await limit(store, concurrency=8, weight="args.weight")
    await limit(store, "key", by="args.tenant", concurrency=100)
    await put(store, *[weighing("light", 1) for _ in range(200)])
    running = await take(store, 8)
    (heavy,) = await put(store, weighing("heavy", 8))
    assert await starts_before(store, heavy, running) <= 8 + 3
    assert len(await take(store, 9)) == 0
    await end(store, *running)
    assert len(await take(store, 9)) == 8


async def test_heavy_job_of_a_shared_key_starts(store: Store) -> None:
    await limit(store, "tenant", by="args.tenant", concurrency=4, weight="args.weight")
    await limit(store, "user", by="args.user", concurrency=100)
    light = '{"tenant":1,"weight":1,"user":"%s"}'
    await put(store, *[new_job(payload=light % (number % 2)) for number in range(200)])
    running = await take(store, 4)
    (heavy,) = await put(store, new_job(payload='{"tenant":1,"weight":4,"user":"b"}'))
    assert await starts_before(store, heavy, running) <= 4 + 4


async def test_heavy_jobs_of_two_limits_all_start(store: Store) -> None:
    await limit(store, "one", concurrency=4, weight="args.weight")
    await limit(store, "two", task="slow", concurrency=4, weight="args.weight")
    await limit(store, "key", by="args.tenant", concurrency=100)
    await put(store, *[weighing("light", 1, task=task) for _ in range(150) for task in ("slow", "work")])
    running = await take(store, 4)
    heavy = await put(store, *[weighing(name, 4, task="slow") for name in ("a", "b", "c")])
    for job in heavy:
        assert await starts_before(store, job, running) < 30


async def test_heavy_job_waiting_for_its_key_holds_up_no_other(store: Store) -> None:
    await limit(store, "all", concurrency=8, weight="args.weight")
    await limit(store, "key", by="args.tenant", concurrency=1)
    await put(store, weighing("heavy", 1), weighing("heavy", 8))
    assert len(await take(store, 1)) == 1
    await put(store, *[weighing(number, 1) for number in range(30)])
    running = await take(store, 9)
    assert len(running) == 7
    for _ in range(10):
        await end(store, running.pop())
        running += await take(store, 9)
        assert len(running) == 7


async def test_heavy_job_reserves_nothing_of_a_limit_where_it_weighs_one(store: Store) -> None:
    await limit(store, "tenant", by="args.tenant", concurrency=4, weight="args.weight")
    await limit(store, "user", by="args.user", concurrency=1)
    payload = '{"tenant":%s,"user":%s,"weight":%s}'
    await put(store, new_job(payload=payload % (1, 1, 1)))
    assert len(await take(store, 9)) == 1
    _, light = await put(
        store, *[new_job(payload=payload % (tenant, 2, weight)) for tenant, weight in ((1, 4), (2, 1))]
    )
    assert await take_ids(store, 9) == [light]


async def test_heavy_job_of_a_paused_key_holds_up_no_other(store: Store) -> None:
    await limit(store, "region", by="args.region", concurrency=10, weight="args.pages")
    await limit(store, "tenant", by="args.tenant", concurrency=10)
    await store.limits.pause_buckets(["tenant=1"], timedelta(hours=1))
    _, light = await put(
        store,
        *[new_job(payload=f'{{"region":5,"tenant":{tenant},"pages":{pages}}}') for tenant, pages in ((1, 10), (2, 1))],
    )
    assert await take_ids(store, 9) == [light]


async def test_heavy_job_waiting_for_one_limit_leaves_the_others(store: Store) -> None:
    await limit(store, "all", concurrency=8, weight="args.weight")
    await limit(store, "slow", task="slow", concurrency=1)
    await limit(store, "key", by="args.tenant")
    await put(store, weighing("first", 1, task="slow"))
    assert len(await take(store, 1)) == 1
    await put(store, *[weighing(f"slow-{number}", 2, task="slow") for number in range(5)])
    await put(store, *[weighing(number, 1) for number in range(30)])
    assert len(await take(store, 9)) == 7


@pytest.mark.parametrize("by", ["args.tenant", "args.user"])
async def test_heavy_job_gets_its_tokens(store: Store, clock: ManualClock, by: str) -> None:
    await limit(store, rate=10, burst=10, weight="args.weight", **({"by": "args.all"} if by == "args.user" else {}))
    await limit(store, "key", by=by, concurrency=100)
    payload = '{"tenant":"%s","user":"%s","weight":%s,"all":1}'
    await put(store, *[new_job(payload=payload % ("a", "a", 1)) for _ in range(200)])
    assert len(await take(store, 5)) == 5
    (heavy,) = await put(store, new_job(payload=payload % ("b", "b", 10)))
    began = clock()
    assert await starts_before(store, heavy, [], clock) <= 10
    assert clock() - began < 2_100_000
    brought = await claim(store, 9)
    assert not brought.jobs
    assert brought.next_due is not None
    assert brought.next_due <= timedelta(seconds=0.1)


async def test_heavy_job_that_keeps_its_turn_says_when_it_is_due(store: Store) -> None:
    await limit(store, rate=1, period_us=1_000_000, burst=4, weight="args.weight")
    await limit(store, "key", by="args.tenant", concurrency=9)
    await put(store, weighing("light", 1))
    assert len(await take(store, 9)) == 1
    await put(store, weighing("heavy", 4))
    assert (await claim(store, 9)).next_due == timedelta(seconds=1)


async def take_all(store: Store, capacity: dict[str, int] | None = None) -> list[Job]:
    taken: list[Job] = []
    while jobs := await take(store, 100, capacity):
        taken += jobs
    return taken


async def test_heavy_jobs_of_hundreds_of_keys_hold_up_no_other_key(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=2, weight="args.weight")
    await put(store, *[weighing(number, 1) for number in range(330)])
    running = await take_all(store)
    assert len(running) == 330
    heavy = await put(store, *[weighing(number, 2) for number in range(330)])
    assert await take_all(store) == []
    light = await put(store, *[weighing(f"light-{number}", 1) for number in range(5)])

    assert sorted(job.id for job in await take_all(store)) == sorted(light)
    brought = await claim(store, 100)
    assert not brought.jobs
    assert brought.next_due is None or brought.next_due > timedelta(0)
    await end(store, *running)
    assert sorted(job.id for job in await take_all(store)) == sorted(heavy)


@pytest.mark.parametrize("shared", [False, True])
async def test_heavy_jobs_without_tokens_hold_up_no_other_key(store: Store, shared: bool) -> None:
    if shared:  # by a bucket of all, too
        await limit(store, "all", concurrency=1000)
    await limit(store, by="args.tenant", rate=2, burst=2, period_us=3_600_000_000, weight="args.weight")
    await put(store, *[weighing(number, 1) for number in range(330)])
    assert len(await take_all(store)) == 330
    await put(store, *[weighing(number, 2) for number in range(330)])
    (light,) = await put(store, weighing("light", 1))
    brought = await claim(store, 5)
    while not brought.jobs:
        assert brought.next_due == timedelta(0)
        brought = await claim(store, 5)
    assert [job.id for job in brought.jobs] == [light]


async def test_heavy_jobs_without_tokens_let_one_behind_them_reserve_its_own(store: Store, clock: ManualClock) -> None:
    """Jobs of other tasks need the tokens of its key; the others share theirs with none."""
    await limit(store, by="args.tenant", rate=10, burst=10, weight="args.weight")
    for task in ("slow", "swift"):
        await limit(store, task, task=task, concurrency=9)
    for tenant in (*range(100, 130), 900):
        assert await store.limits.take_tokens(f"mail={tenant}", 5) == timedelta(0)
    await put(store, *[weighing(number, 10) for number in range(100, 130)])
    (heavy,) = await put(store, weighing(900, 10, task="slow"))
    assert await take_all(store) == []
    await put(store, weighing(900, 1, task="swift"))
    assert await take_all(store) == []
    clock.advance(0.5)
    assert heavy in [job.id for job in await take_all(store)]


async def test_heavy_job_behind_keys_without_room_reserves_that_of_its_task(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=2, weight="args.weight")
    await limit(store, "slow", task="slow", concurrency=4, weight="args.weight")
    await put(store, *[weighing(number, 1) for number in range(100, 201)])
    await put(store, *[weighing(number, 1, task="slow") for number in (900, 901, 902, 950)])
    running = {tenants([job])[0]: job for job in await take_all(store)}
    await end(store, running["900"], running["950"])
    await put(store, *[weighing(number, 2) for number in range(100, 201)])
    (heavy,) = await put(store, weighing(900, 4, task="slow"))
    assert await take_all(store) == []
    await put(store, weighing(950, 1, task="slow"))
    assert await take_all(store) == []
    await end(store, running["901"], running["902"])
    assert [job.id for job in await take_all(store)] == [heavy]


@pytest.mark.parametrize("wildcard", [False, True])
async def test_keys_without_room_of_some_queues_hold_up_no_other_queue(store: Store, wildcard: bool) -> None:
    """The queue behind them was served last."""
    blocked = ("a", "b", "c")
    for queue in (*blocked, "d"):
        await limit(store, queue, queue=queue, by="args.tenant", concurrency=2, weight="args.weight")
    for queue in blocked:
        await put(store, *[weighing(number, 1, queue=queue) for number in range(120)])
        assert len(await take_all(store, {queue: 100})) == 120
        await put(store, *[weighing(number, 2, queue=queue) for number in range(120)])
        assert await take_all(store, {queue: 100}) == []
    await put(store, weighing("first", 1, queue="d"))
    assert len(await take_all(store, {"d": 1})) == 1
    (job,) = await put(store, weighing("second", 1, queue="d"))

    capacity = dict.fromkeys(blocked, 100) | {EVERY_QUEUE if wildcard else "d": 100}
    assert [each.id for each in await take(store, 100, capacity)] == [job]


async def test_full_keys_of_several_queues_let_a_worker_sleep(store: Store, clock: ManualClock) -> None:
    capacity = {f"queue-{number}": 1000 for number in range(4)}
    for queue in capacity:
        await limit(store, queue, queue=queue, by="args.tenant", concurrency=1)
    for _ in range(2):  # each key has a running and a ready job
        await put(store, *[job_of(key, queue=queue) for queue in capacity for key in range(120)])
    running = await take_all(store, capacity)
    assert len(running) == 480
    claims = [await claim(store, 100, capacity) for _ in range(20)]
    assert all(brought.next_due is None or brought.next_due > timedelta(0) for brought in claims[-5:])

    (freed,) = [job for job in running if (job.queue, tenants([job])) == ("queue-2", [119])]
    await end(store, freed)
    found: list[Job] = []
    while not found:
        clock.advance(0.1)
        found = (await claim(store, 100, capacity)).jobs
    assert [(job.queue, tenants([job])) for job in found] == [("queue-2", [119])]
