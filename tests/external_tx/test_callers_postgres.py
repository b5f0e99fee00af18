"""What is no transaction of the caller's on this very database is refused at once, and harms nothing; and what else
happens around one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from django.db import ConnectionHandler, connections, transaction
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from holdfast import Holdfast
from holdfast.core.errors import Conflict, Invalid
from holdfast.worker import Worker
from tests.external_tx.kinds import by_asyncpg, django_connection, engine_url, plain
from tests.external_tx.support import Place, Undone
from tests.support.servers import until


# ── what cannot be joined ─────────────────────────────────────────────────────────────────────────────────────────
def test_a_connection_that_would_commit_by_itself_is_refused(place: Place) -> None:
    url = plain(place.url)
    with (
        psycopg.connect(url, autocommit=True) as by_psycopg,
        create_engine(engine_url(url, "psycopg"), isolation_level="AUTOCOMMIT").connect() as by_sqlalchemy,
    ):
        for connection in (by_psycopg, by_sqlalchemy, django_connection(place.url)):
            with pytest.raises(Conflict, match="would commit by itself; "):
                place.app.sync.enqueue("work", connection=connection)
    by_sqlalchemy.engine.dispose()

    async def isolated() -> None:
        link = await asyncpg.connect(url)
        with pytest.raises(Conflict, match=r"async with connection\.transaction"):
            await place.app.enqueue("work", connection=link)
        await link.close()
        await place.app.close()

    asyncio.run(isolated())
    assert place.jobs() == 0


def test_a_closed_connection_is_refused(place: Place) -> None:
    url = plain(place.url)
    by_psycopg = psycopg.connect(url)
    by_psycopg.close()
    engine = create_engine(engine_url(url, "psycopg"))
    by_sqlalchemy = engine.connect()
    by_sqlalchemy.close()
    for connection in (by_psycopg, by_sqlalchemy):
        with pytest.raises(Conflict, match="closed"):
            place.app.sync.enqueue("work", connection=connection)
    engine.dispose()

    async def closed() -> None:
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
            async with pool.acquire() as given_back:
                pass
            link = await asyncpg.connect(url)
            await link.close()
            for connection in (link, given_back):
                with pytest.raises(Conflict, match="closed"):
                    await place.app.enqueue("work", connection=connection)
        await place.app.close()

    asyncio.run(closed())
    assert place.jobs() == 0


def test_async_connection_is_refused_without_its_event_loop(place: Place) -> None:
    async def link() -> Any:
        return await asyncpg.connect(plain(place.url))

    with asyncio.Runner() as runner:
        connection = runner.run(link())
        with pytest.raises(Invalid, match="belongs to an event loop"):
            place.app.sync.enqueue("work", connection=connection)
        runner.run(connection.close())


def test_engine_or_session_is_refused_with_a_remedy(place: Place, tmp_path: Path) -> None:
    engine = create_engine(engine_url(place.url, "psycopg"))
    for near in (engine, sessionmaker(engine), place.url):
        with pytest.raises(Invalid, match="one connection, not the pool or the engine"):
            place.app.sync.enqueue("work", connection=near)
    with pytest.raises(Invalid, match=r"session\.connection"):
        place.app.sync.enqueue("work", connection=Session(binds={object: engine}))
    file = sqlite3.connect(tmp_path / "other.db")
    with pytest.raises(Invalid, match=r"'sqlite' is not valid; it is open on another database"):
        place.app.sync.enqueue("work", connection=file)
    file.close()
    engine.dispose()


@pytest.mark.parametrize("granted", [False, True], ids=["nothing", "all but sequences"])
def test_role_without_rights_on_the_queue_gets_a_remedy(place: Place, granted: bool) -> None:
    place.server.execute("create role stranger login")
    try:
        if granted:
            place.execute("grant usage on schema SCHEMA to stranger")
            place.execute("grant all on all tables in schema SCHEMA to stranger")
        with psycopg.connect(place.server.url(user="stranger")) as connection:
            with pytest.raises(Invalid, match="role stranger' may not submit; grant it usage"):
                place.app.sync.enqueue("work", connection=connection)
            assert connection.execute("select 1").fetchone() == (1,), "the transaction is as it was"
    finally:
        place.execute("drop owned by stranger")
        place.server.execute("drop role stranger")


@pytest.mark.parametrize("encoding", ["latin1", "euc_jp", "sql_ascii"])
def test_the_encoding_of_the_session_does_not_matter(place: Place, encoding: str) -> None:
    text = 'é€𝄞 \\u20ac "\0\n␀'
    with psycopg.connect(plain(place.url)) as connection:
        connection.execute(f"set client_encoding = {encoding}")  # type: ignore[arg-type]
        handle = place.app.sync.enqueue("work", {"text": text}, connection=connection)
        connection.commit()
    assert json.loads(place.app.sync.get(handle.id).payload) == {"text": text}


def test_a_copy_of_the_database_is_another_one(place: Place) -> None:
    place.app.sync.close()
    copy = f"copy_{place.schema}"
    ((identity,),) = place.execute("select id from SCHEMA.identity")
    place.server.execute(f"create database {copy} owner app")
    other = Holdfast(place.server.url(copy, schema=place.schema))
    other.sync.count()
    place.server.execute(f"update {place.schema}.identity set id = %s", identity, database=copy)  # noqa: S608 - ours
    with psycopg.connect(place.server.url(copy)) as connection, pytest.raises(Invalid, match="another database"):
        place.app.sync.enqueue("work", connection=connection)
    other.sync.close()
    place.server.execute(f"drop database {copy}")


# ── beside SQLAlchemy's and Django's SQLite ───────────────────────────────────────────────────────────────────────
def test_sqlalchemy_on_a_file_is_python_s_own_connection(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    app.sync.count()
    engine = create_engine(f"sqlite:///{tmp_path}/jobs.db")
    with Session(engine) as session, session.begin():
        app.sync.enqueue("work", connection=session, key="kept")
    with contextlib.suppress(Undone), Session(engine) as session, session.begin():
        app.sync.enqueue("work", connection=session)
        raise Undone
    engine.dispose()
    assert [job.key for job in app.sync.find().jobs] == ["kept"]
    app.sync.close()


# ── news ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_commit_wakes_a_worker(place: Place) -> None:
    """Long before it would look by itself; and not before."""

    @place.app.task("work")
    async def work() -> str:
        return "done"

    async def submitted() -> None:
        worker = Worker(place.app, settings=place.app.settings.replace_values(poll="10m"))
        async with place.app:
            working = asyncio.create_task(worker.run())
            async with by_asyncpg(place.url) as held:
                handle = await work.options(connection=held.connection).enqueue()
                await asyncio.sleep(0.2)
                assert place.jobs() == 0
            assert await handle.result(timeout=40) == "done"
            worker.stop()
            await working

    asyncio.run(submitted())


@pytest.mark.parametrize("options", [{"key": "k"}, {"unique": "active"}], ids=["key", "unique"])
@pytest.mark.parametrize("is_outlived", [False, True], ids=["new", "outlived"])
@pytest.mark.parametrize("ending", ["rolled back", "committed", "deleted"])
def test_two_transactions_that_want_one_key_make_one_job(
    place: Place, ending: str, is_outlived: bool, options: dict[str, Any]
) -> None:
    """The second waits for the first. It gets the first one's job if that is committed and still there."""

    def submit(connection: psycopg.Connection[Any]) -> str:
        return str(place.app.sync.enqueue("work", connection=connection, **options).id)

    if is_outlived:
        place.app.sync.enqueue("work", **options)
        place.execute("delete from SCHEMA.job")  # the key stays, as it does while its lifetime lasts
    with psycopg.connect(plain(place.url)) as one, psycopg.connect(plain(place.url)) as two:
        earlier = submit(one)
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(submit, two)
            waiting = "select 1 from pg_locks where not granted"
            until(lambda: bool(place.server.execute(waiting)), "the second to wait")
            if ending == "deleted":
                one.execute(f"delete from {place.schema}.job; delete from {place.schema}.key")  # type: ignore[arg-type] # noqa: S608
            one.rollback() if ending == "rolled back" else one.commit()
            assert (later.result(40) == earlier) is (ending == "committed")
        two.commit()
    assert place.execute("select id::text, (select count(*) from SCHEMA.key) from SCHEMA.job") == [(later.result(), 1)]


