"""Sends messages through the external API, at a rate that a token bucket in Redis allows."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import UUID

import asyncpg
import httpx
from redis.asyncio import Redis

from holdfast import Context, Holdfast, Settings, provided
from streams.errors import TRANSIENT, raise_for_status
from streams.guard import add_execution_guard
from streams.notifications.token_bucket import TokenBucket
from streams.resources import provide_resources
from streams.state import StateManager

app = Holdfast(settings=Settings.load(path=Path(__file__).with_name("holdfast.toml")))
provide_resources(app)
add_execution_guard(app)
state = StateManager(app)

PROVIDER_URL = os.environ.get("PROVIDER_URL", "http://provider:8000")
BUCKET = "notifications:bucket"


@app.task("notification.send", retry_on=TRANSIENT, timeout=30)
async def send_notification(
    context: Context,
    email: str,
    template: str,
    pool: asyncpg.Pool = provided(),
    redis: Redis = provided(),
    http: httpx.AsyncClient = provided(),
) -> dict[str, str]:
    """Sends one message, and records the delivery together with the success of the job."""
    message_id = await state.save(context, "send", call_provider, redis, http, context.id, email, template)
    async with pool.acquire() as connection, connection.transaction():
        statement = "insert into deliveries (job_id, email, template, message_id) values ($1, $2, $3, $4)"
        await connection.execute(statement, UUID(context.id), email, template, message_id)
        return await context.complete(connection, {"message_id": message_id})


async def call_provider(redis: Redis, http: httpx.AsyncClient, key: str, email: str, template: str) -> str:
    """Takes a token, then calls the provider; returns the message's id.

    A crash between the call and its record repeats the call: the provider recognizes the key and sends nothing twice.
    """
    await TokenBucket(redis, BUCKET).take()
    message = {"to": email, "template": template}
    response = await http.post(f"{PROVIDER_URL}/messages", json=message, headers={"Idempotency-Key": key})
    raise_for_status(response)
    return str(response.json()["message_id"])
