"""SAQ: coroutines, a hundred at once; a sweep finds what a killed process had."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import saq
from redis import Redis as Client
from redis.asyncio import Redis
from saq.queue.redis import RedisQueue

from benchmarks.redis.peers import Peer, Submit, async_noop, async_stamp

_AT_ONCE = 100
_RETRIES = 5  # with the default of one, a job whose process was killed is not run again


async def _noop(_context: Any, *, n: int) -> None:
    await async_noop(n)


async def _stamp(_context: Any, *, n: int) -> None:
    await async_stamp(n)


class Saq(Peer):
    jobs = 10_000

    def __init__(self, url: str) -> None:
        super().__init__(url)
        logging.getLogger("saq").setLevel(logging.ERROR)
        self._queue = RedisQueue(Redis.from_url(url, max_connections=2 * _AT_ONCE))

    @asynccontextmanager
    async def submitting(self) -> AsyncIterator[Submit]:
        await self._queue.connect()
        try:
            yield lambda task, number: self._queue.enqueue(task, n=number, retries=_RETRIES)
        finally:
            await self._queue.disconnect()

    async def work(self) -> None:
        functions = [("noop", _noop), ("stamp", _stamp)]
        worker = saq.Worker(self._queue, functions, concurrency=_AT_ONCE)
        worker.SIGNALS = []
        await self._queue.connect()
        await worker.start()

    def left(self, client: Client) -> int:
        return int(client.zcard("saq:default:incomplete"))
