"""streaQ, for what it is the quickest at: submitting in bulk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from streaq import Worker

from benchmarks.redis.peers import async_noop

_AT_ONCE = 1000


@asynccontextmanager
async def in_bulk(url: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Stores so many jobs, a thousand to a pipeline."""
    worker: Worker[None] = Worker(redis_url=url)
    noop = worker.task(async_noop)

    async def store(jobs: int) -> None:
        for first in range(0, jobs, _AT_ONCE):
            await worker.enqueue_many([noop.enqueue(n) for n in range(first, min(jobs, first + _AT_ONCE))])

    async with worker:
        yield store
