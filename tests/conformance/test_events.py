"""Job events: a client that reads page after page gets every event."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Dependency
from holdfast.core.errors import Invalid
from holdfast.core.models import JobEvent, JobFilter, JobState, Reason
from holdfast.stores.base import Store
from tests.conformance.support import (
    WORKER,
    EventReader,
    Opener,
    ended,
    ending,
    failing,
    lose,
    new_job,
    put,
    running,
    settle,
    take,
)

HOUR = timedelta(hours=1)


@pytest.fixture
def event_reader(runner: asyncio.Runner, store: Store, clock: ManualClock) -> EventReader:
    event_reader = EventReader(store)
    runner.run(event_reader.begin())
    clock.advance(5)
    return event_reader


def brief(events: list[JobEvent]) -> list[tuple[str, JobState]]:
    return [(each.job_id, each.state) for each in events]


async def test_every_final_state_is_reported_once(store: Store, clock: ManualClock, event_reader: EventReader) -> None:
    expected = []
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED):
        expected.append((await ended(store, state), state))
        clock.advance(5)
    (waiting,) = await put(store)
    await store.admin.cancel([waiting])
    clock.advance(5)

    assert brief(await event_reader.new_events()) == [*expected, (waiting, JobState.CANCELLED)]
    clock.advance(5)
    await put(store)
    await take(store)
    assert brief(await event_reader.new_events()) in ([], [(waiting, JobState.CANCELLED)])  # the last may come again


async def test_event_has_the_fields_of_its_job(store: Store, clock: ManualClock, event_reader: EventReader) -> None:
    (job_id,) = await put(store, new_job(task="email.send", queue="mail"))
    (job,) = await take(store, capacity={"mail": 1})
    clock.advance(3)
    started = clock()
    await store.queueing.settle([ending(job, JobState.DEAD, reason=Reason.NON_RETRYABLE, error="no such address")])

    (reported,) = await event_reader.new_events()

    assert reported == JobEvent(
        job_id=job_id,
        task="email.send",
        queue="mail",
        state=JobState.DEAD,
        claims=1,
        attempt=1,
        worker=WORKER,
        started_at_us=started - 3_000_000,
        ended_at_us=started,
        reason=Reason.NON_RETRYABLE,
        error="no such address",
    )


async def test_failed_attempts_are_reported_before_the_end(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, "first")])
    clock.advance(5)
    (job,) = await take(store)
    await lose(store, clock, job)
    clock.advance(5)
    (job,) = await take(store, max_must_start=1)
    await settle(store, job)

    reported = await event_reader.new_events()

    assert [(each.state, each.attempt, each.claims) for each in reported] == [
        (JobState.FAILED, 1, 1),
        (JobState.QUEUED, 2, 2),
        (JobState.SUCCEEDED, 3, 3),
    ]
    assert [each.reason for each in reported] == [Reason.ERROR, Reason.CRASHED, None]
    assert reported[0].error == "first"


async def test_a_release_is_no_failure(store: Store, clock: ManualClock, event_reader: EventReader) -> None:
    job = await running(store)
    await settle(store, job, JobState.QUEUED, reason=Reason.RELEASED, refund=True)

    assert await event_reader.new_events() == []


async def test_long_backlog_is_reported_in_pages(store: Store, clock: ManualClock, event_reader: EventReader) -> None:
    event_reader.limit = 7
    jobs = await put(store, *[new_job() for _ in range(45)])
    for number in range(9):
        batch = await take(store, limit=5)
        first, *rest = batch
        await store.queueing.settle([failing(first, delay=HOUR), *[ending(job, JobState.SUCCEEDED) for job in rest]])
        clock.advance(1 + number % 2)

    reported = await event_reader.new_events()

    assert Counter(each.job_id for each in reported) == Counter(jobs)
    assert [each.ended_at_us for each in reported] == sorted(each.ended_at_us for each in reported)
    assert Counter(each.state for each in reported) == {JobState.SUCCEEDED: 36, JobState.FAILED: 9}


@pytest.mark.parametrize("number", [400, 1000])
async def test_many_endings_of_one_instant_are_reported_once(
    store: Store, clock: ManualClock, event_reader: EventReader, number: int
) -> None:
    """A failed job ends all that wait for it at once."""
    event_reader.limit = 100
    (first,) = await put(store)
    waiters = await put(store, *[new_job(after=(Dependency(first),)) for _ in range(number)])
    (job,) = await take(store)
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom")
    clock.advance(5)
    last = await ended(store, JobState.SUCCEEDED)

    reported = await event_reader.new_events()

    assert Counter(each.job_id for each in reported) == Counter([first, *waiters, last])


async def test_nothing_is_passed_by_while_others_settle(store: Store, opener: Opener, clock: ManualClock) -> None:
    """Writers that settle at once, and who follows asks in between; time goes on."""
    others = [await opener() for _ in range(3)]
    event_reader = EventReader(store, limit=20)
    await event_reader.begin()
    clock.advance(5)
    jobs = await put(store, *[new_job() for _ in range(120)])
    reported: Counter[str] = Counter()
    done = asyncio.Event()

    async def settling(each: Store) -> None:
        while batch := await take(each, limit=4):
            clock.advance(0.01)
            await each.queueing.settle([ending(job, JobState.SUCCEEDED) for job in batch])

    async def following() -> None:
        over = False
        while not over:
            over = done.is_set()
            reported.update(each.job_id for each in await event_reader.new_events())

    async with asyncio.TaskGroup() as group:
        task = group.create_task(following())
        await asyncio.gather(*[settling(each) for each in others])
        done.set()
        await task

    assert set(reported) == set(jobs)


async def test_what_was_replayed_or_deleted_since_is_no_ending(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    replayed = await ended(store, JobState.DEAD)
    deleted = await ended(store, JobState.SUCCEEDED)
    stays = await ended(store, JobState.DEAD)
    await store.admin.replay([replayed])
    await store.admin.delete([deleted])

    assert brief(await event_reader.new_events()) == [(stays, JobState.DEAD)]
    clock.advance(5)
    (job,) = await take(store)
    await settle(store, job)
    reported = [each for each in await event_reader.new_events() if each.job_id != stays]
    assert [(each.job_id, each.claims) for each in reported] == [(replayed, 2)]


async def test_cursor_that_is_too_old_reports_a_gap(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    await ended(store, JobState.SUCCEEDED)
    clock.advance(3601)

    assert (await event_reader.new_events(), event_reader.gap) == ([], True)
    clock.advance(5)
    job_id = await ended(store, JobState.SUCCEEDED)
    assert (brief(await event_reader.new_events()), event_reader.gap) == ([(job_id, JobState.SUCCEEDED)], False)


async def test_silence_is_no_absence(store: Store, clock: ManualClock, event_reader: EventReader) -> None:
    for _ in range(3):
        clock.advance(3000)
        assert (await event_reader.new_events(), event_reader.gap) == ([], False)
    job_id = await ended(store, JobState.SUCCEEDED)
    assert (brief(await event_reader.new_events()), event_reader.gap) == ([(job_id, JobState.SUCCEEDED)], False)


@pytest.mark.parametrize(
    "cursor", ["", "no", "1.2.3.4.5.6.x", "9" * 40, "1.1~1.1", "-1.-1", "1.1.1-", "٣.٣", "a" * 5000]
)
async def test_what_is_no_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(Invalid, match="after: "):
        await store.query.events(cursor, limit=10, max_age=HOUR)


async def test_cursor_that_was_never_issued_is_harmless(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    job_id = await ended(store, JobState.SUCCEEDED)
    for cursor in ("0.0", "1.99999999999999999", f"{clock()}.{10**16}", f"{clock() + 10**12}.1"):
        await store.query.events(cursor, limit=10, max_age=HOUR)

    assert brief(await event_reader.new_events()) == [(job_id, JobState.SUCCEEDED)]
    assert await store.query.count(JobFilter()) == 1


async def test_no_cursor_leads_back_further_than_the_window(store: Store, clock: ManualClock) -> None:
    """Made up: else a client could have everything that ever ended read, again and again."""
    setback = await running(store)
    await store.queueing.settle([failing(setback, delay=HOUR)])
    old = {setback.id} | {await ended(store, state) for state in (JobState.SUCCEEDED, JobState.DEAD)}
    clock.advance(2 * 3600)
    recent = await ended(store, JobState.SUCCEEDED)
    clock.advance(5)
    now, top = clock(), (await store.query.events(None, limit=10, max_age=HOUR)).cursor.split(".")[1]
    reported: set[str] = set()
    for made_up in (
        f"{now}.0",
        f"{now}.1.{recent}.0",
        f"{now}.3",
        f"{now}.{top}.1-{10**8}",
        f"{now}.4.1-{10**8}",
        f"{now}.4.1-{10**17 - 1}",
        f"{now}.4.1-{10**8}~{now}.{top}~1.{recent}.0",
    ):
        event_reader = EventReader(store)
        event_reader.cursor = made_up
        try:
            found = {each.job_id for each in await event_reader.new_events()}
        except Invalid:
            continue
        assert not found & old, made_up
        reported |= found
    assert reported == {recent}


async def test_a_bookmark_names_no_job_and_passes_nothing_by(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    jobs = await put(store, *[new_job() for _ in range(6)])
    await store.admin.cancel(jobs[:4])  # at one instant
    clock.advance(5)
    await store.admin.cancel(jobs[4:])
    cursor, reported, more = event_reader.cursor, set(), True
    while more:
        page = await store.query.events(cursor, limit=1, max_age=HOUR)
        cursor, more = page.cursor, page.more
        reported |= {each.job_id for each in page.events}
        assert not [job_id for job_id in jobs if job_id in page.public_cursor]
        other = EventReader(store, limit=1)
        other.cursor = page.public_cursor
        assert reported | {each.job_id for each in await other.new_events()} == set(jobs)


async def test_last_page_includes_ends_since_the_first(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    jobs = await put(store, *[new_job() for _ in range(7)])
    await store.admin.cancel(jobs[:3])
    first = await store.query.events(event_reader.cursor, limit=2, max_age=HOUR)
    clock.advance(5)
    await store.admin.cancel(jobs[3:])
    event_reader.cursor, event_reader.limit = first.cursor, 2
    assert {each.job_id for each in (*first.events, *await event_reader.new_events())} == set(jobs)


async def test_a_wait_for_any_ending_ends_with_one(store: Store, opener: Opener) -> None:
    other = await opener()
    job = await running(store)
    await store.queueing.wait(["job:*"], timeout=1)  # who begins to hear hears at once
    waiting = asyncio.create_task(store.queueing.wait(["job:*"], timeout=300))
    await other.queueing.settle([ending(job, JobState.SUCCEEDED)])

    async with asyncio.timeout(60):
        await waiting


async def test_job_that_ends_twice_in_one_instant_is_reported_as_it_stands(
    store: Store, clock: ManualClock, event_reader: EventReader
) -> None:
    job = await running(store)
    await settle(store, job)
    await store.admin.replay([job.id], force=True)
    (again,) = await take(store)
    await settle(store, again, JobState.DEAD, reason=Reason.ERROR, error="boom")
    clock.advance(5)
    assert brief(await event_reader.new_events()) == [(job.id, JobState.DEAD)]
