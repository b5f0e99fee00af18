"""Every kind of connection that callers hold, behind one face: what they do, not how they spell it.

``python -m tests.external_tx.kinds URL KIND…``: a process for each kind, forked from this one, submits inside a
transaction, says its pid, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiosqlite
import asyncpg
import django
import psycopg
import sqlalchemy
from django.conf import settings
from django.db import connection, connections, transaction
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from holdfast import Holdfast
from holdfast.core.portal import drive_coroutine, running_loop


class Hold(NamedTuple):
    """A transaction that a caller holds. The methods of a blocking one never wait for an event loop."""

    connection: Any
    execute: Callable[[str], Awaitable[object]]
    savepoint: Callable[[], AbstractAsyncContextManager[object]]


INSERT = "insert into invoice_SCHEMA values (1)"
"""What the caller writes: a row into a table that belongs to the test of that schema."""

Kind = Callable[[str], AbstractAsyncContextManager[Hold]]
"""From the URL of a database to a transaction: committed in the end, rolled back if an error leaves it."""


def plain(url: str) -> str:
    """The URL of the database, without what only Holdfast reads."""
    return url.partition("?")[0]


# ── drivers ───────────────────────────────────────────────────────────────────────────────────────────────────────
@asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[Hold]:
    link = await asyncpg.connect(plain(url))
    try:
        async with link.transaction():
            yield Hold(link, link.execute, link.transaction)
    finally:
        link.terminate()


@asynccontextmanager
async def by_asyncpg_pool(url: str) -> AsyncIterator[Hold]:
    pool = asyncpg.create_pool(plain(url), min_size=1, max_size=1)
    async with pool, pool.acquire() as link, link.transaction():
        yield Hold(link, link.execute, link.transaction)


@asynccontextmanager
async def by_psycopg(url: str) -> AsyncIterator[Hold]:
    with psycopg.connect(plain(url), row_factory=dict_row, cursor_factory=psycopg.RawCursor) as link:

        async def execute(sql: str) -> object:
            return link.execute(sql.encode())

        yield Hold(link, execute, _awaited(link.transaction))


@asynccontextmanager
async def by_psycopg_async(url: str) -> AsyncIterator[Hold]:
    link = await psycopg.AsyncConnection.connect(plain(url), autocommit=True, row_factory=dict_row)
    async with link, link.transaction():
        yield Hold(link, lambda sql: link.execute(sql.encode()), link.transaction)


@asynccontextmanager
async def by_psycopg_pool(url: str) -> AsyncIterator[Hold]:
    with ConnectionPool(plain(url), min_size=1, max_size=1) as pool, pool.connection() as link:

        async def execute(sql: str) -> object:
            return link.execute(sql.encode())

        yield Hold(link, execute, _awaited(link.transaction))


@asynccontextmanager
async def by_psycopg_async_pool(url: str) -> AsyncIterator[Hold]:
    async with AsyncConnectionPool(plain(url), min_size=1, max_size=1) as pool, pool.connection() as link:
        yield Hold(link, lambda sql: link.execute(sql.encode()), link.transaction)


@asynccontextmanager
async def by_aiosqlite(url: str) -> AsyncIterator[Hold]:
    async with aiosqlite.connect(url.removeprefix("sqlite:///")) as link:
        link.row_factory = lambda cursor, row: dict(zip([each[0] for each in cursor.description], row, strict=True))

        @asynccontextmanager
        async def savepoint() -> AsyncIterator[object]:
            await link.execute("savepoint inner_part")
            try:
                yield None
            except BaseException:
                await link.execute("rollback to inner_part")
                raise

        try:
            yield Hold(link, link.execute, savepoint)
        except BaseException:
            await link.rollback()
            raise
        await link.commit()


def _awaited(context: Callable[[], Any]) -> Callable[[], AbstractAsyncContextManager[object]]:
    @asynccontextmanager
    async def entered() -> AsyncIterator[object]:
        with context() as value:
            yield value

    return entered


# ── SQLAlchemy ────────────────────────────────────────────────────────────────────────────────────────────────────
def engine_url(url: str, driver: str) -> str:
    """The URL as SQLAlchemy takes it."""
    return plain(url).replace("://", f"+{driver}://", 1)


@contextmanager
def _engine(url: str) -> Any:
    engine = sqlalchemy.create_engine(engine_url(url, "psycopg"))
    try:
        yield engine
    finally:
        engine.dispose()


def _sqlalchemy(begin: Callable[[sqlalchemy.Engine], Any]) -> Kind:
    @asynccontextmanager
    async def hold(url: str) -> AsyncIterator[Hold]:
        with _engine(url) as engine, begin(engine) as held:

            async def execute(sql: str) -> object:
                return held.execute(sqlalchemy.text(sql))

            yield Hold(held, execute, _awaited(held.begin_nested))

    return hold


@contextmanager
def _scoped(engine: sqlalchemy.Engine) -> Any:
    session = scoped_session(sessionmaker(engine))
    try:
        with session.begin():
            yield session
    finally:
        session.remove()


@contextmanager
def _session(engine: sqlalchemy.Engine) -> Any:
    with Session(engine) as session, session.begin():
        yield session


def _sqlalchemy_async(driver: str, *, orm: bool) -> Kind:
    @asynccontextmanager
    async def hold(url: str) -> AsyncIterator[Hold]:
        engine = create_async_engine(engine_url(url, driver))
        try:
            async with AsyncSession(engine) if orm else engine.connect() as held, held.begin():
                yield Hold(held, lambda sql: held.execute(sqlalchemy.text(sql)), held.begin_nested)
        finally:
            await engine.dispose()

    return hold


# ── Django ────────────────────────────────────────────────────────────────────────────────────────────────────────
def django_connection(url: str) -> Any:
    """Its connection. It is set up once a process: every test's database is on the same server."""
    parts = urlsplit(url)
    if not settings.configured:
        place = {"ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username or ""}
        place |= {"HOST": parts.hostname or "", "PORT": str(parts.port)}
        settings.configure(DATABASES={"default": place, "second": dict(place)}, USE_TZ=True)
        django.setup()
    return connection


def _django(alias: str | None) -> Kind:
    @asynccontextmanager
    async def hold(url: str) -> AsyncIterator[Hold]:
        held = django_connection(url)
        held = connections[alias] if alias else held

        async def execute(sql: str) -> object:
            with held.cursor() as cursor:
                cursor.execute(sql)
            return None

        try:
            with transaction.atomic(using=alias):
                yield Hold(held, execute, _awaited(lambda: transaction.atomic(using=alias)))
        finally:
            held.close()

    return hold


BLOCKING: dict[str, Kind] = {
    "psycopg": by_psycopg,
    "psycopg-pool": by_psycopg_pool,
    "sqlalchemy-session": _sqlalchemy(_session),
    "sqlalchemy-scoped": _sqlalchemy(_scoped),
    "sqlalchemy-connection": _sqlalchemy(lambda engine: engine.begin()),
    "django": _django(None),
    "django-alias": _django("second"),
}
"""Kinds that belong to a thread."""
AWAITED: dict[str, Kind] = {
    "asyncpg": by_asyncpg,
    "asyncpg-pool": by_asyncpg_pool,
    "psycopg-async": by_psycopg_async,
    "psycopg-async-pool": by_psycopg_async_pool,
    "sqlalchemy-asyncpg-session": _sqlalchemy_async("asyncpg", orm=True),
    "sqlalchemy-asyncpg-connection": _sqlalchemy_async("asyncpg", orm=False),
    "sqlalchemy-psycopg-session": _sqlalchemy_async("psycopg", orm=True),
    "sqlalchemy-psycopg-connection": _sqlalchemy_async("psycopg", orm=False),
}
"""Kinds that belong to an event loop."""
KINDS = BLOCKING | AWAITED
ON_SQLITE: dict[str, Kind] = {
    "aiosqlite": by_aiosqlite,
    "sqlalchemy-aiosqlite-session": _sqlalchemy_async("aiosqlite", orm=True),
    "sqlalchemy-aiosqlite-connection": _sqlalchemy_async("aiosqlite", orm=False),
}
"""Kinds on a SQLite file; they belong to an event loop."""


def run(name: str, body: Coroutine[Any, Any, None]) -> None:
    """Run what holds this kind of connection where it belongs: on an event loop, or in a thread without one."""
    if name in AWAITED:
        asyncio.run(asyncio.wait_for(body, 200))
    else:
        drive_coroutine(body)


async def does(app: Holdfast, method: str, *arguments: Any, **options: Any) -> Any:
    """A method of the application, the way it is called here."""
    if running_loop() is not None:
        return await getattr(app, method)(*arguments, **options)
    return getattr(app.sync, method)(*arguments, **options)


async def _hold(kind: str, url: str) -> None:
    app = Holdfast(url)
    async with KINDS[kind](url) as held:
        await held.execute(INSERT.replace("SCHEMA", url.rpartition("=")[2]))
        await does(app, "enqueue", "work", {}, connection=held.connection)
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
        threading.Event().wait()


def main() -> None:
    """Fork, and wait for the end of all."""
    url, *kinds = sys.argv[1:]
    forked = []
    for kind in kinds:
        if not (child := os.fork()):
            run(kind, _hold(kind, url))
            os._exit(1)
        forked.append(child)
    for child in forked:
        os.waitpid(child, 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
