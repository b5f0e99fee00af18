"""What Redis holds when it was spoiled: the doctor sees it, a repair makes everything agree: RELIABILITY F52, B84."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.batches import BATCH_TASK
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.ids import new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.models import Finding, JobFilter, JobState, Lease, Options
from holdfast.core.unique import Unique
from holdfast.stores.base import EVERY_QUEUE, Store
from holdfast.stores.redis import maintenance
from tests.conformance.support import WORKER, ended, ending, lose, new_job, put, running, stored, take, take_ids
from tests.support.keys import Keys

HOUR = timedelta(hours=1)
QUEUES = ("default", "mail")


async def fill(store: Store, clock: ManualClock) -> None:
    """Something in every structure."""
    mark = new_id()
    await ended(store, JobState.SUCCEEDED, key=f"outlived-{mark}", key_for=HOUR)
    clock.advance(0.001)
    await store.maintenance.prune({"succeeded": timedelta(0)}, limit=1)
    for queue in QUEUES:
        for priority in (0, 5, -3):
            await put(store, *[new_job(queue=queue, priority=priority) for _ in range(3)])
        await put(store, new_job(queue=queue, expires_in=HOUR), new_job(queue=queue, expires_in=HOUR, delay=HOUR))
        await put(store, new_job(queue=queue, delay=HOUR), new_job(queue=queue, key=f"{queue}-{mark}"))
        for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED):
            await ended(store, state, queue=queue, key=f"{state}-{queue}-{mark}", options=Options(tags=("t",)))
        (gone,) = await put(store, new_job(queue=queue))
        await store.admin.cancel([gone])
        poison = await running(store, queue=queue)
        for _ in range(2):
            await lose(store, clock, poison)
            if not poison.lost_leases:
                (poison,) = await take(store, 1, {queue: 1}, ids=[poison.id], max_must_start=1)
        await running(store, queue=queue)


def finding_named(findings: list[Finding], name: str) -> Finding:
    (found,) = [each for each in findings if each.name == name]
    return found


async def everything_agrees(store: Store, keys: Keys) -> None:
    """Nothing is left to repair, and all that is ready can be taken, once."""
    assert list(keys.strays()) == []
    assert await store.health.repair() == []
    findings = await store.health.doctor()
    assert finding_named(findings, "structures").level == "ok", finding_named(findings, "structures")
    queued = await store.query.find(JobFilter(states=(JobState.QUEUED,)), limit=10_000)
    ready = {job.id for job in queued.jobs if job.lost_leases < 2}
    taken = []
    while jobs := await take_ids(store, 100, {EVERY_QUEUE: 100}, max_must_start=100):
        taken += jobs
    assert sorted(taken) == sorted(ready)
    while jobs := await take(store, 1, {EVERY_QUEUE: 1}, isolated=True):
        await store.queueing.settle([ending(jobs[0], JobState.DEAD, error="poison")])


async def test_there_is_nothing_to_repair_where_nothing_is_wrong(store: Store, keys: Keys, clock: ManualClock) -> None:
    assert await store.health.repair() == []
    await fill(store, clock)

    await everything_agrees(store, keys)


@pytest.mark.parametrize(
    "name",
    [
        *("ready", "ready:mail", "ready@5", "ready@-3:mail", "schedule", "schedule:mail", "leases", "counts", "chunks"),
        *("index:0", "queues", "priorities:default", "quarantine:mail", "due", "tombstones", "keys", "ended:succeeded"),
        *("ended:dead", "ended:cancelled", "outlived", "expiry"),
    ],
)
@pytest.mark.parametrize("other", [False, True], ids=["missing", "of another type"])
async def test_a_structure_that_is_gone_is_made_again(
    store: Store, keys: Keys, clock: ManualClock, name: str, other: bool
) -> None:
    await fill(store, clock)
    (tombstone,) = await put(store)
    await put(store)
    await store.admin.cancel([tombstone])
    before = {job.id: job.state for job in (await store.query.find(JobFilter(), limit=1000)).jobs}
    assert keys.delete(name) == 1
    if other:
        keys.set(name, "not ours")

    done = await store.health.repair()

    assert {each.level for each in done} == {"ok"} or name in ("outlived", "tombstones")
    assert {job.id: job.state for job in (await store.query.find(JobFilter(), limit=1000)).jobs} == before
    await everything_agrees(store, keys)


async def test_stranded_job_is_an_error_and_runs_after_repair(store: Store, keys: Keys) -> None:
    first, second = await put(store, new_job(), new_job())
    keys.lrem("ready", 0, first)
    held = await running(store)
    keys.zrem("leases", held.id)

    finding = finding_named(await store.health.doctor(), "structures")
    assert (finding.level, "2 jobs are queued and 1 stand there" in finding.text) == ("error", True)
    assert "1 jobs are running and 0 stand there" in finding.text
    assert "doctor --repair" in finding.remedy
    assert await store.health.repair() == [Finding("repair", "ok", "2 jobs put back where they belong")]

    assert await take_ids(store) == [first, second]
    assert [job.id for job in await store.maintenance.find_expired_leases(limit=10)] == [held.id]


@pytest.mark.parametrize("number", [3, 20_000])
async def test_ids_without_a_job_are_dropped_however_many(store: Store, keys: Keys, number: int) -> None:
    kept = await put(store, *[new_job(key=f"k{n}") for n in range(5)])
    ids = [f"nobody-{n}" for n in range(number)]
    for start in range(0, number, 5000):
        piece = ids[start : start + 5000]
        keys.lpush("ready", *piece)
        for name in ("schedule", "leases", "quarantine:default", "ended:dead"):
            keys.zadd(name, dict.fromkeys(piece, 1))
        keys.hset("index:0", mapping={str(900 + n): each for n, each in enumerate(piece)})
        keys.hset("keys", mapping={each: f"0 {each}" for each in piece})
        keys.rpush(f"attempts:{piece[0]}", "x")
    assert finding_named(await store.health.doctor(), "structures").level == "warning"

    assert {each.text.partition(" ")[2] for each in await store.health.repair()} >= {"idempotency keys corrected"}

    assert await take_ids(store, 10) == kept
    assert keys.all() >= {"meta", "seq", "keys"}
    assert keys.hlen("keys") == 5
    await everything_agrees(store, keys)


async def test_jobs_that_make_no_sense_are_moved_aside(store: Store, keys: Keys) -> None:
    good, *bad = await put(store, *[new_job() for _ in range(5)])
    keys.hset(f"job:{bad[0]}", "state", "elsewhere")
    keys.hset(f"job:{bad[1]}", "spec", "nonsense")
    keys.hset(f"job:{bad[2]}", "seq", "one")
    keys.delete(f"job:{bad[3]}")
    keys.set(f"job:{bad[3]}", "not ours")

    await store.health.repair()

    assert (await store.query.find(JobFilter())).jobs == [await stored(store, good)]
    assert len([name for name in keys.all() if ":foreign:" in name]) == 4
    await everything_agrees(store, keys)


async def test_hash_written_by_hand_is_left_to_its_claimer(store: Store, keys: Keys) -> None:
    keys.hset("job:by-hand", mapping={"payload": "{}", "task": "work"})
    keys.rpush("ready", "by-hand")
    keys.hset("job:later", mapping={"payload": "{}", "task": "work"})
    keys.zadd("schedule", {"later": 1})

    assert await store.health.repair() == []

    assert set(await take_ids(store)) == {"by-hand", "later"}


async def test_what_scripts_met_is_forgotten_once_it_is_repaired(store: Store, keys: Keys) -> None:
    keys.lpush("ready", "nobody")
    await take(store)
    assert finding_named(await store.health.doctor(), "keys").level == "warning"

    await store.health.repair()

    assert finding_named(await store.health.doctor(), "keys").level == "ok"


async def test_nothing_is_put_right_that_changes_meanwhile(
    store: Store, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = await put(store, *[new_job() for _ in range(5)])
    keys.lrem("ready", 0, first)
    mends = maintenance.plan_repairs

    def interrupted(seen: maintenance.NamespaceSnapshot) -> list[maintenance.RepairStep]:
        keys.hincrby("counts", "queued:default", 1)
        keys.hincrby("counts", "queued:default", -1)
        return mends(seen)

    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "plan_repairs", interrupted)
        (finding,) = await store.health.repair()

    assert (finding.level, "stop workers" in finding.remedy) == ("error", True)
    assert first not in await take_ids(store, 1)
    assert len(await store.health.repair()) == 1
    assert first in await take_ids(store)


# ── changes of what no counter shows, while a repair reads ──────────────────────────────────────────────────────────
Step = Callable[[], Awaitable[Any]]


async def limit(store: Store, name: str, **fields: Any) -> None:
    values = fields.pop("values", LimitValues(concurrency=3))
    await store.limits.write_limit(LimitChange(Limit(name=name, values=values, **fields), 0))


async def edit_of_a_time(store: Store) -> Step:
    (job,) = await put(store, new_job(delay=HOUR))
    return lambda: store.admin.edit(job, JobChanges(delay=2 * HOUR))


async def edit_of_an_expiry(store: Store) -> Step:
    (job,) = await put(store, new_job(delay=HOUR, expires_in=HOUR))
    return lambda: store.admin.edit(job, JobChanges(expires_in=2 * HOUR))


async def edit_of_a_partition(store: Store) -> Step:
    await limit(store, "tenant", queue="default", by="args.t")
    (job,) = await put(store, new_job(payload='{"t":1}'))
    return lambda: store.admin.edit(job, JobChanges(payload='{"t":2}'))


async def edit_of_a_priority(store: Store) -> Step:
    await limit(store, "one", queue="default")
    (job,) = await put(store, new_job())
    return lambda: store.admin.edit(job, JobChanges(priority=5))


async def replacement_under_a_unique_key(store: Store) -> Step:
    policy = Unique("unstarted", by=["task", "queue"], on_conflict="replace")
    await put(store, policy.bind(new_job(delay=HOUR, expires_in=3 * HOUR)))
    return lambda: put(store, policy.bind(new_job(delay=2 * HOUR, expires_in=4 * HOUR)))


async def assignment_of_a_limit(store: Store) -> Step:
    await limit(store, "earlier", task="other")
    await put(store, new_job("other"), *[new_job(delay=HOUR if n % 2 else None) for n in range(4)])
    await take(store, 2)
    await limit(store, "one", task="work")
    return lambda: store.limits.assign_partitions(task="work")


async def limit_of_a_queue(store: Store) -> Step:
    await limit(store, "earlier", queue="mail")
    return lambda: limit(store, "one", queue="default")


async def pause_of_a_bucket(store: Store) -> Step:
    await limit(store, "one", task="work")
    pauses = iter(range(1, 10))
    return lambda: store.limits.pause_buckets(["one"], next(pauses) * HOUR)


async def use_of_tokens(store: Store) -> Step:
    await limit(store, "one", values=LimitValues(rate=1, period_us=60_000_000, burst=9))
    return lambda: store.limits.take_tokens("one", 1)


async def child_that_exists(store: Store) -> Step:
    (known,) = await put(store, new_job(key="child", queue="mail"))
    await put(store, new_job(queue="mail", after=(Dependency(known, Condition.END),)))
    parent = await running(store)
    lease = Lease(parent.id, parent.claims)
    return lambda: store.workflow.start_children(lease, [new_job(key="child", queue="mail")], WORKER)


async def member_that_exists(store: Store) -> Step:
    await put(store, new_job(key="member"), new_job())
    batch = new_job(BATCH_TASK, is_batch=True)
    await put(store, batch, new_job(options=Options(batch=batch.id)))
    return lambda: put(store, new_job(key="member", options=Options(batch=batch.id)))


CHANGES = [
    *(edit_of_a_time, edit_of_an_expiry, edit_of_a_partition, edit_of_a_priority, replacement_under_a_unique_key),
    *(assignment_of_a_limit, limit_of_a_queue, pause_of_a_bucket, use_of_tokens, child_that_exists, member_that_exists),
]


@pytest.mark.parametrize("after", ["_keys", "_jobs", "_hash", "snapshot"])
@pytest.mark.parametrize("prepare", CHANGES, ids=lambda each: each.__name__)
async def test_a_repair_leaves_alone_what_changes_meanwhile(
    store: Store,
    keys: Keys,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Store], Awaitable[Step]],
    after: str,
) -> None:
    """``after``: the change comes right after this step of the repair's reading, and before anything is written."""
    change = await prepare(store)
    read: Any = getattr(maintenance._Reading, after)

    async def read_and_change(reading: Any, *arguments: Any) -> Any:
        found = await read(reading, *arguments)
        monkeypatch.setattr(maintenance._Reading, after, read)
        before = keys.get("changes")
        clock.advance(1)
        await change()
        assert keys.get("changes") != before
        return found

    monkeypatch.setattr(maintenance._Reading, after, read_and_change)

    assert await store.health.repair() == []

    assert await store.health.repair() == []
    assert finding_named(await store.health.doctor(), "structures").level == "ok"


