"""Statements in a loop on one connection, with nothing a queue needs beside: what server, driver and machine allow.

The table has a job's columns and the index a claim goes by. No results, no retries, no workers: no queue can beat this.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import uvloop

from benchmarks.postgres import server
from holdfast.core.ids import new_id

_TABLE = """
create table bare (
    id uuid primary key, queue text not null, task text not null, payload text not null, rank int not null default 0,
    run_at bigint not null, claims bigint not null default 0, attempts bigint not null default 0,
    state smallint not null default 0, worker text, lease_until bigint, ended_at bigint, result text
) with (fillfactor = 85);
create index bare_ready on bare (queue, rank, run_at, id) where state = 0;
create index bare_lease on bare (lease_until) where state = 1;
"""
_INSERT = """
insert into bare (id, queue, task, payload, run_at)
select * from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[])
"""
_CLAIM = """
update bare set state = 1, claims = claims + 1, attempts = attempts + 1, worker = 'bare', lease_until = $4
where id = any(array(
    select id from bare where state = 0 and queue = 'default' and (rank, run_at, id) > (0, $2::bigint, $3::uuid)
    order by rank, run_at, id limit $1 for update skip locked))
returning id, task, payload, run_at, claims
"""
_COMPLETE = """
update bare b set state = 2, lease_until = null, ended_at = $4, result = d.result
from unnest($1::uuid[], $2::bigint[], $3::text[]) as d (id, claims, result)
where b.id = d.id and b.claims = d.claims and b.state + 0 = 1 returning b.id
"""
Rates = dict[str, float]
"""Jobs a second, by what was done with them."""
Way = Callable[[Any, int, int], Awaitable[Rates]]
"""From a connection, a number of jobs and the size of a batch."""


def measured(jobs: int, way: Way, batch: int) -> Rates:
    """What one connection does in a database of its own."""

    async def connected(url: str) -> Rates:
        connection = await connect(url)
        try:
            return await way(connection, jobs, batch)
        finally:
            await connection.close()

    with server.database() as home:
        return uvloop.run(connected(home.url))


async def connect(url: str) -> Any:
    """A connection that plans as ours do, in a database that has the table from now on."""
    connection = await asyncpg.connect(url, server_settings={"plan_cache_mode": "force_generic_plan", "jit": "off"})
    await connection.execute(_TABLE)
    return connection


async def insert(connection: Any, first: int, number: int) -> None:
    """One transaction of so many jobs."""
    ids = [new_id() for _ in range(number)]
    payloads = [f'{{"n":{n}}}' for n in range(first, first + number)]
    now = time.time_ns() // 1000
    await connection.execute(_INSERT, ids, ["default"] * number, ["noop"] * number, payloads, [now] * number)


async def inserted(connection: Any, jobs: int, batch: int) -> Rates:
    """Insert them."""
    await insert(connection, 0, batch)
    started = time.perf_counter()
    for first in range(0, jobs, batch):
        await insert(connection, first, min(batch, jobs - first))
    return {"insert": jobs / (time.perf_counter() - started)}


async def cycled(connection: Any, jobs: int, batch: int) -> Rates:
    """Claim and complete them, one batch after another, each from the last one's place on."""
    for first in range(0, jobs, 500):
        await insert(connection, first, min(500, jobs - first))
    server.checkpoint()
    claim, complete = await connection.prepare(_CLAIM), await connection.prepare(_COMPLETE)
    done, run_at, last = 0, 0, UUID(int=0)
    claiming = completing = 0.0
    while done < jobs:
        started, now = time.perf_counter(), time.time_ns() // 1000
        rows = await claim.fetch(batch, run_at, last, now + 30_000_000)
        claimed = time.perf_counter()
        run_at, last = max((row[3], row[0]) for row in rows)
        ids, claims = [row[0] for row in rows], [row[4] for row in rows]
        done += len(await complete.fetch(ids, claims, [None] * len(rows), now))
        claiming += claimed - started
        completing += time.perf_counter() - claimed
    return {"claim": jobs / claiming, "complete": jobs / completing, "both": jobs / (claiming + completing)}
