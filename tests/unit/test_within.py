"""``connection=``: jobs inside the caller's own transaction, through the application."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast, JobFilter, JobState
from holdfast.core.errors import Conflict, Invalid, NotFound
from holdfast.core.ids import new_id
from holdfast.stores.sqlite.notifications import SqliteNotifications
from holdfast.worker import Worker


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Holdfast]:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    app.sync.count()
    yield app
    app.sync.close()


@pytest.fixture
def connection(app: Holdfast, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The caller's: with Python's own transactions, as most code has them."""
    connection = sqlite3.connect(tmp_path / "jobs.db")
    connection.execute("create table invoice (n)")
    yield connection
    connection.close()


def test_a_job_exists_exactly_once_its_transaction_is_committed(app: Holdfast, connection: sqlite3.Connection) -> None:
    connection.execute("insert into invoice values (1)")
    handle = app.sync.enqueue("work", {"n": 1}, connection=connection, key="k", delay=60)
    assert handle.created
    assert app.sync.count() == 0

    connection.commit()

    assert app.sync.get("key:k").id == handle.id
    assert handle.sync.state() is JobState.SCHEDULED
    assert connection.execute("select count(*) from invoice").fetchone() == (1,)


def test_rolled_back_neither_job_nor_key_ever_was(app: Holdfast, connection: sqlite3.Connection) -> None:
    handle = app.sync.enqueue("work", connection=connection, key="k")
    connection.execute("insert into invoice values (1)")
    connection.rollback()

    assert app.sync.count() == 0
    again = app.sync.enqueue("work", key="k")
    assert again.created
    assert again.id != handle.id
    assert connection.execute("select count(*) from invoice").fetchone() == (0,)


def test_a_key_is_the_first_one_s_inside_and_outside(app: Holdfast, connection: sqlite3.Connection) -> None:
    outside = app.sync.enqueue("work", key="old")
    first, second, old = app.sync.enqueue_many(
        [app.draft_job("work", {}, key=key) for key in ("new", "new", "old")], connection=connection
    )
    connection.commit()
    assert (first.created, second.created, second.id) == (True, False, first.id)
    assert (old.created, old.id) == (False, outside.id)
    assert app.sync.count() == 2


def test_a_single_insert_by_python_opens_the_transaction(app: Holdfast, connection: sqlite3.Connection) -> None:
    assert not connection.in_transaction
    app.sync.enqueue("work", connection=connection)
    assert connection.in_transaction
    connection.rollback()
    assert app.sync.count() == 0


def test_many_jobs_are_part_of_it_in_their_order(app: Holdfast, connection: sqlite3.Connection) -> None:
    @app.task("work")
    def work(number: int) -> None: ...

    jobs = [work.new_job(number) for number in range(250)]
    handles = app.sync.enqueue_many(iter(jobs), batch_size=100, connection=connection)
    assert app.sync.count() == 0
    connection.commit()
    assert [handle.id for handle in handles] == [job.id for job in jobs]
    assert app.sync.count() == 250


def test_job_waits_for_what_was_answered_to_an_earlier_batch(app: Holdfast, connection: sqlite3.Connection) -> None:
    outside = app.sync.enqueue("work", key="old")
    first = app.draft_job("work", {}, key="old")
    jobs = [first, app.draft_job("work", {}), app.draft_job("work", {}, after=first)]
    last = app.sync.enqueue_many(jobs, batch_size=2, connection=connection)[-1]
    connection.commit()
    assert [each.job_id for each in app.sync.read_waits(last.id).dependencies] == [outside.id]


