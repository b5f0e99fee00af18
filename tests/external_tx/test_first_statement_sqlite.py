"""A submission as the first statement of SQLAlchemy's transaction in a SQLite file: its commit or rollback decides."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Context, Holdfast, JobState
from holdfast.core.errors import Conflict
from holdfast.worker import Worker

ENGINES = {"sqlite": sqlalchemy.create_engine, "sqlite+aiosqlite": create_async_engine}
KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "connection": ("sqlite", lambda engine: engine.connect()),
    "session": ("sqlite", Session),
    "async-connection": ("sqlite+aiosqlite", lambda engine: engine.connect()),
    "async-session": ("sqlite+aiosqlite", AsyncSession),
}
"""From an engine to a connection, or a session, on which nothing has been executed."""

Submit = Callable[[Holdfast, Any], Awaitable[object]]
SUBMISSIONS: dict[str, Submit] = {
    "enqueue": lambda app, held: app.enqueue("work", connection=held),
    "enqueue_many": lambda app, held: app.enqueue_many([app.draft_job("work", {})], connection=held),
    "enqueue_batch": lambda app, held: app.enqueue_batch([app.draft_job("work", {})], connection=held),
}


async def done(answer: Any) -> Any:
    """Returns what a method of a connection returns, whether or not it has to be awaited."""
    return await answer if inspect.isawaitable(answer) else answer


@asynccontextmanager
async def connected(app: Holdfast, kind: str, **options: Any) -> AsyncIterator[Any]:
    """The connection of that kind to the application's file."""
    driver, connect = KINDS[kind]
    engine = ENGINES[driver](app.settings.url.replace("sqlite", driver, 1), **options)
    held = connect(engine)
    if kind == "async-connection":
        await held.start()
    try:
        yield held
    finally:
        await done(held.close())
        await done(engine.dispose())


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("submit", list(SUBMISSIONS.values()), ids=list(SUBMISSIONS))
def test_commit_stores_and_rollback_does_not(app: Holdfast, kind: str, submit: Submit) -> None:
    async def check() -> None:
        async with app, connected(app, kind) as held:
            await submit(app, held)
            await done(held.rollback())
            await done(held.execute(sqlalchemy.text("insert into invoice values (1)")))
            await done(held.commit())
            assert await app.count() == 0

            await submit(app, held)
            assert await app.count() == 0
            await done(held.commit())
            stored = await app.count()
            assert stored > 0

            async with held.begin_nested() if kind.startswith("async") else _entered(held.begin_nested()) as part:
                await submit(app, held)
                await done(part.rollback())
            await done(held.commit())
            assert await app.count() == stored

    asyncio.run(check())


@asynccontextmanager
async def _entered(context: Any) -> AsyncIterator[Any]:
    with context as entered:
        yield entered


@pytest.mark.parametrize("kind", list(KINDS))
def test_commit_after_the_completion_alone_ends_the_job(app: Holdfast, kind: str) -> None:
    states: list[JobState] = []

    @app.task("work", max_attempts=1)
    async def work(context: Context) -> str:
        async with connected(app, kind) as held:
            await context.complete(held, "done")
            await done(held.commit())
        states.append((await app.get(context.id)).state)
        return "done"

    async def serve() -> object:
        async with app:
            handle = await work.enqueue()
            await Worker(app, drain=True).run()
            return await handle.result(timeout=40)

    assert asyncio.run(serve()) == "done"
    assert states == [JobState.SUCCEEDED]


@pytest.mark.parametrize("kind", list(KINDS))
def test_connection_in_autocommit_is_refused(app: Holdfast, kind: str) -> None:
    async def check() -> None:
        async with app, connected(app, kind, isolation_level="AUTOCOMMIT") as held:
            with pytest.raises(Conflict, match="no transaction is open on it"):
                await app.enqueue("work", connection=held)
            await done(held.commit())
            assert await app.count() == 0

    asyncio.run(check())


def test_engine_that_begins_by_itself_may_begin_with_a_submission(app: Holdfast) -> None:
    """As SQLAlchemy's documentation advises for SQLite: the driver begins nothing, SQLAlchemy's event does."""
    engine = sqlalchemy.create_engine(app.settings.url)
    sqlalchemy.event.listen(engine, "connect", lambda link, _: setattr(link, "isolation_level", None))
    sqlalchemy.event.listen(engine, "begin", lambda link: link.exec_driver_sql("begin"))
    with engine.connect() as held:
        app.sync.enqueue("work", connection=held)
        held.rollback()
        assert app.sync.count() == 0
        app.sync.enqueue("work", connection=held)
        held.commit()
    engine.dispose()
    assert app.sync.count() == 1
