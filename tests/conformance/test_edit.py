"""Editing: a job that waits is changed in place, and never one that runs or has ended."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import NEVER_US, Dependency
from holdfast.core.ids import new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import Job, JobFilter, JobState, Options, Reason
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import (
    MINUTE,
    SECOND,
    Opener,
    claim,
    ending,
    failing,
    new_job,
    put,
    queues,
    running,
    settle,
    state_of,
    stored,
    take,
    take_ids,
)

HOUR = timedelta(hours=1)
LARGE = '{"n":"%s"}' % ("x" * 5000)
BOTH = {"default": 9, "other": 9}


async def edit(store: Store, job_id: str, **changes: Any) -> bool:
    """Edits a job; True if it was edited. If not, the answer names its state."""
    answer = await store.admin.edit(job_id, JobChanges(**changes))
    standing = await store.query.get(job_id)
    found = None if standing is None else standing.state
    assert [*answer.changed, *answer.refused] == [(job_id, found)]
    return bool(answer.changed)


# ── one value at a time ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("delay", [None, HOUR])
@pytest.mark.parametrize("payloads", [("{}", LARGE), (LARGE, '{"n":2}'), (LARGE, LARGE.replace("x", "y"))])
async def test_payload_alone_is_replaced(store: Store, delay: timedelta | None, payloads: tuple[str, str]) -> None:
    before, after = payloads
    options = Options(tags=("t",), timeout=3.0)
    (job_id,) = await put(store, new_job(payload=before, delay=delay, key="k", options=options, priority=3))
    whole = await stored(store, job_id)

    assert await edit(store, job_id, payload=after)

    job = await stored(store, job_id)
    assert job.payload == after
    assert (job.state, job.key, job.options, job.run_at_us, job.priority, job.created_at_us) == (
        whole.state,
        "k",
        options,
        whole.run_at_us,
        3,
        whole.created_at_us,
    )


async def test_everything_at_once(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(options=Options(tags=("a", "b"), timeout=3.0)))
    created = clock()
    clock.advance(5)

    assert await edit(
        store,
        job_id,
        queue="other",
        priority=7,
        payload='{"n":1}',
        delay=MINUTE,
        options=Options(tags=("b", "c"), timeout=3.0),
        expires_in=HOUR,
    )

    job = await stored(store, job_id)
    assert (job.state, job.queue, job.priority, job.payload) == (JobState.SCHEDULED, "other", 7, '{"n":1}')
    assert (job.run_at_us, job.created_at_us) == (clock() + 60_000_000, created)
    assert job.expires_at_us == clock() + 3_600_000_000
    assert job.options == Options(tags=("b", "c"), timeout=3.0)
    assert [(await store.query.count(JobFilter(tag=tag))) for tag in "abc"] == [0, 1, 1]
    assert await take_ids(store, 9, BOTH) == []
    clock.advance(60)
    (taken,) = await take(store, 9, BOTH)
    assert (taken.id, taken.payload, taken.priority, taken.options) == (job_id, '{"n":1}', 7, job.options)


async def test_last_tag_is_taken_off(store: Store) -> None:
    (job_id,) = await put(store, new_job(options=Options(tags=("a",))))
    assert await edit(store, job_id, options=Options())

    job = await stored(store, job_id)
    assert job.options_or_default.tags == ()
    assert await store.query.count(JobFilter(tag="a")) == 0


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_scheduled_job_is_made_ready_at_once(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(delay=HOUR))
    assert await edit(store, job_id, run_at_us=clock() - 5)

    job = await stored(store, job_id)
    assert (job.state, job.run_at_us) == (JobState.QUEUED, clock())
    assert await take_ids(store) == [job_id]


async def test_ready_job_is_put_off(store: Store, clock: ManualClock) -> None:
    put_off, other = await put(store, new_job(), new_job())
    assert await edit(store, put_off, delay=MINUTE)

    claimed = await claim(store)
    assert [job.id for job in claimed.jobs] == [other]
    assert claimed.next_due == MINUTE
    clock.advance(60)
    assert await take_ids(store) == [put_off]


async def test_retry_is_moved_with_its_history(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store)
    (job,) = await take(store)
    await store.queueing.settle([failing(job, delay=HOUR)])

    assert await edit(store, job_id, priority=2, payload='{"n":2}')
    assert await state_of(store, job_id) is JobState.FAILED
    assert await edit(store, job_id, delay=MINUTE)
    assert await state_of(store, job_id) is JobState.SCHEDULED
    clock.advance(60)

    (again,) = await take(store)
    assert (again.id, again.attempts, again.payload, again.priority) == (job_id, 2, '{"n":2}', 2)
    assert len(await store.query.attempts(job_id)) == 1


async def test_waiting_job_keeps_waiting(store: Store, clock: ManualClock) -> None:
    other = await running(store)
    (job_id,) = await put(store, new_job(after=(Dependency(other.id),)))

    assert await edit(store, job_id, priority=5, queue="other", payload='{"n":1}', delay=MINUTE)

    job = await stored(store, job_id)
    assert (job.state, job.priority, job.queue, job.payload) == (JobState.WAITING, 5, "other", '{"n":1}')
    clock.advance(120)
    assert await take_ids(store, 9, BOTH) == []
    assert job.run_at_us == NEVER_US


async def test_expiry_is_set_moved_and_taken_off(store: Store, clock: ManualClock) -> None:
    first, second, third = await put(store, new_job(), new_job(expires_in=MINUTE), new_job(expires_in=MINUTE))
    assert await edit(store, first, expires_in=SECOND)
    assert await edit(store, second, expires_at_us=clock() + 3_600_000_000)
    assert await edit(store, third, expires_at_us=None)
    clock.advance(100)

    assert [each.job_id for each in await store.maintenance.expire_unstarted(limit=10)] == [first]
    assert (await stored(store, third)).expires_at_us is None
    assert await take_ids(store) == [second, third]


async def test_job_that_has_begun_takes_no_expiry(store: Store) -> None:
    (job_id,) = await put(store, new_job())
    (job,) = await take(store)
    await settle(store, job, JobState.QUEUED, refund=True)

    assert not await edit(store, job_id, expires_in=SECOND, priority=5)
    assert not await edit(store, job_id, expires_at_us=job.run_at_us + 1)
    unchanged = await stored(store, job_id)
    assert (unchanged.expires_at_us, unchanged.priority) == (None, 0)
    assert await edit(store, job_id, expires_at_us=None, priority=5)


# ── order (promise 6) ───────────────────────────────────────────────────────────────────────────────────────────────
async def by_handler(store: Store, *, carried: bool, capacity: dict[str, int] | None = None) -> list[str]:
    """The ids of the ready jobs, in the order of claims; over a transport, where arrival decides, by order."""
    if not carried:
        return [job_id for _ in range(9) for job_id in await take_ids(store, 1, capacity)]
    jobs = await take(store, 9, capacity)
    return [job.id for job in sorted(jobs, key=lambda job: (-job.priority, job.run_at_us, job.id))]


async def test_order_follows_an_edited_priority(store: Store, carried: bool) -> None:
    first, second, third = [(await put(store))[0] for _ in range(3)]
    assert await edit(store, third, priority=5)
    assert await edit(store, first, priority=-5)

    assert await by_handler(store, carried=carried) == [third, second, first]


async def test_priority_moved_back_and_forth_keeps_the_place(store: Store, clock: ManualClock, carried: bool) -> None:
    ids = []
    for _ in range(4):
        ids += await put(store)
        clock.advance(1)
    for priority in (5, 0, 5, 0):
        assert await edit(store, ids[1], priority=priority)
        assert await edit(store, ids[2], priority=priority)

    assert await by_handler(store, carried=carried) == ids
    assert await take_ids(store) == []


async def test_raised_priority_counts_in_the_midst_of_large_claims(store: Store, carried: bool) -> None:
    """A claim may begin behind the last one: an edited job in front is not passed over."""
    ids = await put(store, *[new_job() for _ in range(400)])
    assert len(await take_ids(store, 200)) == 200
    assert await edit(store, ids[-1], priority=5)
    assert await edit(store, ids[-2], delay=timedelta(0), priority=7)

    found = await take_ids(store, 2 if not carried else 200)
    assert {ids[-1], ids[-2]} <= set(found)
    assert carried or found == [ids[-2], ids[-1]]


async def test_job_moved_to_another_queue_keeps_its_time(store: Store, clock: ManualClock, carried: bool) -> None:
    (moved,) = await put(store)
    clock.advance(1)
    (there,) = await put(store, new_job(queue="other"))
    assert await edit(store, moved, queue="other")

    assert await take_ids(store, 1, {"default": 1}) == []
    assert await by_handler(store, carried=carried, capacity={"other": 1 if not carried else 9}) == [moved, there]
    counted = {queue.name: queue.states.get("queued", 0) for queue in await queues(store)}
    assert counted.get("default", 0) == 0


@pytest.mark.parametrize("paused", [False, True])
async def test_moved_job_is_claimed_once_by_any_worker(store: Store, paused: bool) -> None:
    moved, stays = await put(store, new_job(), new_job())
    assert await edit(store, moved, queue="other")
    if paused:
        await store.admin.pause("other")

    found = [job_id for _ in range(5) for job_id in await take_ids(store, 1, {EVERY_QUEUE: 1})]
    assert sorted(found) == sorted([stays] if paused else [moved, stays])
    await store.admin.resume("other")
    assert await take_ids(store, 9, {EVERY_QUEUE: 9}) == ([moved] if paused else [])


async def test_edits_of_many_ready_jobs_keep_the_order(store: Store, clock: ManualClock, carried: bool) -> None:
    rng = random.Random(7)
    ids: list[str] = []
    for _ in range(60):
        ids += await put(store)
        clock.advance(1)
    for _ in range(200):
        changes: dict[str, Any] = rng.choice(
            [
                {"priority": rng.choice([-1, 0, 0, 1])},
                {"delay": timedelta(0)},
                {"payload": '{"n":1}'},
                {"delay": MINUTE},
            ]
        )
        assert await edit(store, rng.choice(ids), **changes)
        clock.advance(1)
    clock.advance(600)
    jobs = [await stored(store, job_id) for job_id in ids]
    expected = [job.id for job in sorted(jobs, key=lambda job: (-job.priority, job.run_at_us, ids.index(job.id)))]

    found: list[str] = []
    while taken := await take_ids(store, 7):
        found += taken
    assert sorted(found) == sorted(expected)
    assert carried or found == expected


# ── refusals, and races with claims ─────────────────────────────────────────────────────────────────────────────────
async def test_running_and_ended_jobs_stay_as_they_are(store: Store) -> None:
    await put(store, new_job(), new_job(), new_job())
    running, done, dead = await take(store)
    await settle(store, done)
    await store.queueing.settle([ending(dead, JobState.DEAD, reason=Reason.ERROR, error="x")])
    (cancelled,) = await put(store)
    await store.admin.cancel([cancelled])

    for job_id in (running.id, done.id, dead.id, cancelled):
        before = await stored(store, job_id)
        changes = {"payload": '{"n":9}', "queue": "other", "delay": HOUR, "expires_in": SECOND}
        assert not await edit(store, job_id, priority=9, options=Options(tags=("x",)), **changes)
        assert await stored(store, job_id) == before
    assert not await edit(store, new_id(), priority=1)
    assert await store.query.count(JobFilter(tag="x")) == 0


async def test_each_of_64_edits_is_claimed_or_refused(opener: Opener, clock: ManualClock) -> None:
    stores = [await opener() for _ in range(4)]
    ids = await put(stores[0], *[new_job(payload='{"n":0}') for _ in range(64)])

    async def edit_one(number: int) -> bool:
        await asyncio.sleep(0.001 * (number % 16))
        changes = JobChanges(payload='{"n":1}', priority=number % 3)
        return bool((await stores[number % 4].admin.edit(ids[number], changes)).changed)

    taken: list[Job] = []

    async def claim_all(store: Store) -> None:
        async with asyncio.timeout(60):
            while len(taken) < 64:
                brought = await take(store, 4)
                taken.extend(brought)
                if not brought:  # an id that was delivered while its job was being edited is announced again by a sweep
                    clock.advance(1)
                    await store.maintenance.reannounce()

    claims = [asyncio.ensure_future(claim_all(store)) for store in stores]
    edited = await asyncio.gather(*map(edit_one, range(64)))
    await asyncio.gather(*claims)
    jobs = {job.id: job for job in taken}

    assert len(jobs) == 64
    for number, job_id in enumerate(ids):
        expected = ('{"n":1}', number % 3) if edited[number] else ('{"n":0}', 0)
        assert (jobs[job_id].payload, jobs[job_id].priority) == expected
        job = await stored(stores[0], job_id)
        assert (job.payload, job.priority) == expected


async def test_64_edits_of_one_job_leave_one_of_them(opener: Opener) -> None:
    stores = [await opener() for _ in range(4)]
    (job_id,) = await put(stores[0])

    edits = [
        stores[number % 4].admin.edit(
            job_id, JobChanges(payload=f'{{"n":{number}}}', priority=number, options=Options(tags=(str(number),)))
        )
        for number in range(64)
    ]
    answers = await asyncio.gather(*edits)

    assert all(answer.changed for answer in answers)
    (job,) = await take(stores[0])
    assert job.payload == f'{{"n":{job.priority}}}'
    assert job.options_or_default.tags == (str(job.priority),)
    assert await take_ids(stores[0]) == []


async def test_edited_job_wakes_the_workers_of_its_queue(store: Store) -> None:
    (job_id,) = await put(store, new_job(delay=HOUR))
    claimed = await claim(store, 1, {"other": 1})
    assert claimed.jobs == []
    waiting = asyncio.ensure_future(store.queueing.wait(["queue:other"], timeout=30))
    await asyncio.sleep(0.2)

    assert await edit(store, job_id, queue="other", delay=timedelta(0))
    async with asyncio.timeout(20):
        await waiting
    assert await take_ids(store, 1, {"other": 1}) == [job_id]
