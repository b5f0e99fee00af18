"""Turns of keys and queues under limits: who is served next; on every store, in virtual time."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from holdfast.core.clock import ManualClock
from holdfast.stores.base import Store
from tests.conformance.limited import end, job_of, limit, limit_again, tenants
from tests.conformance.support import claim, new_job, put, take


async def test_keys_are_served_in_turn(store: Store) -> None:
    await limit(store, by="args.tenant")
    await put(store, *[job_of(1) for _ in range(100)])
    await put(store, *[job_of(2) for _ in range(2)])
    await put(store, job_of(3))
    jobs = await take(store, 6)
    assert Counter(tenants(jobs)) == {1: 3, 2: 2, 3: 1}
    assert tenants(await take(store, 3)) == [1, 1, 1]


async def test_newcomer_is_served_at_once(store: Store) -> None:
    await limit(store, by="args.tenant")
    await put(store, *[job_of(1) for _ in range(500)])
    for _ in range(20):
        assert len(await take(store, 5)) == 5
    await put(store, job_of(2), job_of(2), job_of(2))
    assert tenants(await take(store, 4)).count(2) == 2
    assert tenants(await take(store, 4)).count(2) == 1


async def test_lone_key_fills_the_least_room_in_order_and_saves_no_turns(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=60, weight="args.pages")
    await limit(store, "all", concurrency=40)
    ids = await put(store, *[job_of(1) for _ in range(100)])
    first = await take(store, 90)
    assert [job.id for job in first] == ids[:40]
    await end(store, *first)
    assert [job.id for job in await take(store, 10)] == ids[40:50]
    await put(store, *[job_of(2) for _ in range(10)])
    assert Counter(tenants(await take(store, 8))) == {1: 4, 2: 4}


async def test_heavy_job_within_a_run_takes_its_weight(store: Store) -> None:
    await limit(store, concurrency=30, weight="args.pages")
    ids = await put(store, *[new_job(payload=f'{{"pages":{20 if n == 7 else 1}}}') for n in range(30)])
    assert [job.id for job in await take(store, 30)] == ids[:11]


async def test_shares_weigh_the_turns(store: Store) -> None:
    await limit(store, by="args.tenant", shares={"1": 3})
    await put(store, *[job_of(tenant) for tenant in (1, 2) for _ in range(100)])
    counted = Counter(tenants([job for _ in range(10) for job in await take(store, 4)]))
    assert abs(counted[1] - 30) <= 1
    assert sum(counted.values()) == 40


async def test_share_of_a_key_holds_from_claim_to_claim(store: Store) -> None:
    await limit(store, task="work", by="args.tenant", shares={"1": 3})
    await put(store, *[job_of(tenant) for tenant in (1, 2) for _ in range(9)])
    assert sorted(tenants(await take(store, 2))) == [1, 2]
    others = ("a", "z")  # one before and one behind this queue, both with jobs left
    await put(store, *[job_of(3, queue=queue) for queue in others for _ in range(10)])
    assert len(await take(store, 18, dict.fromkeys(others, 9))) == 18
    assert tenants(await take(store, 2)) == [1, 1]


async def test_key_with_a_large_share_is_served_alone_until_it_is_the_turn_of_another(store: Store) -> None:
    await limit(store, by="args.tenant", shares={"1": 10})
    await put(store, *[job_of(tenant) for tenant in (1, 2) for _ in range(20)])
    assert sorted(tenants(await take(store, 2))) == [1, 2]
    assert tenants(await take(store, 5)) == [1] * 5


async def test_shares_of_another_limit_weigh_no_turns(store: Store) -> None:
    await limit(store, by="args.tenant")
    await limit(store, "other", task="other", by="args.tenant", shares={"1": 3})
    await put(store, *[job_of(tenant) for tenant in (1, 2) for _ in range(9)])
    assert Counter(tenants(await take(store, 8))) == {1: 4, 2: 4}


async def test_blocked_key_saves_no_turns(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    await put(store, *[job_of(1) for _ in range(50)])
    await put(store, *[job_of(2) for _ in range(50)])
    one, two = sorted(await take(store, 2), key=lambda job: str(tenants([job])))
    for _ in range(20):  # the first key is blocked all the time
        await end(store, two)
        (two,) = await take(store, 2)
        assert tenants([two]) == [2]
    await limit_again(store, concurrency=10)
    await end(store, one, two)
    assert Counter(tenants(await take(store, 8))) == {1: 4, 2: 4}


async def test_many_blocked_keys_delay_no_other(store: Store) -> None:
    await limit(store, by="args.tenant", rate=1, period_us=3_600_000_000)
    await put(store, *[job_of(number) for number in range(300) for _ in range(2)])
    assert len([job for _ in range(4) for job in await take(store, 100)]) == 300
    assert await take(store, 100) == []
    (fresh,) = await put(store, job_of(1000))
    assert [job.id for job in await take(store, 100)] == [fresh]


async def test_claims_without_jobs_go_on_until_all_keys_were_seen(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", rate=1, period_us=3_600_000_000)
    await put(store, *[job_of(number) for number in range(1000, 1500)])
    while jobs := await take(store, 100):
        await end(store, *jobs)
    clock.advance(1)
    await put(store, *[job_of(number) for number in range(1000, 1500)])
    (free,) = await put(store, job_of(2000))
    brought = await claim(store, 5)
    while not brought.jobs:
        assert brought.next_due == timedelta(0)
        brought = await claim(store, 5)
    assert [job.id for job in brought.jobs] == [free]


async def test_queues_under_limits_are_served_in_turn(store: Store) -> None:
    await limit(store, task="work", concurrency=9)
    await put(store, *[new_job(queue=queue) for queue in ("a", "b") for _ in range(4)])
    served = [job.queue for _ in range(4) for job in await take(store, 1, {"a": 1, "b": 1})]
    assert Counter(served) == {"a": 2, "b": 2}


async def test_limited_and_plain_jobs_share_a_queue(store: Store) -> None:
    await limit(store, task="slow", concurrency=100)
    await put(store, *[new_job(task="quick") for _ in range(100)])
    await put(store, *[new_job(task="slow") for _ in range(100)])
    counted = Counter([job.task for _ in range(4) for job in await take(store, 10)])
    assert counted["slow"] >= 10
    assert counted["quick"] >= 10


async def test_turns_of_a_queue_count_in_no_other(store: Store) -> None:
    await limit(store, task="work", by="args.tenant")
    await put(store, *[job_of(1, queue="a") for _ in range(10)])
    await put(store, *[job_of(tenant, queue="b") for tenant in (1, 2) for _ in range(4)])
    assert sorted(tenants(await take(store, 2, {"b": 2}))) == [1, 2]
    assert len(await take(store, 10, {"a": 10})) == 10
    assert sorted(tenants(await take(store, 2, {"b": 2}))) == [1, 2]


async def test_key_that_comes_job_by_job_starves_no_other(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    await put(store, *[job_of(1) for _ in range(30)])
    served = []
    for _ in range(30):
        await put(store, job_of(2))
        (job,) = await take(store, 1)
        served += tenants([job])
        await end(store, job)
    assert abs(served.count(1) - 15) <= 1
