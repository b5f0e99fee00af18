"""Maintenance: due jobs, lost leases and old rows, in bounded steps, by anyone at any time."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.stores.base import Store
from tests.conformance.support import (
    LEASE,
    MINUTE,
    SECOND,
    Opener,
    after,
    ended,
    ending,
    failing,
    new_job,
    put,
    running,
    settle,
    state_of,
    states_of,
    stored,
    take,
)

HOUR = timedelta(hours=1)


async def test_promote_makes_due_jobs_of_every_queue_ready(store: Store, clock: ManualClock) -> None:
    due = await put(store, *[new_job(queue=queue, delay=5 * SECOND) for queue in ("a", "b", "nobody reads")])
    (later,) = await put(store, new_job(delay=6 * SECOND))
    retry = await running(store)
    await store.queueing.settle([failing(retry, delay=5 * SECOND)])
    clock.advance(5)

    assert await store.maintenance.promote_due(limit=100) == 4

    assert await states_of(store, [*due, retry.id, later]) == [JobState.QUEUED] * 4 + [JobState.SCHEDULED]
    assert await store.maintenance.promote_due(limit=100) == 0


async def test_promote_is_bounded_and_takes_the_longest_due_first(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job(delay=n * SECOND) for n in range(10, 0, -1)])
    clock.advance(60)

    assert await store.maintenance.promote_due(limit=4) == 4
    assert await states_of(store, ids) == [JobState.SCHEDULED] * 6 + [JobState.QUEUED] * 4
    assert [await store.maintenance.promote_due(limit=4) for _ in range(3)] == [4, 2, 0]


async def test_a_promoted_job_keeps_its_eligible_time(store: Store, clock: ManualClock) -> None:
    when = clock() + 5_000_000
    (job_id,) = await put(store, new_job(delay=5 * SECOND))
    clock.advance(60)
    await store.maintenance.promote_due(limit=10)

    assert (await stored(store, job_id)).run_at_us == when


async def test_racing_promoters_promote_each_job_once(store: Store, opener: Opener, clock: ManualClock) -> None:
    stores = [store, await opener(), await opener()]
    await put(store, *[new_job(delay=SECOND) for _ in range(100)])
    clock.advance(2)

    assert (
        sum(await asyncio.gather(*[each.maintenance.promote_due(limit=50) for each in stores for _ in range(3)])) == 100
    )


async def test_expired_finds_what_the_remedy_needs_to_know(store: Store, clock: ManualClock) -> None:
    job = await running(store, task="t", max_attempts=3)
    await running(store)
    await store.admin.cancel([job.id])
    clock.advance(LEASE.total_seconds() / 2)
    live = await running(store)
    clock.advance(LEASE.total_seconds() / 2 + 1)

    found = {each.id: each for each in await store.maintenance.find_expired_leases(limit=10)}

    assert len(found) == 2
    assert live.id not in found
    lost = found[job.id]
    assert (lost.claims, lost.attempts, lost.max_attempts, lost.worker) == (1, 1, 3, "worker-1")
    assert (lost.state, lost.cancelling, lost.task, lost.queue) == (JobState.RUNNING, True, "t", "default")


async def test_expired_is_bounded_and_changes_nothing(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job() for _ in range(10)])
    await take(store)
    clock.advance(3600)

    assert len(await store.maintenance.find_expired_leases(limit=4)) == 4
    assert await store.query.count(JobFilter(states=(JobState.RUNNING,))) == 10


async def test_racing_sweepers_settle_each_lost_lease_once(store: Store, opener: Opener, clock: ManualClock) -> None:
    stores = [store, await opener(), await opener()]
    await put(store, *[new_job() for _ in range(60)])
    await take(store)
    clock.advance(3600)

    async def sweep(each: Store) -> int:
        found = await each.maintenance.find_expired_leases(limit=100)
        why = {"reason": Reason.CRASHED, "error": "lease expired", "lease_expired": True}
        lost = [ending(job, JobState.QUEUED, **why) for job in found]
        return sum(answer.accepted for answer in await each.queueing.settle(lost))

    assert sum(await asyncio.gather(*[sweep(each) for each in stores])) == 60
    assert {job.lost_leases for job in await take(store, max_must_start=100)} == {1}


# ── prune ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_each_state_is_kept_as_long_as_it_says(store: Store, clock: ManualClock) -> None:
    ids = {state: await ended(store, state) for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED)}
    keep = {"succeeded": 10 * MINUTE, "dead": 30 * MINUTE, "cancelled": 20 * MINUTE}

    left = []
    for minutes in (9, 2, 10, 10):
        clock.advance(minutes * 60)
        await store.maintenance.prune(keep, limit=100)
        left.append({state for state, job_id in ids.items() if await store.query.get(job_id)})

    assert left == [set(ids), {JobState.DEAD, JobState.CANCELLED}, {JobState.DEAD}, set()]


async def test_states_that_are_not_named_are_kept_for_ever(store: Store, clock: ManualClock) -> None:
    dead = await ended(store, JobState.DEAD)
    await ended(store, JobState.SUCCEEDED)
    clock.advance(10 * 365 * 86_400)

    assert await store.maintenance.prune({"succeeded": HOUR}, limit=100) == 1
    assert await state_of(store, dead) is JobState.DEAD
    assert await store.maintenance.prune({}, limit=100) == 0


async def test_what_has_not_ended_is_never_pruned(store: Store, clock: ManualClock) -> None:
    await put(store, new_job(), new_job(delay=timedelta(days=3650)))
    await running(store)
    job = await running(store)
    await store.queueing.settle([failing(job, delay=timedelta(days=3650))])
    clock.advance(365 * 86_400)

    assert await store.maintenance.prune({state.value: timedelta(0) for state in JobState}, limit=100) == 0
    assert await store.query.count(JobFilter()) == 4


async def test_age_counts_from_the_end_of_the_job(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(25)
    await settle(store, job)
    clock.advance(10)

    assert await store.maintenance.prune({"succeeded": 20 * SECOND}, limit=100) == 0


async def test_job_that_ended_under_a_clock_far_ahead_keeps_no_other_from_being_pruned(
    store: Store, clock: ManualClock
) -> None:
    year = 365 * 86_400
    clock.advance(year)
    ahead = await ended(store, JobState.SUCCEEDED)
    clock.advance(-year)
    for _ in range(2):
        await ended(store, JobState.SUCCEEDED)
    clock.advance(60)

    assert await store.maintenance.prune({"succeeded": SECOND}, limit=100) == 2
    assert await state_of(store, ahead) is JobState.SUCCEEDED
    clock.advance(year)
    assert await store.maintenance.prune({"succeeded": SECOND}, limit=100) == 1


async def test_pruning_is_bounded(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job() for _ in range(25)])
    await store.admin.cancel(JobFilter())
    clock.advance(3600)

    assert [await store.maintenance.prune({"cancelled": MINUTE}, limit=10) for _ in range(4)] == [10, 10, 5, 0]


async def test_a_pruned_job_takes_its_history_along(store: Store, clock: ManualClock) -> None:
    job_id = await ended(store, JobState.DEAD)
    assert await store.query.attempts(job_id)
    clock.advance(3600)
    await store.maintenance.prune({"dead": MINUTE}, limit=10)

    assert await store.query.attempts(job_id) == []


async def test_retention_deletes_no_job_that_is_replayed_meanwhile(
    store: Store, opener: Opener, clock: ManualClock
) -> None:
    others = [await opener() for _ in range(3)]
    ids: list[str] = []
    pruned, replayed = 0, set[str]()
    for _ in range(10):
        batch = await put(store, *[new_job() for _ in range(40)])
        ids += batch
        await store.admin.cancel(batch)
        clock.advance(1)
        sweeps = [store.maintenance.prune({"cancelled": timedelta(0)}, limit=10) for _ in range(4)]
        replays = [others[number % 3].admin.replay([job_id]) for number, job_id in enumerate(batch)]
        counts, answers = await asyncio.gather(asyncio.gather(*sweeps), asyncio.gather(*replays))
        pruned += sum(counts)
        replayed |= {job_id for answer in answers for job_id, _ in answer.changed}
        pruned += await store.maintenance.prune({"cancelled": timedelta(0)}, limit=40)

    assert {job.id for job in await store.query.summaries(ids) if job is not None} == replayed
    assert pruned + len(replayed) == len(ids)


async def test_a_replayed_job_is_not_pruned_by_its_old_end(store: Store, clock: ManualClock) -> None:
    job_id = await ended(store, JobState.DEAD)
    clock.advance(3600)
    await store.admin.replay([job_id])

    assert await store.maintenance.prune({"dead": MINUTE}, limit=10) == 0
    assert await state_of(store, job_id) is JobState.QUEUED


async def test_what_a_replay_brings_back_is_kept_as_long_as_the_failed_job(store: Store, clock: ManualClock) -> None:
    first = await ended(store, JobState.DEAD)
    (second,) = await put(store, after(first))
    (third,) = await put(store, after(second))
    (asked,) = await put(store, new_job())
    await store.admin.cancel([asked])
    assert await states_of(store, [second, third]) == [JobState.CANCELLED] * 2
    clock.advance(100)
    week = {"succeeded": timedelta(seconds=10), "cancelled": timedelta(seconds=10)}
    for _ in range(3):
        await store.maintenance.prune(week, limit=100)
    assert await states_of(store, [second, third, asked]) == [JobState.CANCELLED, JobState.CANCELLED, None]
    await store.admin.replay([first])
    for job_id in (first, second, third):
        (job,) = await take(store)
        assert job.id == job_id
        await settle(store, job)
    clock.advance(100)
    while await store.maintenance.prune(week, limit=100):
        pass
    assert await states_of(store, [first, second, third]) == [None] * 3


async def test_job_that_another_needs_keeps_no_other_from_being_pruned(store: Store, clock: ManualClock) -> None:
    needed, other, past = [await ended(store, JobState.SUCCEEDED) for _ in range(3)]
    (blocker,) = await put(store, new_job(delay=HOUR))
    _, waiter = await put(store, after(needed, blocker), after(past, blocker))
    await store.admin.cancel([waiter])
    clock.advance(100)
    assert await store.maintenance.prune({"succeeded": timedelta(seconds=10)}, limit=100) == 2
    assert await states_of(store, [needed, other, past]) == [JobState.SUCCEEDED, None, None]


@pytest.mark.parametrize("by", ["delete", "prune"])
async def test_what_no_replay_brings_back_any_more_is_pruned(store: Store, clock: ManualClock, by: str) -> None:
    first, other = [await ended(store, JobState.DEAD) for _ in range(2)]
    (second,) = await put(store, after(first, other))
    (third,) = await put(store, after(second))
    clock.advance(100)
    cancelled = {"cancelled": timedelta(seconds=10)}
    await store.admin.delete([first])
    assert await store.maintenance.prune(cancelled, limit=100) == 0  # the other one is dead
    if by == "delete":
        await store.admin.delete([other])
    else:
        cancelled["dead"] = timedelta(seconds=10)
    clock.advance(1)  # what was kept is looked at again, but once in an instant
    while await store.maintenance.prune(cancelled, limit=100):
        clock.advance(1)
    assert await states_of(store, [other, second, third]) == [None] * 3
