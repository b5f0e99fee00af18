"""Submitting and completing inside the caller's transaction on a SQLite file, from connections of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from holdfast import Holdfast, JobState, testing
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.models import Lease
from holdfast.stores.base import ClaimRequest
from tests.external_tx.kinds import ON_SQLITE, Hold, engine_url
from tests.external_tx.support import Undone

INSERT = "insert into invoice values (1)"


class File:
    """A SQLite file with an application's jobs and a table of the caller's."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind
        self.app = Holdfast(f"sqlite:///{path}")
        self.app.sync.count()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("create table invoice (n)")

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of committed rows and jobs."""
        with closing(sqlite3.connect(self.path)) as connection:
            found = connection.execute("select (select count(*) from invoice), (select count(*) from holdfast_job)")
            rows, jobs = found.fetchone()
            return rows, jobs

    def run(self, body: Callable[[Hold], Coroutine[Any, Any, None]]) -> None:
        """Runs ``await body(hold)`` inside a transaction that wrote a row, and commits afterwards."""

        async def hold() -> None:
            async with self.app, ON_SQLITE[self.kind](self.app.settings.url) as held:
                await held.execute(INSERT)
                await body(held)

        asyncio.run(asyncio.wait_for(hold(), 100))


@pytest.fixture(params=list(ON_SQLITE))
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File]:
    file = File(tmp_path / "jobs.db", request.param)
    yield file
    file.app.sync.close()


def test_commit_stores_rows_and_jobs_together(file: File) -> None:
    async def body(held: Hold) -> None:
        drafts = [file.app.draft_job("work", {"n": n}, key=key) for n, key in enumerate(("k", "k", None))]
        first, again, other = await file.app.enqueue_many(drafts, connection=held.connection)
        assert (first.created, again.created, again.id, other.created) == (True, False, first.id, True)
        with contextlib.suppress(Undone):
            async with held.savepoint():
                await held.execute(INSERT)
                await file.app.enqueue("work", {}, connection=held.connection)
                raise Undone
        assert file.counts() == (0, 0)

    file.run(body)

    assert file.counts() == (1, 2)
    assert file.app.sync.get("key:k").payload == '{"n":0}'


def test_rollback_stores_neither_row_nor_job_nor_key(file: File) -> None:
    async def body(held: Hold) -> None:
        await file.app.enqueue("work", {}, connection=held.connection, key="k")
        raise Undone

    with pytest.raises(Undone):
        file.run(body)

    assert file.counts() == (0, 0)
    assert file.app.sync.enqueue("work", key="k").created


def test_job_is_completed_by_the_commit_alone(file: File) -> None:
    async def claim() -> Lease:
        async with file.app as app:
            await app.enqueue("work")
            request = ClaimRequest("w", {"*": 1}, limit=1, lease_for=timedelta(minutes=1))
            return (await (await app.open_store()).queueing.claim(request)).jobs[0].lease

    async def complete(held: Hold) -> None:
        assert (await file.app.external_tx.complete(held.connection, lease, '"done"')).accepted
        assert (await file.app.get(lease.job_id)).state is JobState.RUNNING

    async def complete_and_fail(held: Hold) -> None:
        await complete(held)
        raise Undone

    lease = asyncio.run(claim())
    with pytest.raises(Undone):
        file.run(complete_and_fail)
    assert (file.app.sync.get(lease.job_id).state, file.counts()) == (JobState.RUNNING, (0, 1))

    file.run(complete)
    job = file.app.sync.get(lease.job_id)
    assert (job.state, job.result, file.counts()) == (JobState.SUCCEEDED, '"done"', (1, 1))


def test_refused_submission_leaves_the_transaction_as_it_was(file: File, tmp_path: Path) -> None:
    """Another file is refused, and so is a call that would wait for the connection's loop without one."""
    elsewhere = Holdfast(f"sqlite:///{tmp_path}/other.db")

    async def body(held: Hold) -> None:
        with pytest.raises(Invalid, match=r"it is open on another database; .*other\.db"):
            await elsewhere.enqueue("work", connection=held.connection)
        await elsewhere.close()
        submit = file.app.sync.enqueue
        with pytest.raises(Invalid, match=r"belongs to an event loop: await the call there, without \.sync"):
            await asyncio.to_thread(submit, "work", connection=held.connection)
        await file.app.enqueue("work", connection=held.connection)

    file.run(body)
    assert file.counts() == (1, 1)


BY_ITSELF: list[dict[str, Any]] = [{"isolation_level": None}]
"""Options of a connection on which each statement commits by itself."""
if sys.version_info >= (3, 12):
    BY_ITSELF.append({"autocommit": True})


@pytest.mark.parametrize("file", ["aiosqlite"], indirect=True)
@pytest.mark.parametrize("options", BY_ITSELF, ids=lambda options: next(iter(options)))
def test_aiosqlite_connection_without_a_transaction_is_refused(file: File, options: dict[str, Any]) -> None:
    async def submit() -> None:
        async with file.app, aiosqlite.connect(file.path, **options) as link:
            with pytest.raises(Conflict, match=r"no transaction is open on it.*BEGIN one first"):
                await file.app.enqueue("work", connection=link)
            await link.execute("begin")
            await file.app.enqueue("work", connection=link)
            await link.execute("commit")
            await link.close()
            with pytest.raises(Conflict, match="it is closed"):
                await file.app.enqueue("work", connection=link)

    asyncio.run(submit())
    assert file.counts() == (0, 1)


@pytest.mark.parametrize("file", ["sqlalchemy-aiosqlite-session"], indirect=True)
def test_engine_of_aiosqlite_in_autocommit_is_refused(file: File) -> None:
    async def submit() -> None:
        engine = create_async_engine(engine_url(file.app.settings.url, "aiosqlite"), isolation_level="AUTOCOMMIT")
        async with file.app, AsyncSession(engine) as session, session.begin():
            with pytest.raises(Conflict, match="no transaction is open on it"):
                await file.app.enqueue("work", connection=session)
        await engine.dispose()

    asyncio.run(submit())
    assert file.counts() == (0, 0)


@pytest.mark.parametrize("file", ["sqlalchemy-aiosqlite-session"], indirect=True)
def test_inline_job_runs_when_a_session_on_aiosqlite_commits(file: File, tmp_path: Path) -> None:
    ran: list[int] = []

    @file.app.task("note")
    async def note(number: int) -> None:
        ran.append(number)

    async def submit(url: str) -> None:
        engine = create_async_engine(engine_url(url, "aiosqlite"))
        async with AsyncSession(engine) as session:
            await note.options(connection=session).enqueue(1)
            await session.rollback()
            await note.options(connection=session).enqueue(2)
            assert ran == []
            await session.commit()
        await engine.dispose()

    url = f"sqlite:///{tmp_path}/test.db"
    with testing.inline(file.app, url=url):
        asyncio.run(submit(url))
    assert ran == [2]
