"""Migrating and checking a store's schema."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import asyncpg

from holdfast.errors import ConfigError, StoreMismatch
from holdfast.job import Finding
from holdfast.stores.postgres.links import Connection, Links
from holdfast.stores.postgres.statements import Query, in_schema
from holdfast.stores.sql import Migration

OLDEST = 14
"""The first major version of PostgreSQL that is supported."""

_APPLIED = "select number, expand from holdfast.migration order by number"
_TABLE = """create table if not exists holdfast.migration
    (number integer primary key, name text not null, expand boolean not null)"""
_OLD_TRANSACTION_S = 300
_NOTIFY_FULL = 0.5


async def migrate(links: Links, migrations: Sequence[Migration]) -> list[str]:
    """Apply what is missing, one starter at a time; the names of what was applied."""
    schema = links.address.schema

    async def once(link: Connection) -> list[str]:
        await _check_server(link)
        if await _is_current(link, schema, migrations):
            return []
        async with link.transaction():
            await link.execute("select pg_advisory_xact_lock($1, $2)", 0x486F6C64, zlib.crc32(schema.encode()) >> 1)
            if not await link.fetchval("select exists (select from pg_namespace where nspname = $1)", schema):
                await link.execute(f'create schema "{schema}"')
            await link.execute(in_schema(_TABLE, schema))
            known = {number for number, _ in await link.fetch(in_schema(_APPLIED, schema))}
            missing = [each for each in migrations if each.number not in known]
            for each in missing:
                await link.execute(script(each, schema))
            return [each.name for each in missing]

    try:
        return await links.call(once)
    except asyncpg.DuplicateTableError as error:
        raise StoreMismatch(
            f"the schema {schema!r} holds tables of another program ({error}); give another one: ?schema=NAME"
        ) from error


def script(migration: Migration, schema: str) -> str:
    """A migration as the statements that apply it and write that down."""
    note = (
        f"insert into holdfast.migration (number, name, expand) "  # noqa: S608 - our own file's name
        f"values ({migration.number}, '{migration.name}', {'true' if migration.expands else 'false'});\n"
    )
    return in_schema(migration.script.rstrip() + "\n" + note, schema)


async def _is_current(link: Connection, schema: str, migrations: Sequence[Migration]) -> bool:
    """Whether the schema has every migration we know. Newer ones that only add do not concern us."""
    try:
        applied = dict(await link.fetch(in_schema(_APPLIED, schema)))
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return False
    newest = migrations[-1].number
    contracted = [number for number, expand in applied.items() if number > newest and not expand]
    if contracted:
        raise StoreMismatch(
            f"the schema {schema!r} is at {max(applied)}, this Holdfast knows {newest}; "
            "upgrade Holdfast to at least what wrote it"
        )
    return all(each.number in applied for each in migrations)


async def _check_server(link: Connection) -> None:
    version = link.get_server_version()
    if version.major < OLDEST:
        raise ConfigError(f"PostgreSQL {version.major} is too old; Holdfast needs {OLDEST} or newer")
    encoding = await link.fetchval("show server_encoding")
    if encoding != "UTF8":
        raise ConfigError(f"the database is encoded in {encoding}; create one with: createdb --encoding=UTF8 …")


async def examine(links: Links, statements: Mapping[str, Query]) -> list[Finding]:
    """What the server's settings and statistics say about this store: effective durability first."""
    schema = links.address.schema

    async def once(link: Connection) -> list[Finding]:
        return [
            await _durability(link),
            await _version(link),
            await _snapshots(link),
            await _vacuum(link, schema),
            await _indexes(link, schema),
            await _queue_usage(link),
            _pooler(links),
        ]

    findings = await links.call(once)
    ((stuck,),) = await links.fetch(statements["stuck"])
    return [*findings, _stuck(stuck)]


