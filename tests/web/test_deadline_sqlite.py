"""The API's deadline on the store: its own, and no other's in the process."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import httpx

from holdfast import Holdfast
from holdfast.web import create_app
from tests.support.load import TEST_SECONDS, slowness

DEADLINE, LATE = 2.0, 1.0
"""Seconds the API has for an answer, and what the machine adds."""
JOB = {"task": "work", "payload": {}}


def test_locked_store_fails_the_api_and_delays_the_application(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    api = create_app(app)

    async def use() -> None:
        async with app, httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://api") as client:
            assert (await client.post("/v1/jobs", json=JOB)).status_code == 201
            other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
            other.execute("begin immediate")
            enqueued = asyncio.create_task(app.enqueue("work", {}))
            for path, body in (("/v1/jobs", JOB), ("/v1/schedules", {**JOB, "name": "often", "every": 60})):
                began = time.monotonic()
                answer = await client.post(path, json=body)
                assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
                assert time.monotonic() - began < DEADLINE + LATE * slowness()
            assert not enqueued.done()
            other.execute("rollback")
            other.close()
            assert (await enqueued).created
            assert await app.count() == 2

    asyncio.run(asyncio.wait_for(use(), TEST_SECONDS))


def test_api_and_application_take_turns_at_writing(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    api = create_app(app)
    written = {app: 0, api.app: 0}

    async def write(each: Holdfast) -> None:
        while sum(written.values()) < 400:
            await each.enqueue("work", {})
            written[each] += 1

    async def use() -> None:
        async with app:
            await asyncio.gather(*(write(each) for each in written))

    asyncio.run(asyncio.wait_for(use(), TEST_SECONDS))
    assert min(written.values()) > 40, written
