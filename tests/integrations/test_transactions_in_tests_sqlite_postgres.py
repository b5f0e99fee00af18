"""Test modes on the test's own database: jobs in its transactions, whether these are committed or rolled back."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psycopg
import pytest
from fastapi import FastAPI
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import ConfigError, Holdfast, HoldfastError, Invalid, NotFound, testing
from holdfast.integrations.fastapi import holdfast_lifespan
from holdfast.testing.temporary_stores import PREFIX
from tests.support.postgres import shared

ran: list[int] = []
app = Holdfast("postgresql://app@127.0.0.1:9/none")


@app.task("note")
async def note(number: int) -> int:
    ran.append(number)
    return number


@app.task("fail")
async def fail() -> None:
    raise ArithmeticError("no good")


@app.task("follow")
async def follow(number: int) -> None:
    await note.enqueue(number + 1)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The URL of a database of the application under test, with a table of its own and nothing else afterwards."""
    url = shared().url(shared().create_database())
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table orders (number int primary key)")
        yield url
        assert connection.execute("select count(*) from orders").fetchone() == (0,)
        assert _schemas(connection) == []


@pytest.fixture(scope="module")
def store(database: str) -> Iterator[testing.TemporaryStore]:
    with testing.temporary_store(database) as store:
        yield store


def _schemas(connection: psycopg.Connection[Any]) -> list[str]:
    found = connection.execute("select nspname from pg_namespace where nspname like 'holdfast%'")
    return [name for (name,) in found]


def on_asyncpg(database: str) -> str:
    return database.replace("postgresql://", "postgresql+asyncpg://")


