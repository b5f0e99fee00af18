"""The PostgreSQL store: its verb families on one schema, composed for each event loop, and its migrations."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Callable, Sequence
from importlib.resources import files

import asyncpg

from holdfast.core.errors import ConfigError, StoreMismatch, Unavailable
from holdfast.core.limits import Limit
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.named_sql import (
    Migration,
    chosen_migrations,
    load_migrations,
    load_statements,
    noted_script,
)
from holdfast.stores.common.server_store import LoopResources, ServerStore
from holdfast.stores.postgres.admin import PostgresAdmin
from holdfast.stores.postgres.encoding import in_schema, number_parameters
from holdfast.stores.postgres.external_tx import PostgresExternal
from holdfast.stores.postgres.health import PostgresHealth
from holdfast.stores.postgres.limits import PostgresLimits
from holdfast.stores.postgres.maintenance import PostgresMaintenance
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Connection, PostgresPool, parse_url
from holdfast.stores.postgres.query import PostgresQuery
from holdfast.stores.postgres.queueing import PostgresQueueing
from holdfast.stores.postgres.schedules import PostgresSchedules
from holdfast.stores.postgres.transport_queries import PostgresTransportQueries
from holdfast.stores.postgres.workflow import PostgresWorkflow
from holdfast.stores.transportable import TransportQueries


class PostgresStore(ServerStore["_PostgresResources"]):
    """A store in one schema. ``now`` (microseconds since 1970) replaces the server's clock; only tests give one.
    ``call_deadline``: seconds a call takes at most, if a caller waits for its answer."""

    def __init__(self, url: str, *, now: Callable[[], int] | None = None, call_deadline: float | None = None) -> None:
        super().__init__()
        self.call_deadline = call_deadline
        self.address = parse_url(url)
        self.url = self.address.shown
        self.now = now
        here = files("holdfast.stores.postgres")
        self.sql = number_parameters(load_statements(here / "queries.sql"), self.address.schema)
        self.migrations = load_migrations(here / "migrations")
        self.limit_cache = LimitCache(self._read_limits)
        self.external = PostgresExternal(lambda: self._resources.pool, self.sql, now, self.url, self.limit_cache)

    async def _read_limits(self) -> list[Limit]:
        return await self._resources.limits.read_limits()

    def _make_resources(self) -> _PostgresResources:
        return _PostgresResources(self)

    async def missing(self) -> str | None:
        pool = PostgresPool(self.address, now=None)
        try:
            return await describe_missing(pool)
        finally:
            await pool.close()

    def migration_sql(self, span: str) -> str:
        return render_migrations(chosen_migrations(self.migrations, span), self.address.schema)

    @property
    def transport_queries(self) -> TransportQueries:
        return self._resources.transport_queries


class _PostgresResources(LoopResources):
    """The connections of one event loop and the verbs on them."""

    pool: PostgresPool
    notifications: PostgresNotifications

    def __init__(self, store: PostgresStore) -> None:
        self.pool = pool = PostgresPool(store.address, now=store.now, call_deadline=store.call_deadline)
        self.notifications = notifications = PostgresNotifications(pool, store.sql)
        sql = store.sql
        limit_cache = store.limit_cache
        self.query = query = PostgresQuery(pool, sql)
        self.limits = PostgresLimits(pool, notifications, sql, limit_cache)
        self.queueing = queueing = PostgresQueueing(pool, notifications, sql, query, limit_cache)
        self.maintenance = maintenance = PostgresMaintenance(pool, notifications, sql, queueing.note_ready)
        self.admin = PostgresAdmin(pool, notifications, sql, queueing.note_ready)
        self.schedules = PostgresSchedules(pool, notifications, sql, queueing.note_ready, limit_cache)
        self.workflow = PostgresWorkflow(pool, notifications, sql, queueing.note_ready, limit_cache)
        self.health = PostgresHealth(pool, sql, query)
        self.transport_queries = PostgresTransportQueries(pool, notifications, sql, queueing, maintenance)
        self._migrations = store.migrations
        super().__init__()

    async def migrate(self) -> list[str]:
        return await apply_migrations(self.pool, self._migrations)


# ── migrations ────────────────────────────────────────────────────────────────────────────────────────────────────────
OLDEST = 14
"""The first major version of PostgreSQL that is supported."""

_APPLIED = "select number, expand from holdfast.migration order by number"
_HAS_LIMITS = """select exists (select from pg_attribute join pg_class on pg_class.oid = attrelid
    join pg_namespace on pg_namespace.oid = relnamespace
    where nspname = $1 and relname = 'job' and attname = 'partition')"""
_STANDS = """select from pg_class join pg_namespace on pg_namespace.oid = relnamespace
    where nspname = $1 and relname = 'migration'"""
_TABLE = """create table holdfast.migration
    (number integer primary key, name text not null, expand boolean not null)"""

_TAKEN = (
    asyncpg.DuplicateTableError,
    asyncpg.DuplicateFunctionError,
    asyncpg.DuplicateObjectError,
    asyncpg.UndefinedColumnError,
)
_PATIENCE = 3600.0  # seconds for one migration
_LOCK_MS = 300  # how long others wait behind us at most, if another session has a table open
_TRIES, _PAUSE = 30, 0.7


async def apply_migrations(pool: PostgresPool, migrations: Sequence[Migration]) -> list[str]:
    """Apply what is missing, one starter at a time; the names of what was applied."""
    schema = pool.address.schema

    async def run_once(connection: Connection, *, applying: bool) -> list[str] | None:
        await _check_server(connection)
        try:
            if await _is_current(connection, schema, migrations):
                return []
            return await _apply(connection, schema, migrations) if applying else None
        except _TAKEN as error:
            raise StoreMismatch(
                f"the schema {schema!r} holds something of another program ({error}); give another one: ?schema=NAME"
            ) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise ConfigError(
                f"this role may not use or migrate the schema {schema!r} ({error}); grant it the use of schema, "
                "tables and sequences, or let their owner run `holdfast migrate`, or what `holdfast migrate --sql` "
                "prints"
            ) from error

    applied = await pool.call(functools.partial(run_once, applying=False))
    if applied is None:
        applied = await pool.call(functools.partial(run_once, applying=True), extra_time=_PATIENCE * len(migrations))
    return applied or []


async def describe_missing(pool: PostgresPool) -> str | None:
    """The part that is not there, where opening would make a store; None where there is one."""
    schema = pool.address.schema
    # From the catalogue, which every role may read: whether this one may use the schema is for opening to say.
    rows = await pool.call(lambda connection: connection.fetch(_STANDS, schema))
    return None if rows else f"the database {pool.address.shown} has no tables of Holdfast in its schema {schema!r} yet"


async def _apply(connection: Connection, schema: str, migrations: Sequence[Migration]) -> list[str]:
    """Applies missing migrations, each in a transaction of its own: no lock outlives the change that needs it."""
    applied = []
    while (name := await _apply_next(connection, schema, migrations)) is not None:
        applied.append(name)
    return applied


async def _apply_next(connection: Connection, schema: str, migrations: Sequence[Migration]) -> str | None:
    """Applies the first missing migration; returns its name. Sessions behind us wait while we wait for a lock: so
    we wait briefly, let them by, and try again."""
    for _ in range(_TRIES):
        try:
            async with connection.transaction():
                return await _next(connection, schema, migrations)
        except asyncpg.LockNotAvailableError:
            await asyncio.sleep(_PAUSE)
    raise Unavailable(
        f"the schema {schema!r} cannot be migrated: another session holds a table of it in an open transaction; "
        "end that, or wait for it (pg_stat_activity tells whose it is), and start again"
    )


async def _next(connection: Connection, schema: str, migrations: Sequence[Migration]) -> str | None:
    """In a transaction, one process at a time."""
    await connection.execute("set local lock_timeout = 0")
    await connection.execute("select pg_advisory_xact_lock($1, $2)", 0x486F6C64, zlib.crc32(schema.encode()) >> 1)
    if not await connection.fetchval("select exists (select from pg_namespace where nspname = $1)", schema):
        await connection.execute(f'create schema "{schema}"')
    if not await connection.fetchval("select to_regclass($1) is not null", in_schema("holdfast.migration", schema)):
        await connection.execute(in_schema(_TABLE, schema))
    known = {number for number, _ in await connection.fetch(in_schema(_APPLIED, schema))}
    missing = next((each for each in migrations if each.number not in known), None)
    if missing is None:
        return None
    await connection.execute("set local statement_timeout = 0")  # a new index of a large table takes its time
    await connection.execute(f"set local lock_timeout = '{_LOCK_MS}ms'")
    await connection.execute(migration_script(missing, schema), timeout=_PATIENCE)
    return missing.name


def migration_script(migration: Migration, schema: str) -> str:
    """A migration as the statements that apply it and write that down."""
    note = (
        f"insert into holdfast.migration (number, name, expand) "  # noqa: S608 - our own file's name
        f"values ({migration.number}, '{migration.name}', {'true' if migration.expands else 'false'});"
    )
    return in_schema(noted_script(migration, note), schema)


def render_migrations(migrations: Sequence[Migration], schema: str) -> str:
    """Renders migrations as SQL for other migration tools; from the first one on with the schema and its table."""
    scripts = [migration_script(each, schema) for each in migrations]
    if migrations[0].number == 1:
        scripts.insert(0, in_schema(f'create schema if not exists "{schema}";\n\n{_TABLE};\n', schema))
    return "\n".join(["-- For one transaction, as the role that Holdfast connects as.\n", *scripts])


async def _is_current(connection: Connection, schema: str, migrations: Sequence[Migration]) -> bool:
    """Returns True if the schema has every migration we know. Newer ones that only add do not concern us."""
    try:
        applied = dict(await connection.fetch(in_schema(_APPLIED, schema)))
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return False
    newest = migrations[-1].number
    if applied and not await connection.fetchval(_HAS_LIMITS, schema):
        raise StoreMismatch(
            f"the schema {schema!r} was made by an earlier Holdfast (schema {max(applied)}), and cannot be brought up "
            "to date; let the version that made it finish its jobs, then give another schema: ?schema=NAME"
        )
    contracted = [number for number, expand in applied.items() if number > newest and not expand]
    if contracted:
        raise StoreMismatch(
            f"the schema {schema!r} is at {max(applied)}, this Holdfast knows {newest}; "
            "upgrade Holdfast to at least what wrote it"
        )
    return all(each.number in applied for each in migrations)


async def _check_server(connection: Connection) -> None:
    version = connection.get_server_version()
    if version.major < OLDEST:
        raise ConfigError(f"PostgreSQL {version.major} is too old; Holdfast needs {OLDEST} or newer")
    encoding = connection.get_settings().server_encoding
    if encoding != "UTF8":
        raise ConfigError(f"the database is encoded in {encoding}; create one with: createdb --encoding=UTF8 …")
    isolation = await connection.fetchval("show default_transaction_isolation")
    if isolation != "read committed":  # limits are counted in the snapshot of each statement
        raise ConfigError(
            f"default_transaction_isolation is {isolation!r}, and behind a pooler a session cannot choose its own; "
            "alter role … set default_transaction_isolation = 'read committed'"
        )
