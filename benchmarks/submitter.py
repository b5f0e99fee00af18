"""A submitter as a process: ``submitter QUEUE STORE``, of Holdfast or of a peer.

Says it is ready. To each line of JSON, ``[rate, first, jobs]``, it submits so many jobs a second at random gaps, each
by itself and without waiting for another, and answers when each submission returned and the last was due. Ends with its
input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from benchmarks.application import Application
from benchmarks.telling import say

Submit = Callable[[int], Awaitable[object]]


@asynccontextmanager
async def _holdfast(store: str) -> AsyncIterator[Submit]:
    async with Application(store) as app:
        yield lambda number: app.stamp.enqueue(n=number)


@asynccontextmanager
async def _pgqueuer(store: str) -> AsyncIterator[Submit]:
    from benchmarks.postgres import peer

    async with peer.queries(store) as queries:
        yield lambda number: queries.enqueue("stamp", peer.payload(number))


@asynccontextmanager
async def _huey(store: str) -> AsyncIterator[Submit]:
    from benchmarks.sqlite.peer import Peer

    peer = Peer(Path(store))
    yield lambda number: asyncio.to_thread(peer.stamp, number)


@asynccontextmanager
async def _taskiq(store: str) -> AsyncIterator[Submit]:
    from benchmarks.redis.peers import peer

    async with peer("taskiq-stream", store).submitting() as submit:
        yield lambda number: submit("stamp", number)


_QUEUES = {"Holdfast": _holdfast, "PgQueuer": _pgqueuer, "Huey": _huey, "taskiq-stream": _taskiq}


async def _paced(submit: Submit, rate: float, numbers: range) -> tuple[list[tuple[int, float]], float]:
    """Each number, and the monotonic clock when its submission returned; and when the last one was due."""
    returned: list[tuple[int, float]] = []

    async def submit_one(number: int) -> None:
        await submit(number)
        returned.append((number, time.monotonic()))

    due = time.monotonic()
    async with asyncio.TaskGroup() as calls:
        for number in numbers:
            due += random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.create_task(submit_one(number))
    return returned, due


async def _serve(queue: str, store: str) -> None:
    loop = asyncio.get_running_loop()
    async with _QUEUES[queue](store) as submit:
        say({"ready": True})
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            rate, first, jobs = json.loads(line)
            returned, due = await _paced(submit, rate, range(first, first + jobs))
            say({"returned": returned, "due": due})


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:]))
