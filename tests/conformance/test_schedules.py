"""Schedules: one write moves a schedule and submits the jobs of its ticks, or changes nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.batches import BATCH_TASK, BatchProgress
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, Options
from holdfast.core.schedule import Schedule, ScheduleChange
from holdfast.stores.base import Store
from tests.conformance.support import Opener, ended, new_job, put, running, settle, state_of, stored, take_ids

SECOND_US = 1_000_000


def schedule_of(name: str = "nightly", **fields: Any) -> Schedule:
    return Schedule(
        **{
            "id": "0198c0de-0000-7000-8000-000000000001",
            "name": name,
            "job": replace(new_job(payload='{"label":"é␀\\u0000"}'), id=""),
            "every_us": SECOND_US,
            **fields,
        }
    )


async def added(store: Store, schedule: Schedule) -> Schedule:
    revision = await store.schedules.write_schedule(ScheduleChange(schedule, 0))
    assert revision is not None
    return replace(schedule, revision=revision)


async def test_schedule_comes_back_as_it_was_written(store: Store, clock: ManualClock) -> None:
    options = Options(tags=("a", "ä"), metadata={"x": [1, None]}, timeout=2.5, retry={"kind": "fixed"})
    written = await added(
        store,
        schedule_of(
            job=replace(new_job(queue="mail", priority=-3, max_attempts=None, options=options), id=""),
            every_us=None,
            cron="0 3 * * *",
            zone="Europe/Zurich",
            next_us=clock() + 5,
            owner="shop",
            jitter_us=7,
            max_runs=9,
            last_job="0198c0de-0000-7000-8000-000000000002",
        ),
    )

    assert await store.schedules.read_schedules("nightly") == [written]
    assert await store.schedules.read_schedules("other") == []
    assert written.revision == clock()


async def test_write_with_another_revision_changes_nothing(store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock()))
    moved = replace(first, runs=1)
    job = new_job()

    assert await store.schedules.write_schedule(ScheduleChange(first, 0, [job])) is None
    assert await store.schedules.write_schedule(ScheduleChange(moved, first.revision + 1, [job])) is None
    assert await store.schedules.write_schedule(ScheduleChange(moved, first.revision - 1, [job], remove=True)) is None
    assert await store.schedules.write_schedule(ScheduleChange(replace(moved, name="other"), 5, [job])) is None

    assert await store.schedules.read_schedules("nightly") == [first]
    assert await store.schedules.read_schedules("other") == []
    assert await store.query.get(job.id) is None


async def test_write_submits_its_jobs_and_wakes_their_queue(store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock()))
    ready, later = new_job(has_client_id=True), new_job(delay=None, run_at_us=clock() + SECOND_US)

    revision = await store.schedules.write_schedule(
        ScheduleChange(replace(first, next_us=clock() + SECOND_US), first.revision, [ready, later])
    )

    assert revision == first.revision + 1
    assert await state_of(store, later.id) == JobState.SCHEDULED
    assert await take_ids(store) == [ready.id]


async def test_job_that_is_there_already_stays_one(store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock()))
    job = new_job(has_client_id=True)
    await store.queueing.submit([job])

    assert await store.schedules.write_schedule(ScheduleChange(first, first.revision, [job])) == first.revision + 1
    assert await store.query.count(JobFilter()) == 1


async def test_written_job_expires(store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock()))
    job = new_job(has_client_id=True, expires_in=timedelta(seconds=10))

    assert await store.schedules.write_schedule(ScheduleChange(first, first.revision, [job]))

    assert (await stored(store, job.id)).expires_at_us == clock() + 10 * SECOND_US
    clock.advance(11)
    assert [each.job_id for each in await store.maintenance.expire_unstarted(limit=10)] == [job.id]
    assert await take_ids(store) == []


async def test_written_jobs_wait_for_others(store: Store, clock: ManualClock) -> None:
    succeeded, cancelled = await ended(store, JobState.SUCCEEDED), await ended(store, JobState.CANCELLED)
    open_job = await running(store)
    first = await added(store, schedule_of(next_us=clock()))
    due, failed, waiting = [
        new_job(has_client_id=True, after=(Dependency(each, Condition.SUCCESS),))
        for each in (succeeded, cancelled, open_job.id)
    ]

    assert await store.schedules.write_schedule(ScheduleChange(first, first.revision, [due, failed, waiting]))

    assert await state_of(store, failed.id) is JobState.CANCELLED
    assert await state_of(store, waiting.id) is JobState.WAITING
    assert await take_ids(store) == [due.id]
    await settle(store, open_job)
    assert await take_ids(store) == [waiting.id]


async def test_written_job_joins_its_batch(store: Store, clock: ManualClock) -> None:
    batch = new_job(BATCH_TASK, is_batch=True)
    await put(store, batch, new_job(options=Options(batch=batch.id)))
    first = await added(store, schedule_of(next_us=clock()))
    job = new_job(has_client_id=True, options=Options(batch=batch.id))

    assert await store.schedules.write_schedule(ScheduleChange(first, first.revision, [job]))

    assert await store.workflow.read_batch(batch.id) == BatchProgress(2, 0, 0)


async def test_refused_job_leaves_the_schedule_as_it_is(store: Store, clock: ManualClock) -> None:
    batch, member = new_job(BATCH_TASK, is_batch=True), new_id()
    await put(store, batch, new_job(id=member, options=Options(batch=batch.id)))
    await store.admin.cancel([member])
    first = await added(store, schedule_of(next_us=clock()))
    moved, missing = replace(first, runs=1), new_id()
    orphan = new_job(after=(Dependency(missing, Condition.SUCCESS),))
    late = new_job(options=Options(batch=batch.id))

    with pytest.raises(Invalid, match=f"after: '{missing}'"):
        await store.schedules.write_schedule(ScheduleChange(moved, first.revision, [new_job(), orphan]))
    with pytest.raises(Conflict, match=batch.id):
        await store.schedules.write_schedule(ScheduleChange(moved, first.revision, [new_job(), late]))

    assert await store.schedules.write_schedule(ScheduleChange(moved, first.revision - 1, [orphan])) is None
    assert await store.schedules.read_schedules("nightly") == [first]
    assert await store.schedules.write_schedule(ScheduleChange(moved, first.revision)) == first.revision + 1
    assert await store.query.count(JobFilter()) == 2


async def test_only_one_of_many_writers_moves_a_schedule(opener: Opener, store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock()))
    stores = [store, await opener(), await opener()]
    changes = [ScheduleChange(replace(first, runs=n + 1), first.revision, [new_job()]) for n in range(12)]

    answers = await asyncio.gather(*[stores[n % 3].schedules.write_schedule(each) for n, each in enumerate(changes)])

    assert [answer for answer in answers if answer is not None] == [first.revision + 1]
    assert await store.query.count(JobFilter()) == 1


async def test_removed_name_begins_anew_behind_every_earlier_revision(store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock()))
    second_revision = await store.schedules.write_schedule(ScheduleChange(first, first.revision))
    assert second_revision is not None
    assert (
        await store.schedules.write_schedule(ScheduleChange(first, second_revision, remove=True)) == second_revision + 1
    )
    assert await store.schedules.read_schedules() == []
    clock.advance(1)

    again = await added(store, schedule_of(next_us=clock()))

    assert again.revision > second_revision
    assert await store.schedules.write_schedule(ScheduleChange(first, first.revision, [new_job()])) is None


async def test_due_says_what_has_come_and_when_the_next_comes(store: Store, clock: ManualClock) -> None:
    nothing = await store.schedules.due_schedules(limit=10)
    assert (nothing.schedules, nothing.now_us, nothing.next_us) == ([], clock(), None)
    for n in (3, 1, 2):
        await added(store, schedule_of(f"s{n}", next_us=clock() + n * SECOND_US))
    await added(store, schedule_of("paused", next_us=clock(), paused=True))
    await added(store, schedule_of("ended", next_us=None))
    clock.advance(2)

    due = await store.schedules.due_schedules(limit=10)

    assert [each.name for each in due.schedules] == ["s1", "s2"]
    assert (due.now_us, due.next_us) == (clock(), clock() + SECOND_US)
    assert [each.name for each in (await store.schedules.due_schedules(limit=1)).schedules] == ["s1"]


async def test_schedules_are_read_in_pages_by_name(store: Store) -> None:
    names = [f"s-{n:03}" for n in range(7)]
    for name in reversed(names):
        await added(store, schedule_of(name))

    assert [each.name for each in await store.schedules.read_schedules()] == names
    assert [each.name for each in await store.schedules.read_schedules(after="s-002", limit=3)] == names[3:6]
    assert await store.schedules.read_schedules(after="s-006") == []


async def test_clock_that_is_set_back_makes_no_tick_due_again(store: Store, clock: ManualClock) -> None:
    first = await added(store, schedule_of(next_us=clock() + SECOND_US))
    clock.advance(1)
    (due,) = (await store.schedules.due_schedules(limit=10)).schedules
    moved = replace(due, next_us=clock() + SECOND_US)
    assert await store.schedules.write_schedule(ScheduleChange(moved, due.revision, [new_job()])) == first.revision + 1

    clock.advance(-3600)

    assert (await store.schedules.due_schedules(limit=10)).schedules == []
    assert await store.schedules.write_schedule(ScheduleChange(moved, due.revision, [new_job()])) is None


async def test_written_jobs_wake_who_waits_for_their_queue(opener: Opener, store: Store, clock: ManualClock) -> None:
    other = await opener()
    first = await added(store, schedule_of(next_us=clock()))
    waiting = asyncio.create_task(other.queueing.wait(["queue:default"], timeout=3600))
    while not waiting.done():
        job = new_job()
        first = replace(first, runs=first.runs + 1)
        revision = await store.schedules.write_schedule(ScheduleChange(first, first.revision, [job]))
        assert revision is not None
        first = replace(first, revision=revision)
        await asyncio.wait([waiting], timeout=1)
    await waiting
