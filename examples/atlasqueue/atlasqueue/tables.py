"""The tables ``jobs`` and ``idempotency_keys``, for SQL and dashboards; changes go through Holdfast."""

from __future__ import annotations

from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

import asyncpg

from atlasqueue.transport import delete_lists, opened_lists
from holdfast import ConfigError, Holdfast

_LOCK = 0x41515545  # two that migrate at once make the views one after another
_VIEWS = """select array_agg(viewname || pg_get_viewdef(view) || (select count(*) from pg_trigger where tgrelid = view)
    order by viewname)
    from (select viewname, (schemaname || '.' || viewname)::regclass as view from pg_views
        where schemaname = current_schema and viewname in ('jobs', 'idempotency_keys')) v"""


async def migrate(app: Holdfast) -> list[str]:
    """Bring the database up to date: Holdfast's tables, then the views. What was applied."""
    own = {"schema", "pooled"} & parse_qs(urlsplit(app.settings.url).query).keys()
    if own:
        raise ConfigError(f"DATABASE_URL: AtlasQueue has a database to itself; leave out {' and '.join(sorted(own))}")
    async with app:
        applied = await app.migrate()
    link = await asyncpg.connect(app.settings.url)
    try:
        async with link.transaction():
            await link.execute("select pg_advisory_xact_lock($1)", _LOCK)
            before = await link.fetchval(_VIEWS)
            await link.execute((files("atlasqueue") / "tables.sql").read_text(encoding="utf-8"))
            if await link.fetchval(_VIEWS) != before:
                applied = [*applied, "tables"]
    except asyncpg.WrongObjectTypeError as error:
        raise ConfigError(f"DATABASE_URL: {error}: give AtlasQueue a database of its own, or rename that one") from None
    finally:
        await link.close()
    return applied


async def wipe(app: Holdfast) -> None:
    """Delete all jobs and keys, what Redis has of them, and then the tables: where Redis is away, nothing."""
    link = await asyncpg.connect(app.settings.url)
    try:
        are_there = await link.fetchval("select to_regclass('holdfast.job') is not null")
        queues = await link.fetch("select distinct queue from holdfast.job") if are_there else []
        if app.settings.transport != "none":
            async with opened_lists(app.settings) as lists:
                await delete_lists(lists, [row["queue"] for row in queues])
        await link.execute("""drop view if exists jobs, idempotency_keys; drop function if exists refuse_change;
            drop schema if exists holdfast cascade""")
    finally:
        await link.close()
