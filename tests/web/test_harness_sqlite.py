"""The API of an application under test: on the harness's store, by its clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from holdfast import Holdfast
from holdfast.testing import Harness
from holdfast.web import create_app
from tests.support.load import TEST_SECONDS


def test_api_follows_its_application_into_a_harness(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    api = create_app(app)

    @app.task("work")
    async def work() -> None: ...

    async def use() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://api") as client:
            for _ in range(2):
                async with Harness(app) as harness:
                    began = harness.now
                    job = (await client.post("/v1/jobs", json={"task": "work", "payload": {}, "delay": 3600})).json()
                    await harness.run_until_idle()
                    job = (await client.get(f"/v1/jobs/{job['id']}")).json()
                    assert job["state"] == "succeeded"
                    assert (harness.now - began).total_seconds() >= 3600
                    assert await app.count() == 1
            assert (await client.get("/v1/jobs")).json()["jobs"] == []
        await app.close()

    asyncio.run(asyncio.wait_for(use(), TEST_SECONDS))
