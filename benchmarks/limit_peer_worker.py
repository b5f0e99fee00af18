"""Drain of a peer, as a process: ``limit_peer_worker PEER URL LIMIT JOBS KEYS``.

Answers ``fill`` when all jobs are stored, and ``go`` with the jobs per second until the last completion is committed.
An error is an answer, too. Each peer runs up to a hundred coroutines at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from importlib import import_module
from typing import Any

import uvloop

from benchmarks.telling import say

CONCURRENCY = 100
"""Handlers of a worker process, and the limit of a limited queue."""
RATE = 100_000
"""Starts per second of a queue with a rate: more than any peer reaches."""

_LOOK = 0.01  # seconds between two looks whether a queue is empty, or has jobs
_FILLERS = 20  # concurrent submissions
_MAX_SECONDS = 300  # for one drain, fill included

HANDLED: list[int] = []
"""Numbers of the jobs that ran."""


def main() -> None:
    """Runs one drain, and ends without a shutdown of the peer: its database is dropped."""
    name, url, limit, jobs, keys = sys.argv[1:]
    say({"ready": True})
    timer = threading.Timer(_MAX_SECONDS, lambda: _end({"error": f"{len(HANDLED)} of {jobs} jobs in {_MAX_SECONDS} s"}))
    timer.daemon = True
    timer.start()
    uvloop.run(_serve(name, url, limit, int(jobs), int(keys)))


async def _serve(name: str, url: str, limit: str, jobs: int, keys: int) -> None:
    try:
        _end({"rate": await _measure(_PEERS[name], url, limit, jobs, keys)})
    except Exception as error:
        _end({"error": f"{type(error).__name__}: {error}"})


def _end(answer: dict[str, Any]) -> None:
    say(answer)
    os._exit(0)


async def _measure(kind: type[Peer], url: str, limit: str, jobs: int, keys: int) -> float:
    sys.stdin.readline()
    peer = kind(url, limit, keys)
    await peer.fill(jobs)
    say({"filled": jobs})
    sys.stdin.readline()
    peer.started = time.monotonic()
    working = asyncio.ensure_future(peer.work())
    while len(HANDLED) < jobs or await peer.count_unfinished():
        await asyncio.wait([working], timeout=_LOOK)
        if working.done():
            raise RuntimeError("the worker ended early") from working.exception()
    return jobs / (time.monotonic() - peer.started)


class Peer(ABC):
    """Jobs ``n`` of ``keys`` keys on the server of a URL, under a limit: ``queue``, ``keys``, ``rate`` or ``none``."""

    started = 0.0
    """When the worker began to look for jobs."""

    def __init__(self, url: str, limit: str, keys: int) -> None:
        self.url, self.limit, self.keys = url, limit, keys

    @abstractmethod
    async def fill(self, jobs: int) -> None:
        """Creates the tables and stores this many jobs."""

    @abstractmethod
    async def work(self) -> None:
        """Runs jobs until cancelled."""

    @abstractmethod
    async def count_unfinished(self) -> int:
        """Counts the stored jobs whose completion is not committed."""

    def key(self, number: int) -> str | None:
        """Returns the key of a job, if each key is limited."""
        return f"key-{number % self.keys}" if self.limit == "keys" else None


class Procrastinate(Peer):
    """Procrastinate with a lock per key; a lock that becomes free wakes no worker, so it polls."""

    def __init__(self, url: str, limit: str, keys: int) -> None:
        super().__init__(url, limit, keys)
        import procrastinate

        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        self._app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, max_size=20))

        @self._app.task(name="work")
        async def work(n: int) -> None:
            HANDLED.append(n)

        self._task = work

    async def fill(self, jobs: int) -> None:
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()
        if self.limit == "none":
            for first in range(0, jobs, 1000):
                await self._task.batch_defer_async(*({"n": n} for n in range(first, min(first + 1000, jobs))))
        else:
            await _each(range(jobs), lambda n: self._task.configure(lock=self.key(n)).defer_async(n=n))

    async def work(self) -> None:
        await self._app.run_worker_async(
            concurrency=CONCURRENCY, fetch_job_polling_interval=_LOOK, install_signal_handlers=False
        )

    async def count_unfinished(self) -> int:
        return await _count_rows(self.url, "select count(*) from procrastinate_jobs where status <> 'succeeded'")


class Dbos(Peer):
    """DBOS with a limit of the queue, or of each partition; it polls every ten milliseconds instead of each second."""

    def __init__(self, url: str, limit: str, keys: int) -> None:
        super().__init__(url, limit, keys)
        from dbos import DBOS

        self._dbos = DBOS

        @DBOS.workflow(name="work")
        async def work(n: int) -> None:
            HANDLED.append(n)

        self._create()

    def _create(self) -> None:
        url = self.url.replace("postgresql://", "postgresql+psycopg://")
        self._dbos(
            config={"name": "peer", "system_database_url": url, "application_version": "1", "log_level": "ERROR"}
        )

    async def fill(self, jobs: int) -> None:
        from dbos import DBOSClient

        self._dbos.launch()  # creates its tables
        self._dbos.destroy()
        options: dict[str, Any] = {
            "queue": {"global_concurrency": CONCURRENCY},
            "keys": {"partition_concurrency": 1},
            "rate": {"limiter": {"limit": RATE, "period": 1.0}},
            "none": {},
        }[self.limit]
        client = DBOSClient(system_database_url=self.url, application_name="peer")
        client.register_queue("work", polling_interval_sec=_LOOK, **options)

        async def enqueue(n: int) -> None:
            partition = {"queue_partition_key": self.key(n)} if self.limit == "keys" else {}
            await client.enqueue_async({"workflow_name": "work", "queue_name": "work", **partition}, n)

        await _each(range(jobs), enqueue)
        client.destroy()

    async def work(self) -> None:
        self._create()
        self._dbos.launch()
        self.started = time.monotonic()  # launching takes a third of a second, and ends with the first look for jobs
        await asyncio.Event().wait()

    async def count_unfinished(self) -> int:
        return await _count_rows(self.url, "select count(*) from dbos.workflow_status where status <> 'SUCCESS'")


class Saq(Peer):
    """SAQ: on PostgreSQL with a group per key, on Redis without limits."""

    def __init__(self, url: str, limit: str, keys: int) -> None:
        super().__init__(url, limit, keys)
        if url.startswith("redis"):
            from redis.asyncio import Redis

            redis = import_module("saq.queue.redis")
            self._queue = redis.RedisQueue(Redis.from_url(url, max_connections=2 * CONCURRENCY))
        else:
            self._queue = import_module("saq.queue.postgres").PostgresQueue(url=url)

    async def fill(self, jobs: int) -> None:
        await self._queue.connect()
        await _each(range(jobs), lambda n: self._queue.enqueue("work", n=n, group_key=self.key(n)))

    async def work(self) -> None:
        import saq

        async def work(_context: Any, *, n: int) -> None:
            HANDLED.append(n)

        worker: Any = saq.Worker(self._queue, [("work", work)], concurrency=CONCURRENCY)
        worker.SIGNALS = []
        await worker.start()

    async def count_unfinished(self) -> int:
        return int(await self._queue.count("incomplete"))


class Streaq(Peer):
    """streaQ, which has no limits."""

    def __init__(self, url: str, limit: str, keys: int) -> None:
        super().__init__(url, limit, keys)
        import streaq

        self._worker: Any = streaq.Worker(redis_url=url, concurrency=CONCURRENCY)

        async def work(n: int) -> None:
            HANDLED.append(n)

        self._task = self._worker.task(work, name="work", silent=True)

    async def fill(self, jobs: int) -> None:
        async with self._worker:
            for first in range(0, jobs, 1000):
                await self._worker.enqueue_many([self._task.enqueue(n) for n in range(first, min(first + 1000, jobs))])

    async def work(self) -> None:
        await self._worker.run_async()

    async def count_unfinished(self) -> int:
        return len(HANDLED) - int(self._worker.counters["completed"])


_PEERS: dict[str, type[Peer]] = {"procrastinate": Procrastinate, "dbos": Dbos, "saq": Saq, "streaq": Streaq}


async def _each(numbers: Iterable[int], submit: Callable[[int], Awaitable[object]]) -> None:
    left = iter(numbers)

    async def some() -> None:
        for number in left:
            await submit(number)

    await asyncio.gather(*[some() for _ in range(_FILLERS)])


async def _count_rows(url: str, sql: str) -> int:
    import psycopg

    async with await psycopg.AsyncConnection.connect(url) as connection:
        row = await (await connection.execute(sql)).fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    main()
