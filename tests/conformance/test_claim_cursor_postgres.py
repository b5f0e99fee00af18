"""Claim cursors on a real server: nothing in front of them is left behind, and dead index entries are walked over once.
And due jobs that another transaction has locked: claims pass over them.

The bound itself is held by tests/unit/test_claim_cursors.py, in virtual time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, cast

import asyncpg
import psycopg
import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import Unavailable
from holdfast.core.models import Job, JobState, NewJob, Reason
from holdfast.core.steps import NewStep
from holdfast.core.waits import SignalWait
from holdfast.stores import open_store
from holdfast.stores.base import EVERY_QUEUE, Store
from holdfast.stores.postgres import claiming, cursors, queueing
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.listener_lock import ListenerLock
from holdfast.stores.postgres.pool import PostgresPool, Rows
from holdfast.stores.postgres.store import PostgresStore
from tests.conformance.limited import job_of, limit
from tests.conformance.support import (
    SECOND,
    WORKER,
    Opener,
    claim,
    ending,
    lose_all,
    new_job,
    notified,
    put,
    running,
    settle,
    take,
    take_ids,
)
from tests.support import postgres
from tests.support.servers import until

BATCH = 200
"""A claim large enough for a cursor."""
PATIENCE = 60.0
"""Seconds until a job counts as left behind. The bound is 2 s, but a loaded machine may be slow to claim at all."""
PINNED = 15_000
NEW_SESSIONS = True
"""The server's statistics count the reads of a session when it ends."""


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.shared().fresh_schema() as schema:
        yield schema


@contextmanager
def session(schema: str, **options: Any) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres.shared().url(), options=f"-c search_path={schema}", **options) as connection:
        yield connection


async def opened(schema: str) -> Store:
    """A store object as another process would have it, on the server's clock."""
    store = open_store(postgres.shared().url(schema=schema))
    await store.open()
    return store


async def submit_many(store: Store, number: int, **fields: Any) -> list[str]:
    jobs: list[NewJob] = [new_job(**fields) for _ in range(number)]
    return [job_id for first in range(0, number, 5000) for job_id in await put(store, *jobs[first : first + 5000])]