def test_batch_is_part_of_it_and_a_refused_member_changes_nothing(
    app: Holdfast, connection: sqlite3.Connection
) -> None:
    ended = app.sync.enqueue_batch([app.draft_job("work", {})], on_end=app.draft_job("callback", {}))
    app.sync.cancel(JobFilter(tasks=("work",)))
    connection.execute("insert into invoice values (1)")
    batch = app.sync.enqueue_batch([app.draft_job("work", {}) for _ in range(3)], connection=connection)
    app.sync.enqueue("work", batch=batch, connection=connection)
    written = connection.total_changes
    for refused, error in ((ended.id, Conflict), (new_id(), Invalid)):
        with pytest.raises(error, match=refused):
            app.sync.enqueue("work", batch=refused, connection=connection)
    assert connection.total_changes == written
    with pytest.raises(NotFound):
        app.sync.read_batch(batch.id)
    connection.commit()
    assert app.sync.read_batch(batch.id).members == 4
    assert app.sync.count() == 3 + 5


def test_async_callers_and_typed_tasks_do_the_same(app: Holdfast, connection: sqlite3.Connection) -> None:
    @app.task("work")
    async def work(number: int) -> None: ...

    async def submit() -> None:
        async with app:
            prepared = work.options(connection=connection, key="k")
            kept = await prepared.enqueue(1)
            await app.enqueue("work", {"number": 2}, connection=connection)
            connection.commit()
            lost = await work.options(connection=connection).enqueue(3)
            connection.rollback()
            assert await kept.state() is JobState.QUEUED
            assert await app.count() == 2
            assert (await app.get("key:k")).id == kept.id
            with pytest.raises(Exception, match=lost.id):
                await lost.job()

    asyncio.run(submit())


def test_another_database_is_refused(app: Holdfast, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as other, pytest.raises(Invalid, match="another database") as caught:
        app.sync.enqueue("work", connection=other)
    other.close()
    assert "jobs.db" in str(caught.value)
    memory = sqlite3.connect(":memory:")
    with pytest.raises(Invalid, match="another database"):
        app.sync.enqueue("work", connection=memory)
    memory.close()
    assert app.sync.count() == 0


@pytest.mark.parametrize("thing", ["connection", 7, object()], ids=["text", "number", "object"])
def test_what_is_no_connection_is_refused(app: Holdfast, thing: object) -> None:
    with pytest.raises(Invalid, match="give a connection of sqlite3"):
        app.sync.enqueue("work", connection=thing)
    assert app.sync.count() == 0


def test_a_connection_that_commits_by_itself_needs_an_open_transaction(app: Holdfast, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    with pytest.raises(Conflict, match="BEGIN"):
        app.sync.enqueue("work", connection=connection)
    assert app.sync.count() == 0
    connection.execute("begin")
    app.sync.enqueue("work", connection=connection)
    connection.execute("commit")
    assert app.sync.count() == 1
    connection.close()


def test_bad_input_leaves_the_transaction_as_it_was(app: Holdfast, connection: sqlite3.Connection) -> None:
    connection.execute("insert into invoice values (1)")
    with pytest.raises(Invalid, match="priority"):
        app.sync.enqueue("work", priority=1000, connection=connection)
    connection.commit()
    assert connection.execute("select count(*) from invoice").fetchone() == (1,)
    assert app.sync.count() == 0


def test_commit_is_noticed_within_a_second_without_notification(
    app: Holdfast, connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's connection knows nothing of our wake-ups: only the file tells. No datagram goes out."""
    monkeypatch.setattr(SqliteNotifications, "_send", lambda self, datagram, address: None)

    @app.task("work")
    async def work() -> float:
        return time.monotonic()

    async def submit() -> float:
        async with app:
            worker = Worker(app, settings=app.settings.replace_values(poll="30s"))
            running = asyncio.create_task(worker.run())
            await asyncio.sleep(0.3)  # it has looked, found nothing, and sleeps until its poll
            handle = await work.options(connection=connection).enqueue()
            await asyncio.sleep(0.05)
            committed = time.monotonic()
            connection.commit()
            started = await handle.result(timeout=60)
            worker.stop()
            await running
            return started - committed

    assert 0 < asyncio.run(submit()) < 1
