"""Expiry: a job that no worker has taken by an instant ends by itself, and is never started afterwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, Reason, ReplayRate
from holdfast.core.unique import Unique
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import (
    MINUTE,
    SECOND,
    Opener,
    claim,
    ending,
    failing,
    lose,
    new_job,
    put,
    settle,
    state_of,
    stored,
    take,
    take_ids,
)

HOUR = timedelta(hours=1)


async def put_expiring(store: Store, seconds: float = 60, **fields: Any) -> str:
    """A job that expires after so many seconds."""
    (job_id,) = await put(store, new_job(expires_in=timedelta(seconds=seconds), **fields))
    return job_id


async def assert_expired(store: Store, job_id: str, ended_at: int) -> None:
    job = await stored(store, job_id)
    assert (job.state, job.reason, job.ended_at_us) == (JobState.CANCELLED, Reason.EXPIRED, ended_at)
    assert (job.attempts, job.worker, job.lease_until_us) == (0, None, None)
    assert job.error is not None


# ── when it ends ────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_claim_ends_a_job_at_its_instant(store: Store, clock: ManualClock) -> None:
    job_id = await put_expiring(store)
    expires_at = clock() + 60_000_000
    assert (await stored(store, job_id)).expires_at_us == expires_at

    clock.advance(60)
    claimed = await claim(store)

    assert claimed.jobs == []
    assert [each.job_id for each in claimed.expired] == [job_id]
    await assert_expired(store, job_id, expires_at)
    assert (await stored(store, job_id)).expires_at_us == expires_at
    assert await store.query.attempts(job_id) == []


async def test_job_is_claimed_until_the_last_microsecond(store: Store, clock: ManualClock) -> None:
    job_id = await put_expiring(store)
    clock.advance(59.999999)

    assert await take_ids(store) == [job_id]


async def test_instant_counts_by_the_clock_of_the_store(store: Store, clock: ManualClock) -> None:
    first, second = await put(
        store, new_job(expires_at_us=clock() + 1_000_000), new_job(expires_at_us=clock() + 3_000_000)
    )
    clock.advance(2)

    assert await take_ids(store) == [second]
    await assert_expired(store, first, clock())


async def test_job_submitted_after_its_instant_ends_without_a_start(store: Store, clock: ManualClock) -> None:
    (late,) = await put(store, new_job(expires_at_us=clock() - 1))

    assert await take_ids(store) == []
    await assert_expired(store, late, clock())


async def test_sweep_ends_jobs_that_no_worker_serves(store: Store, clock: ManualClock) -> None:
    ready = await put_expiring(store, queue="unserved")
    scheduled = await put_expiring(store, queue="other", delay=HOUR)
    paused = await put_expiring(store, queue="paused")
    await store.admin.pause("paused")
    plain, later = await put(store, new_job(), new_job(expires_in=HOUR))
    assert await store.maintenance.expire_unstarted(limit=100) == []

    clock.advance(60)
    expired = await store.maintenance.expire_unstarted(limit=100)

    assert {(each.job_id, each.task, each.queue) for each in expired} == {
        (ready, "work", "unserved"),
        (scheduled, "work", "other"),
        (paused, "work", "paused"),
    }
    for job_id in (ready, scheduled, paused):
        await assert_expired(store, job_id, clock())
    assert await store.maintenance.expire_unstarted(limit=100) == []
    assert set(await take_ids(store)) == {plain, later}


async def test_sweep_ends_a_bounded_batch_the_earliest_first(store: Store, clock: ManualClock) -> None:
    ids = [await put_expiring(store, 10 - number) for number in range(7)]
    clock.advance(60)

    batches = [await store.maintenance.expire_unstarted(limit=3) for _ in range(4)]

    assert [len(batch) for batch in batches] == [3, 3, 1, 0]
    assert {each.job_id for each in batches[0]} == set(ids[-3:])


async def test_no_expired_job_is_claimed_among_thousands(store: Store, clock: ManualClock) -> None:
    """More than one claim ends: those that are left are passed over."""
    jobs = [new_job(expires_in=SECOND, priority=number % 2) for number in range(1500)]
    await put(store, *jobs)
    live = await put(store, new_job(), new_job(priority=-1))
    clock.advance(2)

    claimed: list[str] = []
    for _ in range(40):
        claimed += await take_ids(store, 10)

    assert set(claimed) == set(live)
    while await store.maintenance.expire_unstarted(limit=1000):
        pass
    assert await store.query.count(JobFilter(reason=Reason.EXPIRED)) == 1500


@pytest.mark.parametrize("queue", ["default", EVERY_QUEUE])
async def test_expired_jobs_do_not_hold_up_others(store: Store, clock: ManualClock, queue: str) -> None:
    await put(store, *[new_job(expires_in=SECOND, priority=5) for _ in range(20)])
    clock.advance(2)
    plain = await put(store, new_job(), new_job())

    assert set(await take_ids(store, 2, {queue: 2})) == set(plain)


async def test_delivered_id_of_an_expired_job_is_refused(store: Store, clock: ManualClock) -> None:
    job_id = await put_expiring(store)
    clock.advance(60)

    claimed = await claim(store, ids=[job_id])

    assert (claimed.jobs, claimed.refused) == ([], 1)
    await assert_expired(store, job_id, clock())


async def test_expired_job_wakes_its_waiters_and_shows_as_event(store: Store, clock: ManualClock) -> None:
    cursor = (await store.query.events(None, limit=10, max_age=HOUR)).cursor
    job_id = await put_expiring(store)
    clock.advance(60)
    await store.maintenance.expire_unstarted(limit=10)

    await store.queueing.wait([f"job:{job_id}"], timeout=30)
    found = await store.query.events(cursor, limit=10, max_age=HOUR)

    assert [(each.job_id, each.state, each.reason) for each in found.events] == [
        (job_id, JobState.CANCELLED, Reason.EXPIRED)
    ]


# ── what has begun does not expire ──────────────────────────────────────────────────────────────────────────────────
async def test_running_job_does_not_expire(store: Store, clock: ManualClock) -> None:
    await put_expiring(store, 10)
    (job,) = await take(store)
    clock.advance(20)

    assert await store.maintenance.expire_unstarted(limit=10) == []
    assert (await settle(store, job)).accepted


async def test_job_that_was_cancelled_before_does_not_expire(store: Store, clock: ManualClock) -> None:
    job_id = await put_expiring(store)
    assert (await store.admin.cancel([job_id])).changed
    before = await stored(store, job_id)
    clock.advance(61)

    assert await store.maintenance.expire_unstarted(limit=100) == []
    assert await take(store) == []
    assert await stored(store, job_id) == before


async def test_retry_released_and_lost_job_do_not_expire(store: Store, clock: ManualClock) -> None:
    retried, released, lost = [await put_expiring(store, 40, queue=name) for name in ("a", "b", "c")]
    jobs = {job.queue: job for job in await take(store, 10, {"a": 1, "b": 1, "c": 1})}
    await store.queueing.settle([failing(jobs["a"], delay=MINUTE)])
    await store.queueing.settle([ending(jobs["b"], JobState.QUEUED, reason=Reason.RELEASED, refund=True)])
    await lose(store, clock, jobs["c"])
    clock.advance(60)

    assert await store.maintenance.expire_unstarted(limit=10) == []
    assert set(await take_ids(store, 10, {"a": 1, "b": 1, "c": 1})) == {retried, released, lost}


async def test_begun_jobs_do_not_fill_the_batches_of_a_sweep(store: Store, clock: ManualClock) -> None:
    for _ in range(8):
        await put_expiring(store, 10)
    assert len(await take(store)) == 8
    waiting = await put_expiring(store, 20)
    clock.advance(25)

    assert [each.job_id for each in await store.maintenance.expire_unstarted(limit=2)] == [waiting]


# ── other operations ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("after", [0, 5])
async def test_replay_clears_the_expiry(store: Store, clock: ManualClock, after: int) -> None:
    expired, cancelled = await put_expiring(store, 10), await put_expiring(store, 100)
    await store.admin.cancel([cancelled])
    clock.advance(20)
    await store.maintenance.expire_unstarted(limit=10)
    ids = [expired, cancelled]

    replayed = await store.admin.replay(ids, pace=ReplayRate(after=timedelta(seconds=after)))
    clock.advance(200)

    assert [job_id for job_id, _ in replayed.changed] == ids
    assert [(await stored(store, job_id)).expires_at_us for job_id in ids] == [None, None]
    assert await store.maintenance.expire_unstarted(limit=10) == []
    assert set(await take_ids(store)) == set(ids)


async def test_deleted_and_pruned_jobs_leave_nothing(store: Store, clock: ManualClock) -> None:
    deleted, pruned = await put_expiring(store), await put_expiring(store, 10)
    await store.admin.delete([deleted])
    clock.advance(20)
    await store.maintenance.expire_unstarted(limit=10)
    await store.maintenance.prune({"cancelled": timedelta(0)}, limit=10)
    clock.advance(100)

    assert await store.query.get(pruned) is None
    assert await store.maintenance.expire_unstarted(limit=10) == []
    (again,) = await put(store, new_job(id=deleted, has_client_id=True))
    assert await take_ids(store) == [again]


async def test_key_of_an_expired_job_stands_for_it(store: Store, clock: ManualClock) -> None:
    job_id = await put_expiring(store, key="k")
    clock.advance(60)
    await store.maintenance.expire_unstarted(limit=10)

    (answer,) = await store.queueing.submit([new_job(key="k", expires_in=MINUTE)])

    assert (answer.job_id, answer.created) == (job_id, False)
    await assert_expired(store, job_id, clock())


async def test_known_id_keeps_its_expiry(store: Store, clock: ManualClock) -> None:
    job_id = new_id()
    await put(store, new_job(id=job_id, expires_in=HOUR))
    await put(store, new_job(id=job_id, expires_in=SECOND), new_job())

    assert (await stored(store, job_id)).expires_at_us == clock() + 3_600_000_000


@pytest.mark.parametrize("policy", ["replace", "reschedule"])
async def test_later_submission_of_the_same_work_renews_expiry(store: Store, clock: ManualClock, policy: str) -> None:
    unique = Unique("unstarted", by=["task", "queue"], on_conflict=policy)
    (job_id,) = await put(store, unique.bind(new_job(expires_in=MINUTE)))
    clock.advance(50)
    await store.queueing.submit([unique.bind(new_job(expires_in=MINUTE))])
    assert (await stored(store, job_id)).expires_at_us == clock() + 60_000_000
    clock.advance(50)
    assert await store.maintenance.expire_unstarted(limit=10) == []
    await store.queueing.submit([unique.bind(new_job())])
    assert (await stored(store, job_id)).expires_at_us is None
    clock.advance(50)

    assert await take_ids(store) == [job_id]


async def test_batch_of_all_kinds_keeps_its_order(store: Store, clock: ManualClock) -> None:
    large = '{"n":"%s"}' % ("x" * 5000)
    jobs = [
        new_job(),
        new_job(expires_in=MINUTE),
        new_job(expires_in=MINUTE, key="k"),
        new_job(expires_in=HOUR, payload=large),
        new_job(key="l"),
    ]
    ids = await put(store, *jobs)

    assert ids == [job.id for job in jobs]
    found = [(await stored(store, job_id)).expires_at_us for job_id in ids]
    minute, hour = clock() + 60_000_000, clock() + 3_600_000_000
    assert found == [None, minute, minute, hour, None]
    assert (await stored(store, ids[3])).payload == large
    summaries = await store.query.summaries(ids)
    assert [each and each.expires_at_us for each in summaries] == found


async def test_stores_on_one_database_end_a_job_once(opener: Opener, clock: ManualClock) -> None:
    stores = [await opener() for _ in range(3)]
    ids = [await put_expiring(stores[0]) for _ in range(30)]
    clock.advance(60)

    expired = [each for store in stores for each in await store.maintenance.expire_unstarted(limit=20)]
    claimed = await claim(stores[1])

    assert sorted([each.job_id for each in [*expired, *claimed.expired]]) == sorted(ids)
    assert claimed.jobs == []
    assert await state_of(stores[0], ids[0]) is JobState.CANCELLED
