"""The workflow that creates a user: validate, store, provision, welcome.

Each step is recorded with the job, so a retry, a crash or a replay goes on behind the last one that has ended. Steps
that write to this service's database are recorded in the same transaction: their effect happens exactly once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from uuid import UUID

import asyncpg
import httpx

from holdfast import Context, Holdfast, Settings, provided
from streams.errors import TRANSIENT, raise_for_status
from streams.guard import add_execution_guard
from streams.resources import provide_resources
from streams.state import StateManager

app = Holdfast(settings=Settings.load(path=Path(__file__).with_name("holdfast.toml")))
provide_resources(app)
add_execution_guard(app)
state = StateManager(app)

NOTIFICATIONS_URL = os.environ.get("NOTIFICATIONS_URL", "http://notifications:8000")
QUOTA_MIB = 1024
EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s.]+")


@app.task("user.create", retry_on=TRANSIENT, timeout=60)
async def create_user(
    context: Context, email: str, name: str, pool: asyncpg.Pool = provided(), http: httpx.AsyncClient = provided()
) -> dict[str, str]:
    """Creates a user, and has the service `notifications` welcome them."""
    address = await state.save(context, "validate", validate_email, email)
    async with pool.acquire() as connection, connection.transaction():
        user_id = await state.save(context, "store", store_user, address, name, connection=connection)
    async with pool.acquire() as connection, connection.transaction():
        await state.save(context, "provision", provision_account, user_id, connection=connection)
    key = f"{context.id}:welcome"
    welcome_id = await state.save(context, "welcome", start_welcome, http, key, address)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("update users set status = 'active' where id = $1", UUID(user_id))
        return await context.complete(connection, {"user_id": user_id, "welcome_job_id": welcome_id})


def validate_email(email: str) -> str:
    """Returns the address in lower case. ValueError is no transient error: the job is a dead letter at once."""
    if not EMAIL.fullmatch(email):
        raise ValueError(f"email: {email!r} is not an address; give one like ada@example.com")
    return email.lower()


async def store_user(connection: asyncpg.Connection, email: str, name: str) -> str:
    """Inserts the user; returns the id."""
    statement = "insert into users (email, name) values ($1, $2) on conflict (email) do nothing returning id"
    user_id = await connection.fetchval(statement, email, name)
    if user_id is None:
        raise ValueError(f"email: {email!r} belongs to another user; give another address")
    return str(user_id)


async def provision_account(connection: asyncpg.Connection, user_id: str) -> None:
    """Inserts the user's account."""
    statement = "insert into accounts (user_id, quota_mib) values ($1, $2)"
    await connection.execute(statement, UUID(user_id), QUOTA_MIB)


async def start_welcome(http: httpx.AsyncClient, key: str, email: str) -> str:
    """Starts a job of the service `notifications`; returns its id. The key makes it one job."""
    job = {"type": "notification.send", "payload": {"email": email, "template": "welcome"}, "idempotency_key": key}
    response = await http.post(f"{NOTIFICATIONS_URL}/jobs", json=job)
    raise_for_status(response)
    return str(response.json()["job_id"])
