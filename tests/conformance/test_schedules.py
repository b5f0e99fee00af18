"""Schedules: one write moves a schedule and submits the jobs of its ticks, or changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState, Options
from holdfast.core.schedule import Schedule, ScheduleChange
from holdfast.stores.base import Store
from tests.conformance.support import Opener, new_job, state_of, take_ids

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
