"""The execution guard: before a job runs, its idempotency key is set in Redis if it is absent (SET NX).

The key is read from PostgreSQL, once for each run: a claimed job does not carry it, and metadata are the client's.

The value names the owner and its phase: ``<job id> running`` or ``<job id> done``. A job is skipped if the key belongs
to another job, or to the same job in phase ``done``. Its own retries, redeliveries and replays run.

The guard saves work; it does not make effects happen once. That is done by idempotency keys in PostgreSQL, fenced
leases, and steps that are committed together with the service's own rows. So the guard lets a job run if Redis is away.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from holdfast import CallNext, ConfigError, Context, Holdfast, HoldfastError, NotFound
from streams.resources import open_client

GUARD_TTL = "GUARD_TTL_SECONDS"
DEFAULT_TTL = 86_400  # 24 hours
MAX_TTL = 31_536_000  # a year
RUNNING, DONE = "running", "done"
log = logging.getLogger(__name__)


def add_execution_guard(app: Holdfast) -> None:
    """Adds the guard as a middleware around every job of the application."""
    guard = ExecutionGuard(app, read_ttl())
    app.middleware(guard.run)
    app.lifespan(guard.close_with_worker)


def read_ttl() -> int:
    """Returns the lifetime of a key in seconds, from the environment; ConfigError names a wrong value."""
    text = os.environ.get(GUARD_TTL) or str(DEFAULT_TTL)
    if not re.fullmatch("[0-9]{1,8}", text) or not 1 <= int(text) <= MAX_TTL:
        raise ConfigError(f"{GUARD_TTL}: {text!r} is not valid; give a whole number of seconds from 1 to {MAX_TTL:,}")
    return int(text)


class ExecutionGuard:
    """Keys ``<service>:guard:<idempotency key>``, and ``<service>:guard_job:<id>`` of jobs without an idempotency key.

    ``<service>:guard_skipped`` counts skipped jobs.
    """

    def __init__(self, app: Holdfast, ttl: int) -> None:
        self._app = app
        self._ttl = ttl
        self._service = app.settings.api_service
        self._redis: Redis = open_client(app)

    async def run(self, job: Context, call_next: CallNext) -> Any:
        """Runs the job unless its key belongs to another job or to a finished run of this one."""
        key = await self._read_key(job.id)
        guard_key = f"{self._service}:guard_job:{job.id}" if key is None else f"{self._service}:guard:{key}"
        try:
            owner = await self._find_other_owner(guard_key, job.id)
        except RedisError as error:
            log.warning("the execution guard is off, Redis is away: %s", error)
            owner = None
        if owner is not None:
            return {"skipped": f"{'the guard' if key is None else f'idempotency_key {key!r}'} belongs to job {owner}"}
        result = await call_next(job)
        try:
            await self._redis.set(guard_key, f"{job.id} {DONE}", ex=self._ttl)
        except RedisError as error:
            log.warning("the execution guard cannot mark %s as done: %s", job.id, error)
        return result

    async def _read_key(self, job_id: str) -> str | None:
        try:
            return (await self._app.get(job_id)).key
        except HoldfastError as error:
            log.warning("the execution guard cannot read the key of %s, so its id stands for it: %s", job_id, error)
            return None

    async def _find_other_owner(self, key: str, job_id: str) -> str | None:
        """Takes the key for this job. Returns None, or the owner and phase for which the job must be skipped."""
        running = f"{job_id} {RUNNING}"
        if await self._redis.set(key, running, nx=True, ex=self._ttl):
            return None
        value = await self._redis.get(key) or running  # it may have expired between the two commands
        owner, _, phase = value.partition(" ")
        if phase == RUNNING and (owner == job_id or not await self._exists(owner)):
            await self._redis.set(key, running, ex=self._ttl)
            return None
        await self._redis.incr(f"{self._service}:guard_skipped")
        return f"{owner}, which is {phase}"

    async def _exists(self, job_id: str) -> bool:
        """Returns False for a job that was deleted before it had ended: it cannot finish the work any more."""
        try:
            await self._app.get(job_id)
        except NotFound:
            return False
        return True

    @asynccontextmanager
    async def close_with_worker(self, _: Holdfast) -> AsyncIterator[None]:
        """Lifespan: closes the connections when the worker stops."""
        yield
        await self._redis.aclose()
