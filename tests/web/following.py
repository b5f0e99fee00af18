"""Following the events of a served API, and what is to happen meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx

from holdfast import Holdfast
from holdfast.core.lifecycle import Outcome, decide
from holdfast.core.models import Job
from holdfast.core.retry import Retry
from holdfast.stores.base import ClaimRequest
from holdfast.web.server import serve_in_loop
from tests.support.plain_http import PLAIN

PATIENCE = 120.0


class Events:
    """What a stream tells."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()
        self.id = ""
        """Of the last event."""

    async def blocks(self) -> AsyncIterator[dict[str, str]]:
        """Each block of the stream, by its fields."""
        block: dict[str, str] = {}
        async for line in self._lines:
            if line:
                name, _, value = line.partition(":")
                block[name] = value.strip()
                continue
            self.id = block.get("id", self.id)
            yield block
            block = {}

    async def begun(self) -> Events:
        """Once it says where it begins."""
        async with asyncio.timeout(PATIENCE):
            async for _ in self.blocks():
                if self.id:
                    break
        return self

    async def take(self, number: int) -> list[tuple[str, dict[str, Any]]]:
        """The next so many events: their kinds and data; fewer where the stream ends before."""
        found: list[tuple[str, dict[str, Any]]] = []
        async with asyncio.timeout(PATIENCE):
            async for block in self.blocks():
                if "data" in block:
                    found.append((block["event"], json.loads(block["data"])))
                if len(found) == number:
                    break
        return found

    async def kinds(self, number: int) -> list[tuple[str, str]]:
        """The same in brief: kinds and ids of jobs."""
        return [(kind, data["id"]) for kind, data in await self.take(number)]

    async def ended(self) -> None:
        """Return when the stream has ended."""
        async with asyncio.timeout(PATIENCE):
            async for _ in self.blocks():
                pass


@asynccontextmanager
async def events(
    address: str, last: str | None = None, token: str | None = None, **query: Any
) -> AsyncIterator[Events]:
    """Follow."""
    headers = {} if last is None else {"Last-Event-ID": last}
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(timeout=PATIENCE, verify=PLAIN) as client,
        client.stream("GET", f"{address}/v1/events", params=query, headers=headers) as answer,
    ):
        yield Events(answer)


@asynccontextmanager
async def served(url: str, **settings: Any) -> AsyncIterator[tuple[Holdfast, str]]:
    """The API on a socket, in this event loop; the application and the address."""
    app = Holdfast(url, **{"api_port": 0, **settings})
    async with serve_in_loop(app, app.settings) as server:
        yield app, server.address


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's own coroutine."""
    asyncio.run(body())


async def end(app: Holdfast, job_id: str, outcome: Outcome) -> Job:
    """Take this very job as worker-1, and let it end so."""
    store = await app.open_store()
    claim = await store.queueing.claim(
        ClaimRequest("worker-1", {"*": 1}, limit=1, lease_for=timedelta(minutes=1), ids=[job_id])
    )
    (job,) = claim.jobs
    (answer,) = await store.queueing.settle([decide(job, outcome, Retry.fixed(3600), random.Random(0))])
    assert answer.accepted
    return job
