"""Numbers of waiting jobs by bucket, for limits with a depth by key or of a task; on every store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.job_changes import JobChanges
from holdfast.core.limits import Assigned, Limit, LimitChange, LimitValues
from holdfast.core.models import Job, JobState, Reason
from holdfast.stores.base import Store
from tests.conformance.limited import end, get, job_of, limit
from tests.conformance.support import LEASE, MINUTE, ending, failing, new_job, put, take

PAYLOAD = '{{"tenant":{0},"user":{0}}}'


async def count(store: Store, *buckets: str, max_count: int = 100) -> list[int]:
    return await store.limits.count_unstarted(buckets, max_count=max_count)


async def fail(store: Store, job: Job, **fields: Any) -> None:
    (answer,) = await store.queueing.settle([failing(job, **fields)])
    assert answer.accepted


async def test_jobs_that_have_not_started_are_counted_by_bucket(store: Store) -> None:
    await limit(store, by="args.tenant", depth=9)
    await put(store, *[job_of(1) for _ in range(3)], job_of(1, delay=MINUTE), job_of(2), job_of(10), job_of('"1x"'))
    await put(store, job_of(1, queue="other"))
    assert await count(store, "mail=1", "mail=2", "mail=10", "mail=3", "mail") == [4, 1, 1, 0, 0]
    assert await count(store) == []


async def test_number_is_counted_up_to_a_bound(store: Store) -> None:
    await limit(store, by="args.tenant", depth=9)
    await put(store, *[job_of(1) for _ in range(7)])
    (number,) = await count(store, "mail=1", max_count=3)
    assert number >= 3


async def test_number_follows_every_change_of_a_job(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", depth=50)
    ids = await put(store, *[job_of(1) for _ in range(6)])
    first, second, third = await take(store, 3)
    assert await count(store, "mail=1") == [3]
    await fail(store, first, delay=MINUTE)
    await fail(store, second)
    await end(store, third)
    assert await count(store, "mail=1") == [5]
    await store.admin.cancel([ids[5]])
    await store.admin.delete([ids[4]])
    assert await count(store, "mail=1") == [3]
    await store.admin.replay([ids[5]])
    await store.admin.replay([third.id], force=True, payload='{"tenant":2}')
    assert await count(store, "mail=1", "mail=2") == [4, 1]
    await store.admin.edit(ids[5], JobChanges(payload='{"tenant":2}'))
    assert await count(store, "mail=1", "mail=2") == [3, 2]
    await store.admin.edit(ids[5], JobChanges(queue="other"))
    assert await count(store, "mail=1", "mail=2") == [3, 1]


async def test_recovered_jobs_are_counted_until_they_are_taken_again(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", depth=50)
    await put(store, job_of(1))
    for lost_leases in (1, 2):  # the second one quarantines it
        (job,) = await take(store, 1, max_must_start=9)
        clock.advance(LEASE.total_seconds() + 1)
        lost = ending(job, JobState.QUEUED, reason=Reason.CRASHED, lease_expired=True)
        assert [answer.accepted for answer in await store.queueing.settle([lost])] == [True], lost_leases
        assert await count(store, "mail=1") == [1]
    assert len(await take(store, 1, {"*": 1}, isolated=True)) == 1
    assert await count(store, "mail=1") == [0]


async def test_job_that_expires_is_counted_no_more(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", depth=50)
    await put(store, job_of(1, expires_in=MINUTE))
    clock.advance(61)
    await store.maintenance.expire_unstarted(limit=10)
    assert await count(store, "mail=1") == [0]


async def test_limits_of_queue_and_task_are_counted_beside_others(store: Store) -> None:
    await limit(store, "zeta", by="args.tenant", depth=9)
    await limit(store, "yota", task="work", depth=9)
    await limit(store, "alpha", by="args.user", concurrency=5)
    await put(store, *[new_job(task="work", payload=PAYLOAD.format(number % 2)) for number in range(6)])
    await put(store, *[new_job(task="work", queue="other") for _ in range(2)], new_job(task="rest"))
    assert await count(store, "zeta=0", "zeta=1", "yota", "zeta=null") == [3, 3, 8, 1]


async def test_ended_jobs_under_two_limits_are_counted_no_more(store: Store) -> None:
    await limit(store, "zeta", by="args.tenant", depth=9)
    await limit(store, "alpha", by="args.user", depth=9)
    await put(store, *[new_job(payload=PAYLOAD.format(1)) for _ in range(3)])
    await end(store, *await take(store, 2))
    assert await count(store, "zeta=1", "alpha=1") == [1, 1]


async def test_new_depth_of_a_limit_counts_the_jobs_that_wait(store: Store) -> None:
    await limit(store, "alpha", by="args.user", concurrency=5)
    revision = await limit(store, "zeta", by="args.tenant", concurrency=5)
    await limit(store, "yota", task="work", concurrency=5)
    await put(store, *[new_job(task="work", payload=PAYLOAD.format(1)) for _ in range(4)])
    bounded = Limit(name="zeta", queue="default", by="args.tenant", values=LimitValues(concurrency=5, depth=9))
    assert await store.limits.write_limit(LimitChange(bounded, revision)) is not None
    assert await store.limits.assign_partitions(queue="default") == Assigned(4, None)
    assert await count(store, "zeta=1") == [4]
    assert len(await take(store, 9)) == 4


@pytest.mark.parametrize("value", ["ä ", "a\x1fb", "x" * 100, "%_", "\U0001f600"])
async def test_any_value_of_a_key_is_counted(store: Store, value: str) -> None:
    await limit(store, by="args.tenant", depth=9)
    (job_id,) = await put(store, new_job(payload=json.dumps({"tenant": value})))
    partition = (await get(store, job_id)).partition
    assert partition is not None
    assert await count(store, partition) == [1]


async def test_many_buckets_are_counted_in_one_call(store: Store) -> None:
    await limit(store, by="args.tenant", depth=9)
    await put(store, *[job_of(number) for number in range(5)])
    numbers = await count(store, *[f"mail={number}" for number in range(2000)])
    assert numbers == [1] * 5 + [0] * 1995
