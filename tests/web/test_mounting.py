"""The API inside other applications, and by itself: who opens the store, who closes it, which path is whose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from holdfast import ConfigError, Holdfast, Invalid
from holdfast.core.models import NewJob
from holdfast.web import create_app

JOB = {"task": "work", "payload": {}}


def test_api_is_mounted_below_a_path_of_another_site(home: str) -> None:
    app = Holdfast(home)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with app:
            yield

    site = Starlette(lifespan=lifespan, routes=[Mount("/ünser/queue", create_app(app))])

    async def use() -> None:
        async with (
            site.router.lifespan_context(site),
            httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://site/%C3%BCnser/queue") as client,
        ):
            job = await client.post("/v1/jobs", json={**JOB, "key": "a/b"})
            assert job.status_code == 201
            assert job.headers["location"] == f"/%C3%BCnser/queue/v1/jobs/{job.json()['id']}"
            assert (await client.get("/v1/jobs/key:a%2Fb")).json()["id"] == job.json()["id"]
            assert (await client.get("/v1/nothing")).status_code == 404
            described = (await client.get("/openapi.json")).json()
            assert described["servers"] == [{"url": "/%C3%BCnser/queue"}]

    asyncio.run(asyncio.wait_for(use(), 200))


async def _lifespan(api: Any) -> tuple[list[str], asyncio.Event, asyncio.Task[None]]:
    """Start the API as a server would; its messages, what ends it, and its task."""
    given: list[str] = []
    begun, end = asyncio.Event(), asyncio.Event()
    messages = iter(("lifespan.startup", "lifespan.shutdown"))

    async def receive() -> dict[str, Any]:
        message = next(messages)
        if message == "lifespan.shutdown":
            await end.wait()
        return {"type": message}

    async def send(message: dict[str, Any]) -> None:
        given.append(message["type"])
        begun.set()

    task = asyncio.create_task(api({"type": "lifespan"}, receive, send))
    await begun.wait()
    return given, end, task


def test_lifespan_opens_and_closes_the_store(home: str) -> None:
    api = create_app(Holdfast(home))

    async def use() -> None:
        given, end, task = await _lifespan(api)
        assert given == ["lifespan.startup.complete"]
        store = await api.app.open_store()
        end.set()
        await task
        assert given == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert await api.app.open_store() is not store
        await api.app.close()

    asyncio.run(asyncio.wait_for(use(), 200))


def test_api_leaves_the_deadline_of_its_application_alone(home: str) -> None:
    app = Holdfast(home)
    api = create_app(app)
    assert (app.call_deadline, api.app.call_deadline) == (None, 1.5)
    assert app.new_store() is not api.app.new_store()


def test_closing_the_application_closes_the_store_of_its_api(home: str) -> None:
    app = Holdfast(home)
    api = create_app(app)

    async def use() -> None:
        async with app:
            store = await api.app.open_store()
            assert store is not await app.open_store()
        assert await api.app.open_store() is not store
        await app.close()

    asyncio.run(asyncio.wait_for(use(), 200))


def test_closing_an_api_leaves_another_one_open(home: str) -> None:
    app = Holdfast(home)
    api, other = create_app(app), create_app(app)

    async def use() -> None:
        async with app:
            store = await other.app.open_store()
            async with api.app:
                pass
            assert await other.app.open_store() is store

    asyncio.run(asyncio.wait_for(use(), 200))


def test_api_calls_methods_that_its_application_overrides(home: str) -> None:
    class Strict(Holdfast):
        def draft_job(self, task: str, payload: Mapping[str, Any] | str, **options: Any) -> NewJob:
            job = super().draft_job(task, payload, **options)
            raise Invalid("task", job.task, "submit nothing")

    app = Strict(home)
    api = create_app(app)

    async def use() -> None:
        async with app, httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://api") as client:
            answer = await client.post("/v1/jobs", json=JOB)
            assert (answer.status_code, answer.json()["field"]) == (422, "task")

    asyncio.run(asyncio.wait_for(use(), 200))


def test_application_opened_by_the_site_stays_open(home: str) -> None:
    app = Holdfast(home)

    async def use() -> None:
        async with app:
            store = await app.open_store()
            _, end, task = await _lifespan(create_app(app))
            end.set()
            await task
            assert await app.open_store() is store

    asyncio.run(asyncio.wait_for(use(), 200))


def test_a_store_that_is_not_ours_fails_the_start(tmp_path: Any) -> None:
    (tmp_path / "notes.txt").write_text("not a database")
    api = create_app(Holdfast(f"sqlite:///{tmp_path}/notes.txt"))

    async def use() -> None:
        given, end, task = await _lifespan(api)
        end.set()
        with pytest.raises(ConfigError):
            await task
        assert given == ["lifespan.startup.failed"]

    asyncio.run(asyncio.wait_for(use(), 200))


def test_a_web_socket_is_closed(home: str) -> None:
    given: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        given.append(message["type"])

    asyncio.run(create_app(Holdfast(home))({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert given == ["websocket.close"]


def test_an_api_without_keys_warns_unless_exposed(home: str, caplog: pytest.LogCaptureFixture) -> None:
    create_app(Holdfast(home), exposed=True)
    assert caplog.records == []
    create_app(Holdfast(home))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("holdfast", "WARNING")
    assert "keys_file is not set" in record.getMessage()
    assert "create_app(app, exposed=True)" in record.getMessage()
