"""What Redis holds, for those who look with redis-cli: seed 001's structures, other people's hands, little memory."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from importlib.resources import files

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import ConfigError
from holdfast.core.ids import new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import JobFilter, JobState, Lease, Options
from holdfast.core.workers import WorkerCommand
from holdfast.stores import open_store
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import (
    LEASE,
    Opener,
    claim,
    ended,
    ending,
    failing,
    lose,
    new_job,
    put,
    queues,
    running,
    settle,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)
from tests.support.keys import Keys

HOUR = timedelta(hours=1)
LETTERS = {"prefix": "delayed-queue:", "schedule": "jobs", "ready": "dueJobs", "leases": "unackedJobs", "job": "job:"}
"""The names of seed 001."""


# ── the structures ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_job_moves_from_schedule_to_ready_to_leases(store: Store, keys: Keys, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(delay=HOUR, payload='{"n":1}'))
    due = clock() + 3_600_000_000
    assert keys.zrange("schedule", 0, -1, withscores=True) == [(job_id, due)]
    assert (keys.type("schedule"), keys.exists("ready"), keys.exists("leases")) == ("zset", 0, 0)
    assert (keys.hget(f"job:{job_id}", "payload"), keys.hget(f"job:{job_id}", "dueTime")) == ('{"n":1}', str(due))

    clock.advance(3600)
    assert await store.maintenance.promote_due(limit=10) == 1
    assert (keys.exists("schedule"), keys.type("ready"), keys.lrange("ready", 0, -1)) == (0, "list", [job_id])

    (job,) = await take(store)
    assert (keys.exists("ready"), keys.zrange("leases", 0, -1)) == (0, [job_id])
    assert keys.zscore("leases", job_id) == clock() + LEASE // timedelta(microseconds=1)
    assert keys.hget(f"job:{job_id}", "pickupTime") == str(clock())

    await settle(store, job)
    assert keys.exists("leases") == 0
    assert {"schedule", "ready", "leases"}.isdisjoint(keys.all())


async def test_names_of_keys_can_be_chosen(home: str, keys: Keys, clock: ManualClock) -> None:
    prefix = keys.prefix + LETTERS["prefix"]
    address = (
        home.partition("?")[0] + "?" + "&".join(f"{name}={word}" for name, word in LETTERS.items() if name != "prefix")
    )
    store = open_store(f"{address}&prefix={prefix.replace('{', '%7B').replace('}', '%7D')}", now=clock)
    await store.open()
    later, now = await put(store, new_job(delay=HOUR), new_job())

    assert keys.zrange("delayed-queue:jobs", 0, -1) == [later]
    assert keys.lrange("delayed-queue:dueJobs", 0, -1) == [now]
    assert {name for name in keys.all() if "job:" in name} == {f"delayed-queue:job:{each}" for each in (later, now)}
    await take(store)
    assert keys.zrange("delayed-queue:unackedJobs", 0, -1) == [now]
    assert all(name.startswith("delayed-queue:") for name in keys.all())
    await store.close()


@pytest.mark.parametrize(
    "query",
    [
        "namespace=",
        "namespace=a{b",
        "prefix=",
        "ready=schedule",
        "ready=counts",
        "job=a:b",
        "job=ready",
        "durability=much",
        "payload=half",
        "password=x",
    ],
)
def test_names_that_would_clash_are_refused(query: str) -> None:
    with pytest.raises(ConfigError, match="url: "):
        open_store(f"redis://localhost/0?{query}")


@pytest.mark.parametrize("parameter", ["schedule", "ready", "leases", "job"])
def test_no_key_can_have_the_name_of_another_that_a_script_has(parameter: str) -> None:
    scripts = (files("holdfast.stores.redis") / "scripts").iterdir()
    quoted = {name for script in scripts for name in re.findall(r"PREFIX \.\. '(\w+)", script.read_text("utf-8"))}
    assert {"meta", "expiry", "failures", "unstarted", "done", "worker"} <= quoted
    for name in quoted:
        with pytest.raises(ConfigError, match=f"url: {parameter}='{name}' is not valid"):
            open_store(f"redis://localhost/0?{parameter}={name}")


async def test_each_queue_and_priority_has_a_list_of_its_own(store: Store, keys: Keys) -> None:
    ids = await put(store, new_job(), new_job(priority=5), new_job(queue="mail"), new_job(queue="mail", priority=-3))

    lists = {name: keys.lrange(name, 0, -1) for name in keys.all() if name.startswith("ready")}

    assert lists == {"ready": [ids[0]], "ready@5": [ids[1]], "ready:mail": [ids[2]], "ready@-3:mail": [ids[3]]}


async def test_a_lost_job_is_back_in_the_ready_list_once(store: Store, keys: Keys, clock: ManualClock) -> None:
    (job_id,) = await put(store)
    (job,) = await take(store)
    await put(store)
    await lose(store, clock, job)

    assert keys.lrange("ready", 0, -1)[0] == job_id
    assert len(await take_ids(store, max_must_start=5)) == 2
    assert await take_ids(store, max_must_start=5) == []


async def test_everything_goes_when_all_jobs_are_deleted_or_pruned(
    store: Store, keys: Keys, clock: ManualClock
) -> None:
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED):
        await ended(store, state, key=f"{state}", options=Options(tags=("t",)), priority=3, queue="mail")
    await put(store, new_job(), new_job(delay=HOUR), new_job(priority=-4))
    await store.admin.cancel(JobFilter(states=(JobState.FAILED,)))
    clock.advance(1)
    await store.maintenance.prune({state.value: timedelta(0) for state in JobState}, limit=100)
    await store.admin.delete(JobFilter())
    assert await take(store, capacity={EVERY_QUEUE: 10}) == []

    left = keys.all()
    answered = {name for name in left if name.startswith("done:")}  # answers of operations, for a minute
    assert left - answered == {"meta", "seq", "changes", "failures"}
    assert 0 < keys.ttl("failures") <= 3600
    assert all(0 < keys.ttl(name) <= 60 for name in answered)


async def test_counts_and_every_structure_stay_true(store: Store, keys: Keys) -> None:
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED):
        await ended(store, state, queue="b")
    await running(store)
    await put(store, new_job(), new_job(delay=HOUR))

    assert list(keys.strays()) == []
    assert len(keys.hgetall("counts")) == 7


# ── hands that are not ours ───────────────────────────────────────────────────────────────────────────────────────


async def test_an_id_pushed_by_hand_with_its_hash_runs(home: str, keys: Keys, clock: ManualClock) -> None:
    store = open_store(home + "&task=callback", now=clock)
    await store.open()
    keys.hset("job:01ARZ3NDEKTSV4RRFFQ69G5FAV", mapping={"payload": '{"n":1}', "dueTime": "1700000000000"})
    keys.rpush("ready", "01ARZ3NDEKTSV4RRFFQ69G5FAV")

    (job,) = await take(store)

    assert (job.id, job.task, job.payload, job.queue) == (
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "callback",
        '{"n":1}',
        "default",
    )
    assert (await settle(store, job)).accepted
    assert (await store.query.find(JobFilter())).jobs == [await stored(store, job.id)]
    assert [info.states for info in await queues(store)] == [{"succeeded": 1}]
    await store.close()


async def test_a_hash_that_names_its_task_needs_no_setting(store: Store, keys: Keys) -> None:
    keys.hset("job:by-hand", mapping={"payload": "{}", "task": "work"})
    keys.lpush("ready", "by-hand")

    assert [job.task for job in await take(store, capacity={EVERY_QUEUE: 5})] == ["work"]


async def test_scheduled_job_moved_to_the_ready_list_by_hand_runs(store: Store, keys: Keys) -> None:
    (job_id,) = await put(store, new_job(delay=HOUR))
    keys.zrem("schedule", job_id)
    keys.rpush("ready", job_id)

    assert await take_ids(store) == [job_id]


async def test_job_that_waits_for_its_retry_is_moved_to_the_ready_list_by_hand(store: Store, keys: Keys) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, delay=HOUR)])
    keys.zrem("schedule", job.id)
    keys.rpush("ready", job.id)

    assert await take_ids(store) == [job.id]


async def test_scheduled_job_copied_to_the_ready_list_starts_on_time(store: Store, keys: Keys) -> None:
    (job_id,) = await put(store, new_job(delay=HOUR))
    keys.rpush("ready", job_id)

    assert await take_ids(store) == []
    assert await state_of(store, job_id) is JobState.SCHEDULED


async def test_id_pushed_by_hand_keeps_its_place_during_promotion(store: Store, keys: Keys, clock: ManualClock) -> None:
    (due,) = await put(store, new_job(delay=timedelta(seconds=1)))
    (first,) = await put(store)
    clock.advance(2)
    keys.hset("job:by-hand", mapping={"payload": "{}", "task": "work"})
    keys.rpush("ready", "by-hand")
    assert await store.maintenance.promote_due(limit=10) == 1

    assert set(await take_ids(store)) == {first, due, "by-hand"}


async def test_id_pushed_by_hand_wakes_waiters(store: Store, keys: Keys) -> None:
    await store.queueing.wait(["queue:default"], timeout=0.05)
    waiting = asyncio.create_task(store.queueing.wait(["queue:default"], timeout=50))
    while not any(each["cmd"] == "blmove" for each in keys.client.client_list()):  # noqa: ASYNC110 - the server's
        await asyncio.sleep(0.01)
    keys.hset("job:by-hand", mapping={"payload": "{}", "task": "work"})
    keys.rpush("ready", "by-hand")

    await asyncio.wait_for(waiting, timeout=60)

    assert keys.lrange("ready", 0, -1) == ["by-hand"]


@pytest.mark.parametrize("place", ["ready", "schedule", "leases"])
async def test_ids_without_a_job_are_dropped_and_reported(store: Store, keys: Keys, place: str) -> None:
    ids = [f"nobody-{n}" for n in range(500)]
    if place == "ready":
        keys.lpush("ready", *ids)
    else:
        keys.zadd(place, dict.fromkeys(ids, 1))
    (job_id,) = await put(store)

    assert await take_ids(store, 1) == [job_id]
    while place == "leases" and keys.exists("leases") and keys.zcard("leases") > 1:
        assert await store.maintenance.find_expired_leases(limit=100) == []
    while await take_ids(store):
        pass
    (finding,) = [each for each in await store.health.doctor() if each.name == "keys"]
    assert (finding.level, "500 ids" in finding.text) == ("warning", True)


async def test_job_without_its_hash_affects_no_other_job(store: Store, keys: Keys, clock: ManualClock) -> None:
    gone, job_id = await put(store, new_job(), new_job())
    delayed, other = await put(store, new_job(delay=HOUR), new_job(delay=HOUR))
    lost = await running(store)
    for each in (gone, delayed, lost.id):
        keys.delete(f"job:{each}")
    clock.advance(3600)

    assert await store.maintenance.find_expired_leases(limit=10) == []
    assert await take_ids(store) == [job_id, other]
    assert not (await settle(store, lost)).accepted
    assert len((await store.query.find(JobFilter())).jobs) == 2


@pytest.mark.parametrize(
    "name",
    [
        *("ready", "schedule", "leases", "counts", "chunks", "queues", "due", "tombstones", "keys", "paused"),
        *("index:0", "priorities:default", "quarantine:default", "workers", "outlived"),
        *("ended:succeeded", "ended:dead", "seq", "changes"),
    ],
)
async def test_a_key_of_another_type_is_moved_away_and_reported(store: Store, keys: Keys, name: str) -> None:
    if name in ("seq", "changes"):
        keys.rpush(name, "not ours")
    else:
        keys.set(name, "not ours")

    one, other = await put(store, new_job(key="k"), new_job(priority=2))
    later = await put(store, new_job(delay=HOUR))
    jobs = await take(store)
    assert [job.id for job in jobs] == [other, one]
    await settle(store, jobs[0])
    await settle(store, jobs[1], JobState.DEAD, error="boom", reason=None)
    await store.admin.edit(later[0], JobChanges(delay=2 * HOUR))
    await store.admin.cancel(later)
    await store.maintenance.find_expired_leases(limit=10)
    await store.maintenance.prune({}, limit=10)
    await store.admin.send_command(WorkerCommand.STOP)
    await store.admin.pause("other")

    assert await states_of(store, [one, other, *later]) == [JobState.DEAD, JobState.SUCCEEDED, JobState.CANCELLED]
    moved = [each for each in keys.all() if each.startswith(f"{name}:foreign:")]
    assert len(moved) == 1
    (finding,) = [each for each in await store.health.doctor() if each.name == "keys"]
    assert "1 keys of another type" in finding.text


async def test_unreadable_job_is_dead_and_does_not_block_its_queue(store: Store, keys: Keys) -> None:
    spoiled, job_id = await put(store, new_job(options=Options(timeout=1.0)), new_job())
    keys.hset(f"job:{spoiled}", "options", "no json")

    assert await take_ids(store) == [job_id]
    kept = await stored(store, spoiled)
    assert (kept.state, kept.reason) == (JobState.DEAD, "payload")


# ── order, far and near ───────────────────────────────────────────────────────────────────────────────────────────


async def test_what_falls_due_late_goes_before_all_that_came_since(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job() for _ in range(30)])
    clock.advance(1)
    (due,) = await put(store, new_job(delay=timedelta(seconds=1)))
    clock.advance(2)
    since = await put(store, *[new_job() for _ in range(500)])

    assert await take_ids(store, 1000) == [*ids, due, *since]


async def test_released_jobs_go_back_where_they_were(store: Store, clock: ManualClock) -> None:
    ids = []
    for _ in range(60):
        ids += await put(store, *[new_job() for _ in range(10)])
        clock.advance(0.001)
    jobs = await take(store, 400)
    for first in (200, 0):  # two workers stop, the later one first
        batch = [ending(job, JobState.QUEUED, refund=True) for job in jobs[first : first + 200][::-1]]
        assert all(answer.accepted for answer in await store.queueing.settle(batch))

    assert await take_ids(store, 1000) == ids


async def test_tombstones_of_cancelled_jobs_keep_the_claim_order(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job() for _ in range(10)])
    await store.admin.cancel(ids[:5])
    clock.advance(1)
    (behind,) = await put(store)
    clock.advance(1)
    await store.admin.replay(ids[:2])
    await store.admin.delete(ids[2:3])
    await store.queueing.submit([new_job(id=ids[2])])

    assert await take_ids(store) == [*ids[5:], behind, *ids[:3]]


async def test_tombstone_applies_only_to_its_own_list(store: Store, keys: Keys) -> None:
    """An id that was deleted may come again, in another queue or with another priority."""
    again, urgent, ahead = await put(store, new_job(), new_job(), new_job())
    await store.admin.delete([again, urgent])
    await put(store, new_job(id=again, queue="mail"), new_job(id=urgent, priority=5))
    assert list(keys.strays()) == []
    assert await store.health.repair() == []

    assert await take_ids(store, 5, {"mail": 5}) == [again]
    assert await take_ids(store, 5) == [urgent, ahead]
    assert list(keys.strays()) == []
    assert not keys.exists("tombstones")


@pytest.mark.parametrize("waiting", [1, 3000])
async def test_tombstone_at_the_head_keeps_order_after_replay(store: Store, clock: ManualClock, waiting: int) -> None:
    gone, first, *_ = await put(store, new_job(), *[new_job() for _ in range(waiting)])
    assert await take_ids(store, ids=[gone]) == [gone]
    (late,) = await put(store, new_job(delay=timedelta(seconds=1)))
    clock.advance(0.5)
    (before,) = await put(store)
    clock.advance(1)
    await store.queueing.settle([ending(Lease(gone, 1), JobState.DEAD, error="boom")])
    await store.admin.replay([gone])

    assert await take_ids(store, 1) == [first]
    taken = await take_ids(store, 2 * waiting + 10)
    assert taken[-3:] == [before, late, gone]


async def test_job_replayed_before_its_first_claim_counts_attempts(store: Store) -> None:
    (job_id,) = await put(store)
    await store.admin.cancel([job_id])
    await store.admin.replay([job_id])

    (job,) = await take(store)

    assert (job.claims, job.attempts) == (1, 1)
    assert (await stored(store, job_id)).attempts == 1


async def test_one_claim_skips_a_thousand_tombstones(store: Store) -> None:
    ids = await put(store, *[new_job() for _ in range(1500)])
    while (await store.admin.cancel(JobFilter(), limit=1000)).more:
        pass
    (job_id,) = await put(store)

    assert await take_ids(store, 1) == [job_id]
    assert len(ids) == 1500


# ── size ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 511, 512, 513, 5000])
async def test_texts_of_any_length_survive_being_taken_apart(store: Store, length: int) -> None:
    text = '"' + "ä" * ((length - 2) // 2) + "x" * (length % 2) + '"'
    job = await running(store, payload=text)
    assert job.payload == text
    await store.queueing.settle([failing(job, error=text)])
    assert (await stored(store, job.id)).error == text
    (job,) = await take(store)
    await settle(store, job, result=text)

    kept = await stored(store, job.id)

    assert (kept.payload, kept.result, kept.error) == (text, text, None)


async def test_a_hash_stays_small_with_a_payload_of_100_bytes(store: Store, keys: Keys) -> None:
    job = await running(store, payload='"' + "x" * 98 + '"')
    await settle(store, job, result='"' + "y" * 98 + '"')

    assert keys.client.object("encoding", f"{keys.prefix}job:{job.id}") in ("ziplist", "listpack")


async def test_payloads_can_be_kept_whole(home: str, keys: Keys, clock: ManualClock) -> None:
    store = open_store(home + "&payload=whole", now=clock)
    await store.open()
    payload = '{"text":"' + "x" * 300 + '"}'
    (job_id,) = await put(store, new_job(payload=payload))

    assert keys.hget(f"job:{job_id}", "payload") == payload
    assert [job.payload for job in await take(store)] == [payload]
    await store.close()


async def test_job_costs_at_most_650_bytes_and_frees_them(store: Store, keys: Keys, clock: ManualClock) -> None:
    def used() -> int:
        return sum(keys.client.memory_usage(keys.prefix + name, samples=0) or 0 for name in keys.all())

    empty = used()
    await put(store, *[new_job(payload='"' + "x" * 98 + '"') for _ in range(1000)])
    waiting = (used() - empty) / 1000
    for _ in range(2):
        jobs = await take(store, 500)
        await store.queueing.settle([ending(job, result='"ok"') for job in jobs])
    finished = (used() - empty) / 1000
    clock.advance(1)
    assert [await store.maintenance.prune({"succeeded": timedelta(0)}, limit=1000) for _ in range(2)] == [1000, 0]

    assert waiting <= 650
    assert finished <= 650
    assert used() <= empty + 1000


# ── many of them ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_is_stored_in_order_in_pieces(store: Store, opener: Opener, keys: Keys) -> None:
    batches = [[new_job() for _ in range(450)] for _ in range(3)]
    stores = [store, await opener(), await opener()]

    await asyncio.gather(*[each.queueing.submit(batch) for each, batch in zip(stores, batches, strict=True)])

    ready = keys.lrange("ready", 0, -1)
    for batch in batches:
        ids = [job.id for job in batch]
        assert [each for each in ready if each in set(ids)] == ids


async def test_due_jobs_by_the_thousand_are_claimed_in_order(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job(delay=timedelta(milliseconds=n)) for n in range(1, 2001)])
    clock.advance(60)

    taken = []
    while jobs := await take_ids(store, 500):
        taken += jobs

    assert taken == ids


async def test_empty_queues_do_not_slow_down_claims(store: Store, keys: Keys) -> None:
    await put(store, *[new_job(queue=f"q{n}") for n in range(300)])
    taken = []
    while jobs := await take(store, 200, {EVERY_QUEUE: 5}):
        taken += jobs

    assert len(taken) == 300
    assert "queues" not in keys.all()
    assert (await claim(store, capacity={EVERY_QUEUE: 5})).next_due is None
    assert await state_of(store, new_id()) is None
