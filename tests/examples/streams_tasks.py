"""Tasks for the tests of the `streams` example, beside those of the service that SERVICE names."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from holdfast import Context, Holdfast, provided
from tests.examples.streams_support import DELAYS

ERRORS: dict[str, type[Exception]] = {"timeout": TimeoutError, "value": ValueError, "key": KeyError}
app: Holdfast = import_module(f"streams.{os.environ['SERVICE']}.tasks").app
TRANSIENT = import_module("streams.errors").TRANSIENT
granted_at: ContextVar[float] = ContextVar("granted_at")


@app.task("test.job", retry_on=TRANSIENT)
async def run_job(
    context: Context,
    fail: int = 0,
    error: str = "timeout",
    seconds: float = 0,
    until: str = "",
    kill_after_commit: bool = False,
    pool: asyncpg.Pool = provided(),
) -> int:
    """Notes its execution, fails that often, waits; then its effect and its success are one commit."""
    await pool.execute("insert into executions (job_id, pid) values ($1, $2)", UUID(context.id), os.getpid())
    if context.attempts <= fail:
        raise ERRORS[error]("as the test wants it")
    await asyncio.sleep(seconds)
    while until and not Path(until).exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.02)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("insert into effects (job_id) values ($1)", UUID(context.id))
        await context.complete(connection, context.attempts)
    if kill_after_commit:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.attempts


def note_delays() -> None:
    """Makes calls of the provider note the seconds between their tokens and their answers in Redis."""
    tasks = import_module("streams.notifications.tasks")
    call_provider = tasks.call_provider

    class NotedBucket(tasks.TokenBucket):  # type: ignore[misc, name-defined]
        async def take(self) -> float:
            granted_at.set(await super().take())
            return granted_at.get()

    async def call_and_note(redis: Any, *arguments: Any) -> str:
        message_id = str(await call_provider(redis, *arguments))
        await redis.rpush(DELAYS, time.time() - granted_at.get())
        return message_id

    tasks.TokenBucket, tasks.call_provider = NotedBucket, call_and_note


if os.environ["SERVICE"] == "notifications":
    note_delays()