async def test_submissions_claims_and_ends_leave_the_key_of_other_changes_alone(store: Store, keys: Keys) -> None:
    await put(store, new_job(), new_job(delay=HOUR), new_job(after=(Dependency(*await put(store), Condition.END),)))
    for job in await take(store):
        await store.queueing.settle([ending(job)])

    assert "changes" not in keys.all()


async def test_a_repair_beside_workers_and_submitters_loses_nothing(store: Store, keys: Keys) -> None:
    """It may give up, but what it does is right."""
    stop = asyncio.Event()
    ends = 0

    async def work() -> int:
        done = 0
        while not stop.is_set():
            await put(store, *[new_job(priority=random.randint(-2, 2)) for _ in range(random.randint(1, 5))])
            jobs = await take(store, 3)
            await store.queueing.settle([ending(job) for job in jobs])
            done += len(jobs)
            await asyncio.sleep(random.uniform(0, 0.02))
        return done

    working = [asyncio.create_task(work()) for _ in range(3)]
    for _ in range(20):
        await store.health.repair()
    stop.set()
    ends = sum(await asyncio.gather(*working))

    assert await store.query.count(JobFilter(states=(JobState.SUCCEEDED,))) == ends
    await everything_agrees(store, keys)


async def test_whatever_is_spoiled_but_the_jobs_themselves_is_repaired(
    store: Store, keys: Keys, clock: ManualClock
) -> None:
    rng = random.Random(random.randrange(1 << 32))
    for _ in range(6):
        await fill(store, clock)
        ids = list(keys.jobs())
        for _ in range(25):
            spoil(keys, rng, ids)
        before = {job: fields["state"] for job, fields in keys.jobs().items()}

        await store.health.repair()

        assert {job: fields["state"] for job, fields in keys.jobs().items()} == before
        await everything_agrees(store, keys)


