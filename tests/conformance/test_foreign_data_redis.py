"""Data that other programs push into Redis: ids that are no UUIDs, bytes that are no text, unknown words. Reading
survives all of it, and our own jobs are not held up."""

from __future__ import annotations

import shlex
from datetime import timedelta

import pytest

from holdfast.core.errors import ConfigError
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState
from holdfast.stores import open_store
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import (
    ended,
    ending,
    failing,
    heartbeat,
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
from tests.support.keys import Keys

LATER = timedelta(hours=1)
STRANGE = ("invoice-7", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "ü b\n:*{}", b"\xff\xfe\x00", "", "x" * 5000)


def raw(keys: Keys, command: str, name: str, *words: str | bytes | int) -> None:
    """A command with words of any bytes."""
    keys.client.execute_command(command, keys.prefix + name, *words)


def write(keys: Keys, job: str | bytes, *fields: str | bytes) -> None:
    """The hash of a job written by hand."""
    name = f"{keys.prefix}job:".encode() + (job if isinstance(job, bytes) else job.encode())
    keys.client.execute_command("HSET", name, *(fields or ("payload", "{}", "task", "work")))


async def read_everything(store: Store) -> None:
    """Every verb that looks at what is there."""
    await store.query.find(JobFilter(), limit=100)
    for state in JobState:
        await store.query.find(JobFilter(states=(state,)), limit=100)
        await store.query.count(JobFilter(states=(state,), tasks=("work",)))
    await queues(store)
    await store.query.stats(recent=LATER, max_count=100)
    await store.query.workers()
    await store.maintenance.find_expired_leases(limit=100)
    await store.health.doctor()
    await store.maintenance.promote_due(limit=100)
    await store.queueing.heartbeat(heartbeat(), [], lease_for=LATER)
    await store.maintenance.prune({"succeeded": LATER, "dead": LATER, "cancelled": LATER}, limit=100)
    for verb in (store.admin.cancel, store.admin.replay, store.admin.delete):
        await verb(JobFilter(tag="none"), limit=10)


async def test_non_uuid_id_is_handled_everywhere_and_blocks_no_job(store: Store, keys: Keys) -> None:
    for job in STRANGE:
        write(keys, job)
        raw(keys, "RPUSH", "ready", job)
    (ours,) = await put(store)
    await read_everything(store)

    taken = await take(store, 10)
    await read_everything(store)
    for each in taken:
        await settle(store, each)
    await read_everything(store)

    assert ours in [each.id for each in taken]
    assert await state_of(store, ours) is JobState.SUCCEEDED
    assert await store.query.count(JobFilter()) == len(STRANGE) + 1
    await store.health.repair()
    await read_everything(store)


async def test_field_called_partition_in_a_hash_written_by_hand_limits_nothing(store: Store, keys: Keys) -> None:
    write(keys, "by-hand", "payload", "{}", "task", "work", "partition", "5")
    raw(keys, "RPUSH", "ready", "by-hand")

    assert await take_ids(store) == ["by-hand"]


async def test_unknown_id_is_dropped_wherever_it_is_listed(store: Store, keys: Keys) -> None:
    await store.queueing.settle([failing(await running(store))])
    for job in STRANGE:
        for name in ("ready", "ready@5", "ended:succeeded"):
            raw(keys, "RPUSH", name, job)
        for name in ("schedule", "leases", "quarantine:default", "ended:dead", "ended:cancelled"):
            raw(keys, "ZADD", name, 1, job)
        raw(keys, "ZADD", "priorities:default", 0, 5)
        raw(keys, "HSET", "index:0", 40 + STRANGE.index(job), job)
        raw(keys, "HSET", "keys", job, job)
    (ours,) = await put(store)

    await read_everything(store)

    assert ours in await take_ids(store, 10, {EVERY_QUEUE: 10})
    assert await take(store, 1, isolated=True) == []
    await read_everything(store)
    await store.health.repair()
    assert list(keys.strays()) == []


FIELDS = (
    ("state", "elsewhere"),
    ("state", b"\xff"),
    ("spec", "nonsense"),
    ("spec", b"0 5 \xff\nwork"),
    ("dueTime", "soon"),
    ("claims", "many"),
    ("attempts", "few"),
    ("lost_leases", "-1"),
    ("seq", "first"),
    ("worker", b"\xff"),
    ("payload", b"\xff"),
    ("options", "[[["),
    ("endTime", "never"),
    ("reason", b"\xff"),
    ("error", b"\xff"),
)


@pytest.mark.parametrize("state", ["queued", "running", "succeeded", "dead"])
async def test_job_with_a_malformed_field_blocks_no_other_job(store: Store, keys: Keys, state: str) -> None:
    for fields in FIELDS:
        job_id = await _standing(store, state)
        write(keys, job_id, *fields)
        (ours,) = await put(store)

        await read_everything(store)
        await store.query.get(job_id)
        await store.query.attempts(job_id)

        assert ours in [job.id for job in await take(store, 10)], fields
        await store.admin.cancel([job_id])
        await store.admin.replay([job_id], force=True)
        await store.admin.delete([job_id])
        assert (await stored(store, ours)).state is JobState.RUNNING
    await store.health.repair()
    await read_everything(store)


async def _standing(store: Store, state: str) -> str:
    """A job in this state."""
    if state == "queued":
        return (await put(store))[0]
    return (await running(store)).id if state == "running" else await ended(store, JobState(state))


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("HSET", "counts", ("elsewhere:default", "7")),
        ("HSET", "counts", ("queued:default", "many")),
        ("HSET", "counts", (b"queued:\xff", "1")),
        ("HSET", "counts", ("nonsense", "1")),
        ("SADD", "paused", (b"\xff",)),
        ("ZADD", "queues", (0, b"\xff")),
        ("ZADD", "due", (0, b"\xff")),
        ("ZADD", "priorities:default", (0, "high")),
        ("ZADD", "chunks", (1, "nonsense")),
        ("HSET", "index:0", ("nonsense", "x")),
        ("HSET", "keys", ("key", b"\xff")),
        ("SET", "seq", ("many",)),
        ("HSET", "tombstones", ("nobody", "many")),
    ],
    ids=repr,
)
async def test_malformed_entry_blocks_no_other_job(
    store: Store, keys: Keys, command: str, name: str, words: tuple[str | bytes | int, ...]
) -> None:
    first, *_ = await put(store, new_job(), new_job(key="other"))
    raw(keys, command, name, *words)

    await read_everything(store)
    await store.query.by_key("key")

    assert first in await take_ids(store, 1, {EVERY_QUEUE: 1})
    await store.health.repair()
    await read_everything(store)
    assert len(await take(store, 10, {EVERY_QUEUE: 10})) == 1


