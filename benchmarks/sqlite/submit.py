"""Submit: in bulk, one by one from blocking and from async code, and a hundred at once (targets 5b)."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_least, times_at_least
from benchmarks.sqlite.peer import Peer

TITLE = "Submit, synchronous=FULL"
_BLOCK = 50  # submissions of one side before it is the other's turn
_WARM = 14  # blocks that do not count


def run(plan: Plan) -> list[Line]:
    """Alternate: each way of ours, the peer, and the bare insert that no queue can beat."""
    bulk = Line("bulk, 1,000 a transaction", "jobs/s", target=at_least(100_000))
    blocking = Line("one by one, blocking", "jobs/s", target=times_at_least(1.0))
    awaited = Line("one by one, async", "jobs/s", target=times_at_least(0.85))
    together = Line("100 at once, async", "jobs/s", target=at_least(40_000))
    floor = Line("one by one, blocking, against a bare INSERT", "jobs/s", other="sqlite3")
    blocks = plan.size(60, 2)
    for _ in range(plan.rounds):
        ours, theirs, bare = _blocking(plan, blocks)
        blocking.add(ours, theirs)
        floor.add(ours, bare)
        awaited.add(*uvloop.run(_awaited(plan, blocks)))
        bulk.add(_async(plan, in_bulk, plan.size(50_000, 1000)))
        together.add(_async(plan, at_once, plan.size(20_000, 100)))
    return [bulk, blocking, awaited, together, floor]


async def in_bulk(app: Application, jobs: int) -> None:
    """Jobs drafted one by one, stored by the thousand."""
    await app.enqueue_many(app.noop.new_job(n=index) for index in range(jobs))


async def one_by_one(app: Application, jobs: int) -> None:
    """Each stored before the next is begun."""
    for index in range(jobs):
        await app.noop.enqueue(n=index)


async def at_once(app: Application, jobs: int) -> None:
    """A hundred callers, each one by one."""
    await asyncio.gather(*[one_by_one(app, jobs // 100) for _ in range(100)])


def _async(plan: Plan, way: Callable[[Application, int], Awaitable[None]], jobs: int) -> float:
    async def timed(path: Path) -> float:
        async with Application(path) as app:
            await way(app, 10)
            started = time.perf_counter()
            await way(app, jobs)
            return jobs / (time.perf_counter() - started)

    with plan.place() as folder:
        return uvloop.run(timed(folder / "jobs.db"))


def _blocking(plan: Plan, blocks: int) -> tuple[float, float, float]:
    """Ours, the peer and a bare insert, a block of each in turn: what else the machine does meets all three alike."""
    with plan.place() as folder:
        app, peer, bare = Application(folder / "jobs.db"), Peer(folder / "huey.db"), _bare(folder / "bare.db")
        ways: list[Callable[[int], object]] = [lambda n: app.noop.sync.enqueue(n=n), peer.noop, bare]
        took: list[list[float]] = [[] for _ in ways]
        for _ in range(_WARM + blocks):
            for way, times in zip(ways, took, strict=True):
                times.append(_timed(way))
        app.sync.close()
        peer.huey.storage.close()
    ours, theirs, floor = (_rate(times) for times in took)
    return ours, theirs, floor


async def _awaited(plan: Plan, blocks: int) -> tuple[float, float]:
    """Ours from an event loop and the peer as it is, a block of each in turn."""
    ours, theirs = [], []
    with plan.place() as folder:
        peer = Peer(folder / "huey.db")
        async with Application(folder / "jobs.db") as app:
            for _ in range(_WARM + blocks):
                started = time.perf_counter()
                await one_by_one(app, _BLOCK)
                ours.append(time.perf_counter() - started)
                theirs.append(_timed(peer.noop))
        peer.huey.storage.close()
    return _rate(ours), _rate(theirs)


def _timed(way: Callable[[int], object]) -> float:
    started = time.perf_counter()
    for index in range(_BLOCK):
        way(index)
    return time.perf_counter() - started


def _rate(took: list[float]) -> float:
    """Jobs a second in the middle block, once the log of a new file has its length."""
    return _BLOCK / statistics.median(took[_WARM:])


def _bare(path: Path) -> Callable[[int], object]:
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode=wal", "synchronous=full"):
        connection.execute(f"pragma {pragma}").fetchall()
    connection.execute("create table bare (seq integer primary key, id text unique, payload text)")
    insert = "insert into bare (id, payload) values (?, ?)"
    return lambda n: connection.execute(insert, (str(uuid.uuid4()), f'{{"n":{n}}}'))
