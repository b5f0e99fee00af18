"""The keys of limits in Redis: what they hold, other people's hands, repair, and lost answers."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.job_changes import JobChanges
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.models import Finding, Job, JobFilter, JobState, NewJob, Options, Reason, UniqueKey
from holdfast.stores.base import ClaimRequest, Store
from tests.conformance.support import LEASE, WORKER, Opener, ending, failing, new_job, put, take, take_ids
from tests.support.keys import Keys

HOUR = timedelta(hours=1)


async def limit(store: Store, name: str = "mail", **fields: Any) -> None:
    own = {field: fields.pop(field) for field in ("queue", "task", "by") if field in fields}
    known = {each.name: each.revision for each in await store.limits.read_limits()}
    changed = Limit(name=name, values=LimitValues(**fields), **own)
    assert await store.limits.write_limit(LimitChange(changed, known.get(name, 0))) is not None


def job_of(tenant: object, **fields: Any) -> NewJob:
    return new_job(payload=f'{{"tenant":{tenant}}}', **fields)


def tenants(jobs: list[Job]) -> list[Any]:
    return [job.decode_arguments().get("tenant") for job in jobs]


async def end(store: Store, *jobs: Job) -> None:
    assert all(each.accepted for each in await store.queueing.settle([ending(job) for job in jobs]))


async def fill(store: Store, clock: ManualClock) -> None:
    """Jobs under limits in every state, in ready and throttled partitions, quarantined and suspect ones."""
    await limit(store, "all", queue="default", concurrency=50, weight="args.weight")
    await limit(store, "tenant", queue="default", by="args.tenant", rate=1, period_us=3_600_000_000, burst=2)
    await limit(store, "slow", task="slow", concurrency=3)
    await put(store, *[job_of(number % 4, priority=number % 3) for number in range(40)])
    await put(store, *[job_of(7, queue="mail", task="slow", delay=delay) for delay in (*[None] * 6, HOUR)])
    await put(store, *[new_job(payload='{"tenant":9,"weight":4}') for _ in range(3)], new_job(queue="plain"))
    suspect, poison = await take(store, 2, max_must_start=9)
    for job, lost_leases in ((suspect, 1), (poison, 2)):
        held = job
        for _ in range(lost_leases):
            clock.advance(LEASE.total_seconds() + 1)
            lost = ending(held, JobState.FAILED, reason=Reason.CRASHED, lease_expired=True)
            await store.queueing.settle([lost])
            again = [each for each in await take(store, 50, max_must_start=9) if each.id != job.id]
            await end(store, *again)
            held = (await store.query.get(job.id)) or held
    await put(store, *[job_of(number) for number in range(20, 30)])
    jobs = await take(store, 6, {"*": 6})
    await store.queueing.settle([failing(jobs[0], delay=HOUR), ending(jobs[1], JobState.DEAD, error="x")])
    (cancelled,) = await put(store, job_of(3))
    await store.admin.cancel([cancelled])


async def everything_agrees(store: Store) -> None:
    assert await store.health.repair() == []
    (structures,) = [each for each in await store.health.doctor() if each.name == "structures"]
    assert structures.level == "ok", structures


async def test_nothing_of_limits_needs_repair_where_nothing_is_wrong(store: Store, clock: ManualClock) -> None:
    await fill(store, clock)
    await everything_agrees(store)


@pytest.mark.parametrize("other", [False, True], ids=["missing", "of another type"])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "start_tags:default",
            "throttled:default",
            "idle_start_tags:default",
            "partitioned_queues",
            "queues_with_limits",
            "used",
            "buckets",
            "refills",
        ),
        *("unstarted", "virtual", "partition:default\x1fall\x1ftenant=3", "partition:mail\x1fslow"),
    ],
)
async def test_key_of_limits_that_is_gone_is_made_again(
    store: Store, keys: Keys, clock: ManualClock, name: str, other: bool
) -> None:
    await fill(store, clock)
    waiting = {job.id for job in (await store.query.find(JobFilter(states=(JobState.QUEUED,)), limit=1000)).jobs}
    assert keys.delete(name) == 1
    if other:
        keys.set(name, "not ours")

    assert {each.level for each in await store.health.repair()} <= {"ok"}

    await everything_agrees(store)
    taken: set[str] = set()
    for _ in range(100):
        jobs = await take(store, 50, {"*": 50}, max_must_start=50)
        jobs += await take(store, 1, {"*": 1}, isolated=True)
        await end(store, *jobs)
        taken |= {job.id for job in jobs}
        clock.advance(1800)
    assert taken >= waiting


@pytest.mark.parametrize(
    "name", ["start_tags:default", "throttled:default", "idle_start_tags:default", "used", "buckets", "refills"]
)
async def test_claim_survives_a_foreign_key(store: Store, keys: Keys, clock: ManualClock, name: str) -> None:
    await fill(store, clock)
    keys.delete(name)
    keys.set(name, "not ours")
    clock.advance(7200)
    await put(store, job_of(99))
    assert 99 in tenants(await take(store, 50, max_must_start=50))
    assert [key for key in keys.all() if key.startswith(f"{name}:foreign:")]


async def test_used_room_that_leaked_is_corrected(store: Store, keys: Keys) -> None:
    await limit(store, queue="default", concurrency=2)
    await put(store, new_job(), new_job())
    keys.hset("used", "mail", 2)
    assert await take(store) == []
    (structures,) = [each for each in await store.health.doctor() if each.name == "structures"]
    assert "0 jobs are running under limits, by weight, and 2 stand there" in structures.text
    assert await store.health.repair() == [Finding("repair", "ok", "1 counts corrected")]
    assert len(await take(store)) == 2


async def test_ended_jobs_leave_only_limits_behind(store: Store, keys: Keys) -> None:
    await limit(store, queue="default", by="args.tenant", concurrency=1)
    await put(store, *[job_of(number % 7) for number in range(50)])
    while jobs := await take(store):
        await end(store, *jobs)
    left = {key.partition(":")[0] for key in keys.all()} - {"done"}  # it expires
    of_jobs = {"chunks", "counts", "ended", "index", "job", "seq"}
    assert left == of_jobs | {"limits", "queues_with_limits", "changes", "meta"}


async def test_partition_holds_jobs_in_order_and_can_be_read(store: Store, keys: Keys, clock: ManualClock) -> None:
    await limit(store, queue="default", concurrency=1, weight=2)
    await limit(store, "tenant", queue="default", by="args.tenant")
    low, first, second = await put(store, job_of('"x"', priority=-1), job_of('"x"'), job_of('"x"'))
    (high,) = await put(store, job_of('"x"', priority=5))
    key = "partition:default\x1fmail\x1ftenant=x"
    members = keys.zrange(key, 0, -1)
    assert [member[28:] for member in members] == [high, first, second, low]
    assert members[1] == f"{1_000_000:06x}{clock():013x}{2:09x}{first}"
    assert keys.hget(f"job:{first}", "partition") == "mail\x1ftenant=x\n[2, 1]"
    assert keys.hget(f"job:{first}", "spec") == "0 5 default\nwork\n"
    await store.admin.delete([second])
    assert [member[28:] for member in keys.zrange(key, 0, -1)] == [high, first, low]


async def test_id_pushed_by_hand_waits_for_its_turn(store: Store, keys: Keys) -> None:
    await limit(store, task="slow", concurrency=1)
    first, later = await put(store, new_job("slow"), new_job("slow", delay=HOUR))
    keys.zrem("schedule", later)
    keys.lpush("ready", later)
    (job,) = await take(store)
    assert await take(store) == []
    await end(store, job)
    (other,) = await take(store)
    assert {job.id, other.id} == {first, later}


async def test_hash_written_by_hand_obeys_the_limit_of_its_queue(store: Store, keys: Keys) -> None:
    await limit(store, queue="default", concurrency=1)
    keys.hset("job:by-hand", mapping={"payload": "{}", "task": "work"})
    keys.rpush("ready", "by-hand", "nothing")
    await put(store, new_job())
    jobs = [await take(store) for _ in range(2)]
    assert list(map(len, jobs)) == [1, 0]
    await end(store, *jobs[0])
    assert len(await take(store)) == 1
    assert keys.exists("ready") == 0


async def test_backlog_without_partitions_comes_in_order(store: Store, opener: Opener) -> None:
    other = await opener()
    ids = await put(other, *[new_job(priority=number % 2) for number in range(900)])
    await store.admin.cancel(ids[:4])
    await limit(store, queue="default", concurrency=10_000)
    taken: list[str] = []
    while found := await take_ids(store, 100):
        taken += found
    assert sorted(taken) == sorted(ids[4:])
    high = set(ids[1::2])
    assert [job_id for job_id in taken[:100] if job_id not in high] == []
    await everything_agrees(store)


async def test_partition_that_comes_back_keeps_its_turn(store: Store) -> None:
    await limit(store, queue="default", by="args.tenant")
    await put(store, *[job_of(1) for _ in range(50)])
    await put(store, job_of(2))
    served = Counter[Any]()
    for _ in range(20):
        (job,) = await take(store, 1)
        served[tenants([job])[0]] += 1
        if tenants([job]) == [2]:
            await put(store, job_of(2))  # at once again: its jobs come one by one
    assert abs(served[1] - served[2]) <= 1


async def test_blocked_partition_that_is_not_ahead_keeps_no_start_tag(store: Store, keys: Keys) -> None:
    await limit(store, "slow", task="slow", rate=1, period_us=3_600_000_000)
    await limit(store, "tenant", queue="default", by="args.tenant")
    await put(store, job_of(1, task="slow"))
    assert len(await take(store)) == 1
    await put(store, job_of(2, task="slow"))
    assert await take(store) == []
    assert keys.exists("throttled:default")
    assert not keys.exists("idle_start_tags:default")


async def test_raised_rate_holds_at_once(store: Store, clock: ManualClock) -> None:
    await limit(store, queue="default", rate=1, period_us=3_600_000_000)
    await put(store, *[new_job() for _ in range(5)])
    assert len(await take(store)) == 1
    assert await take(store) == []
    await limit(store, queue="default", rate=10, period_us=1_000_000)
    assert await take(store) == []
    clock.advance(0.1)
    assert len(await take(store)) == 1


async def test_full_bucket_of_many_partitions_delays_no_other(store: Store) -> None:
    await limit(store, "slow", task="slow", concurrency=1)
    await limit(store, "tenant", queue="default", by="args.tenant", concurrency=5)
    await put(store, *[job_of(number, task="slow") for number in range(900)])
    (job,) = await take(store, 1)
    (free,) = await put(store, job_of(5000))
    for _ in range(4):  # a claim looks at some partitions without room, the next one at others
        if found := await take_ids(store, 1):
            break
    assert found == [free]
    await end(store, job)
    assert len(await take(store, 5)) == 1


async def test_jobs_of_an_unanswered_claim_are_given_back(store: Any, clock: ManualClock) -> None:
    await limit(store, queue="default", concurrency=3)
    assert await take(store) == []
    await put(store, *[new_job() for _ in range(3)])
    clock.advance(1)
    lost = [job.id for job in (await store.queueing._claim_ready(ClaimRequest(WORKER, {"default": 2}, 2, LEASE))).jobs]
    store.queueing._unconfirmed_claims.add(WORKER)
    clock.advance(1)
    (third,) = await take(store, 3)
    assert third.id not in lost
    assert await take_ids(store, 3) == lost


async def test_changed_payload_moves_a_job_to_its_partition(store: Store) -> None:
    await limit(store, queue="default", by="args.tenant", concurrency=1)
    edited, replayed = await put(store, job_of(1), job_of(1))
    await store.admin.cancel([replayed])
    await store.admin.edit(edited, JobChanges(payload='{"tenant":2}'))
    await store.admin.replay([replayed], payload='{"tenant":3}')
    await put(store, job_of(1))
    assert sorted(tenants(await take(store))) == [1, 2, 3]
    await everything_agrees(store)


@pytest.mark.parametrize("last", [1, 2])
async def test_job_replaced_twice_at_once_stands_in_one_partition(
    store: Store, keys: Keys, clock: ManualClock, last: int
) -> None:
    await limit(store, queue="default", by="args.tenant", concurrency=2)
    unique = Options(unique=UniqueKey("\x1fu", "unstarted", None, "replace"))
    await put(store, job_of(0, options=unique))
    clock.advance(1)
    await put(store, job_of(1, options=unique), job_of(last, options=unique))
    assert len([name for name in keys.all() if name.startswith("partition:")]) == 1
    await everything_agrees(store)
    assert tenants(await take(store)) == [last]


async def test_job_moves_between_limited_and_plain_queues(store: Store) -> None:
    await limit(store, queue="mail", concurrency=1)
    there, back = await put(store, new_job(), new_job(queue="mail"))
    await store.admin.edit(there, JobChanges(queue="mail"))
    await store.admin.edit(back, JobChanges(queue="default"))
    assert await take_ids(store, 9, {"default": 9}) == [back]
    assert await take_ids(store, 9, {"mail": 9}) == [there]
    await everything_agrees(store)


async def test_many_expired_jobs_of_a_partition_are_not_taken(store: Store, clock: ManualClock) -> None:
    await limit(store, queue="default", by="args.tenant", concurrency=500)
    await put(store, *[job_of(number % 3, expires_in=timedelta(minutes=1)) for number in range(450)])
    (kept,) = await put(store, job_of(1))
    clock.advance(61)
    taken: list[str] = []
    for _ in range(4):
        taken += await take_ids(store, 50)
    assert taken == [kept]
    await everything_agrees(store)


async def test_limit_of_depth_alone_leaves_jobs_plain(store: Store, keys: Keys) -> None:
    await limit(store, queue="default", depth=5)
    await put(store, new_job())
    assert not keys.exists("queues_with_limits")
    assert len(await take(store)) == 1


async def test_partitions_that_wait_for_one_bucket_are_drained_without_pauses(store: Store, keys: Keys) -> None:
    await limit(store, "slow", task="slow", concurrency=1)
    await limit(store, "tenant", queue="default", by="args.tenant", concurrency=5)
    await put(store, *[job_of(number, task="slow") for number in range(400)])
    taken = 0
    while jobs := await take(store, 5):  # the clock stands still
        assert len(jobs) == 1
        taken += 1
        if taken == 5:
            await everything_agrees(store)
        await end(store, *jobs)
    assert taken == 400
    assert not keys.exists("waiting:default", keys.prefix + "start_tags:default", keys.prefix + "partitioned_queues")
