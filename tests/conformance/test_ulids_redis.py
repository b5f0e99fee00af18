"""``ids=ulid``: ULIDs in Redis, UUIDs for users of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from inspect import isfunction
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import replace

from holdfast.core.batches import BATCH_TASK
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.ids import as_ulid
from holdfast.core.job_changes import JobChanges
from holdfast.core.models import Job, JobFilter, JobState, Lease, NewJob, Options
from holdfast.core.schedule import Schedule, ScheduleChange
from holdfast.core.workers import LeaseStatus
from holdfast.stores import open_store
from holdfast.stores.base import EVERY_QUEUE, Selection, Store
from holdfast.stores.redis import id_codec
from holdfast.stores.redis.id_codec import decode_id, encode_id
from tests.conformance.support import (
    LEASE,
    SECOND,
    WORKER,
    Opener,
    claim,
    heartbeat,
    lose,
    new_job,
    put,
    settle,
    state_of,
    stored,
    take,
    take_ids,
)
from tests.conformance.test_wait import quiet
from tests.support.keys import Keys

HOUR = timedelta(hours=1)


@pytest.fixture
def opener(runner: asyncio.Runner, clock: ManualClock, home: str) -> Iterator[Opener]:
    opener = Opener(home + "&ids=ulid", clock)
    yield opener
    runner.run(opener.close())


async def test_whole_lifecycle_is_stored_as_ulids_and_reported_as_uuids(
    store: Store, keys: Keys, clock: ManualClock
) -> None:
    first, later = new_job(key="k"), new_job(delay=HOUR)
    assert await put(store, first, later) == [first.id, later.id]
    assert (await store.queueing.submit([new_job(key="k")]))[0].job_id == first.id
    assert keys.lrange("ready", 0, -1) == [as_ulid(first.id)]
    assert keys.zrange("schedule", 0, -1) == [as_ulid(later.id)]

    (job,) = await take(store)
    assert (job.id, keys.zrange("leases", 0, -1)) == (first.id, [as_ulid(first.id)])
    leases = [job.lease, Lease(later.id, 1)]
    assert (await store.queueing.heartbeat(heartbeat(), leases, lease_for=LEASE)).statuses == [
        LeaseStatus.HELD,
        LeaseStatus.LOST,
    ]
    assert (await lose(store, clock, job)).state is JobState.QUEUED
    assert [each.reason for each in await store.query.attempts(first.id)] == ["crashed"]
    (job,) = await take(store, max_must_start=1)
    answer = await settle(store, job, result="1")
    assert (answer.job_id, answer.accepted) == (first.id, True)
    assert await store.query.by_key("k") == await stored(store, first.id)

    assert (await store.admin.cancel([later.id])).changed == [(later.id, JobState.CANCELLED)]
    assert (await store.admin.replay(JobFilter(states=(JobState.CANCELLED,)))).changed == [(later.id, JobState.QUEUED)]
    assert (await claim(store, ids=[later.id])).jobs[0].id == later.id
    assert [each.id for each in (await store.query.find(JobFilter())).jobs] == [later.id, first.id]
    assert {name for name in keys.all() if name.startswith("job:")} == {
        f"job:{as_ulid(each)}" for each in (first.id, later.id)
    }
    assert (await store.admin.delete([first.id])).changed == [(first.id, JobState.SUCCEEDED)]
    assert await store.query.get(first.id) is None


async def test_job_is_edited_by_its_uuid(store: Store) -> None:
    batch = new_job(BATCH_TASK, is_batch=True)
    member = new_job(options=Options(batch=batch.id))
    await put(store, batch, member)
    options = (await stored(store, member.id)).options_or_default

    changes = JobChanges(priority=5, options=replace(options, tags=("t",)))
    edited = await store.admin.edit(member.id, changes)

    assert (edited.changed, edited.refused) == ([(member.id, JobState.QUEUED)], [])
    missing = new_job().id
    assert (await store.admin.edit(missing, changes)).refused == [(missing, None)]
    (job,) = await take(store)
    assert (job.id, job.priority, job.options) == (member.id, 5, Options(batch=batch.id, tags=("t",)))


async def test_job_with_options_outside_a_batch_is_read(store: Store) -> None:
    options = Options(tags=("t",))
    (job_id,) = await put(store, new_job(options=options))
    assert (await stored(store, job_id)).options == options
    (job,) = await take(store)
    assert (job.id, job.options) == (job_id, options)


async def test_jobs_that_expired_are_reported_by_uuid(store: Store, clock: ManualClock) -> None:
    (first,) = await put(store, new_job(expires_in=SECOND))
    clock.advance(2)
    assert [each.job_id for each in (await claim(store)).expired] == [first]

    (second,) = await put(store, new_job(expires_in=SECOND))
    clock.advance(2)
    assert [each.job_id for each in await store.maintenance.expire_unstarted(limit=10)] == [second]


WITHOUT_JOB_IDS = {"read_schedules", "due_schedules"}
"""Verbs whose types have room for ids of jobs, in which there are none: the job of a schedule is a template."""


def has_job_id(kind: Any, name: str = "") -> bool:
    """Returns True if an argument, a field or an answer of this name and type has ids of jobs."""
    if name in {"job_id", "job_ids", "topics"} or kind in (Job, NewJob, Selection):
        return True
    parts = get_args(kind)
    if isinstance(kind, type) and not parts and kind.__module__.startswith("holdfast."):
        return any(has_job_id(each, field) for field, each in get_type_hints(kind).items())
    return any(has_job_id(each) for each in parts)


@pytest.mark.parametrize("family", ["queueing", "maintenance", "admin", "query", "schedules", "workflow", "limits"])
def test_every_verb_with_ids_of_jobs_turns_them(family: str) -> None:
    protocol = get_type_hints(vars(Store)[family].fget)["return"]
    verbs = {name: verb for name, verb in vars(protocol).items() if isfunction(verb) and not name.startswith("_")}
    wrapper = getattr(id_codec, f"Ulid{protocol.__name__}", None)

    having = {name for name, verb in verbs.items() if any(has_job_id(k, n) for n, k in get_type_hints(verb).items())}

    assert having - WITHOUT_JOB_IDS == (set() if wrapper is None else verbs.keys() & vars(wrapper).keys())


async def test_waiter_is_woken_when_the_job_ends(store: Store, opener: Opener) -> None:
    (job_id,) = await put(store)
    other = await opener()
    await quiet(other, [f"job:{job_id}"])  # it returns at once for a job that is gone, and this one is not
    waiting = asyncio.create_task(other.queueing.wait([f"job:{job_id}"], timeout=50))
    (job,) = await take(store)
    await settle(store, job)

    await asyncio.wait_for(waiting, timeout=60)

    assert await state_of(other, job_id) is JobState.SUCCEEDED


@pytest.mark.parametrize("by_hand", ["01ARZ3NDEKTSV4RRFFQ69G5FAV", "invoice-7", "018f0f5e-7c7a-7000-8000-000000000001"])
async def test_job_written_by_hand_runs_whatever_its_id(store: Store, keys: Keys, by_hand: str) -> None:
    keys.hset(f"job:{by_hand}", mapping={"payload": "{}", "task": "work"})
    keys.rpush("ready", by_hand)

    (job,) = await take(store, capacity={EVERY_QUEUE: 5})

    assert (await settle(store, job)).accepted
    assert keys.hget(f"job:{by_hand}", "state") == "succeeded"
    assert (await stored(store, job.id)).worker == WORKER
    assert await take_ids(store) == []


@pytest.mark.parametrize(
    "text",
    ["01ARZ3NDEKTSV4RRFFQ69G5FAV", "01arz3ndektsv4rrffq69g5fav", "8ZZZZZZZZZZZZZZZZZZZZZZZZZ", "x", "by-hand:x", "ü"],
)
def test_what_is_read_is_written_back_as_it_was(text: str) -> None:
    assert encode_id(decode_id(text)) == text


def test_other_spellings_are_refused() -> None:
    with pytest.raises(ConfigError, match="ids='snowflake' is not valid; give one of: uuid, ulid"):
        open_store("redis://localhost/0?ids=snowflake")


async def test_jobs_of_a_schedule_have_ulids_too(store: Store, clock: ManualClock) -> None:
    schedule = Schedule(id=new_job().id, name="s", job=new_job(), every_us=1, next_us=clock())
    revision = await store.schedules.write_schedule(ScheduleChange(schedule, 0))
    assert revision is not None
    job = new_job()
    waiting = new_job(after=(Dependency(job.id, Condition.SUCCESS),))
    assert await store.schedules.write_schedule(ScheduleChange(schedule, revision, [job, waiting])) == revision + 1
    (taken,) = await take(store)
    assert (taken.id, await state_of(store, waiting.id)) == (job.id, JobState.WAITING)
    missing = new_job(after=(Dependency(new_job().id, Condition.SUCCESS),))
    with pytest.raises(Invalid, match=missing.after[0].job_id):
        await store.schedules.write_schedule(ScheduleChange(schedule, revision + 1, [missing]))
    with pytest.raises(Invalid, match=missing.after[0].job_id):
        await store.workflow.start_children(taken.lease, [missing], WORKER)