@pytest.mark.parametrize("options", [{"key": "k"}, {"unique": "active"}], ids=["key", "unique"])
def test_two_transactions_that_take_over_a_key_at_once_make_one_job(place: Place, options: dict[str, Any]) -> None:
    """Both have seen that it is free before either has taken it."""
    place.app.sync.enqueue("work", **options)
    place.execute("delete from SCHEMA.job")

    def submit() -> str:
        with psycopg.connect(plain(place.url)) as connection:
            return str(place.app.sync.enqueue("work", connection=connection, **options).id)

    with psycopg.connect(plain(place.url)) as locking, ThreadPoolExecutor(2) as pool:
        locking.execute(f"select from {place.schema}.key for update")  # type: ignore[arg-type]
        both = [pool.submit(submit) for _ in range(2)]
        until(lambda: len(place.server.execute("select 1 from pg_locks where not granted")) == 2, "both to wait")
        locking.rollback()
        (job_id,) = {each.result(40) for each in both}
    assert place.execute("select id::text from SCHEMA.job") == [(job_id,)]


def test_django_on_a_file_too(place: Place, tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    app.sync.count()
    django_connection(place.url)
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{tmp_path}/jobs.db"}
    connections.settings["file"] = ConnectionHandler({"default": file}).settings["default"]
    try:
        with pytest.raises(Conflict, match="atomic"):
            app.sync.enqueue("work", connection=connections["file"])
        with transaction.atomic(using="file"):
            app.sync.enqueue("work", connection=connections["file"], key="kept")
        with contextlib.suppress(Undone), transaction.atomic(using="file"):
            app.sync.enqueue("work", connection=connections["file"])
            raise Undone
    finally:
        connections["file"].close()
        del connections["file"], connections.settings["file"]
    assert [job.key for job in app.sync.find().jobs] == ["kept"]
    app.sync.close()