def spoil(keys: Keys, rng: random.Random, ids: list[str]) -> None:
    """Take something away from a structure, or put something into it that is not its own."""
    names = sorted(name for name in keys.all() if not name.startswith(("job:", "meta", "seq", "worker")))
    name, job = rng.choice([name for name in names if ":foreign:" not in name]), rng.choice([*ids, "nobody"])
    kind = keys.type(name)
    if rng.random() < 0.2:
        keys.delete(name)
    elif rng.random() < 0.1:
        keys.set(name, "not ours")
    elif kind == "list" and not name.startswith(("attempts:", "ended:")):
        rng.choice([lambda: keys.lpop(name), lambda: keys.rpush(name, job), lambda: keys.lrem(name, 1, job)])()
    elif kind == "zset" and name not in ("chunks", "queues", "due", "outlived") and not name.startswith("priorities:"):
        rng.choice([lambda: keys.zpopmin(name), lambda: keys.zadd(name, {job: rng.randrange(10**15)})])()
    elif kind == "hash" and name.startswith("index:"):
        keys.hset(name, str(int(name[6:]) * 64 + rng.randrange(64)), job)
    elif kind == "hash" and name in ("counts", "tombstones"):
        field = rng.choice(list(keys.hgetall(name)))
        keys.hset(name, field, rng.randrange(9))


async def test_two_jobs_of_one_number_get_one_each(store: Store, keys: Keys) -> None:
    first, second = await put(store, new_job(), new_job())
    keys.hset(f"job:{second}", "seq", keys.hget(f"job:{first}", "seq"))

    await store.health.repair()
    (third,) = await put(store)

    assert next(job.id for job in (await store.query.find(JobFilter())).jobs) == third
    assert len((await store.query.find(JobFilter())).jobs) == 3
    await everything_agrees(store, keys)
    assert not (await store.queueing.settle([ending(Lease("nobody", 1))]))[0].accepted
