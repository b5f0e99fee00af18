"""TaskIQ: coroutines, a hundred at once; on a stream with acknowledgements, and on a list without."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis import Redis as Client
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker, RedisStreamBroker

from benchmarks.redis.peers import Peer, Submit, async_noop, async_stamp

_AT_ONCE = 100


class _Taskiq(Peer):
    jobs = 12_000
    broker_class: Any

    def __init__(self, url: str) -> None:
        super().__init__(url)
        logging.getLogger("taskiq").setLevel(logging.ERROR)
        self._broker = self.broker_class(url)
        self._tasks = {
            name: self._broker.register_task(function, task_name=name)
            for name, function in (("noop", async_noop), ("stamp", async_stamp))
        }

    @asynccontextmanager
    async def submitting(self) -> AsyncIterator[Submit]:
        await self._broker.startup()
        try:
            yield lambda task, number: self._tasks[task].kiq(number)
        finally:
            await self._broker.shutdown()

    async def work(self) -> None:
        await run_receiver_task(self._broker, max_async_tasks=_AT_ONCE, max_prefetch=_AT_ONCE, run_startup=True)


class Stream(_Taskiq):
    broker_class = RedisStreamBroker

    def left(self, client: Client) -> int:
        return sum(int(group["pending"]) + int(group["lag"] or 0) for group in client.xinfo_groups("taskiq"))


class List(_Taskiq):
    broker_class = ListQueueBroker

    def left(self, client: Client) -> int:
        return int(client.llen("taskiq"))
