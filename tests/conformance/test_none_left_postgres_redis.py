"""A claim says ``none_left`` only if it left no ready job and new ones are notified of: then its worker waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.limits import Limit, LimitChange, LimitTable, LimitValues
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import Opener, claim, lose_all, new_job, notified, put, take

EVERY = {EVERY_QUEUE: 100}


async def ready(store: Store, number: int = 3, **fields: Any) -> None:
    """Submits ready jobs."""
    await put(store, *[new_job(**fields) for _ in range(number)])


@pytest.mark.parametrize("capacity", [None, EVERY, {"default": 4, "other": 1}])
async def test_claim_of_fewer_jobs_than_wanted_leaves_none(store: Store, capacity: dict[str, int] | None) -> None:
    async with notified(store):
        await ready(store)
        found = await claim(store, 4, capacity)
        assert (len(found.jobs), found.none_left) == (3, True)
        assert (await claim(store, 4, capacity)).jobs == []


async def test_claim_that_is_full_may_leave_some(store: Store) -> None:
    async with notified(store):
        await ready(store)
        found = await claim(store, 2, {"default": 100})
        assert (len(found.jobs), found.none_left) == (2, False)


async def test_claim_that_fills_one_of_its_queues_may_leave_some(store: Store) -> None:
    async with notified(store):
        await ready(store)
        await ready(store, queue="other")
        found = await claim(store, 100, {"default": 2, "other": 100})
        assert (len(found.jobs), found.none_left) == (5, False)


async def test_claim_that_stops_at_a_last_attempt_may_leave_some(store: Store) -> None:
    async with notified(store):
        await ready(store, max_attempts=1)
        found = await claim(store, 100, max_must_start=1)
        assert (len(found.jobs), found.none_left, found.stopped_at_last_attempt) == (1, False, True)


async def test_claim_that_passes_over_a_suspect_may_leave_some(store: Store, clock: ManualClock) -> None:
    async with notified(store):
        await ready(store)
        await take(store)
        await lose_all(store, clock)
        found = await claim(store, 100, max_must_start=2)
        assert (len(found.jobs), found.none_left) == (2, False)
        assert len(await take(store, max_must_start=2)) == 1
        assert (await claim(store, 100, max_must_start=2)).none_left


async def test_claim_before_many_cancelled_jobs_leaves_none_only_at_the_end(store: Store) -> None:
    """Redis leaves their ids in the list, and reads past a bounded number of them in one script."""
    async with notified(store):
        (first, *cancelled, last) = await put(store, *[new_job() for _ in range(1002)])
        assert len((await store.admin.cancel(cancelled)).changed) == 1000
        found, taken = await claim(store, 10), []
        while not found.none_left:
            taken += found.jobs
            found = await claim(store, 10)
    assert [job.id for job in [*taken, *found.jobs]] == [first, last]


async def test_claim_leaves_none_with_jobs_that_are_not_ready(store: Store) -> None:
    async with notified(store):
        await ready(store)
        await ready(store, queue="paused")
        await store.admin.pause("paused")
        await put(store, new_job(delay=timedelta(minutes=1)))
        found = await claim(store, 100, EVERY)
        assert (len(found.jobs), found.none_left) == (3, True)
        assert found.next_due is not None


async def test_claim_beside_jobs_under_limits_may_leave_some(store: Store) -> None:
    limit = Limit(name="mail", queue="mail", values=LimitValues(concurrency=1))
    async with notified(store):
        assert await store.limits.write_limit(LimitChange(limit, 0)) is not None
        await put(store, *LimitTable(await store.limits.read_limits()).bind([new_job(queue="mail") for _ in range(2)]))
        found = await claim(store, 100, EVERY, free_runners=100)
        assert (len(found.jobs), found.none_left) == (1, False)


async def test_claim_leaves_none_beside_limited_jobs_of_another_queue(store: Store) -> None:
    """They were ready before the limit, and have no partition yet."""
    limit = Limit(name="mail", queue="mail", values=LimitValues(concurrency=1))
    async with notified(store):
        await ready(store, queue="mail")
        assert await store.limits.write_limit(LimitChange(limit, 0)) is not None
        found = await claim(store)
        assert (found.jobs, found.none_left) == ([], True)


async def test_claim_without_notifications_may_leave_some(opener: Opener) -> None:
    store = await opener()
    await ready(store)
    found = await claim(store)
    assert (len(found.jobs), found.none_left) == (3, False)