async def _durability(link: Connection) -> Finding:
    fsync, commit, pages = [
        await link.fetchval("select current_setting($1)", name)
        for name in ("fsync", "synchronous_commit", "full_page_writes")
    ]
    text = f"fsync={fsync} synchronous_commit={commit} full_page_writes={pages}"
    if fsync == "off" or pages == "off":
        return Finding(
            "durability", "error", f"{text}: a crash can lose everything", "set fsync and full_page_writes on"
        )
    if commit == "off":
        remedy = "alter role … set synchronous_commit = on"
        return Finding("durability", "error", f"{text}: a crash loses the last acknowledged jobs", remedy)
    if commit == "local" and await link.fetchval("select current_setting('synchronous_standby_names')"):
        return Finding("durability", "warning", f"{text}: a failover can lose jobs", "set synchronous_commit = on")
    return Finding("durability", "ok", text)


async def _version(link: Connection) -> Finding:
    return Finding("version", "ok", f"PostgreSQL {await link.fetchval('show server_version')}")


async def _snapshots(link: Connection) -> Finding:
    row = await link.fetchrow(
        "select pid, coalesce(application_name, ''), extract(epoch from statement_timestamp() - xact_start)::int "
        "from pg_stat_activity where backend_xmin is not null and pid <> pg_backend_pid() order by xact_start limit 1"
    )
    if row is None or row[2] < _OLD_TRANSACTION_S:
        return Finding("transactions", "ok", "no transaction holds an old snapshot")
    pid, name, age = row
    return Finding(
        "transactions",
        "warning",
        f"process {pid} ({name or 'unnamed'}) has held a transaction open for {age} s: nothing can be vacuumed",
        f"end it, or: select pg_terminate_backend({pid})",
    )


async def _vacuum(link: Connection, schema: str) -> Finding:
    row = await link.fetchrow(
        "select n_live_tup, n_dead_tup, current_setting('autovacuum') from pg_stat_user_tables "
        "where schemaname = $1 and relname = 'job'",
        schema,
    )
    live, dead, autovacuum = row or (0, 0, "on")
    text = f"autovacuum={autovacuum}, {live:,} live rows, {dead:,} dead ones"
    if autovacuum != "on":
        return Finding("vacuum", "error", text, "set autovacuum = on")
    if dead > 100_000 and dead > 2 * live:
        return Finding("vacuum", "warning", text, f"vacuum {schema}.job, and look for old transactions")
    return Finding("vacuum", "ok", text)


_INDEXES = frozenset(
    {"job_pkey", "job_ready", "job_suspect", "job_quarantined", "job_due", "job_due_anywhere", "job_lease"}
    | {"job_unsuccessful", "job_ended", "tag_of", "key_of", "key_over"}
)


async def _indexes(link: Connection, schema: str) -> Finding:
    rows = await link.fetch(
        "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid "
        "join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1 and i.indisvalid",
        schema,
    )
    missing = sorted(_INDEXES - {name for (name,) in rows})
    if not missing:
        return Finding("indexes", "ok", "all there and valid")
    return Finding("indexes", "error", f"missing or invalid: {', '.join(missing)}", "create them as in the migrations")


async def _queue_usage(link: Connection) -> Finding:
    usage = float(await link.fetchval("select pg_notification_queue_usage()"))
    text = f"notification queue {usage:.0%} full"
    if usage < _NOTIFY_FULL:
        return Finding("notifications", "ok", text)
    return Finding("notifications", "warning", text, "a listening session is stuck in a transaction: end it")


def _pooler(links: Links) -> Finding:
    if links.address.pooled:
        return Finding("pooler", "ok", "pooled=1: workers poll, no LISTEN")
    return Finding("pooler", "ok", "direct connection: LISTEN/NOTIFY (behind PgBouncer in transaction mode: ?pooled=1)")


def _stuck(stuck: int) -> Finding:
    if not stuck:
        return Finding("leases", "ok", "no job runs under a lease that expired over a minute ago")
    return Finding("leases", "warning", f"{stuck} jobs run under expired leases", "start a worker: it recovers them")
