"""Suspects that stand where everybody looks first: as many as a crash of many workers leaves."""

from __future__ import annotations

import pytest

from holdfast.core.clock import ManualClock
from holdfast.stores.base import Store
from tests.conformance.support import claim, lose_all, new_job, put, running, settle, take, take_ids
from tests.support.keys import Keys


@pytest.mark.parametrize("limit", [50, 500])
async def test_healthy_jobs_behind_many_suspects_are_claimed(
    store: Store, home: str, clock: ManualClock, limit: int
) -> None:
    suspects = await put(store, *[new_job(priority=n % 2) for n in range(1000)])
    for _ in range(2):
        assert len(await take(store, 500)) == 500
    await lose_all(store, clock)
    healthy = await put(store, *[new_job() for _ in range(600)])
    keys = Keys(home)
    before = keys.client.info("commandstats")["cmdstat_evalsha"]["calls"]

    claimed = await claim(store, limit, max_must_start=1)

    scripts = keys.client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
    keys.client.close()
    assert [job.lost_leases for job in claimed.jobs] == [1] + [0] * (limit - 1)
    assert [job.id for job in claimed.jobs] == [suspects[1], *healthy[: limit - 1]]
    assert scripts < 12
    assert await take_ids(store, 1000, max_must_start=0) == healthy[limit - 1 :]
    assert await take_ids(store, 200, max_must_start=200) == suspects[3:403:2]


async def test_queue_behind_more_suspects_than_a_claim_skips_is_served(store: Store, keys: Keys) -> None:
    suspects = await put(store, *[new_job(queue="a") for _ in range(5500)])
    marking = keys.client.pipeline()
    for job_id in suspects:
        marking.hset(f"{keys.prefix}job:{job_id}", mapping={"claims": 1, "attempts": 1, "lost_leases": 1})
    marking.execute()
    expected = await put(store, new_job(queue="b"))

    found = await claim(store, 10, {"a": 10, "b": 10}, max_must_start=0)

    assert [job.id for job in found.jobs] == expected
    assert not found.none_left


async def test_quarantined_id_of_a_job_that_is_not_queued_is_dropped(
    store: Store, clock: ManualClock, keys: Keys
) -> None:
    job = await running(store)
    keys.zadd("quarantine:default", {job.id: clock()})

    assert await take_ids(store, isolated=True) == []
    assert keys.zcard("quarantine:default") == 0
    assert (await settle(store, job)).accepted
