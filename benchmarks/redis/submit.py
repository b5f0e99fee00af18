"""Submit: in bulk, one by one, and a hundred at once (target 4b)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import uvloop

from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_least, times_at_least
from benchmarks.redis import server
from benchmarks.redis.peers import peer
from benchmarks.redis.peers.streaq import in_bulk
from benchmarks.redis.server import ALWAYS, EVERYSEC
from benchmarks.submit import at_once, one_by_one, timed

TITLE = "Submit"
_BLOCK = 50  # submissions of one side before it is the other's turn
_LONE = ("dramatiq", "taskiq-list", "saq")
"""The quickest with lone submissions; that they may lose the job later does not matter here."""

Ones = list[Callable[[int], Awaitable[object]]]


def run(plan: Plan) -> list[Line]:
    """Alternate: ours and the peers, a block of each in turn."""
    bulk = Line("bulk, 1,000 a call", "jobs/s", other="streaQ", target=times_at_least(5))
    lone = Line("one by one", "jobs/s", other="the quickest peer", target=times_at_least(1.1))
    each_lone = {name: Line("one by one", "jobs/s", other=name) for name in _LONE}
    together = Line("100 at once", "jobs/s", other="saq", target=at_least(50_000))
    synced = Line("one by one, always", "jobs/s", other="the quickest peer")
    for _ in range(plan.rounds):
        bulk.add(*uvloop.run(_in_bulk(plan.size(5000, 100), plan.size(10, 1))))
        ours, *theirs = uvloop.run(_lone(EVERYSEC, _LONE, plan))
        lone.add(ours, max(theirs))
        for line, rate in zip(each_lone.values(), theirs, strict=True):
            line.add(ours, rate)
        ours, *theirs = uvloop.run(_lone(ALWAYS, _LONE, plan))
        synced.add(ours, max(theirs))
        together.add(*uvloop.run(_together(plan.size(5000, 100), plan.size(6, 1))))
    return [bulk, lone, together, synced, *each_lone.values()]


async def _in_bulk(jobs: int, blocks: int) -> list[float]:
    with server.database() as url:
        async with Application(url) as app, in_bulk(url) as theirs:

            async def ours(jobs: int) -> None:
                await app.enqueue_many(app.noop.new_job(n=index) for index in range(jobs))

            return await timed([ours, theirs], jobs, blocks)


async def _lone(fsync: str, names: tuple[str, ...], plan: Plan) -> list[float]:
    with server.database(fsync) as url:
        async with AsyncExitStack() as stack:
            ones = await _submitting(stack, url, names)
            return await timed([one_by_one(one) for one in ones], _BLOCK, plan.size(60, 1))


async def _together(jobs: int, blocks: int) -> list[float]:
    with server.database() as url:
        async with AsyncExitStack() as stack:
            ones = await _submitting(stack, url, ("saq",))
            return await timed([at_once(one) for one in ones], jobs, blocks)


async def _submitting(stack: AsyncExitStack, url: str, names: tuple[str, ...]) -> Ones:
    """How each side stores one job."""
    app = await stack.enter_async_context(Application(url))
    ones: Ones = [lambda n: app.noop.enqueue(n=n)]
    for name in names:
        submit = await stack.enter_async_context(peer(name, url).submitting())
        ones.append(lambda n, submit=submit: submit("noop", n))
    return ones
