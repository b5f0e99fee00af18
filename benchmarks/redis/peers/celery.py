"""Celery: one process that runs jobs beside the one that fetches them; acknowledged late, since what it acknowledges
before it runs is lost with its process."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import celery
from redis import Redis as Client

from benchmarks.redis.peers import Peer, noop, ready, stamp

_URL = "HOLDFAST_BENCHMARK_URL"


def _made(url: str) -> Any:
    app = celery.Celery("peer", broker=url)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=64,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
    )
    for function in (noop, stamp):
        app.task(function, name=function.__name__)
    return app


class Celery(Peer):
    jobs = 4_000

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._app = _made(url)

    def submitting(self) -> Any:
        async def submit(task: str, number: int) -> None:
            self._app.tasks[task].delay(number)

        return ready(submit)

    async def work(self) -> None:
        isolated = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "celery", "--quiet", "-A", "benchmarks.redis.peers.celery", "worker"),
            *("--pool", "prefork", "--concurrency", "1", "--loglevel", "CRITICAL", *isolated),
            env={**os.environ, _URL: self.url, "C_FORCE_ROOT": "1"},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await process.wait()
        finally:
            process.terminate()
            await process.wait()

    def left(self, client: Client) -> int:
        return int(client.llen("celery")) + int(client.hlen("unacked"))


if _URL in os.environ:  # the worker that ``work`` has started
    app = _made(os.environ[_URL])
