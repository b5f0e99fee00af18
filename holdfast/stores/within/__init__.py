"""Working inside a transaction the caller holds, on whatever connection they hold it.

caller.py          what is asked of any connection
by_….py            how one kind of connection gives it, by its own library, imported only where such a one is at hand
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from holdfast.errors import Invalid
from holdfast.job import Lease, NewJob, Settled, Submitted
from holdfast.portal import running_loop
from holdfast.store import Dialogue, Store, TransactionalStore
from holdfast.stores.within.caller import Caller, is_failed, refuse_failed

T = TypeVar("T")

_KINDS = {
    "sqlite3.Connection": "by_sqlite3",
    "asyncpg.connection.Connection": "by_asyncpg",
    "asyncpg.pool.PoolConnectionProxy": "by_asyncpg",
    "psycopg.Connection": "by_psycopg",
    "psycopg.AsyncConnection": "by_psycopg_async",
    "sqlalchemy.engine.base.Connection": "by_sqlalchemy",
    "sqlalchemy.orm.session.Session": "by_sqlalchemy",
    "sqlalchemy.orm.scoping.scoped_session": "by_sqlalchemy",
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": "by_sqlalchemy_async",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "by_sqlalchemy_async",
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": "by_sqlalchemy_async",
    "django.db.backends.base.base.BaseDatabaseWrapper": "by_django",
    "django.utils.connection.ConnectionProxy": "by_django",
}
"""The module for each kind of connection, by the full name of its class, or of one that it inherits from."""

_OF_A_LOOP = frozenset({"by_asyncpg", "by_psycopg_async", "by_sqlalchemy_async"})
"""Those whose connections belong to an event loop."""

_WANTED = (
    "give a connection of sqlite3, asyncpg, psycopg or Django, or a session or connection of SQLAlchemy "
    "(one connection, not the pool or the engine), to the database of this application; or leave it out"
)


class Reach(Protocol):
    """How a coroutine of the store's is run from where the caller is: on its event loop, or without one."""

    def __call__(self, call: Coroutine[Any, Any, T], /) -> Coroutine[Any, Any, T]: ...


class Within:
    """What an application does inside its callers' transactions.

    On a connection without an event loop everything happens in the thread of the caller, and nothing there waits for a
    loop: ``portal.drive`` can run it.
    """

    def __init__(self, opened: Callable[[], Coroutine[Any, Any, Store]], reach: Reach) -> None:
        self._opened = opened
        self._reach = reach
        self._known: weakref.WeakKeyDictionary[Store, weakref.WeakSet[object]] = weakref.WeakKeyDictionary()

    async def submit(self, connection: object, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Submit on ``connection``: the jobs exist once its owner commits, and never if they roll back."""
        store = await self._transactional()
        caller = await self._recognised(store, connection)
        return await _hold(caller, store.submission(jobs))

    async def complete(self, connection: object, lease: Lease, result: str | None) -> Settled:
        """End a running job on ``connection``: it has succeeded once its owner commits."""
        store = await self._transactional()
        caller = await self._recognised(store, connection)
        return await _hold(caller, store.completion(lease, result))

    async def _transactional(self) -> TransactionalStore:
        return cast(TransactionalStore, await self._reach(self._opened()))

    async def _recognised(self, store: TransactionalStore, connection: object) -> Caller:
        """The connection, ready, and known to be one to this store."""
        caller = await _caller(connection)
        known = self._known.setdefault(store, weakref.WeakSet())
        if caller.physical is not None and caller.physical in known:
            return caller
        if caller.dialect != store.dialect:
            raise Invalid(
                "connection",
                caller.dialect,
                f"it is open on another database; this application's jobs are in {store.url}",
            )
        await _hold(caller, await self._reach(store.recognition()))
        if caller.physical is not None:
            known.add(caller.physical)
        return caller


async def _caller(connection: object) -> Caller:
    names = (f"{each.__module__}.{each.__qualname__}" for each in type(connection).__mro__)
    kind = next((_KINDS[name] for name in names if name in _KINDS), None)
    if kind is None:
        raise Invalid("connection", connection, _WANTED)
    if kind in _OF_A_LOOP and running_loop() is None:
        raise Invalid(
            "connection", type(connection).__name__, "it belongs to an event loop: await the call there, without .sync"
        )
    held: Callable[[object], Coroutine[Any, Any, Caller]] = import_module(f"{__name__}.{kind}").held
    return await held(connection)


async def _hold(caller: Caller, dialogue: Dialogue[T]) -> T:
    """Hold the dialogue on the caller's connection. The errors of its driver are for the caller, who knows them."""
    try:
        statement = next(dialogue)
        while True:
            try:
                rows = await caller.fetch(statement)
            except Exception as error:
                if is_failed(error):
                    raise refuse_failed() from error
                raise
            statement = dialogue.send(rows)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
