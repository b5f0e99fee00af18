"""Success of a job and submission of the next one in one transaction: neither is there without the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
from redis.asyncio import Redis
from redis.exceptions import RedisError

from holdfast import Context, Holdfast
from holdfast.core.models import NewJob

_TIMEOUT = 2.0  # seconds for Redis; without it a sweep finds the job
_MAX_CONNECTIONS = 10


class ChainCompletion:
    """Completes jobs that are followed by another one, on connections of its own."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._pool: asyncpg.Pool | None = None
        self._redis: Redis | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Holds the connections while this lasts. The first job that needs one makes it."""
        settings = self._app.settings
        redis = Redis.from_url(settings.transport_url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
        async with redis, asyncpg.create_pool(settings.url, min_size=0, max_size=_MAX_CONNECTIONS) as pool:
            self._pool, self._redis = pool, redis
            yield

    async def complete(self, job: Context, follower: NewJob, result: Any) -> Any:
        """Ends the job as succeeded and submits its follower; returns the result."""
        assert self._pool is not None
        async with self._pool.acquire() as connection, connection.transaction():
            handle = await self._app.submit(follower, connection=connection)
            await job.complete(connection, result)
        await self._announce(handle.id)
        return result

    async def _announce(self, job_id: str) -> None:
        assert self._redis is not None
        with suppress(RedisError, OSError):
            await self._redis.lpush(self._app.settings.transport_key, job_id)
