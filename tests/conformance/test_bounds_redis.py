"""Bounds of the work of one script, for which all other clients wait, and writes that a script leaves out."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState
from holdfast.stores.base import Store
from tests.conformance.limited import job_of, limit
from tests.conformance.support import (
    EventReader,
    ended,
    ending,
    failing,
    lose_all,
    new_job,
    put,
    running,
    take,
    take_ids,
)
from tests.support.keys import Keys

SECOND = timedelta(seconds=1)


async def test_making_ready_in_many_queues_reads_few_other_jobs(store: Store, home: str, clock: ManualClock) -> None:
    """Each of them belongs in the middle of a list of its own."""
    queues = [f"q{n}" for n in range(20)]
    early = await put(store, *[new_job(queue=queue) for queue in queues])
    due = await put(store, *[new_job(queue=queue, delay=SECOND) for queue in queues])
    clock.advance(2)
    late = await put(store, *[new_job(queue=queue) for queue in queues for _ in range(200)])
    keys = Keys(home)
    keys.client.config_resetstat()

    assert await store.maintenance.promote_due(limit=100) == 20

    looked = keys.client.info("commandstats")["cmdstat_hmget"]["calls"]
    keys.client.close()
    assert looked < 2200
    claimed = [await take_ids(store, 500, {queue: 500}) for queue in queues]
    assert sorted(job for ids in claimed for job in ids) == sorted(early + due + late)
    exact = [ids[:2] == [early[n], due[n]] for n, ids in enumerate(claimed)]
    assert sum(exact) >= 9, "as many as can be put in their places for that"


async def test_page_of_dead_letters_reads_only_its_own_payloads(store: Store, home: str) -> None:
    dead = [await ended(store, JobState.DEAD, payload=f'{{"n":{n}}}') for n in range(30)]
    keys = Keys(home)
    keys.client.config_resetstat()

    page = await store.query.find(JobFilter(states=(JobState.DEAD,), queue="default"), limit=2)

    read = keys.client.info("commandstats")["cmdstat_hgetall"]["calls"]
    keys.client.close()
    assert [(job.id, job.payload) for job in page.jobs] == [(dead[29], '{"n":29}'), (dead[28], '{"n":28}')]
    rest = await store.query.find(JobFilter(states=(JobState.DEAD,)), cursor=page.cursor)
    assert [job.id for job in rest.jobs] == dead[27::-1]
    assert read < 10


async def test_new_attempt_event_reads_no_earlier_attempts(store: Store, home: str, clock: ManualClock) -> None:
    job = await running(store, max_attempts=None)
    keys = Keys(home)
    keys.client.rpush(f"{keys.prefix}attempts:{job.id}", *["record"] * 100_000)
    event_reader = EventReader(store)
    await event_reader.begin()
    begun = event_reader.cursor
    clock.advance(1)
    await store.queueing.settle([failing(job)])

    took = []
    for _ in range(5):
        keys.client.config_resetstat()
        event_reader.cursor = begun
        assert [each.job_id for each in await event_reader.new_events()] == [job.id]
        took.append(keys.client.info("commandstats")["cmdstat_lrange"]["usec_per_call"])

    keys.client.close()
    assert min(took) < 500, "microseconds, where reading all takes thousands"


async def test_empty_pruning_and_known_keys_note_no_change(store: Store, keys: Keys, clock: ManualClock) -> None:
    """A full server still answers them, and a repair that is under way need not begin again."""
    await put(store, new_job(key="welcome"))
    noted = keys.get("changes")
    clock.advance(60)
    (again,) = await store.queueing.submit([new_job(key="welcome")])
    assert not again.created
    assert await store.maintenance.prune({"succeeded": timedelta(0)}, limit=100) == 0
    assert keys.get("changes") == noted


async def test_keys_of_pruned_jobs_are_freed_in_the_same_call(store: Store, keys: Keys, clock: ManualClock) -> None:
    await put(store, *[new_job(key=f"order-{number}") for number in range(300)])
    await store.queueing.settle([ending(job) for job in await take(store, 300)])
    clock.advance(60)
    assert await store.maintenance.prune({"succeeded": timedelta(seconds=1)}, limit=500) == 300
    assert {"keys", "outlived"}.isdisjoint(keys.all())


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.DEAD])
async def test_pruning_looks_at_few_waiters_in_each_script(
    store: Store, keys: Keys, clock: ManualClock, state: JobState
) -> None:
    for _ in range(12):
        job_id = await ended(store, state)
        keys.hset(f"job:{job_id}", "hasDependents", "1")
        keys.zadd(f"dependents:{job_id}", {f"gone-{number}": 0 for number in range(900)})
    clock.advance(60)
    keys.client.config_resetstat()

    assert await store.maintenance.prune({state: SECOND}, limit=100) == 12

    assert keys.client.info("commandstats")["cmdstat_evalsha"]["calls"] > 7, "scripts that look at 1,000 or few more"


async def test_deleted_job_leaves_no_expiry(store: Store, keys: Keys) -> None:
    ids = await put(store, *[new_job(expires_in=timedelta(days=365)) for _ in range(2)])
    assert len((await store.admin.delete(ids[:1])).changed) == 1
    assert keys.zrange("expiry", 0, -1) == ids[1:]


async def test_doctor_reads_no_long_hash_of_tombstones(store: Store, keys: Keys) -> None:
    async def hashes_read(number: int) -> int:
        keys.hset("tombstones", mapping=dict.fromkeys(range(number), 1))
        keys.client.config_resetstat()
        await store.health.doctor()
        return int(keys.client.info("commandstats")["cmdstat_hvals"]["calls"])

    assert [await hashes_read(number) for number in (10_000, 10_001)] == [2, 1]


async def test_isolated_claim_looks_at_a_bounded_number_of_jobs(store: Store, keys: Keys, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=9)
    await put(store, job_of(1))
    for _ in range(2):
        assert len(await take(store)) == 1
        await lose_all(store, clock)
    await store.limits.pause_buckets(["mail=1"], timedelta(hours=1))
    keys.zadd("quarantine:default", {f"gone-{number}": clock() for number in range(20_000)})
    keys.client.config_resetstat()

    assert await take(store, 1, isolated=True) == []

    assert keys.client.info("commandstats")["cmdstat_hmget"]["calls"] < 25_000


async def test_new_connection_that_finds_no_loss_writes_nothing(store: Store, keys: Keys) -> None:
    (job_id,) = await put(store)
    before = keys.hgetall("meta")
    keys.client.client_kill_filter(_type="normal", skipme=True)
    keys.client.config_resetstat()
    await store.query.get(job_id)
    assert keys.client.info("commandstats")["cmdstat_eval"]["calls"] > 0
    assert keys.hgetall("meta") == before
