"""Job events of PostgreSQL, where transactions become visible in another order than they dated their rows."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import Invalid
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.stores.base import Store
from holdfast.stores.common.event_cursor import FIRST_ID
from holdfast.stores.postgres.events import SnapshotCursor
from holdfast.stores.postgres.pool import parse_url
from tests.conformance.support import EventReader, ending, failing, new_job, put, stored, take

FOREIGN = "create temporary table if not exists anything (n int); insert into anything values (1)"
"""What gives a transaction its number, and nothing of ours to do."""


@asynccontextmanager
async def connected(store: Store) -> AsyncIterator[Any]:
    """A connection of another client."""
    link = await asyncpg.connect(parse_url(store.url).dsn)
    try:
        yield link
    finally:
        await link.close()


async def complete(link: Any, store: Store, clock: ManualClock, job: Job) -> None:
    """End a job within the transaction that is open there."""
    given = json.dumps({"at": clock(), "id": job.id, "claims": job.claims, "result": None})
    schema = parse_url(store.url).schema
    assert await link.fetchval(f'select accepted from "{schema}".complete($1)', given)  # noqa: S608 - a name of ours


async def begun(store: Store, clock: ManualClock, within: timedelta = timedelta(hours=1)) -> EventReader:
    event_reader = EventReader(store, within=within)
    await event_reader.begin()
    clock.advance(1)
    return event_reader


def ids(reported: list[Any]) -> list[str]:
    return [each.job_id for each in reported]


async def test_late_commit_is_not_skipped(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job() for _ in range(3)])
    late, quick, last = await take(store)
    event_reader = await begun(store, clock)
    async with connected(store) as link, link.transaction():
        await complete(link, store, clock, late)
        for job in (quick, last):  # dated later, and seen sooner, for a while
            clock.advance(5)
            await store.queueing.settle([ending(job, JobState.SUCCEEDED)])
            assert ids(await event_reader.new_events()) == [job.id]
        clock.advance(5)
        assert await event_reader.new_events() == []
    assert ids(await event_reader.new_events()) == [late.id]
    assert await event_reader.new_events() == []


async def test_job_ended_inside_a_savepoint_is_not_skipped(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job() for _ in range(2)])
    within, other = await take(store)
    event_reader = await begun(store, clock)
    async with connected(store) as link, link.transaction():
        async with link.transaction():
            await complete(link, store, clock, within)
        await store.queueing.settle([ending(other, JobState.SUCCEEDED)])
        assert ids(await event_reader.new_events()) == [other.id]
    assert ids(await event_reader.new_events()) == [within.id]
    await store.admin.replay([within.id], force=True)
    (again,) = await take(store)
    await store.queueing.settle([ending(again, JobState.DEAD)])
    assert [(each.job_id, each.claims) for each in await event_reader.new_events()] == [(within.id, 2)]


async def test_only_writer_that_commits_late_is_not_skipped(store: Store, clock: ManualClock) -> None:
    """A snapshot does not list the newest transaction while no later one is over."""
    await put(store)
    (job,) = await take(store, lease_for=timedelta(hours=1))
    event_reader = await begun(store, clock)
    async with connected(store) as link, link.transaction():
        await complete(link, store, clock, job)
        for _ in range(3):
            clock.advance(60)
            assert await event_reader.new_events() == []
    assert ids(await event_reader.new_events()) == [job.id]


async def test_commit_hours_late_is_not_skipped_within_the_requested_period(store: Store, clock: ManualClock) -> None:
    await put(store)
    (job,) = await take(store, lease_for=timedelta(hours=9))
    event_reader = await begun(store, clock, within=timedelta(days=1))
    async with connected(store) as link, link.transaction():
        await complete(link, store, clock, job)
        for _ in range(3):
            clock.advance(timedelta(minutes=50).total_seconds())
            assert await event_reader.new_events() == []
    assert ids(await event_reader.new_events()) == [job.id]


async def test_subscription_during_an_old_transaction_reports_its_events(store: Store, clock: ManualClock) -> None:
    await put(store)
    (job,) = await take(store, lease_for=timedelta(hours=1))
    async with connected(store) as link, link.transaction():
        await complete(link, store, clock, job)
        clock.advance(timedelta(minutes=30).total_seconds())
        event_reader = await begun(store, clock)
    assert ids(await event_reader.new_events()) == [job.id]
    assert await event_reader.new_events() == []


async def test_end_does_not_repeat_when_another_job_depends_on_it(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store)
    (job,) = await take(store)
    event_reader = await begun(store, clock)
    await store.queueing.settle([ending(job, JobState.SUCCEEDED)])
    assert ids(await event_reader.new_events()) == [job_id]
    await put(store, new_job(after=(Dependency(job_id, Condition.SUCCESS),)))
    assert await event_reader.new_events() == []


async def test_attempt_that_fails_between_two_pages_is_reported_once(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job(max_attempts=3) for _ in range(3)])
    jobs = await take(store)
    event_reader = await begun(store, clock)

    async def fail(*failed: Job) -> None:
        for job in failed:
            await store.queueing.settle([failing(job, delay=timedelta(hours=1))])
            clock.advance(5)

    await fail(*jobs[:2])
    page = await store.query.events(event_reader.cursor, limit=1, max_age=timedelta(hours=1))
    assert (ids(page.events), page.more) == ([jobs[0].id], True)
    await fail(jobs[2])
    event_reader.cursor, event_reader.limit = page.cursor, 1
    assert ids(await event_reader.new_events()) == [job.id for job in jobs[1:]]


async def test_a_transaction_is_known_by_its_begin(store: Store, clock: ManualClock) -> None:
    """Otherwise the first read of a client would scan the events of an hour."""
    clock.advance(time.time() - clock() / 1e6)
    async with connected(store) as link, link.transaction():
        await link.execute(FOREIGN)
        number = int(await link.fetchval("select pg_current_xact_id()::text"))
        before = clock()
        clock.advance(60)
        seen = SnapshotCursor.read((await begun(store, clock)).cursor).seen
    assert abs(seen.running[number] - before) < 30_000_000


async def test_others_long_transactions_hold_up_nothing(store: Store, clock: ManualClock) -> None:
    """However long another client has one open on this server, what ends meanwhile appears, and once."""
    async with connected(store) as link, link.transaction():
        await link.execute(FOREIGN)
        event_reader = await begun(store, clock)
        for _ in range(10):
            (job_id,) = await put(store)
            (job,) = await take(store)
            await store.queueing.settle([ending(job, JobState.SUCCEEDED)])
            assert ids(await event_reader.new_events()) == [job_id]
            clock.advance(300)
    assert await event_reader.new_events() == []


async def test_twenty_slow_writers_are_all_reported_once(store: Store, clock: ManualClock) -> None:
    """Some end jobs behind savepoints, some roll back, and some have written something of their own before."""
    await put(store, *[new_job() for _ in range(200)])
    jobs = await take(store, limit=200)
    event_reader = await begun(store, clock)
    event_reader.limit = 10
    reported: Counter[str] = Counter()
    chance = random.Random(7)

    async def writing(mine: list[Job]) -> None:
        async with connected(store) as link:
            for job in mine:
                await _slowly(link, store, clock, job, chance)

    async def following(writers: asyncio.Future[Any]) -> None:
        over = False
        while not over:
            over = writers.done()
            reported.update(ids(await event_reader.new_events()))

    writers = asyncio.gather(*[writing(jobs[n::20]) for n in range(20)])
    await asyncio.gather(writers, following(writers))

    succeeded = (await store.query.find(JobFilter(states=(JobState.SUCCEEDED,)), limit=500)).jobs
    assert reported == Counter(job.id for job in succeeded)
    assert 100 < len(succeeded) < 200


async def _slowly(link: Any, store: Store, clock: ManualClock, job: Job, chance: random.Random) -> None:
    """End a job in a transaction that is open for a while."""
    clock.advance(0.001)
    transaction = link.transaction()
    await transaction.start()
    if chance.random() < 0.5:
        await link.execute(FOREIGN)
        await asyncio.sleep(chance.random() * 0.02)
    if chance.random() < 0.5:
        async with link.transaction():
            await complete(link, store, clock, job)
    else:
        await complete(link, store, clock, job)
    await asyncio.sleep(chance.random() * 0.05)
    await (transaction.rollback() if chance.random() < 0.2 else transaction.commit())


async def test_a_cursor_of_another_server_is_a_gap(store: Store, clock: ManualClock) -> None:
    event_reader = await begun(store, clock)
    at, top, *_ = event_reader.cursor.split(".")
    event_reader.cursor = f"{at}.{int(top) + 10**9}"

    assert (await event_reader.new_events(), event_reader.gap) == ([], True)


@pytest.mark.parametrize("rest", ["5.0-1", "5.5-1", "5.9-1", f"5~NOW.5~1.{'-' * 36}.1", "5~NOW.5.9-1~1.NO_JOB.1"])
async def test_what_this_server_cannot_have_written_is_no_mark(store: Store, clock: ManualClock, rest: str) -> None:
    made_up = f"{clock()}.{rest}".replace("NOW", str(clock())).replace("NO_JOB", FIRST_ID)

    with pytest.raises(Invalid, match="after: "):
        await store.query.events(made_up, limit=10, max_age=timedelta(hours=1))


@pytest.mark.parametrize("tops", [("0", "5"), ("5", "0"), ("5", "9" * 18)])
async def test_snapshot_unknown_to_this_server_is_a_gap(
    store: Store, clock: ManualClock, tops: tuple[str, str]
) -> None:
    seen, shown = tops
    made_up = f"{clock()}.{seen}~{clock()}.{shown}~1.{FIRST_ID}.0"

    assert (await store.query.events(made_up, limit=10, max_age=timedelta(hours=1))).gap


async def test_a_mark_outlives_many_transactions(store: Store, clock: ManualClock) -> None:
    """Who comes back within the hour goes on where they were."""
    event_reader = await begun(store, clock)
    ended = []
    for _ in range(30):
        (job_id,) = await put(store)
        (job,) = await take(store)
        await store.queueing.settle([ending(job, JobState.SUCCEEDED)])
        ended.append(job_id)
        clock.advance(timedelta(minutes=1).total_seconds())

    event_reader.limit = 4
    assert ids(await event_reader.new_events()) == ended
    assert (await stored(store, ended[0])).state is JobState.SUCCEEDED
