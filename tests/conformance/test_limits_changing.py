"""Limits that change while everything runs, races and wake-ups, and their buckets; on every store."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.job_changes import JobChanges
from holdfast.core.limits import SEPARATOR, BucketUse, Limit, LimitChange, LimitValues
from holdfast.core.models import Job, JobFilter, Options
from holdfast.core.unique import Unique
from holdfast.stores.base import Store
from tests.conformance.limited import end, get, job_of, limit, limit_again, tenants
from tests.conformance.support import MINUTE, SECOND, Opener, claim, new_job, put, take

DAY = timedelta(days=1)


# ── changes while everything runs ───────────────────────────────────────────────────────────────────────────────────
async def test_values_change_at_once(store: Store, opener: Opener) -> None:
    other = await opener()
    await limit(store, concurrency=1)
    await put(store, *[new_job() for _ in range(9)])
    assert len(await take(other, 9)) == 1
    await limit_again(store, concurrency=4)
    assert len(await take(other, 9)) == 3
    await limit_again(store, concurrency=2)
    assert await take(other, 9) == []
    (known,) = await store.limits.read_limits()
    await store.limits.write_limit(LimitChange(known, known.revision, remove=True))
    assert len(await take(other, 9)) == 5


async def test_raised_rate_holds_at_once(store: Store, clock: ManualClock) -> None:
    await limit(store, rate=1, period_us=3_600_000_000)
    await put(store, *[new_job() for _ in range(3)])
    assert len(await take(store, 9)) == 1
    assert await take(store, 9) == []
    await limit_again(store, rate=10, period_us=1_000_000)
    assert await take(store, 9) == []
    clock.advance(0.1)
    assert len(await take(store, 9)) == 1
    assert await store.limits.take_tokens("mail", 1) <= timedelta(seconds=0.1)


async def test_changes_of_burst_give_no_tokens(store: Store, clock: ManualClock) -> None:
    minute = {"rate": 1, "period_us": 60_000_000}
    await limit(store, burst=10, **minute)
    await put(store, *[new_job() for _ in range(40)])
    assert len(await take(store, 40)) == 10
    for burst in (1, 10, 5, 10):
        await limit_again(store, burst=burst, **minute)
        assert await take(store, 40) == []
    clock.advance(60)
    assert len(await take(store, 40)) == 1
    clock.advance(300)
    await limit_again(store, burst=3, **minute)
    assert len(await take(store, 1)) == 1
    await limit_again(store, burst=10, **minute)
    assert len(await take(store, 40)) == 2


async def test_larger_burst_adds_nothing_to_a_bucket_that_was_not_full(store: Store, clock: ManualClock) -> None:
    second = {"rate": 10, "period_us": 1_000_000}
    await limit(store, by="args.tenant", burst=5, **second)
    await put(store, *[job_of(1) for _ in range(500)])
    assert len(await take(store, 500)) == 5
    (known,) = await store.limits.read_limits()
    changed = Limit(name="mail", queue="default", by="args.tenant", values=LimitValues(burst=400, **second))
    assert await store.limits.write_limit(LimitChange(changed, known.revision))
    clock.advance(0.6)
    assert len(await take(store, 500)) == 6
    clock.advance(3600)
    assert len(await take(store, 500)) == 400


async def test_changed_rate_keeps_the_tokens(store: Store, clock: ManualClock) -> None:
    await limit(store, rate=1, period_us=60_000_000, burst=4)
    await put(store, *[new_job() for _ in range(40)])
    assert len(await take(store, 1)) == 1
    await limit_again(store, rate=1, period_us=1_000_000, burst=8)
    assert len(await take(store, 40)) == 3
    clock.advance(1)
    assert len(await take(store, 40)) == 1


async def test_limit_that_loses_its_rate_holds_no_job_back(store: Store) -> None:
    await limit(store, rate=1, period_us=3_600_000_000)
    await put(store, *[new_job() for _ in range(4)])
    assert len(await take(store, 9)) == 1
    await limit_again(store, concurrency=3)
    assert len(await take(store, 9)) == 2


async def test_changed_limit_frees_the_keys_of_all_queues(store: Store, clock: ManualClock, home: str) -> None:
    await limit(store, task="slow", rate=1, period_us=3_600_000_000)
    await put(store, *[new_job(queue=f"q{number:04}", task="slow") for number in range(1020)])
    last = {"q1018": 5, "q1019": 5}
    assert len(await take(store, 5)) == 0
    assert len(await take(store, 5, last)) == 1
    for _ in range(20 if home.startswith("redis:") else 2):  # a claim blocks a part of them there, all of them here
        assert await take(store, 100, {"*": 100}) == []
    await limit_again(store, rate=1000)
    assert await take(store, 5, last) == []
    clock.advance(1)
    assert len(await take(store, 5, last)) == 1


async def test_limit_holds_for_jobs_that_came_before_it(store: Store, opener: Opener) -> None:
    other = await opener()
    await put(other, *[job_of(tenant) for tenant in (1, 1, 1, 2)])
    await limit(store, by="args.tenant", concurrency=1)
    assert Counter(tenants(await take(store, 9))) == {1: 1, 2: 1}
    await put(other, job_of(1), job_of(3))  # its limits may be older
    assert tenants(await take(store, 9)) == [3]


async def test_waiting_jobs_of_a_task_are_assigned(store: Store) -> None:
    ids = await put(store, *[job_of(1, task="slow", delay=delay) for delay in (None, None, DAY)])
    await put(store, job_of(1, task="quick"))
    await limit(store, task="slow", by="args.tenant", concurrency=1)
    changed, after, _ = await store.limits.assign_partitions(task="slow", limit=2)
    while after is not None:
        more, after, _ = await store.limits.assign_partitions(task="slow", after=after, limit=2)
        changed += more
    assert changed == 3
    assert (await get(store, ids[2])).partition == "mail=1"
    assert sum(job.task == "slow" for job in await take(store, 9)) == 1
    assert await store.limits.assign_partitions(task="slow") == (0, None, 0)


async def test_job_shows_its_partition(store: Store) -> None:
    await limit(store, "a", by="args.tenant", concurrency=1)
    await limit(store, "b", concurrency=1)
    (job_id,) = await put(store, job_of('"x"'))
    assert (await get(store, job_id)).partition == f"a=x{SEPARATOR}b"
    (plain,) = await put(store, new_job(queue="other"))
    assert (await get(store, plain)).partition is None


async def test_keys_tags_and_uniqueness_go_with_limits(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    policy = Unique("active")
    jobs = [policy.bind(job_of(1, options=Options(tags=("t",)))), policy.bind(job_of(1))]
    first, again, keyed, _ = await store.queueing.submit([*jobs, job_of(1, key="k"), job_of(1, key="k")])
    assert (again.created, again.job_id) == (False, first.job_id)
    assert await store.query.count(JobFilter()) == 2
    (job,) = await take(store, 9)
    assert job.id == first.job_id
    await end(store, job)
    assert [job.id for job in await take(store, 9)] == [keyed.job_id]


async def test_replaced_payload_moves_to_its_partition(store: Store) -> None:
    policy = Unique("unstarted", by=["task", "queue"], on_conflict="replace")
    await limit(store, by="args.tenant", concurrency=1)
    await store.queueing.submit([policy.bind(job_of(1))])
    (answer,) = await store.queueing.submit([policy.bind(job_of(2))])
    assert answer.changed
    await put(store, job_of(1))
    assert sorted(tenants(await take(store, 9))) == [1, 2]


@pytest.mark.parametrize("queue", ["default", "free"])
async def test_moved_job_that_is_rescheduled_keeps_its_own_limits(store: Store, queue: str) -> None:
    policy = Unique("unstarted", by=["task", "queue"], on_conflict="reschedule")
    await limit(store, concurrency=1)
    other = "free" if queue == "default" else "default"
    (first,) = await store.queueing.submit([policy.bind(new_job(queue=other))])
    await store.admin.edit(first.job_id, JobChanges(queue=queue))
    (answer,) = await store.queueing.submit([policy.bind(new_job(queue=other))])
    assert answer.changed
    await put(store, new_job())
    jobs = await take(store, 9, {"default": 9, "free": 9})
    assert Counter(job.queue for job in jobs) == Counter({"default", queue})


# ── races and wake-ups ──────────────────────────────────────────────────────────────────────────────────────────────
async def test_claims_at_once_never_exceed_the_limit(store: Store, opener: Opener) -> None:
    stores = [store, *[await opener() for _ in range(3)]]
    await limit(store, "all", concurrency=7)
    await limit(store, "tenant", by="args.tenant", concurrency=2)
    await put(store, *[job_of(number % 5) for number in range(200)])
    ended = 0
    held: list[Job] = []
    for turn in range(40):
        claims = [take(each, 3, worker=f"worker-{turn}-{number}") for number, each in enumerate(stores * 2)]
        held += [job for jobs in await asyncio.gather(*claims) for job in jobs]
        assert len(held) <= 7
        assert max(Counter(tenants(held)).values(), default=0) <= 2
        await end(store, *held[: turn % 5])
        ended += len(held[: turn % 5])
        held = held[turn % 5 :]
    assert ended > 60


async def test_submissions_during_claims_are_all_claimed(store: Store, opener: Opener) -> None:
    other = await opener()
    await limit(store, by="args.tenant", concurrency=50)
    done = 0

    async def submit_all() -> None:
        for number in range(150):
            await put(other, job_of(number % 3))

    submitting = asyncio.ensure_future(submit_all())
    while not submitting.done() or done < 150:
        jobs = await take(store, 10)
        await end(store, *jobs)
        done += len(jobs)
        if submitting.done() and not jobs:
            break
    await submitting
    assert done == 150


async def test_ending_wakes_a_worker_that_waits_for_room(store: Store, opener: Opener) -> None:
    other = await opener()
    await limit(store, concurrency=1)
    await put(store, new_job(), new_job())
    (job,) = await take(store, 5)
    assert await take(other, 5) == []
    waiting = asyncio.ensure_future(other.queueing.wait(["queue:default"], timeout=30))
    await asyncio.sleep(0.05)
    await end(store, job)
    async with asyncio.timeout(20):
        while not await take(other, 5):
            await asyncio.wait([waiting], timeout=20)
            waiting = asyncio.ensure_future(other.queueing.wait(["queue:default"], timeout=30))
    waiting.cancel()


async def test_ending_wakes_workers_of_every_queue_that_shares_its_limit(store: Store, opener: Opener) -> None:
    other = await opener()
    await limit(store, task="work", concurrency=1)
    queues = [f"tenant-{number:03}" for number in range(150)]
    await put(store, *[new_job(task="work", queue=queue) for queue in queues])
    (job,) = await take(store, 1, {queues[0]: 1})
    seen = asyncio.ensure_future(other.queueing.wait(["queue:seen"], timeout=30))
    async with asyncio.timeout(20):
        while not seen.done():  # until all earlier notifications have come
            await put(store, new_job(queue="seen"))
            await asyncio.wait([seen], timeout=0.1)
    await other.queueing.wait([f"queue:{queues[-1]}"], timeout=0.1)  # takes those that came before it waited
    waiting = asyncio.ensure_future(other.queueing.wait([f"queue:{queues[-1]}"], timeout=60))
    await end(store, job)
    async with asyncio.timeout(20):
        await waiting
    assert [each.queue for each in await take(other, 1, {queues[-1]: 1})] == [queues[-1]]


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_use_of_buckets_is_reported(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=3, weight=2, rate=1, period_us=60_000_000, burst=4)
    await put(store, *[job_of(1) for _ in range(3)])
    (job,) = await take(store, 9)
    one, two = await store.limits.bucket_use(["mail=1", "mail=2"])
    assert (one.bucket, one.used, one.free_at_us) == ("mail=1", 2, 0)
    assert two == BucketUse(bucket="mail=2", used=0, free_at_us=0)
    await end(store, job)
    (again,) = await take(store, 9)
    (one,) = await store.limits.bucket_use(["mail=1"])
    assert (one.used, one.free_at_us) == (2, await store.health.server_time_us() + 60_000_000)
    assert again.id != job.id


async def test_pause_holds_a_bucket_for_all(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=5)
    await put(store, job_of(1), job_of(2))
    await store.limits.pause_buckets(["mail=1"], MINUTE)
    await store.limits.pause_buckets(["mail=1"], SECOND)
    brought = await claim(store, 9)
    assert tenants(brought.jobs) == [2]
    brought = await claim(store, 9)
    assert (brought.jobs, brought.next_due) == ([], MINUTE)
    clock.advance(59)
    assert await take(store, 9) == []
    clock.advance(1)
    assert tenants(await take(store, 9)) == [1]


async def test_pause_of_a_removed_limit_holds_its_jobs_alone(store: Store) -> None:
    revision = await limit(store, "slow", task="slow", concurrency=5)
    await limit(store, by="args.tenant", concurrency=5)
    await put(store, *[job_of(number, task="slow") for number in range(5)])
    await store.limits.pause_buckets(["slow"], MINUTE)
    gone = Limit(name="slow", task="slow", values=LimitValues(concurrency=5))
    assert await store.limits.write_limit(LimitChange(gone, revision, remove=True)) is not None
    await put(store, job_of(9))
    assert tenants(await take(store, 2)) == [9]


async def test_keys_behind_a_full_limit_of_a_task_hold_up_no_other_task(store: Store) -> None:
    await limit(store, "slow", task="slow", concurrency=1)
    await limit(store, by="args.tenant", concurrency=5)
    await put(store, *[job_of(number, task="slow") for number in range(300)])
    assert len(await take(store, 2)) == 1
    quick = await put(store, *[job_of(number) for number in range(1000, 1003)])
    assert sorted([job.id for _ in range(2) for job in await take(store, 2)]) == sorted(quick)


async def test_end_of_a_pause_wakes_workers_and_spares_other_buckets(
    store: Store, clock: ManualClock, opener: Opener
) -> None:
    await limit(store, by="args.tenant", concurrency=5, rate=1, period_us=60_000_000, burst=1)
    (written,) = await store.limits.read_limits()
    await put(store, job_of(1), job_of(1), job_of(2))
    other = await opener()
    await store.limits.pause_buckets(["mail=1", "mail=2"], 60 * MINUTE)
    assert await take(other, 9) == []
    one, two = await store.limits.bucket_use(["mail=1", "mail=2"])
    assert (one.paused, one.free_at_us) == (two.paused, two.free_at_us)
    assert one.paused
    waiting = asyncio.ensure_future(other.queueing.wait(["queue:default"], timeout=30))
    await store.limits.pause_buckets(["mail=1"], timedelta(0))
    assert await store.limits.write_limit(LimitChange(written, written.revision))
    async with asyncio.timeout(20):
        while not (jobs := await take(other, 9)):
            await asyncio.wait([waiting], timeout=20)
            waiting = asyncio.ensure_future(other.queueing.wait(["queue:default"], timeout=30))
    waiting.cancel()
    assert tenants(jobs) == [1]  # its token; the pause has added none
    one, two = await store.limits.bucket_use(["mail=1", "mail=2"])
    assert (one.paused, two.paused) == (False, True)


async def test_tokens_are_taken_by_handlers(store: Store, clock: ManualClock, opener: Opener) -> None:
    written = await store.limits.write_limit(
        LimitChange(Limit(name="api", values=LimitValues(rate=1, period_us=1_000_000, burst=2)), 0)
    )
    assert written
    other = await opener()
    answers = await asyncio.gather(*[each.limits.take_tokens("api", 1) for each in (store, other) * 3])
    assert sorted(answers)[:2] == [timedelta(0)] * 2
    assert sorted(answers)[2:] == [SECOND] * 4
    assert await store.limits.take_tokens("api", 2) == 2 * SECOND
    clock.advance(2)
    assert await store.limits.take_tokens("api", 5) == timedelta(0)  # more than it ever holds: all of them
    assert await store.limits.take_tokens("unknown", 1) == timedelta(0)


async def test_job_of_a_removed_limit_ends(store: Store) -> None:
    await limit(store, "other", task="other", concurrency=1)
    revision = await limit(store, task="work", concurrency=1)
    await put(store, new_job())
    (job,) = await take(store, 1)
    (known,) = [each for each in await store.limits.read_limits() if each.name == "mail"]
    assert await store.limits.write_limit(LimitChange(known, revision, remove=True)) is not None
    await end(store, job)


async def test_pruning_leaves_the_ready_jobs_of_all_queues(store: Store) -> None:
    await limit(store, queue="mail", by="args.tenant", concurrency=9)
    ids = await put(store, job_of(1, queue="mail"), new_job(queue="plain"), job_of(2, queue="mail"), new_job(queue="a"))
    await store.maintenance.prune({}, limit=100)
    assert sorted([job.id for job in await take(store, 9, dict.fromkeys(("mail", "plain", "a"), 9))]) == sorted(ids)


async def test_many_keys_leave_nothing_behind(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=1, rate=1, period_us=1_000_000)
    await put(store, *[job_of(number) for number in range(250)])
    while jobs := await take(store, 100):
        await end(store, *jobs)
    clock.advance(3600)
    for _ in range(5):
        await store.maintenance.prune({}, limit=100)
    assert await store.health.doctor()
    assert await take(store, 5) == []
