"""Claiming: who gets which job, in which order, and never early."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.limited import limit
from tests.conformance.support import (
    LEASE,
    MINUTE,
    Opener,
    claim,
    ended,
    failing,
    new_job,
    put,
    running,
    settle,
    state_of,
    stored,
    take,
    take_ids,
)


async def test_a_claimed_job_is_running_under_a_lease(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(payload='{"a":1}', task="t", priority=3))

    (job,) = await take(store, worker="me")

    assert (job.id, job.task, job.payload, job.queue, job.priority) == (job_id, "t", '{"a":1}', "default", 3)
    assert (job.claims, job.attempts, job.state, job.worker) == (1, 1, JobState.RUNNING, "me")
    kept = await stored(store, job_id)
    assert (kept.claims, kept.attempts, kept.state, kept.worker) == (1, 1, JobState.RUNNING, "me")
    assert (kept.started_at_us, kept.lease_until_us) == (clock(), clock() + LEASE // timedelta(microseconds=1))


async def test_a_job_under_a_live_lease_is_not_delivered_again(store: Store, opener: Opener) -> None:
    await put(store, new_job(), new_job())
    assert len(await take(store)) == 2

    assert await take(store) == []
    assert await take(await opener(), worker="other") == []


async def test_an_expired_lease_is_not_simply_taken_over(store: Store, clock: ManualClock) -> None:
    """The lost attempt has to be settled first, or it would never count."""
    await running(store)
    clock.advance(3600)

    assert await take(store, max_must_start=9) == []


async def test_every_claim_grows_claims_and_attempts(store: Store) -> None:
    (job_id,) = await put(store, new_job(max_attempts=None))

    for n in range(1, 6):
        (job,) = await take(store)
        assert (job.id, job.claims, job.attempts) == (job_id, n, n)
        await store.queueing.settle([failing(job)])


async def test_a_higher_priority_goes_first(store: Store, carried: bool) -> None:
    priorities = [0, -100, 5, 100, 0, -1, 5]
    ids = await put(store, *[new_job(priority=priority) for priority in priorities])

    by_priority = [ids[n] for n in sorted(range(7), key=lambda n: (-priorities[n], n))]

    assert [job_id for _ in range(7) for job_id in await take_ids(store, 1)] == (ids if carried else by_priority)


async def test_one_claim_delivers_in_order_too(store: Store) -> None:
    ids = await put(store, *[new_job(priority=n % 3) for n in range(30)])

    assert await take_ids(store) == [ids[n] for n in sorted(range(30), key=lambda n: (-(n % 3), n))]


async def test_of_equal_priority_the_earlier_eligible_goes_first(
    store: Store, clock: ManualClock, carried: bool
) -> None:
    late = new_job(run_at_us=clock() + 20_000_000)
    early = new_job(run_at_us=clock() + 10_000_000)
    await put(store, late, early)
    clock.advance(30)
    (now,) = await put(store)

    due = [early.id, late.id]
    assert await take_ids(store) == ([now, *due] if carried else [*due, now])


@pytest.mark.parametrize("delays", [(2,), (7,), (2, 7)])
async def test_due_jobs_take_their_places_among_ready_ones(
    store: Store, clock: ManualClock, carried: bool, delays: Sequence[int]
) -> None:
    due = await put(store, *[new_job(run_at_us=clock() + 1_000_000 * delay + 1) for delay in delays])
    ready: list[str] = []
    for _ in range(10):
        ready += await put(store)
        clock.advance(1)
    places = dict(zip([*due, *ready], [*(delay + 0.5 for delay in delays), *range(10)], strict=True))

    assert await take_ids(store) == ([*ready, *due] if carried else sorted(places, key=places.__getitem__))


async def test_an_instant_in_the_past_jumps_no_queue(store: Store, clock: ManualClock) -> None:
    """A job is not eligible before it exists."""
    (waiting,) = await put(store)
    clock.advance(10)
    (pushing,) = await put(store, new_job(run_at_us=clock() - 3_600_000_000))

    assert await take_ids(store) == [waiting, pushing]


async def test_of_equal_eligibility_the_earlier_submission_goes_first(store: Store, opener: Opener) -> None:
    """Whatever the ids say: they are minted by clients whose clocks may be wrong."""
    ids = [new_id() for _ in range(40)]
    random.Random(7).shuffle(ids)
    other = await opener()
    for n, job_id in enumerate(ids):
        await put(other if n % 2 else store, new_job(id=job_id))

    assert [job_id for _ in range(8) for job_id in await take_ids(store, 5)] == ids


async def test_a_job_is_never_delivered_early(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(delay=timedelta(seconds=10)))
    clock.advance(9.999999)
    assert await take(store) == []

    clock.advance(0.000001)
    assert await take_ids(store) == [job_id]


async def test_a_retry_is_not_delivered_before_its_delay_is_over(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, delay=timedelta(seconds=5))])
    clock.advance(4.999999)
    assert await take(store) == []

    clock.advance(0.000001)
    assert await take_ids(store) == [job.id]


async def test_claiming_says_how_many_due_jobs_it_made_ready(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job(delay=timedelta(seconds=n)) for n in range(5, 10)])
    clock.advance(7)

    brought = await claim(store, 1)

    assert brought.promoted == 3
    assert [job.id for job in brought.jobs] == ids[:1]
    assert await state_of(store, ids[2]) is JobState.QUEUED
    assert await state_of(store, ids[3]) is JobState.SCHEDULED


async def test_without_promotion_due_jobs_stay_where_they_are(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(delay=timedelta(seconds=5)))
    clock.advance(10)

    brought = await claim(store, promote=False)

    assert (brought.jobs, brought.promoted) == ([], 0)
    assert await state_of(store, job_id) is JobState.SCHEDULED
    assert await take_ids(store, promote=True) == [job_id]


async def test_next_due_is_the_exact_time_until_the_next_job(store: Store, clock: ManualClock) -> None:
    await put(store, new_job(delay=timedelta(seconds=60)), new_job(delay=timedelta(seconds=12.345678)))
    assert (await claim(store)).next_due == timedelta(seconds=12.345678)

    clock.advance(2.345678)
    assert (await claim(store)).next_due == timedelta(seconds=10)

    clock.advance(10)
    assert (await claim(store)).next_due == timedelta(seconds=47.654322)


async def test_next_due_counts_retries(store: Store) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, delay=timedelta(seconds=5))])

    assert (await claim(store)).next_due == timedelta(seconds=5)


async def test_next_due_is_none_where_nothing_is_scheduled(store: Store) -> None:
    await put(store, new_job(), new_job(queue="other", delay=timedelta(seconds=5)))

    assert (await claim(store)).next_due is None
    assert (await claim(store, capacity={"other": 1})).next_due == timedelta(seconds=5)
    assert (await claim(store, capacity={"default": 1, "other": 1})).next_due == timedelta(seconds=5)
    assert (await claim(store, capacity={EVERY_QUEUE: 1})).next_due == timedelta(seconds=5)


async def test_of_each_queue_at_most_what_it_wants(store: Store) -> None:
    await put(store, *[new_job(queue=queue) for queue in ("a", "b", "c") for _ in range(10)])

    jobs = await take(store, 100, {"a": 3, "b": 1, "c": 0, "nobody": 5})

    assert Counter(job.queue for job in jobs) == {"a": 3, "b": 1}


async def test_never_more_than_the_limit(store: Store) -> None:
    await put(store, *[new_job(queue=queue) for queue in ("a", "b") for _ in range(10)])

    assert len(await take(store, 4, {"a": 10, "b": 10})) == 4
    assert len(await take(store, 100, {"a": 100, "b": 100})) == 16


async def test_no_named_queue_starves_behind_another(store: Store) -> None:
    await put(store, *[new_job(queue="busy", priority=100) for _ in range(50)])
    await put(store, *[new_job(queue="quiet", priority=-100) for _ in range(2)])

    served = [job.queue for _ in range(10) for job in await take(store, 1, {"busy": 1, "quiet": 1})]

    assert served.count("quiet") == 2


async def test_claims_of_other_queues_leave_the_named_ones_their_turns(store: Store) -> None:
    await put(store, *[new_job(queue=name) for name in ("a", "b") for _ in range(4)])

    served = []
    for _ in range(4):
        served += [job.queue for job in await take(store, 1, {"a": 1, "b": 1})]
        assert await take(store, 1, {"a": 0, "b": 0, "*": 1}) == []

    assert (served.count("a"), served.count("b")) == (2, 2)


async def test_queues_that_are_not_wanted_are_left_alone(store: Store) -> None:
    await put(store, new_job(queue="other"))

    assert await take(store, capacity={"default": 5}) == []
    assert await take(store, capacity={}) == []


@pytest.mark.parametrize("queue", ["a", "b"])
@pytest.mark.parametrize("capacity", [{"a": 10, "b": 10}, {EVERY_QUEUE: 10}], ids=["named", "star"])
async def test_job_behind_many_cancelled_ones_is_served_by_the_same_claim(
    store: Store, capacity: dict[str, int], queue: str
) -> None:
    """Their number is what Redis reads in one script of a claim of ten: it ends with the last of them."""
    await put(store, *[new_job(queue="a") for _ in range(410)])
    await store.admin.cancel(JobFilter(queue="a"))
    expected = await put(store, new_job(queue=queue))

    assert await take_ids(store, 10, capacity) == expected


async def test_the_star_serves_queues_in_turn_and_starves_none(store: Store) -> None:
    await put(store, *[new_job(queue="busy", priority=100) for _ in range(60)])
    for name in ("quiet", "seldom", "último"):
        await put(store, *[new_job(queue=name, priority=-100) for _ in range(3)])

    served = [job.queue for _ in range(16) for job in await take(store, 1, {EVERY_QUEUE: 1})]

    assert Counter(served) >= Counter({"busy": 3, "quiet": 3, "seldom": 3, "último": 3})


@pytest.mark.parametrize(
    "capacity", [{"mail": 1, EVERY_QUEUE: 1}, {"mail": 1, EVERY_QUEUE: 9}, {"none": 1, EVERY_QUEUE: 1}]
)
async def test_unlisted_queues_beside_a_named_one_are_served_in_turn(store: Store, capacity: dict[str, int]) -> None:
    await put(store, *[new_job(queue=queue) for queue in ("mail", "busy") for _ in range(20)])
    await put(store, *[new_job(queue=queue) for queue in ("a", "z") for _ in range(3)])

    served = [job.queue for _ in range(12) for job in await take(store, 2, capacity)]

    assert Counter(served) >= Counter({"a": 3, "z": 3})


async def test_unlisted_queues_share_the_slots_of_the_wildcard(store: Store) -> None:
    await put(store, *[new_job(queue=f"q{n % 4}") for n in range(20)], *[new_job(queue="mail") for _ in range(5)])

    jobs = await take(store, 100, {"mail": 2, EVERY_QUEUE: 3})
    assert Counter(job.queue if job.queue == "mail" else "others" for job in jobs) == {"mail": 2, "others": 3}
    assert len(await take(store, 5, {"mail": 0, EVERY_QUEUE: 100})) == 5
    assert len(await take(store, 100, {"mail": 0, EVERY_QUEUE: 100})) == 12
    assert await take(store, 100, {EVERY_QUEUE: 0}) == []


async def test_a_named_queue_keeps_its_own_bound_beside_the_star(store: Store) -> None:
    await put(store, *[new_job(queue=queue) for queue in ("mail", "other") for _ in range(5)])

    jobs = await take(store, 100, {"mail": 2, EVERY_QUEUE: 4})

    assert Counter(job.queue for job in jobs) == {"mail": 2, "other": 4}


async def test_the_star_delivers_within_a_queue_in_order(store: Store, carried: bool) -> None:
    ids = await put(store, *[new_job(queue="a", priority=n) for n in range(5)])

    taken = [job_id for _ in range(5) for job_id in await take_ids(store, 1, {EVERY_QUEUE: 1})]
    assert taken == (ids if carried else ids[::-1])


@pytest.mark.parametrize("wanted", ["default", EVERY_QUEUE])
async def test_a_paused_queue_is_skipped_until_it_is_resumed(store: Store, opener: Opener, wanted: str) -> None:
    (job_id,) = await put(store)
    (other_id,) = await put(store, new_job(queue="other"))
    await (await opener()).admin.pause("default")

    assert await take_ids(store, capacity={wanted: 5, "other": 5} if wanted == "default" else {wanted: 5}) == [other_id]
    assert await take_ids(store, capacity={wanted: 5}, ids=[job_id]) == []

    await store.admin.resume("default")
    assert await take_ids(store, capacity={wanted: 5}) == [job_id]


@pytest.mark.parametrize("limited", [False, True])
async def test_a_thousand_paused_queues_delay_no_other(store: Store, limited: bool) -> None:
    """Also of those that stand behind all of them in the order of names."""
    if limited:
        await limit(store, task="work", concurrency=10_000)
    closed = [f"closed-{number:04}" for number in range(1_000)]
    await asyncio.gather(*map(store.admin.pause, closed))
    await put(store, *[new_job(queue=queue) for queue in closed])
    opened = await put(store, *[new_job(queue=queue) for queue in ("a", "b", "y", "z")])

    taken = [job_id for _ in range(2) for job_id in await take_ids(store, 2, {EVERY_QUEUE: 2})]

    assert sorted(taken) == sorted(opened)
    assert await take_ids(store, 2, {EVERY_QUEUE: 2}) == []


@pytest.mark.parametrize("limited", [False, True])
async def test_many_due_jobs_delay_none_of_a_higher_priority(store: Store, clock: ManualClock, limited: bool) -> None:
    if limited:
        await limit(store, queue="default", concurrency=10_000)
    await put(store, new_job(queue="plain"), new_job())
    await take(store, 1, {"plain": 1, "default": 1})  # the plain one; the next claim begins with limited ones
    await put(store, *[new_job(delay=timedelta(seconds=1)) for _ in range(450)])
    urgent = await put(store, *[new_job(delay=timedelta(seconds=2), priority=9) for _ in range(2)])
    clock.advance(3)

    assert await take_ids(store, 1) + await take_ids(store, 1) == urgent


async def test_only_ready_delivered_ids_are_claimed_and_others_refused(store: Store) -> None:
    ready, unasked = await put(store, new_job(), new_job())
    taken = (await running(store)).id
    dead = await ended(store, JobState.DEAD)
    (later,) = await put(store, new_job(delay=timedelta(hours=1)))

    brought = await claim(store, ids=[taken, ready, dead, later, new_id()])

    assert [job.id for job in brought.jobs] == [ready]
    assert brought.refused == 4
    assert await state_of(store, unasked) is JobState.QUEUED


async def test_id_delivered_twice_is_claimed_once_and_refused_once(store: Store) -> None:
    (job_id,) = await put(store)

    brought = await claim(store, ids=[job_id, job_id])

    assert ([job.id for job in brought.jobs], brought.refused) == ([job_id], 1)


async def test_delivered_ids_of_any_queue_are_claimed_for_the_star(store: Store) -> None:
    ids = await put(store, new_job(queue="a"), new_job(queue="b"), new_job(queue="closed"))
    await store.admin.pause("closed")

    brought = await claim(store, capacity={EVERY_QUEUE: 5}, ids=ids)

    assert ([job.id for job in brought.jobs], brought.refused) == (ids[:2], 1)


async def test_delivered_ids_are_bounded_by_limit_and_wants(store: Store) -> None:
    ids = await put(store, *[new_job(queue=queue) for queue in ("a", "b") for _ in range(4)])

    assert len(await take(store, 3, {"a": 9, "b": 9}, ids=ids)) == 3
    jobs = await take(store, 9, {"a": 0, "b": 2}, ids=ids)
    assert Counter(job.queue for job in jobs) == {"b": 2}


async def test_delivered_ids_of_unlisted_queues_share_the_slots_of_the_wildcard(store: Store) -> None:
    ids = await put(store, *[new_job(queue=queue) for queue in ("a", "b", "mail") for _ in range(4)])

    jobs = await take(store, 9, {"mail": 1, EVERY_QUEUE: 3}, ids=ids)

    assert Counter(job.queue if job.queue == "mail" else "others" for job in jobs) == {"mail": 1, "others": 3}


async def test_a_delivered_job_that_is_due_is_made_ready(store: Store, clock: ManualClock) -> None:
    (due,) = await put(store, new_job(delay=timedelta(seconds=5)))
    clock.advance(5)

    assert await take_ids(store, ids=[due], promote=False) == []
    assert await take_ids(store, ids=[due]) == [due]


async def test_an_empty_delivery_claims_nothing(store: Store) -> None:
    await put(store)

    brought = await claim(store, ids=[])

    assert (brought.jobs, brought.refused) == ([], 0)


async def test_racing_claimers_never_share_a_job(store: Store, opener: Opener) -> None:
    stores = [store, *[await opener() for _ in range(3)]]
    ids = await put(store, *[new_job() for _ in range(200)])

    batches = await asyncio.gather(*[take_ids(stores[n % 4], 7, worker=f"w{n}") for n in range(40)])

    taken = [job_id for batch in batches for job_id in batch]
    assert sorted(taken) == sorted(ids)


async def test_a_batch_of_several_hundred_is_one_claim(store: Store) -> None:
    ids = await put(store, *[new_job() for _ in range(713)])

    assert await take_ids(store, 500) == ids[:500]
    assert await take_ids(store, 500) == ids[500:]


async def test_a_batch_with_keys_keeps_its_order(store: Store) -> None:
    ids = await put(store, new_job(key="b"), new_job(), new_job(key="a"), new_job())

    assert await take_ids(store) == ids


async def test_wildcard_claim_takes_jobs_it_made_ready_elsewhere(store: Store, clock: ManualClock) -> None:
    await put(store, new_job(queue="a"))
    assert len(await take(store, capacity={EVERY_QUEUE: 5})) == 1
    await put(store, new_job(queue="b", delay=timedelta(seconds=1)))
    assert await take(store, capacity={EVERY_QUEUE: 5}) == []
    await put(store, *[new_job(queue="a") for _ in range(2)])
    clock.advance(2)

    assert sorted(job.queue for job in await take(store, 9, {EVERY_QUEUE: 5})) == ["a", "a", "b"]


async def test_retry_comes_behind_the_jobs_that_are_ready(store: Store, clock: ManualClock) -> None:
    (retried,) = await put(store)
    (job,) = await take(store, 1)
    (before,) = await put(store)
    await settle(store, job, JobState.FAILED, reason=Reason.ERROR, error="no", delay=MINUTE)
    clock.advance(59)
    (meanwhile,) = await put(store)
    clock.advance(1)
    assert await store.maintenance.promote_due(limit=10) in (0, 1)
    clock.advance(1)
    (after,) = await put(store)
    assert [(await take_ids(store, 1))[0] for _ in range(4)] == [before, meanwhile, retried, after]
