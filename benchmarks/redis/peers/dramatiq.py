"""Dramatiq: threads, a heartbeat for each process, an acknowledgement for each message; no middlewares.

One thread was the quickest with handlers that do nothing (1, 2, 4 and 8 were tried).
"""

from __future__ import annotations

import asyncio
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from redis import Redis as Client

from benchmarks.redis.peers import Peer, noop, ready, stamp

_THREADS = 1


class Dramatiq(Peer):
    jobs = 20_000

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._broker = RedisBroker(url=url, middleware=[])
        self._actors = {
            function.__name__: dramatiq.actor(function, actor_name=function.__name__, broker=self._broker)
            for function in (noop, stamp)
        }

    def submitting(self) -> Any:
        async def submit(task: str, number: int) -> None:
            self._actors[task].send(number)

        return ready(submit)

    async def work(self) -> None:
        worker = dramatiq.Worker(self._broker, worker_threads=_THREADS)
        worker.start()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(worker.stop)

    def left(self, client: Client) -> int:
        return int(client.hlen("dramatiq:default.msgs"))
