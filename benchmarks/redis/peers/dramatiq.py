"""Dramatiq: threads, a heartbeat for each process, an acknowledgement for each message; no middlewares.

Its own number of threads and a thousand messages fetched beforehand were the quickest: 1, 4 and 8 threads with its own
two messages each, 16, 200 and 1,000 were tried.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from redis import Redis as Client

from benchmarks.redis.peers import Peer, noop, ready, stamp

_THREADS = 8
_PREFETCH = 1000


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
        worker.queue_prefetch = _PREFETCH  # what its environment variable dramatiq_queue_prefetch says
        worker.start()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(worker.stop)

    def left(self, client: Client) -> int:
        return int(client.hlen("dramatiq:default.msgs"))
