"""Submit: in bulk, one by one, and a hundred at once (target 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import asyncpg
import uvloop
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.queries import Queries

from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_least, times_at_least
from benchmarks.postgres import bare, peer, server
from benchmarks.submit import Way, at_once, one_by_one, timed

TITLE = "Submit"
_BLOCK = 50  # submissions of one side before it is the other's turn
_CONNECTIONS = 10  # of the peer, where a hundred callers share them


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer, and the bare insert that no queue can beat, a block of each in turn."""
    bulk = Line("bulk, 1,000 a transaction", "jobs/s", other="PgQueuer", target=times_at_least(2))
    lone = Line("one by one", "jobs/s", other="PgQueuer", target=times_at_least(1))
    together = Line("100 at once", "jobs/s", other="PgQueuer", target=at_least(20_000))
    bulk_floor = Line("bulk, against a bare INSERT", "jobs/s", other="asyncpg")
    lone_floor = Line("one by one, against a bare INSERT", "jobs/s", other="asyncpg")
    for _ in range(plan.rounds):
        ours, theirs, floor = uvloop.run(_alternating(_in_bulk, plan.size(5000, 100), plan.size(10, 1)))
        bulk.add(ours, theirs)
        bulk_floor.add(ours, floor)
        ours, theirs, floor = uvloop.run(_alternating(_one_by_one, _BLOCK, plan.size(60, 1)))
        lone.add(ours, theirs)
        lone_floor.add(ours, floor)
        ours, theirs, _ = uvloop.run(_alternating(_at_once, plan.size(5000, 100), plan.size(6, 1)))
        together.add(ours, theirs)
    return [bulk, lone, together, bulk_floor, lone_floor]


async def _alternating(way: Callable[..., list[Way]], jobs: int, blocks: int) -> list[float]:
    """Jobs a second of each side in its middle block."""
    with server.database() as home, server.database() as their_home, server.database() as bare_home:
        await peer.install(their_home.url)
        async with AsyncExitStack() as stack:
            app = await stack.enter_async_context(Application(home.url))
            pool = await stack.enter_async_context(asyncpg.create_pool(their_home.url, min_size=_CONNECTIONS))
            lone = await stack.enter_async_context(peer.queries(their_home.url))
            connection = await bare.connect(bare_home.url)
            stack.push_async_callback(connection.close)
            ways = way(app, lone, Queries(AsyncpgPoolDriver(pool)), connection)
            return await timed(ways, jobs, blocks)


def _in_bulk(app: Application, lone: Queries, pooled: Queries, connection: object) -> list[Way]:
    async def ours(jobs: int) -> None:
        await app.enqueue_many(app.noop.new_job(n=index) for index in range(jobs))

    async def floor(jobs: int) -> None:
        for first in range(0, jobs, 1000):
            await bare.insert(connection, first, min(1000, jobs - first))

    return [ours, lambda jobs: peer.in_bulk(lone, jobs), floor]


def _one_by_one(app: Application, lone: Queries, pooled: Queries, connection: object) -> list[Way]:
    return [
        one_by_one(lambda n: app.noop.enqueue(n=n)),
        one_by_one(lambda n: lone.enqueue("noop", peer.payload(n))),
        one_by_one(lambda n: bare.insert(connection, n, 1)),
    ]


def _at_once(app: Application, lone: Queries, pooled: Queries, connection: object) -> list[Way]:
    """A bare connection has nothing for a hundred callers."""
    return [
        at_once(lambda n: app.noop.enqueue(n=n)),
        at_once(lambda n: pooled.enqueue("noop", peer.payload(n))),
        lambda jobs: asyncio.sleep(0),
    ]
