"""The peer on the same server: PgQueuer, all its tables logged, with batches of 500 and its autovacuum settings.

It deletes a job when it has run and writes a line to its log; results are not kept. A job may have one argument: bytes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

BATCH = 500
STARTS: list[tuple[int, float, float]] = []
"""Of each ``stamp`` job in this process: its number, and the monotonic and the wall clock when its handler started."""


async def noop(job: Job) -> None:
    """Nothing at all."""


async def stamp(job: Job) -> None:
    """Tell when the job started."""
    STARTS.append((int((job.payload or b"0").removeprefix(b'{"n":').removesuffix(b"}")), time.monotonic(), time.time()))


def payload(number: int) -> bytes:
    """What Holdfast's jobs carry too."""
    return b'{"n":%d}' % number


@asynccontextmanager
async def queries(url: str) -> AsyncIterator[Queries]:
    """Its calls, on one connection."""
    connection = await asyncpg.connect(url)
    try:
        yield Queries(AsyncpgDriver(connection))
    finally:
        await connection.close()


async def install(url: str, jobs: int = 0) -> None:
    """Its tables as it advises, and this many ``noop`` jobs."""
    async with queries(url) as peer:
        await peer.install()
        await peer.optimize_autovacuum()
        await in_bulk(peer, jobs)


async def in_bulk(peer: Queries, jobs: int) -> None:
    """Jobs stored by the thousand."""
    for start in range(0, jobs, 1000):
        numbers = range(start, min(jobs, start + 1000))
        await peer.enqueue(["noop"] * len(numbers), [payload(n) for n in numbers], [0] * len(numbers))
