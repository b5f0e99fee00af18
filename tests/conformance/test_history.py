"""History: how many jobs ended in each minute and hour, counted by sweeps, each end once."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from holdfast.core.clock import ManualClock
from holdfast.core.history import COUNT_DELAY, HistoryInterval, HistoryRow
from holdfast.core.models import JobFilter, JobState
from holdfast.stores.base import Store
from tests.conformance.support import Opener, ended, ending, new_job, put, running, settle, take

LAG_SECONDS = COUNT_DELAY.total_seconds() + 1
MINUTE_US, HOUR_US = HistoryInterval.MINUTE.length_us, HistoryInterval.HOUR.length_us


async def count_all(store: Store, limit: int = 1000) -> int:
    """Counts until nothing is left; returns the number of calls."""
    for calls in range(1, 1000):
        if not await store.maintenance.count_ended(limit=limit):
            return calls
    raise AssertionError("there are always more")


async def read_minutes(store: Store, clock: ManualClock) -> list[HistoryRow]:
    return await store.query.read_history(clock() - 3 * HOUR_US, HistoryInterval.MINUTE)


async def count_total(store: Store, clock: ManualClock) -> int:
    rows = await read_minutes(store, clock)
    hours = await store.query.read_history(clock() - 3 * HOUR_US, HistoryInterval.HOUR)
    assert sum(row.number for row in rows) == sum(row.number for row in hours)
    return sum(row.number for row in rows)


async def test_ended_jobs_are_counted_by_step_queue_and_state(store: Store, clock: ManualClock) -> None:
    clock.advance(60 - clock() / 1e6 % 60)
    first = HistoryInterval.MINUTE.floor_us(clock() + 1_000_000)
    for queue, seconds in (("a", 2.0), ("a", 4.0), ("b", 1.0)):
        job = await running(store, queue=queue)
        clock.advance(seconds)
        await settle(store, job)
    await store.admin.cancel(await put(store, new_job(queue="b")))
    clock.advance(60)
    await ended(store, JobState.DEAD, queue="a")
    await ended(store, JobState.FAILED, queue="a")
    clock.advance(LAG_SECONDS)
    assert await count_all(store) == 1

    rows = await read_minutes(store, clock)
    assert [(row.start_us, row.queue, row.state, row.number) for row in rows] == [
        (first, "a", JobState.SUCCEEDED, 2),
        (first, "b", JobState.SUCCEEDED, 1),
        (first, "b", JobState.CANCELLED, 1),
        (first + MINUTE_US, "a", JobState.DEAD, 1),
    ]
    assert [(row.seconds, row.longest) for row in rows] == [(6.0, 4.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    assert await count_total(store, clock) == 5
    assert await store.query.read_history(first + MINUTE_US + 1, HistoryInterval.MINUTE) == rows[3:]


async def test_each_end_is_counted_once_whoever_counts(store: Store, opener: Opener, clock: ManualClock) -> None:
    stores = [store, await opener(), await opener()]
    for _ in range(3):
        await put(store, *[new_job() for _ in range(50)])
        for job in await take(store, 50):
            await settle(store, job)
            clock.advance(0.1)
        await asyncio.gather(*[each.maintenance.count_ended(limit=7) for each in stores for _ in range(3)])
    clock.advance(LAG_SECONDS)
    await asyncio.gather(*[each.maintenance.count_ended(limit=7) for each in stores for _ in range(3)])
    await count_all(store, limit=7)
    assert await count_total(store, clock) == 150
    clock.advance(3600)
    await count_all(store)
    assert await count_total(store, clock) == 150


async def test_many_ends_of_one_instant_are_counted(store: Store, clock: ManualClock) -> None:
    """More than one call counts, at one instant of the clock."""
    await put(store, *[new_job() for _ in range(300)])
    jobs = await take(store, 200)
    await store.queueing.settle([ending(job) for job in jobs[:100]])
    await store.queueing.settle([ending(job, JobState.DEAD) for job in jobs[100:]])
    await store.admin.cancel(JobFilter(states=(JobState.QUEUED,)))
    clock.advance(LAG_SECONDS)
    await count_all(store, limit=20)
    assert await count_total(store, clock) == 300
    await ended(store, JobState.SUCCEEDED)
    clock.advance(LAG_SECONDS)
    await count_all(store, limit=20)
    assert await count_total(store, clock) == 301


async def test_jobs_are_counted_a_while_after_their_ends(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED)
    clock.advance(COUNT_DELAY.total_seconds() - 1)
    await count_all(store)
    assert await count_total(store, clock) == 0
    clock.advance(2)
    await count_all(store)
    assert await count_total(store, clock) == 1


async def test_replayed_job_is_counted_at_each_of_its_ends(store: Store, clock: ManualClock) -> None:
    job_id = await ended(store, JobState.DEAD)
    clock.advance(LAG_SECONDS)
    await count_all(store)
    await store.admin.replay([job_id])
    (job,) = await take(store, 1)
    await settle(store, job)
    clock.advance(LAG_SECONDS)
    await count_all(store)
    rows = await read_minutes(store, clock)
    assert sorted((row.state, row.number) for row in rows) == [(JobState.DEAD, 1), (JobState.SUCCEEDED, 1)]


async def test_end_that_was_undone_before_the_count_is_not_counted(store: Store, clock: ManualClock) -> None:
    job_id = await ended(store, JobState.SUCCEEDED)
    clock.advance(1)
    await store.admin.replay([job_id], force=True)
    (job,) = await take(store)
    await settle(store, job)
    clock.advance(LAG_SECONDS)
    await count_all(store)
    assert await count_total(store, clock) == 1


async def test_history_outlives_its_jobs_and_ends_itself(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED)
    clock.advance(LAG_SECONDS)
    await count_all(store)
    await store.maintenance.prune({JobState.SUCCEEDED: timedelta(0)}, limit=10)
    assert await count_total(store, clock) == 1
    clock.advance(HistoryInterval.MINUTE.retention_us / 1e6 + 60)
    await count_all(store)
    since = clock() - HistoryInterval.HOUR.retention_us
    assert await store.query.read_history(since, HistoryInterval.MINUTE) == []
    assert [row.number for row in await store.query.read_history(since, HistoryInterval.HOUR)] == [1]


async def test_clock_set_back_counts_nothing_twice(store: Store, clock: ManualClock) -> None:
    await ended(store, JobState.SUCCEEDED)
    clock.advance(LAG_SECONDS)
    await count_all(store)
    clock.advance(-600)
    await count_all(store)
    clock.advance(600)
    await count_all(store)
    assert await count_total(store, clock) == 1
