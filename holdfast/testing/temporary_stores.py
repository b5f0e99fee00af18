"""Empty stores of a test's own on the database of the application, removed in the end.

PostgreSQL: a new schema. Redis: a new namespace. SQLite: the tables of Holdfast in the file of the URL, since a
transaction of the test has to reach them.
"""

from __future__ import annotations

import fcntl
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from holdfast.core.errors import ConfigError, HoldfastError, Invalid
from holdfast.core.portal import Portal, drive_coroutine
from holdfast.stores import open_store
from holdfast.stores.base import Store
from holdfast.stores.common.server_store import ServerStore
from holdfast.stores.forwarding import ForwardingStore

PREFIX = "holdfast_test_"
_MIGRATIONS = "holdfast_migration"
LOCK_WAIT = "5s"  # for tables that an open transaction has locked
_LOCK = 0x486F6C69  # class of the advisory locks of schemas in use
_STALE = r"""select nspname from pg_namespace where nspname like 'holdfast\_test\_%' and nspname <> $1"""
_TABLES = """select relname from pg_class where relnamespace = $1::regnamespace and relkind = 'r'
    and relname not in ('migration', 'identity') order by 1"""


class TemporaryStore:
    """An empty store for tests: give it to a test mode as ``url``, which empties it afterwards."""

    def __init__(self, url: str, delete_rows: Callable[[], None]) -> None:
        self.url = url
        self._delete_own = delete_rows
        self._opened: tuple[object, Store] | None = None
        self._copies: TemporaryStore | None = None
        self._has_copies = False
        self._at_close = ExitStack()

    def delete_rows(self) -> None:
        """Deletes everything in the store, and in that of the copies."""
        self._delete_own()
        if self._copies is not None and self._has_copies:
            self._copies.delete_rows()
            self._has_copies = False

    def keep_store(self, user: object, make_store: Callable[[], Store]) -> Store:
        """Returns the store that the same user has had before, or a new one: connections stay from test to test."""
        if self._opened is None or self._opened[0] is not user:
            self._close_kept()
            self._opened = user, make_store()
        store = self._opened[1]
        if cache := vars(_without_wrappers(store)).get("limit_cache"):
            cache.mark_stale()  # limits were deleted with everything else
        return store

    def open_copies(self) -> TemporaryStore:
        """Returns the private store for copies of jobs that only an open transaction of a test has."""
        if self._copies is None:
            folder = self._at_close.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-test-"))
            self._copies = self._at_close.enter_context(temporary_store(f"sqlite:///{Path(folder) / 'copies.db'}"))
        self._has_copies = True
        return self._copies

    def close(self) -> None:
        """Closes what it has opened."""
        self._close_kept()
        self._at_close.close()

    def _close_kept(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            close_from_outside(opened[1])


def _without_wrappers(store: Any) -> Any:
    while isinstance(store, ForwardingStore):
        store = vars(store)["_inner"]
    return store


def close_from_outside(store: Store) -> None:
    """Closes a store for a caller that may stand outside its event loops."""
    inner = _without_wrappers(store)
    if isinstance(inner, ServerStore):
        inner.close_in_all_loops()
    else:
        drive_coroutine(store.close())


@contextmanager
def temporary_store(url: str) -> Iterator[TemporaryStore]:
    """Makes an empty store on the database of ``url``, for as many tests as you like, and removes it in the end.

    PostgreSQL gets a new schema and Redis a new namespace, whatever the URL says of these. A SQLite file must hold no
    data of Holdfast; a file that is not there yet is removed in the end.
    """
    store = open_store(url)  # ConfigError for a URL that cannot be read
    scheme = urlsplit(url).scheme
    with ExitStack() as stack:
        if scheme == "sqlite":
            path = Path(store.url.removeprefix("sqlite:///")).resolve()
            stack.enter_context(_held_file(url, path))
            making = _sqlite_tables(url, path)
        elif scheme.startswith("postgres"):
            making = _postgres_schema(_with_parameter(url, "schema", f"{PREFIX}{uuid.uuid4().hex[:16]}"))
        else:
            making = _redis_namespace(_with_parameter(url, "namespace", f"{PREFIX}{uuid.uuid4().hex[:16]}"))
        temporary = stack.enter_context(making)
        stack.callback(temporary.close)
        yield temporary


def _with_parameter(url: str, name: str, value: str) -> str:
    parts = urlsplit(url)
    given = {**dict(parse_qsl(parts.query, keep_blank_values=True)), name: value}
    return urlunsplit(parts._replace(query=urlencode(given)))


# ── PostgreSQL ────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def _postgres_schema(url: str) -> Iterator[TemporaryStore]:
    from holdfast.stores.postgres.pool import PostgresPool, parse_url

    address = parse_url(url)
    pool, portal = PostgresPool(address, now=None, max_connections=1), Portal(at_exit=_nothing)
    stack = ExitStack()
    stack.callback(portal.stop_thread)
    stack.callback(lambda: portal.run(pool.close()))
    with stack:
        connection = portal.run(pool.call(lambda _: pool.connect()))
        stack.callback(lambda: portal.run(connection.close()))  # frees the lock
        stack.callback(lambda: portal.run(_execute(connection, f'drop schema if exists "{address.schema}" cascade')))
        portal.run(_prepare_schema(connection, url, address.schema, shared=address.pooled))
        tables = portal.run(connection.fetch(_TABLES, address.schema))
        names = [f'"{address.schema}"."{name}"' for (name,) in tables]
        yield TemporaryStore(url, lambda: portal.run(_delete_rows(connection, names)))


async def _nothing() -> None:
    return None


async def _prepare_schema(connection: Any, url: str, schema: str, *, shared: bool) -> None:
    """Creates and locks the schema. Drops those of test runs that were killed: their locks are free."""
    await connection.execute(f"set client_min_messages = error; set lock_timeout = '{LOCK_WAIT}'")
    if not shared:  # behind a pooler, locks of sessions mean nothing
        await connection.execute("select pg_advisory_lock($1, hashtext($2))", _LOCK, schema)
        for (stale,) in await connection.fetch(_STALE, schema):
            if await connection.fetchval("select pg_try_advisory_lock($1, hashtext($2))", _LOCK, stale):
                await _execute(connection, f'drop schema if exists "{stale}" cascade')
                await connection.execute("select pg_advisory_unlock($1, hashtext($2))", _LOCK, stale)
    store = open_store(url)
    await store.open()
    await store.close()


async def _delete_rows(connection: Any, tables: list[str]) -> None:
    """Deletes all rows. Most tests leave none, which one prepared statement finds in a millisecond."""
    any_rows = " or ".join(f"exists (select from {table})" for table in tables)
    if await connection.fetchval(f"select {any_rows}"):
        await _execute(connection, "; ".join(f"delete from {table}" for table in tables))  # noqa: S608 - our own tables


async def _execute(connection: Any, statement: str) -> None:
    import asyncpg

    try:
        await connection.execute(statement)
    except asyncpg.LockNotAvailableError as error:
        raise HoldfastError(
            "the temporary store is still used by an open transaction; roll it back, or close its connection, before "
            "the test mode or the temporary store ends"
        ) from error


# ── SQLite ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def _held_file(url: str, path: Path) -> Iterator[None]:
    """Holds the file for one run of tests. Invalid if another has it: each would delete what the other stores."""
    lock = path.with_name(f"{path.name}-tests")
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "give each process a file of its own, with the variable PYTEST_XDIST_WORKER in its name"
            raise Invalid("url", url, remedy, "is used by other tests") from None
        try:
            yield
        finally:
            lock.unlink()


@contextmanager
def _sqlite_tables(url: str, path: Path) -> Iterator[TemporaryStore]:
    existed, before = path.exists() and path.stat().st_size > 0, set(_files_of(path))
    application_id, tables = _read_file(path) if existed else (0, [])
    if _has_rows(path, tables):
        remedy = "give a file of the tests' own, or one whose application has none"
        raise Invalid("url", url, remedy, "holds jobs, schedules or limits")
    store = open_store(url)
    store.blocking(store.open())
    store.blocking(store.close())
    made = set(_read_file(path)[1]) - set(tables)

    def delete_rows() -> None:
        tables = [table for table in _read_file(path)[1] if table != _MIGRATIONS]
        _run(path, [f'delete from "{table}"' for table in tables])  # noqa: S608 - our own tables

    try:
        yield TemporaryStore(url, delete_rows)
    finally:
        if not existed:
            before.discard(path)
        elif made:
            drop = [f'drop table if exists "{table}"' for table in sorted(made)]
            _run(path, [*drop, f"pragma application_id = {application_id}"])
        else:
            delete_rows()
        for each in set(_files_of(path)) - before - ({path} if existed else set()):
            with suppress(FileNotFoundError):
                each.unlink()


def _files_of(path: Path) -> list[Path]:
    names = (path.name, *(f"{path.name}-{suffix}" for suffix in ("wal", "shm", "lock", "turn", "journal")))
    return [each for each in map(path.with_name, names) if each.exists()]


def _read_file(path: Path) -> tuple[int, list[str]]:
    """Returns the application id of the file and the tables of Holdfast."""
    with closing(sqlite3.connect(path)) as connection:
        (application_id,) = connection.execute("pragma application_id").fetchone()
        named = "select name from sqlite_master where type = 'table' and name like 'holdfast\\_%' escape '\\'"
        return application_id, [name for (name,) in connection.execute(named)]


def _has_rows(path: Path, tables: list[str]) -> bool:
    with closing(sqlite3.connect(path)) as connection:
        return any(
            connection.execute(f'select exists (select 1 from "{table}")').fetchone()[0]  # noqa: S608 - our own tables
            for table in tables
            if table != _MIGRATIONS
        )


def _run(path: Path, statements: list[str]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma foreign_keys = off")
        connection.execute("begin immediate")
        for statement in statements:
            connection.execute(statement)
        connection.execute("commit")


# ── Redis ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def _redis_namespace(url: str) -> Iterator[TemporaryStore]:
    from redis import Redis

    from holdfast.stores.redis.pool import parse_url

    server, prefix = parse_url(url).server, f"{{{dict(parse_qsl(urlsplit(url).query))['namespace']}}}:"
    if server.kind != "direct":
        raise ConfigError(f"url: tests need a single server, not {server.kind}; give redis://host:6379/0")
    (host, port), *_ = server.hosts
    options = {"host": host, "port": port, **server.options}
    options.pop("connection_class", None)
    with closing(Redis(ssl=server.secure, **options)) as client:

        def delete_keys() -> None:
            for key in client.scan_iter(match=f"{prefix}*", count=1000):
                client.unlink(key)

        try:
            yield TemporaryStore(url, delete_keys)
        finally:
            delete_keys()
