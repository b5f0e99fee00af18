"""A service for the chaos scenarios: each user is a row of its own database, and a message at the provider."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from holdfast import Context, Holdfast, provided
from tests.crash.user_table import UserTable
from tests.support.plain_http import PLAIN

app = Holdfast(allow_faults=True)
PROVIDER = os.environ.get("PROVIDER_URL", "")
users = UserTable(app.settings.url, Path(os.environ.get("CRASH_LEDGER", ".")).parent)


@app.provide
async def open_http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30, verify=PLAIN) as http:
        yield http


@app.task("user.create")
async def create_user(
    context: Context, number: str, fail_odd: bool = False, http: httpx.AsyncClient = provided()
) -> None:
    """Stores a user, then welcomes them. ``fail_odd``: each attempt for an odd number fails at its beginning."""
    if fail_odd and int(number) % 2:
        raise TimeoutError("this one always fails")
    await users.store(context, number)
    await context.step("welcome", welcome_user, http, context.id, number)


async def welcome_user(http: httpx.AsyncClient, job: str, number: str) -> str:
    """Calls the provider, which sends one message for each key."""
    message = {"to": f"user{number}@example.com", "template": "welcome"}
    answer = await http.post(f"{PROVIDER}/messages", json=message, headers={"Idempotency-Key": job})
    answer.raise_for_status()
    return str(answer.json()["message_id"])


def count_calls(ids: list[str]) -> dict[str, int]:
    """Counts the calls for each job in the provider's own log."""
    calls = Counter(call["key"] for call in httpx.get(f"{PROVIDER}/calls", timeout=30, verify=PLAIN).json())
    return {job: calls[job] for job in ids}
