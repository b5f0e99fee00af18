"""Jobs inside the caller's own transaction: they exist exactly if it commits."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Dependency
from holdfast.core.models import JobFilter, JobState, NewJob, Options
from holdfast.stores.base import External, StatementFlow, Store
from tests.conformance.support import Submitted, ended, new_job, put, state_of, stored, take_ids


@pytest.fixture
def connection(tmp_path: Path, store: Store) -> Iterator[sqlite3.Connection]:
    """The caller's connection, with a table of its own beside ours."""
    connection = sqlite3.connect(tmp_path / "holdfast.db", isolation_level=None)
    connection.execute("CREATE TABLE invoice (n)")
    yield connection
    connection.close()


def submit(connection: sqlite3.Connection, store: Store, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Hold a submission's dialogue as a caller's own code may."""
    return go_on(cast(External, store.external).submit_flow(jobs), connection)


def go_on(dialogue: StatementFlow[Any], connection: sqlite3.Connection, rows: Any = None) -> list[Submitted]:
    """Hold the rest of a dialogue, after these rows."""
    try:
        while True:
            statement = dialogue.send(rows)
            rows = connection.execute(statement.sql, tuple(statement.parameters)).fetchall()
    except StopIteration as stop:
        answers: list[Submitted] = stop.value
        return answers


async def test_a_committed_submission_exists(store: Store, connection: sqlite3.Connection) -> None:
    new = new_job(payload='{"a":"x\0y"}', queue="q", priority=2, options=Options(tags=("t",)))
    connection.execute("BEGIN")
    connection.execute("INSERT INTO invoice VALUES (1)")

    assert submit(connection, store, [new]) == [Submitted(new.id, True)]

    assert await store.query.get(new.id) is None, "seen before the commit"
    connection.execute("COMMIT")
    job = await stored(store, new.id)
    assert (job.state, job.payload, job.queue, job.priority) == (JobState.QUEUED, new.payload, "q", 2)
    assert job.options_or_default.tags == ("t",)
    assert await take_ids(store, capacity={"q": 1}) == [new.id]


async def test_job_submitted_by_sql_equals_one_submitted_by_the_store(
    store: Store, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    fields = {"payload": '{"n":1}', "priority": 3, "delay": timedelta(minutes=1), "max_attempts": None}
    ours, theirs = new_job(**fields), new_job(**fields)
    await put(store, ours)
    submit(connection, store, [theirs])

    first, second = await stored(store, ours.id), await stored(store, theirs.id)

    assert (first.state, first.run_at_us, first.created_at_us) == (second.state, second.run_at_us, second.created_at_us)
    assert (first.priority, first.max_attempts, first.options) == (second.priority, second.max_attempts, second.options)
    assert second.state is JobState.SCHEDULED


async def test_a_rolled_back_submission_never_was(store: Store, connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    submit(connection, store, [new_job(key="k"), new_job()])
    connection.execute("ROLLBACK")

    assert await store.query.count(JobFilter()) == 0
    assert await store.query.by_key("k") is None
    assert (await store.queueing.submit([new_job(key="k")]))[0].created


async def test_keys_hold_across_both_ways_of_submitting(store: Store, connection: sqlite3.Connection) -> None:
    (old,) = await put(store, new_job(key="old"))
    first, second = new_job(key="new"), new_job(key="new")
    connection.execute("BEGIN")

    answers = submit(connection, store, [new_job(key="old"), first, second, new_job()])

    connection.execute("COMMIT")
    assert answers[:3] == [Submitted(old, False), Submitted(first.id, True), Submitted(first.id, False)]
    assert answers[3].created
    assert await store.queueing.submit([new_job(key="new")]) == [Submitted(first.id, False)]
    assert await store.query.count(JobFilter()) == 3


async def test_a_dead_key_is_free_here_too(store: Store, connection: sqlite3.Connection, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job(key="k", key_for=timedelta(hours=1)))
    await store.admin.cancel([job_id])
    clock.advance(60)
    await store.maintenance.prune({"cancelled": timedelta(0)}, limit=10)
    assert submit(connection, store, [new_job(key="k")]) == [Submitted(job_id, False)]

    clock.advance(3600)
    assert submit(connection, store, [new_job(key="k")])[0].created


async def test_ids_are_harmless_across_both_ways_of_submitting(store: Store, connection: sqlite3.Connection) -> None:
    new = new_job()
    await put(store, new)

    assert submit(connection, store, [new, new]) == [Submitted(new.id, False)] * 2
    assert await store.query.count(JobFilter()) == 1


async def test_a_batch_keeps_its_order(store: Store, connection: sqlite3.Connection) -> None:
    jobs = [new_job() for _ in range(700)]

    answers = submit(connection, store, jobs)

    assert answers == [Submitted(job.id, True) for job in jobs]
    assert await take_ids(store, 1000) == [job.id for job in jobs]


async def test_an_empty_submission_is_empty(store: Store, connection: sqlite3.Connection) -> None:
    assert submit(connection, store, []) == []


async def test_it_works_on_a_connection_that_returns_rows_by_name(store: Store, connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    new = new_job(key="k")

    assert submit(connection, store, [new]) == [Submitted(new.id, True)]
    assert await state_of(store, new.id) is JobState.QUEUED


async def test_commit_wakes_all_waiters(store: Store, connection: sqlite3.Connection) -> None:
    """Only the file can tell: the caller's connection knows nothing of our wake-ups."""
    topics = ["queue:default", "queue:*", "queue:other"]
    for _ in range(2):
        await asyncio.gather(*[store.queueing.wait([topic], timeout=0.01) for topic in topics])
    waiters = [asyncio.create_task(store.queueing.wait([topic], timeout=20)) for topic in topics[:2] * 2]
    await asyncio.sleep(0.05)

    submit(connection, store, [new_job()])

    done, late = await asyncio.wait(waiters, timeout=60)
    for waiter in late:
        waiter.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    assert (len(done), len(late)) == (4, 0)


async def test_it_neither_commits_nor_begins_by_itself(store: Store, connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    connection.execute("SAVEPOINT mine")
    submit(connection, store, [new_job()])
    assert connection.in_transaction
    connection.execute("ROLLBACK TO mine")
    connection.execute("INSERT INTO invoice VALUES (1)")
    connection.execute("COMMIT")

    assert await store.query.count(JobFilter()) == 0
    assert connection.execute("SELECT count(*) FROM invoice").fetchone() == (1,)


async def test_it_waits_for_its_turn_to_write_before_it_reads_anything(
    store: Store, connection: sqlite3.Connection, tmp_path: Path, clock: ManualClock
) -> None:
    """A transaction that has read does not wait for the lock, but fails; and the events feed has passed the instants
    before it is had: a job that ends at once is dated later."""
    new = new_job(after=(Dependency(await ended(store, JobState.CANCELLED)),))
    connection.execute("BEGIN")
    dialogue = cast(External, store.external).submit_flow([new])
    first = next(dialogue)
    rows = connection.execute(first.sql, tuple(first.parameters)).fetchall()
    with (
        closing(sqlite3.connect(tmp_path / "holdfast.db", timeout=0)) as other,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")
    clock.advance(5)

    go_on(dialogue, connection, rows)

    connection.execute("COMMIT")
    assert (await stored(store, new.id)).ended_at_us == clock()