class Fleet:
    """Three workers that claim without a pause from a backlog that never ends; they listen to nothing."""

    def __init__(self, schema: str, stores: list[Store], producer: Store) -> None:
        self._schema = schema
        self._stores = stores
        self._producer = producer
        self.claimed: set[str] = set()
        self.twice: list[str] = []

    async def work(self, name: str, store: Store) -> None:
        while True:
            jobs = await take(store, BATCH, worker=name)
            ids = [job.id for job in jobs]
            self.twice += self.claimed.intersection(ids)
            self.claimed.update(ids)
            await store.queueing.settle([ending(job) for job in jobs])
            await submit_many(self._producer, len(jobs))

    async def found(self, job_ids: list[str]) -> None:
        """Wait until these have been claimed too, all of them ready by now."""
        await self._until(lambda: self.claimed.issuperset(job_ids))

    async def __aenter__(self) -> Fleet:
        await submit_many(self._producer, 20 * BATCH)
        self._tasks = [asyncio.create_task(self.work(f"w{n}", store)) for n, store in enumerate(self._stores)]
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for store in (*self._stores, self._producer):
            await store.close()
        assert [each for each in results if not isinstance(each, asyncio.CancelledError)] == []
        assert self.twice == []

    async def moved_on(self) -> None:
        """Wait until every worker has claimed a few times more."""
        goal = len(self.claimed) + 5 * len(self._stores) * BATCH
        await self._until(lambda: len(self.claimed) >= goal)

    async def _until(self, reached: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < give_up, "left behind"
            await asyncio.sleep(0.01)


async def test_nothing_in_front_of_the_cursors_is_left_behind(schema: str) -> None:
    producer, operator = await opened(schema), await opened(schema)
    held: list[Job] = [await running(operator, priority=3) for _ in range(3)]
    async with Fleet(schema, [await opened(schema) for _ in range(3)], producer) as fleet:
        with session(schema) as late, session(schema) as direct:
            ((tardy,),) = late.execute("select id::text from submit(%s)", ['[{"task": "work"}]'])
            await fleet.moved_on()

            urgent = await put(operator, new_job(priority=9), new_job(priority=1))
            await fleet.found(urgent)

            late.commit()
            await fleet.found([tardy])

            replayed, retried, given_back = held
            await settle(operator, replayed, JobState.DEAD, reason=Reason.ERROR, error="boom")
            await operator.admin.replay([replayed.id])
            await settle(
                operator, retried, JobState.FAILED, reason=Reason.ERROR, error="boom", delay=timedelta(seconds=0.1)
            )
            await settle(operator, given_back, JobState.QUEUED, refund=True)
            await fleet.found([job.id for job in held])

            (smuggled,) = await put(operator, new_job(delay=timedelta(hours=1)))
            direct.execute("update job set state = 0, run_at = 0 where id = %s", [smuggled])
            direct.commit()
            await fleet.found([smuggled])


async def test_job_with_a_locked_row_is_found_after_unlocking(schema: str) -> None:
    producer = await opened(schema)
    (locked,) = await put(producer, new_job(priority=9))
    with session(schema) as holder:
        holder.execute("select from job where id = %s for update", [locked])
        async with Fleet(schema, [await opened(schema) for _ in range(3)], producer) as fleet:
            await fleet.moved_on()
            assert locked not in fleet.claimed

            holder.rollback()
            await fleet.found([locked])


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks from the start a minute apart, so that what is counted does not depend on how quick this machine is."""
    monkeypatch.setattr(cursors, "INTERVAL", 60.0)
    monkeypatch.setattr(cursors, "LONGEST", 60.0)


@pytest.mark.usefixtures("unhurried")
async def test_two_large_queues_are_served_from_their_cursors(schema: str) -> None:
    """One claim fills itself from the first queue; the place in the other must not be forgotten over it."""
    store = await opened(schema)
    await submit_many(store, 15 * BATCH, queue="a")
    await submit_many(store, 15 * BATCH, queue="b")
    with pinned(schema):
        number = 0
        while jobs := await take(store, BATCH, {"a": BATCH, "b": BATCH}):
            number += len(jobs)
    await store.close()
    assert number == 30 * BATCH
    assert entries_read(schema, number) <= 3 * number


@pytest.mark.usefixtures("unhurried")
async def test_a_pinned_snapshot_makes_claims_no_dearer(schema: str) -> None:
    """Without cursors each claim walks over every job that was taken before: 225,000 entries for 15,000 jobs. With
    them over each job once, and once more in the end, to be sure that there is nothing left."""
    store = await opened(schema)
    ids = await submit_many(store, PINNED)
    seen: list[str] = []
    with pinned(schema):
        while jobs := await take(store, 500):
            seen += [job.id for job in jobs]
            answers = await store.queueing.settle([ending(job) for job in jobs])
            assert all(answer.accepted for answer in answers)
    await store.close()
    assert sorted(seen) == sorted(ids)
    assert entries_read(schema, 2 * PINNED) <= 3 * PINNED


async def test_claim_that_began_at_a_cursor_is_not_exhausted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "INTERVAL", 60.0)  # else a slow machine scans from the start in between
    monkeypatch.setattr(cursors, "LONGEST", 60.0)
    async with notified(store):
        await put(store, *[new_job() for _ in range(BATCH + 5)])
        assert len(await take(store, BATCH)) == BATCH
        found = await claim(store, BATCH)
        assert (len(found.jobs), found.none_left) == (5, False)


async def test_claim_that_failed_in_some_queues_is_not_exhausted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"queue-{number:02}" for number in range(40)]  # more than one statement looks at
    calls = 0

    async def fail_second(pool: PostgresPool, statement: NumberedStatement, **values: Any) -> Rows:
        nonlocal calls
        calls += statement.name == "claim"
        if calls == 2:
            raise Unavailable("the server is away")
        return await fetch(pool, statement, **values)

    fetch = PostgresPool.fetch
    async with notified(store):
        await put(store, new_job(queue=names[0]), new_job(queue=names[-1]))
        monkeypatch.setattr(PostgresPool, "fetch", fail_second)
        found = await claim(store, 100, dict.fromkeys(names, 100))
        assert (len(found.jobs), found.none_left) == (1, False)


async def test_busy_worker_finds_a_queue_that_it_does_not_know(
    store: Store, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim of all queues reads the queue names if the cached list is empty."""
    monkeypatch.setattr(queueing, "_REFRESH", 60.0)
    monkeypatch.setattr(queueing, "_UNNOTIFIED_REFRESH", 60.0)
    monkeypatch.setattr(ListenerLock, "is_polling", True)
    assert await take_ids(store, capacity={EVERY_QUEUE: 9}) == []
    (job_id,) = await put(await opener(), new_job())
    assert await take_ids(store, capacity={EVERY_QUEUE: 9}) == [job_id]


@asynccontextmanager
async def locked(
    store: Store, clock: ManualClock, job_id: str, table: str = "job", column: str = "id"
) -> AsyncIterator[None]:
    """While entered, two seconds later, an open transaction has locked the job, or its row of another table."""
    clock.advance(2)
    address = cast("PostgresStore", store).address
    link = await asyncpg.connect(address.shown.partition("?")[0])
    try:
        async with link.transaction():
            await link.execute(f'select from "{address.schema}".{table} where {column} = $1 for update', job_id)
            yield
    finally:
        await link.close()


@asynccontextmanager
async def locked_due(store: Store, clock: ManualClock, job: NewJob) -> AsyncIterator[str]:
    """A due job that an open transaction has locked."""
    (job_id,) = await put(store, job)
    async with locked(store, clock, job_id):
        yield job_id


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the statements that ran."""
    seen: list[str] = []
    fetch = PostgresPool.fetch

    async def note(pool: PostgresPool, statement: NumberedStatement, **values: Any) -> Rows:
        seen.append(statement.name)
        return await fetch(pool, statement, **values)

    monkeypatch.setattr(PostgresPool, "fetch", note)
    return seen


@pytest.mark.parametrize("queue", ["default", "*"])
@pytest.mark.parametrize("is_limited", [False, True])
async def test_locked_due_job_is_passed_over(
    store: Store,
    opener: Opener,
    clock: ManualClock,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    queue: str,
    is_limited: bool,
) -> None:
    monkeypatch.setattr(claiming, "_PAUSE", 60.0)
    if is_limited:
        await limit(store, by="args.tenant", concurrency=50)
    async with locked_due(store, clock, job_of(1, delay=SECOND)) as due:
        await put(store, *[job_of(1) for _ in range(3)])
        assert len(await take(store, 1, {queue: 1})) == 1
        names.clear()
        found = await claim(store, 1, {queue: 1})
        assert len(found.jobs) == 1
        assert found.next_due is not None
        assert found.next_due > 30 * SECOND
        assert not any(name.startswith("promote") for name in names)

        (later,) = await put(store, job_of(1, delay=SECOND, priority=1))
        assert (await claim(store, 0, {queue: 0})).jobs == []
        found = await claim(store, 1, {queue: 1})
        assert (len(found.jobs), found.next_due) == (1, SECOND)
        clock.advance(1)
        assert await take_ids(store, 9, {queue: 9}) == [later]  # it is not locked
    assert await take_ids(await opener(), 9, {queue: 9}) == [due]


@pytest.mark.parametrize("how", ["in order", "with suspects", "beside a suspect", "isolated", "by id"])
async def test_locked_ready_job_is_passed_over(store: Store, opener: Opener, clock: ManualClock, how: str) -> None:
    ids = await put(store, *[new_job(max_attempts=9) for _ in range(3)])
    for _ in range({"with suspects": 1, "isolated": 2}.get(how, 0)):
        await take(store, 9, max_must_start=9)
        await lose_all(store, clock)
        clock.advance(1)
    suspects = []
    if how == "beside a suspect":
        suspects = [(await running(store, priority=1, max_attempts=9)).id]
        await lose_all(store, clock)
    options = {"max_must_start": 9, "isolated": how == "isolated", "ids": ids if how == "by id" else None}
    async with locked(store, clock, ids[0]), asyncio.timeout(30):
        taken = await take_ids(store, 3, **options)
        assert taken == suspects + (ids[1:2] if how == "isolated" else ids[1:])
    assert ids[0] in await take_ids(await opener(), 9, **options)


@pytest.mark.parametrize("queue", ["default", "*"])
async def test_locked_wait_that_is_over_is_passed_over(
    store: Store, opener: Opener, clock: ManualClock, names: list[str], monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    monkeypatch.setattr(claiming, "_PAUSE", 60.0)
    job = await running(store)
    step = NewStep(job.lease, "approved", 1, True, None, WORKER)
    await store.workflow.receive_signal(SignalWait(step, "approved", SECOND))
    await settle(store, job, JobState.WAITING, refund=True, reason=Reason.SIGNAL, delay=SECOND)
    await limit(store, by="args.tenant", task="limited", concurrency=50)
    async with locked(store, clock, job.id):
        ready = await put(store, *[job_of(1, task="limited") for _ in range(3)])
        assert await take_ids(store, 1, {queue: 1}) == [ready[0]]
        names.clear()
        assert [await take_ids(store, 1, {queue: 1}) for _ in range(2)] == [[job_id] for job_id in ready[1:]]
        assert not any(name.startswith("promote") for name in names)
    assert await take_ids(await opener(), 9, {queue: 9}) == [job.id]


async def test_claim_under_limits_assigns_no_jobs_of_other_queues(store: Store, names: list[str]) -> None:
    await limit(store, concurrency=50)
    limited, _ = await put(store, new_job(), new_job(queue="plain"))
    names.clear()
    assert await take_ids(store, 1, {"default": 1}) == [limited]
    assert names.count("claim_limited") == 1


async def test_sweep_passes_over_a_locked_key(store: Store, clock: ManualClock) -> None:
    """Another program may hold it in a long transaction."""
    ids = await put(store, *[new_job(key=key, key_for=SECOND) for key in ("held", "free")])
    async with locked(store, clock, ids[0], "key", "job_id"):
        assert await store.maintenance.prune({}, limit=10) == 0
    assert [job and job.id for job in await store.query.by_keys(["held", "free"])] == ids


async def test_locked_due_job_is_tried_once_after_each_pause(
    store: Store, clock: ManualClock, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_PAUSE", 0.0)
    async with locked_due(store, clock, new_job(delay=SECOND)) as due:
        assert await take(store) == []
        names.clear()
        assert await take(store) == []
        assert names.count("promote_queues") == 1
    assert await take_ids(store) == [due]
    assert (await claim(store)).next_due is None


async def test_oldest_ready_jobs_are_those_of_one_queue(store: Store, clock: ManualClock) -> None:
    suspects = {queue: await running(store, queue=queue) for queue in ("a", "b")}
    await lose_all(store, clock)
    ready = {queue: (await put(store, new_job(queue=queue)))[0] for queue in ("a", "b")}
    clock.advance(2)
    found = await cast("PostgresStore", store).transport_queries.oldest_ready("a", limit=9, aged=SECOND)
    assert sorted(found) == sorted([suspects["a"].id, ready["a"]])


@contextmanager
def pinned(schema: str) -> Iterator[None]:
    """Another session's snapshot that keeps every dead row."""
    with session(schema) as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select count(*) from job")
        yield


def entries_read(schema: str, writes: int) -> int:
    """Entries of the ready index that were read, once the connections that wrote have ended and reported it."""
    with session(schema, autocommit=True) as connection:

        def written() -> bool:
            query = "select n_tup_upd from pg_stat_user_tables where schemaname = %s and relname = 'job'"
            return connection.execute(query, [schema]).fetchone() == (writes,)

        until(written, "the server's statistics")
        query = "select idx_tup_read from pg_stat_user_indexes where schemaname = %s and indexrelname = 'job_ready'"
        (read,) = connection.execute(query, [schema]).fetchone() or ()
    return int(read)
