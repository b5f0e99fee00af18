"""Batches in Redis: their keys, their repair, and submissions of several parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from redis.exceptions import ResponseError

from holdfast.core.batches import BATCH_TASK
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import ConfigError, Conflict, Invalid, Unavailable
from holdfast.core.ids import as_ulid, new_id
from holdfast.core.models import JobFilter, JobState, NewJob, Options, Reason
from holdfast.stores.base import Store
from holdfast.stores.connections.redis import RedisConnection, Script
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.claiming import MAX_PER_SCRIPT
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.queueing import RedisQueueing
from holdfast.stores.redis.submission import encode_stages, find_related
from tests.conformance.support import (
    Opener,
    everything_agrees,
    new_job,
    put,
    settle,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)
from tests.support.keys import Keys

DEAD, SUCCEEDED, WAITING = JobState.DEAD, JobState.SUCCEEDED, JobState.WAITING


def new_batch() -> NewJob:
    return new_job(BATCH_TASK, is_batch=True)


def member(batch: str) -> NewJob:
    return new_job(options=Options(batch=batch))


async def fill(store: Store) -> dict[str, str]:
    """A batch of three with a success and a failure, and its callback; ids by what they are."""
    batch = new_batch()
    members = [member(batch.id) for _ in range(3)]
    last = new_job(after=(Dependency(batch.id, Condition.END),))
    await put(store, batch, *members, last)
    first, second = await take(store, 2)
    await settle(store, first)
    await settle(store, second, DEAD, reason=Reason.ERROR, error="boom")
    return {"batch": batch.id, "failed": second.id, "open": members[2].id, "last": last.id}


async def test_structures_of_batches_agree_from_beginning_to_end(store: Store, keys: Keys) -> None:
    ids = await fill(store)
    await everything_agrees(store, keys)
    (job,) = await take(store)
    await settle(store, job)
    assert await state_of(store, ids["batch"]) is DEAD
    await everything_agrees(store, keys)
    await store.admin.replay([ids["failed"]])
    assert await state_of(store, ids["batch"]) is WAITING
    await everything_agrees(store, keys)
    for job in await take(store):
        await settle(store, job)
    assert await state_of(store, ids["batch"]) is SUCCEEDED
    await everything_agrees(store, keys)


async def test_deletion_of_all_jobs_leaves_no_keys_of_batches(store: Store, keys: Keys, clock: ManualClock) -> None:
    await fill(store)
    await settle(store, (await take(store))[0])
    while (await store.admin.delete(JobFilter())).changed:
        pass
    clock.advance(3600)
    await store.maintenance.prune({"succeeded": timedelta(0)}, limit=100)
    left = {name for name in keys.all() if not name.startswith("done:")}
    assert left <= {"meta", "seq", "changes", "failures"}


@pytest.mark.parametrize("name", ["waits", "members", "failed"])
async def test_wrong_number_of_a_batch_is_repaired(store: Store, keys: Keys, name: str) -> None:
    ids = await fill(store)
    key = f"job:{ids['batch']}"
    right = keys.hget(key, name)
    keys.hset(key, name, "7")
    await store.health.repair()
    assert keys.hget(key, name) == right
    await everything_agrees(store, keys)


async def test_wrong_number_of_an_empty_batch_is_repaired(store: Store, keys: Keys) -> None:
    (batch,) = await put(store, new_batch())
    keys.hset(f"job:{batch}", "members", "7")
    await store.health.repair()
    assert keys.hget(f"job:{batch}", "members") == "0"
    await everything_agrees(store, keys)


async def test_batch_whose_members_have_ended_is_repaired_to_its_end(store: Store, keys: Keys) -> None:
    ids = await fill(store)
    keys.delete(f"job:{ids['open']}")
    await store.health.repair()
    found = await stored(store, ids["batch"])
    assert (found.state, found.reason, found.error) == (DEAD, "dependency", "2 of 3 jobs of the batch have failed")
    await everything_agrees(store, keys)
    assert await take_ids(store) == [ids["last"]]


async def test_batch_of_several_parts_waits_for_its_last_part(store: Store, keys: Keys) -> None:
    batch = new_batch()
    jobs = [batch, *[member(batch.id) for _ in range(2 * MAX_PER_SCRIPT)]]
    parts = [jobs[:MAX_PER_SCRIPT], jobs[MAX_PER_SCRIPT : 2 * MAX_PER_SCRIPT], jobs[2 * MAX_PER_SCRIPT :]]
    stages = encode_stages(parts, "submit", {}, in_one_piece=False)
    assert [[call[0] for call in stage] for stage in stages] == [["0b", "0b"], [f"0b {batch.id}"]]
    await put(store, *jobs)
    progress = await store.workflow.read_batch(batch.id)
    assert progress is not None
    assert (progress.members, progress.ended) == (2 * MAX_PER_SCRIPT, 0)
    await everything_agrees(store, keys)
    for _ in range(2):
        for job in await take(store, MAX_PER_SCRIPT):
            await settle(store, job)
    assert await state_of(store, batch.id) is SUCCEEDED


@pytest.mark.parametrize("ids", ["uuid", "ulid"])
async def test_what_is_deleted_while_parts_are_stored_is_a_conflict_that_tells_them(
    home: str, ids: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = Opener(f"{home}&ids={ids}", clock)
    store = await opener()
    (gone,) = await put(store)
    check = RedisQueueing._check_related

    async def check_and_delete(queueing: RedisQueueing, jobs: Sequence[NewJob]) -> None:
        await check(queueing, jobs)
        assert (await store.admin.delete([gone])).changed

    monkeypatch.setattr(RedisQueueing, "_check_related", check_and_delete)
    jobs = [new_job() for _ in range(MAX_PER_SCRIPT)]
    with pytest.raises(Conflict, match="was deleted") as refusal:
        await put(store, *jobs, new_job(after=(Dependency(gone, Condition.END),)))
    assert refusal.value.stored == [*[job.id for job in jobs], None]
    assert await store.query.count(JobFilter()) == len(jobs)
    await opener.close()


async def test_batch_waits_for_a_refused_part_until_its_submission_is_repeated(
    store: Store, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = new_job(has_client_id=True)
    await put(store, gone)
    check = RedisQueueing._check_related

    async def check_and_delete(queueing: RedisQueueing, jobs: Sequence[NewJob]) -> None:
        await check(queueing, jobs)
        assert (await store.admin.delete([gone.id])).changed

    batch = new_job(BATCH_TASK, is_batch=True, has_client_id=True)
    members = [member(batch.id) for _ in range(2 * MAX_PER_SCRIPT)]
    late = new_job(after=(Dependency(gone.id, Condition.END),), options=Options(batch=batch.id))
    callback = new_job(after=(Dependency(batch.id, Condition.SUCCESS),))
    jobs = [batch, *members[:MAX_PER_SCRIPT], late, *members[MAX_PER_SCRIPT:], callback]
    with monkeypatch.context() as patched:
        patched.setattr(RedisQueueing, "_check_related", check_and_delete)
        with pytest.raises(Conflict) as refusal:
            await put(store, *jobs)
    assert refusal.value.stored == [*[job.id for job in jobs[:MAX_PER_SCRIPT]], *[None] * (len(jobs) - MAX_PER_SCRIPT)]
    for job in await take(store, len(jobs)):
        await settle(store, job)
    assert await state_of(store, batch.id) is WAITING
    await put(store, gone)
    await put(store, *jobs)
    while taken := await take(store, len(jobs)):
        for job in taken:
            await settle(store, job)
    assert await states_of(store, [job.id for job in jobs]) == [SUCCEEDED] * len(jobs)
    await everything_agrees(store, keys)


async def test_full_server_in_the_middle_of_a_batch_leaves_it_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = new_batch()
    jobs = [batch, *[member(batch.id) for _ in range(3 * MAX_PER_SCRIPT)]]
    refused: list[bool] = []
    ask_each = RedisConnection.ask_each

    async def refuse_the_second(connection: RedisConnection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        if refused or sum(command[0] == "EVALSHA" for command in commands) < 2:
            return await ask_each(connection, commands)
        refused.append(True)
        second = [number for number, command in enumerate(commands) if command[0] == "EVALSHA"][1]
        replies = await ask_each(connection, [*commands[:second], *commands[second + 1 :]])
        full = ResponseError("OOM command not allowed when used memory > 'maxmemory'")
        return [*replies[:second], full, *replies[second:]]

    monkeypatch.setattr(RedisConnection, "ask_each", refuse_the_second)
    with pytest.raises(Unavailable) as error:
        await put(store, *jobs)
    assert refused
    assert [job_id is None for job_id in error.value.stored[::MAX_PER_SCRIPT]] == [False, True, False, True]
    for job in await take(store, len(jobs)):
        await settle(store, job)
    assert await state_of(store, batch.id) is WAITING
    await put(store, *jobs)
    for job in await take(store, len(jobs)):
        await settle(store, job)
    assert await states_of(store, [job.id for job in jobs]) == [SUCCEEDED] * len(jobs)


def test_batch_with_a_new_id_needs_no_look_before_its_parts_are_stored() -> None:
    batch, known = new_batch(), new_job(BATCH_TASK, is_batch=True, has_client_id=True)
    assert find_related([batch, member(batch.id), new_job()]) == []
    assert [job.id for job in find_related([batch, known, member(batch.id)])] == [known.id]


async def test_batch_whose_last_part_has_callbacks_alone_ends(store: Store, keys: Keys) -> None:
    batch = new_batch()
    callback = new_job(after=(Dependency(batch.id, Condition.SUCCESS),))
    await put(store, batch, *[member(batch.id) for _ in range(MAX_PER_SCRIPT - 1)], callback)
    await everything_agrees(store, keys)
    for job in await take(store, MAX_PER_SCRIPT):
        await settle(store, job)
    assert await state_of(store, batch.id) is SUCCEEDED
    assert await take_ids(store) == [callback.id]


async def test_held_batch_goes_on_when_its_submission_is_repeated(store: Store, keys: Keys) -> None:
    """As after a crash between two parts of a submission."""
    batch = new_batch()
    jobs = [batch, member(batch.id)]
    await put(store, *jobs)
    keys.hset(f"job:{batch.id}", mapping={"submitting": 1, "waits": 2})
    await everything_agrees(store, keys)
    (job,) = await take(store)
    await settle(store, job)
    assert await state_of(store, batch.id) is WAITING
    await put(store, *jobs)
    assert await state_of(store, batch.id) is SUCCEEDED


async def test_batches_are_stored_as_ulids_and_reported_as_uuids(home: str, keys: Keys, clock: ManualClock) -> None:
    opener = Opener(home + "&ids=ulid", clock)
    store = await opener()
    batch, missing = new_batch(), new_id()
    first = member(batch.id)
    await put(store, batch, first)
    assert keys.hgetall(f"dependencies:{as_ulid(batch.id)}") == {as_ulid(first.id): "success open 0"}
    with pytest.raises(Invalid, match=missing):
        await put(store, member(missing))
    (job,) = await take(store)
    assert job.options is not None
    assert job.options.batch == batch.id
    await settle(store, job)
    options = (await stored(store, job.id)).options
    assert options is not None
    assert options.batch == batch.id
    with pytest.raises(Conflict, match=batch.id):
        await put(store, member(batch.id))
    progress = await store.workflow.read_batch(batch.id)
    assert progress is not None
    assert progress.ended == 1
    await opener.close()


async def test_bad_input_in_the_last_part_stores_nothing(store: Store) -> None:
    batch = new_batch()
    late = new_job(run_at_us=9 * 10**18, options=Options(batch=batch.id))
    with pytest.raises(Invalid, match="run_at"):
        await put(store, batch, *[member(batch.id) for _ in range(2 * MAX_PER_SCRIPT)], late)
    assert await store.query.count(JobFilter()) == 0


async def test_batch_that_goes_between_its_parts_is_not_taken_for_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = new_job(BATCH_TASK, is_batch=True, has_client_id=True)
    callback = new_job(after=(Dependency(batch.id, Condition.SUCCESS),))
    jobs = [batch, callback, *[member(batch.id) for _ in range(MAX_PER_SCRIPT)]]
    run_each = NamespacePool.run_each

    async def run_and_delete(pool: NamespacePool, script: Script, calls: Any, **options: Any) -> list[Any]:
        replies = await run_each(pool, script, calls, **options)
        monkeypatch.setattr(NamespacePool, "run_each", run_each)
        assert (await store.admin.cancel([batch.id])).changed
        assert (await store.admin.delete([batch.id])).changed
        return replies

    checked = RedisQueueing._check_related

    async def check(queueing: RedisQueueing, jobs: Sequence[NewJob]) -> None:
        await checked(queueing, jobs)
        monkeypatch.setattr(NamespacePool, "run_each", run_and_delete)

    monkeypatch.setattr(RedisQueueing, "_check_related", check)
    with pytest.raises(Conflict):
        await put(store, *jobs)
    monkeypatch.setattr(RedisQueueing, "_check_related", checked)
    assert await store.query.get(batch.id) is None


async def test_lost_answer_to_a_later_part_leaves_the_earlier_answers_as_they_were(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [new_job(key="0")]
    while len(jobs) < 2 * MAX_PER_SCRIPT:
        jobs.append(new_job(key=str(len(jobs)), after=(Dependency(jobs[-1].id, Condition.SUCCESS),)))
    await put(store, *jobs)
    ask_each, asked = RedisConnection.ask_each, []

    async def lose_the_second(connection: RedisConnection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        replies = await ask_each(connection, commands)
        if any(len(command) > 3 * MAX_PER_SCRIPT for command in commands):
            asked.append(commands)
            if len(asked) == 2:
                raise ConnectionResetError("the answer is lost")
        return replies

    monkeypatch.setattr(RedisQueueing, "_check_related", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(RedisConnection, "ask_each", lose_the_second)
    answers = await store.queueing.submit(jobs)
    assert len(asked) == 3
    assert not any(answer.created for answer in answers[:MAX_PER_SCRIPT])


async def test_error_in_a_later_stage_tells_what_is_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, run_each, calls = new_batch(), NamespacePool.run_each, []
    jobs = [batch, *[member(batch.id) for _ in range(MAX_PER_SCRIPT)]]

    async def refuse_the_second(pool: NamespacePool, script: Script, parts: Any, **options: Any) -> list[Any]:
        calls.append(parts)
        if len(calls) == 2:
            raise ConfigError("the rights are gone")
        return await run_each(pool, script, parts, **options)

    monkeypatch.setattr(NamespacePool, "run_each", refuse_the_second)
    with pytest.raises(ConfigError) as error:
        await store.queueing.submit(jobs)
    assert error.value.stored == [*[job.id for job in jobs[:MAX_PER_SCRIPT]], None]
