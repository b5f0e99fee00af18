"""Migrating a store's schema."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import asyncpg

from holdfast.errors import ConfigError, StoreMismatch
from holdfast.stores.postgres.links import Connection, Links
from holdfast.stores.postgres.statements import in_schema
from holdfast.stores.sql import Migration

OLDEST = 14
"""The first major version of PostgreSQL that is supported."""

_APPLIED = "select number, expand from holdfast.migration order by number"
_TABLE = """create table if not exists holdfast.migration
    (number integer primary key, name text not null, expand boolean not null)"""


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
