"""Success of a job and submission of the next one in one transaction: neither is there without the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from atlasqueue.transport import opened_lists
from holdfast import Context, Holdfast, HoldfastError
from holdfast.core.models import NewJob
from holdfast.transports.redis import RedisList

_MAX_CONNECTIONS = 10


class ChainCompletion:
    """Completes jobs that are followed by another one, on connections of its own."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._pool: asyncpg.Pool | None = None
        self._lists: RedisList | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Holds the connections while this lasts. The first job that needs one makes it."""
        settings = self._app.settings
        async with (
            opened_lists(settings) as lists,
            asyncpg.create_pool(settings.url, min_size=0, max_size=_MAX_CONNECTIONS) as pool,
        ):
            self._pool, self._lists = pool, lists
            yield

    async def complete(self, job: Context, follower: NewJob, result: Any) -> Any:
        """Ends the job as succeeded and submits its follower; returns the result."""
        assert self._pool is not None
        async with self._pool.acquire() as connection, connection.transaction():
            handle = await self._app.submit(follower, connection=connection)
            await job.complete(connection, result)
        await self._announce(follower.queue, handle.id)
        return result

    async def _announce(self, queue: str, job_id: str) -> None:
        assert self._lists is not None
        with suppress(HoldfastError):  # without Redis a sweep finds the job
            await self._lists.publish({queue: [job_id]})
