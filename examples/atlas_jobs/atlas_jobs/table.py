"""The view ``jobs`` that has Atlas Jobs' columns, for people and their tools."""

from __future__ import annotations

from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

import asyncpg

from holdfast import ConfigError

_LOCK = 0x41746C6173  # instances that start together make the view one after another


async def prepare(url: str) -> None:
    """Take over the original's table if there is one, and make the view. The store is migrated before."""
    own = {"schema", "pooled"} & parse_qs(urlsplit(url).query).keys()
    if own:
        raise ConfigError(f"url: Atlas Jobs has a database to itself; leave out {' and '.join(sorted(own))}")
    link = await asyncpg.connect(url, command_timeout=10)
    try:
        async with link.transaction():
            await link.execute("select pg_advisory_xact_lock($1)", _LOCK)
            if await link.fetchval("select relkind from pg_class where oid = to_regclass('jobs')") == b"r":
                await link.execute(_script("adopt.sql"))
            await link.execute(_script("table.sql"))
    finally:
        await link.close()


def _script(name: str) -> str:
    return (files("atlas_jobs") / name).read_text(encoding="utf-8")
