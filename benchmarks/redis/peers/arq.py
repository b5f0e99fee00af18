"""arq: coroutines, a hundred at once, looking every ten milliseconds (its default, twice a second, drains a tenth)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker
from redis import Redis as Client

from benchmarks.redis.peers import Peer, Submit, async_noop, async_stamp

_AT_ONCE = 100
_POLL = 0.01  # seconds


async def _noop(_context: Any, n: int) -> None:
    await async_noop(n)


async def _stamp(_context: Any, n: int) -> None:
    await async_stamp(n)


class Arq(Peer):
    jobs = 8_000

    def __init__(self, url: str) -> None:
        super().__init__(url)
        logging.getLogger("arq").setLevel(logging.ERROR)
        self._settings = RedisSettings.from_dsn(url)

    @asynccontextmanager
    async def submitting(self) -> AsyncIterator[Submit]:
        pool = await create_pool(self._settings)
        try:
            yield pool.enqueue_job
        finally:
            await pool.aclose()

    async def work(self) -> None:
        worker = Worker(
            [func(_noop, name="noop", keep_result=0), func(_stamp, name="stamp", keep_result=0)],
            redis_settings=self._settings,
            max_jobs=_AT_ONCE,
            poll_delay=_POLL,
            handle_signals=False,
            log_results=False,
        )
        await worker.async_run()

    def left(self, client: Client) -> int:
        return int(client.zcard("arq:queue"))