@asynccontextmanager
async def rolled_back(url: str) -> AsyncIterator[AsyncSession]:
    """SQLAlchemy's recipe: commits of the session end savepoints of a transaction that is rolled back."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        await outer.rollback()
    await engine.dispose()


Body = Callable[[], Coroutine[Any, Any, None]]


def run(body: Body) -> None:
    asyncio.run(asyncio.wait_for(body(), 100))


# ── a transaction that the test rolls back ────────────────────────────────────────────────────────────────────────────
def test_inline_job_runs_when_the_session_commits(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        async with rolled_back(on_asyncpg(database)) as session:
            await session.execute(text("insert into orders values (1)"))
            job = await note.options(connection=session, delay=60).enqueue(1)
            assert ran == []
            testing.assert_enqueued(app, task=note, args={"number": 1}, count=1)
            await session.commit()
            assert ran == [1]
            (found,) = testing.assert_enqueued(app, task=note, count=1)
            assert (found.id, found.state, found.return_value()) == (job.id, "succeeded", 1)

    with testing.inline(app, url=store):
        run(body)


@pytest.mark.parametrize("mode", [testing.inline, testing.manual])
def test_rollback_takes_the_job_away(store: testing.TemporaryStore, database: str, mode: Any) -> None:
    async def body() -> None:
        async with rolled_back(on_asyncpg(database)) as session:
            await note.options(connection=session).enqueue(1)
            testing.assert_enqueued(app, task="note")
            await session.rollback()
            testing.refute_enqueued(app)
            async with session.begin():
                savepoint = await session.begin_nested()
                await note.options(connection=session).enqueue(2)
                await savepoint.rollback()
                await note.options(connection=session).enqueue(3)
                async with session.begin_nested():
                    await note.options(connection=session).enqueue(4)
                assert ran == []
            assert [job.decode_arguments()["number"] for job in testing.enqueued(app)] == [3, 4]
            assert ran == ([3, 4] if mode is testing.inline else [])

    with mode(app, url=store):
        run(body)
        testing.refute_enqueued(app)


def test_commit_raises_the_error_of_the_job(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        async with rolled_back(on_asyncpg(database)) as session:
            await fail.options(connection=session).enqueue()
            with pytest.raises(ArithmeticError, match="no good"):
                await session.commit()
            await session.execute(text("insert into orders values (1)"))  # it can go on
            await session.commit()

    with testing.inline(app, url=store):
        run(body)


def test_jobs_of_a_job_run_as_well(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        async with rolled_back(on_asyncpg(database)) as session:
            await follow.options(connection=session).enqueue(1)
            await session.commit()
            assert ran == [2]

    with testing.inline(app, url=store):
        run(body)


def test_manual_job_in_an_open_transaction_is_listed(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        connection = await asyncpg.connect(database)
        outer = connection.transaction()
        await outer.start()
        job = await note.options(connection=connection, key="k", tags=["t"], priority=3, delay=60).enqueue(1)
        expected = {"key": "k", "tag": "t", "priority": 3, "delay": 60, "queue": "default", "args": {"number": 1}}
        (found,) = testing.assert_enqueued(app, count=1, **expected)  # type: ignore[arg-type]
        assert (found.id, found.state) == (job.id, "scheduled")
        with pytest.raises(NotFound):
            await app.get(job.id)
        again = await note.options(connection=connection, key="k").enqueue(1)
        assert (again.id, again.created) == (job.id, False)
        await outer.rollback()
        testing.refute_enqueued(app)
        await connection.close()

    with testing.manual(app, url=store):
        run(body)


def test_manual_job_of_a_rolled_back_transaction_runs_once(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        async with rolled_back(on_asyncpg(database)) as session:
            await follow.options(connection=session).enqueue(1)
            await testing.run_enqueued(app)  # its session has not committed
            await note.options(connection=session, delay=60).enqueue(9)
            assert ran == []
            await session.commit()
            assert ran == []
            await testing.run_enqueued(app)
            await testing.run_enqueued(app)
            assert ran == [2]
            states = {job.task: job.state for job in testing.enqueued(app)}
            assert states == {"follow": "succeeded", "note": "scheduled"}
            await fail.options(connection=session).enqueue()
            await session.commit()
            with pytest.raises(ArithmeticError, match="no good"):
                await testing.run_enqueued(app)
        testing.assert_enqueued(app, count=1)  # by the job, in a transaction of its own

    with testing.manual(app, url=store):
        run(body)


@pytest.mark.parametrize("mode", [testing.inline, testing.manual])
def test_job_that_ran_in_an_open_transaction_runs_once(store: testing.TemporaryStore, database: str, mode: Any) -> None:
    async def body() -> None:
        connection = await asyncpg.connect(database)
        async with connection.transaction():
            await note.options(connection=connection).enqueue(1)
            await testing.run_enqueued(app)
            assert ran == [1]
        await testing.run_enqueued(app)
        assert ran == [1]
        await connection.close()

    with mode(app, url=store):
        run(body)


# ── a transaction that is committed ───────────────────────────────────────────────────────────────────────────────────
def test_inline_job_of_a_real_commit_is_in_the_store(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        engine = create_async_engine(on_asyncpg(database), pool_size=1, max_overflow=0)
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(text("select 1"))
            job = await note.options(connection=session, delay=60).enqueue(5)
        assert ran == [5]
        assert await job.result(timeout=0) == 5
        with pytest.raises(ArithmeticError):
            async with AsyncSession(engine) as session, session.begin():
                await fail.options(connection=session).enqueue()
        async with AsyncSession(engine) as session:
            await note.options(connection=session).enqueue(6)
        assert ran == [5]
        await engine.dispose()

    with testing.inline(app, url=store):
        run(body)
        testing.assert_enqueued(app, task="note", count=1)
    with testing.manual(app, url=store):
        testing.refute_enqueued(app)


@pytest.mark.parametrize("library", ["asyncpg", "psycopg", "sqlalchemy"])
def test_jobs_of_plain_connections_run_on_demand(store: testing.TemporaryStore, database: str, library: str) -> None:
    @asynccontextmanager
    async def begin() -> AsyncIterator[Any]:
        if library == "asyncpg":
            connection = await asyncpg.connect(database)
            async with connection.transaction():
                yield connection
            await connection.close()
        elif library == "psycopg":
            async with await psycopg.AsyncConnection.connect(database) as connection:
                yield connection
        else:
            engine = create_async_engine(on_asyncpg(database))
            async with engine.begin() as connection:
                yield connection
            await engine.dispose()

    async def body() -> None:
        async with begin() as connection:
            job = await note.options(connection=connection).enqueue(1)
            await testing.run_enqueued(app)  # in its open transaction
            assert ran == [1]
        testing.assert_enqueued(app, task="note", count=1)
        async with begin() as connection:
            job = await note.options(connection=connection).enqueue(2)
        await testing.run_enqueued(app)
        assert await job.result(timeout=0) == 2

    with testing.inline(app, url=store):
        run(body)


def test_manual_jobs_run_on_demand(store: testing.TemporaryStore, database: str) -> None:
    async def body() -> None:
        await follow.enqueue(1)
        await note.options(delay=3600).enqueue(9)
        connection = await asyncpg.connect(database)
        async with connection.transaction():
            await note.options(connection=connection).enqueue(7)
        await connection.close()
        assert ran == []
        await testing.run_enqueued(app)
        assert sorted(ran) == [2, 7]
        await fail.enqueue()
        with pytest.raises(ArithmeticError):
            await testing.run_enqueued(app)

    with testing.manual(app, url=store):
        run(body)
    with pytest.raises(HoldfastError, match=r"testing\.manual\(app\)"):
        asyncio.run(testing.run_enqueued(app))


def test_site_with_a_worker_in_another_thread(store: testing.TemporaryStore, database: str) -> None:
    engine = create_async_engine(on_asyncpg(database))

    @asynccontextmanager
    async def run_worker(_: FastAPI) -> AsyncIterator[None]:
        async with app.worker():
            yield
        await engine.dispose()

    site = FastAPI(lifespan=holdfast_lifespan(app, run_worker))

    @site.post("/orders/{number}", status_code=202)
    async def order(number: int) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await note.options(connection=session).enqueue(number)

    async def ask() -> int:
        transport = httpx.ASGITransport(site)
        async with site.router.lifespan_context(site), httpx.AsyncClient(transport=transport) as client:
            answer = await client.post("http://site/orders/1")
            await asyncio.sleep(0.1)  # a worker would take a job that was only stored
            return answer.status_code

    for mode in (testing.inline, testing.manual):
        with mode(app, url=store), ThreadPoolExecutor(1) as pool:
            assert pool.submit(asyncio.run, ask()).result() == 202
            testing.assert_enqueued(app, task="note", count=1)
            assert ran == [1]


# ── blocking callers ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("rolls_back", [True, False])
def test_blocking_session_runs_jobs_at_its_commit(
    store: testing.TemporaryStore, database: str, *, rolls_back: bool
) -> None:
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    with testing.inline(app, url=store), engine.connect() as connection:
        outer = connection.begin() if rolls_back else None
        with Session(connection if rolls_back else engine, join_transaction_mode="create_savepoint") as session:
            note.options(connection=session).sync.enqueue(1)
            assert ran == []
            session.commit()
            assert ran == [1]
            testing.assert_enqueued(app, task="note", count=1)
        if outer is not None:
            outer.rollback()
    engine.dispose()


def test_blocking_session_in_an_event_loop_runs_jobs_at_its_commit(
    store: testing.TemporaryStore, database: str
) -> None:
    async def body() -> None:
        engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
        with Session(engine) as session, session.begin():
            await note.options(connection=session).enqueue(1)
        assert ran == [1]
        engine.dispose()

    with testing.inline(app, url=store):
        run(body)


def test_sqlite_file_of_the_test_takes_jobs_and_keeps_its_own_tables(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table orders (number int)")
        with testing.inline(app, url=f"sqlite:///{path}"):
            connection.execute("insert into orders values (1)")
            job = note.options(connection=connection).sync.enqueue(1)
            testing.assert_enqueued(app, task="note", count=1)
            connection.rollback()
            testing.refute_enqueued(app)
            note.options(connection=connection).sync.enqueue(2)
            connection.commit()
            asyncio.run(testing.run_enqueued(app))
            assert ran == [2]
            engine = create_engine(f"sqlite:///{path}")
            with Session(engine) as session, session.begin():
                job = note.options(connection=session).sync.enqueue(3)
            assert job.sync.result(timeout=0) == 3
            engine.dispose()
        tables = connection.execute("select name from sqlite_master").fetchall()
        assert (tables, connection.execute("pragma application_id").fetchone()) == ([("orders",)], (0,))
    assert [each.name for each in tmp_path.iterdir()] == ["shop.db"]


# ── the store of the test ─────────────────────────────────────────────────────────────────────────────────────────────
def test_url_gets_a_schema_that_is_dropped(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        before = _schemas(connection)
        with testing.manual(app, url=f"{database}?schema=public"):
            app.sync.enqueue("note", {"number": 1})
            (made,) = set(_schemas(connection)) - set(before)
            assert made.startswith(PREFIX)
        assert _schemas(connection) == before


def test_harness_drops_its_schema(database: str) -> None:
    async def body() -> None:
        async with testing.Harness(app, url=database) as harness:
            await note.options(delay=3600).enqueue(1)
            await harness.run_until_idle()
            assert ran == [1]

    with psycopg.connect(database, autocommit=True) as connection:
        before = _schemas(connection)
        run(body)
        assert _schemas(connection) == before


def test_harness_runs_jobs_of_committed_transactions(database: str, store: testing.TemporaryStore) -> None:
    async def body() -> None:
        connection = await asyncpg.connect(database)
        async with testing.Harness(app, url=store) as harness:
            await note.enqueue(1)
            await harness.run_until_idle()
            async with connection.transaction():
                job = await note.options(connection=connection).enqueue(2)
                await harness.run_until_idle()
                assert ran == [1]
            await harness.run_until_idle()
            assert (ran, await job.state()) == ([1, 2], "succeeded")
        await connection.close()

    run(body)
    with testing.manual(app, url=store):
        testing.refute_enqueued(app)


def test_schemas_of_killed_runs_are_dropped_by_the_next(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"create schema {PREFIX}left".encode())
        with testing.temporary_store(database), testing.temporary_store(database):
            assert f"{PREFIX}left" not in _schemas(connection)
            assert len(_schemas(connection)) >= 2


def test_bad_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave out"), testing.manual(app, url="postgresql+asyncpg://localhost/shop"):
        pytest.fail("the mode was entered")


def test_connection_without_a_url_says_what_to_do(database: str) -> None:
    with (
        psycopg.connect(database) as connection,
        testing.inline(app),
        pytest.raises(Invalid, match=r"testing\.inline\(app, url=…\)"),
    ):
        note.options(connection=connection).sync.enqueue(1)


def test_application_is_as_before(database: str, store: testing.TemporaryStore) -> None:
    before = dict(vars(app))
    for mode in (testing.inline, testing.manual):
        with mode(app, url=store):
            assert app.settings.url == store.url
    assert vars(app) == before


def test_open_transaction_is_named_when_the_store_is_removed(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.testing.temporary_stores.LOCK_WAIT", "50ms")
    with psycopg.connect(database) as connection:
        with pytest.raises(HoldfastError, match="still used by an open transaction; roll it back"):
            leave_a_transaction_open(database, connection)
        connection.rollback()
    with testing.temporary_store(database):  # drops what was left
        pass


def leave_a_transaction_open(database: str, connection: psycopg.Connection[Any]) -> None:
    with testing.manual(app, url=database):
        note.options(connection=connection).sync.enqueue(1)