async def test_running_job_whose_description_was_spoiled_ends_with_the_others(store: Store, keys: Keys) -> None:
    jobs = [await running(store) for _ in range(2)]
    keys.hset(f"job:{jobs[0].id}", "spec", "nonsense")

    answers = await store.queueing.settle([ending(job) for job in jobs])

    assert [answer.accepted for answer in answers] == [True, True]
    assert [await state_of(store, job.id) for job in jobs[1:]] == [JobState.SUCCEEDED]
    assert keys.hget(f"job:{jobs[0].id}", "state") == "succeeded"


async def test_malformed_attempt_and_worker_records_are_tolerated(store: Store, keys: Keys) -> None:
    job = await running(store)
    await store.queueing.settle([ending(job, JobState.DEAD, error="boom")])
    raw(keys, "RPUSH", f"attempts:{job.id}", b"\xff\xff", b"\x93\x01\x02\x03", "x")
    raw(keys, "ZADD", "workers", 1, "stranger")
    raw(keys, "HSET", "worker:stranger", "seen", "yesterday")
    await store.queueing.heartbeat(heartbeat(), [], lease_for=LATER)

    assert [each.error for each in await store.query.attempts(job.id)] == ["boom"]
    assert [info.heartbeat.worker for info in await store.query.workers()] == [heartbeat().worker]
    await store.queueing.deregister("stranger")


async def test_doctor_reports_ids_in_a_ready_list_without_queue_name(store: Store, keys: Keys) -> None:
    ids = [new_id(), new_id()]
    for job in ids:
        write(keys, job)
        raw(keys, "RPUSH", "ready:", job)

    [finding] = [each for each in await store.health.doctor() if each.name == "queue names"]

    assert (finding.level, finding.text.partition(",")[0]) == ("error", f"2 ids wait in {keys.prefix}ready:")
    program, repeat, times, *command = shlex.split(finding.remedy.partition(": ")[2])
    assert (program, repeat) == ("redis-cli", "-r")
    for _ in range(int(times)):
        keys.client.execute_command(*command)
    assert await take_ids(store) == ids
    assert [each.level for each in await store.health.doctor() if each.name == "queue names"] == ["ok"]


# ── one job with the fewest commands ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["queues", "chunks", "index:0", "counts", "priorities:mail", "ready@5:mail", "seq"])
async def test_one_submission_moves_a_key_of_another_type_away_and_stores_once(
    store: Store, keys: Keys, name: str
) -> None:
    if name == "seq":
        keys.rpush(name, "not ours")
    else:
        keys.set(name, "not ours")

    (job_id,) = await put(store, new_job(queue="mail", priority=5, payload="x" * 300))

    assert len([each for each in keys.all() if each.startswith(f"{name}:foreign:")]) == 1
    assert keys.lrange("ready@5:mail", 0, -1) == [job_id]
    assert (keys.hgetall("counts"), keys.hgetall("index:0")) == ({"queued:mail": "1"}, {"1": job_id})
    assert (await stored(store, job_id)).payload == "x" * 300
    assert [job.id for job in await take(store, 10, {"mail": 10})] == [job_id]


@pytest.mark.parametrize(("name", "value"), [("counts", "many"), ("seq", "many")])
async def test_one_submission_replaces_a_number_that_is_none(store: Store, keys: Keys, name: str, value: str) -> None:
    if name == "seq":
        keys.set(name, value)
    else:
        keys.hset(name, "queued:default", value)

    (job_id,) = await put(store, new_job())

    assert (keys.get("seq"), keys.hgetall("counts")) == ("1", {"queued:default": "1"})
    assert keys.lrange("ready", 0, -1) == [job_id]


async def test_a_known_id_is_stored_once(store: Store, keys: Keys) -> None:
    job = new_job()

    assert [(await store.queueing.submit([job]))[0].created for _ in range(2)] == [True, False]
    assert (keys.lrange("ready", 0, -1), keys.get("seq"), keys.hgetall("counts")) == (
        [job.id],
        "1",
        {"queued:default": "1"},
    )


@pytest.mark.parametrize("name", ["ready", "schedule", "steps", "job", "job:other", "ready%405"])
def test_prefix_under_a_key_of_another_store_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="url: prefix="):
        open_store(f"redis://localhost/0?prefix=app:{name}:")


@pytest.mark.parametrize("prefix", ["app:", "ready:", "job", "app:billing:", "app:ready-made:"])
def test_prefix_beside_those_of_other_stores_is_accepted(prefix: str) -> None:
    assert "prefix=" in open_store(f"redis://localhost/0?prefix={prefix}").url
