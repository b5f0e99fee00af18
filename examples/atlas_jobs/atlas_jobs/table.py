"""Reading: the view ``jobs`` that has Atlas Jobs' columns, and the counts its routes show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import asyncpg

from holdfast import ConfigError

Counts = dict[str, int]

_LOCK = 0x41746C6173  # instances that start together make the view one after another
_UNCLAIMED = "unassigned"
"""Stands for the worker of jobs that nobody has claimed yet."""

_BY_STATUS = """select status, count(*) from jobs
    where $1::int is null or updated_at >= now() - make_interval(mins => $1) group by 1 order by 1"""
_BY_WORKER = """select worker_id, status, count(*) from jobs
    where $1::int is null or updated_at >= now() - make_interval(mins => $1) group by 1, 2 order by 1, 2"""


class Table:
    """The view, through a pool of connections of its own."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @classmethod
    @asynccontextmanager
    async def opened(cls, url: str) -> AsyncIterator[Table]:
        """Connect, take over the original's table if there is one, and make the view. The store is migrated before."""
        own = {"schema", "pooled"} & parse_qs(urlsplit(url).query).keys()
        if own:
            raise ConfigError(f"url: Atlas Jobs has a database to itself; leave out {' and '.join(sorted(own))}")
        async with asyncpg.create_pool(url, min_size=1, max_size=4, command_timeout=10) as pool:
            async with pool.acquire() as link, link.transaction():
                await link.execute("select pg_advisory_xact_lock($1)", _LOCK)
                if await link.fetchval("select relkind from pg_class where oid = to_regclass('jobs')") == b"r":
                    await link.execute(_script("adopt.sql"))
                await link.execute(_script("table.sql"))
            yield cls(pool)

    async def job(self, job_id: UUID) -> dict[str, Any] | None:
        """A row, by the names of its columns."""
        row = await self._pool.fetchrow("select * from jobs where job_id = $1", job_id)
        return None if row is None else dict(row)

    async def by_status(self) -> Counts:
        """How many jobs in each status."""
        async with self._pool.acquire() as link:
            return await _by_status(link)

    async def by_worker(self) -> dict[str, Counts]:
        """How many jobs in each status, by who claimed them last."""
        async with self._pool.acquire() as link:
            return await _by_worker(link)

    async def metrics(self, minutes: int) -> dict[str, Any]:
        """All counts, of one instant; ``recent`` are the jobs that changed within so many minutes."""
        async with self._pool.acquire() as link, link.transaction(isolation="repeatable_read", readonly=True):
            attempts = "select attempt_count::text, count(*) from jobs group by attempt_count order by attempt_count"
            waiting = "select count(*) from jobs where status = 'QUEUED' and next_run_at > now()"
            return {
                "statusCounts": await _by_status(link),
                "byWorker": await _by_worker(link),
                "attemptDistribution": dict(await link.fetch(attempts)),
                "scheduledForRetry": await link.fetchval(waiting),
                "recent": {
                    "minutes": minutes,
                    "statusCounts": await _by_status(link, minutes),
                    "byWorker": await _by_worker(link, minutes),
                },
            }


async def _by_status(link: Any, minutes: int | None = None) -> Counts:
    return dict(await link.fetch(_BY_STATUS, minutes))


async def _by_worker(link: Any, minutes: int | None = None) -> dict[str, Counts]:
    counts: dict[str, Counts] = {}
    for worker, status, count in await link.fetch(_BY_WORKER, minutes):
        counts.setdefault(worker or _UNCLAIMED, {})[status] = count
    return counts


def _script(name: str) -> str:
    return (files("atlas_jobs") / name).read_text(encoding="utf-8")
