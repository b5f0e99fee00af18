"""Resources of a worker, opened once per process and injected into handlers with `provided()`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import httpx
from redis.asyncio import Redis

from holdfast import Holdfast

POOL_SIZE = 10
REDIS_TIMEOUT = 2.0  # seconds
HTTP_TIMEOUT = 5.0  # seconds


def provide_resources(app: Holdfast) -> None:
    """Registers the service's own database, Redis and an HTTP client as dependencies of handlers."""

    @app.provide
    async def open_pool() -> AsyncIterator[asyncpg.Pool]:
        # min_size=0: a worker starts while its database is away.
        async with asyncpg.create_pool(app.settings.url, min_size=0, max_size=POOL_SIZE, timeout=5) as pool:
            yield pool

    @app.provide
    async def open_redis() -> AsyncIterator[Redis]:
        async with open_client(app) as redis:
            yield redis

    @app.provide
    async def open_http() -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(timeout=HTTP_TIMEOUT) as http:
            yield http


def open_client(app: Holdfast) -> Redis:
    """Returns a client of the Redis that carries the service's streams; it connects when it is used."""
    url = app.settings.transport_url
    return Redis.from_url(
        url, decode_responses=True, socket_timeout=REDIS_TIMEOUT, socket_connect_timeout=REDIS_TIMEOUT
    )
