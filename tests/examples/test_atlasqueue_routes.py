"""The routes of the AtlasQueue example in this process, on SQLite: no server is needed. Named by rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from holdfast import Settings
from holdfast.web import create_app
from tests.support.stores import MIGRATED
from tests.web.client import UNKNOWN_ID

Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]
JOB = {"type": "email.send", "payload": {"to": "user@example.com"}}


@pytest.fixture
def use(tmp_path: Path) -> Callable[[Ask], Any]:
    """Has a function ask the application, which has no jobs yet, and returns what it returns."""
    from atlasqueue.api import create_site
    from atlasqueue.app import AtlasQueue
    from atlasqueue.config import FILE

    async def run(url: str, ask: Ask) -> Any:
        app = AtlasQueue(settings=Settings.load(path=FILE, environ={}, url=url, transport="none"))
        site = create_site(create_app(app))
        async with site.router.lifespan_context(site) as state:

            async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
                await site({**scope, "state": dict(state or {})}, receive, send)

            transport = httpx.ASGITransport(with_state)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await ask(client)

    def used(ask: Ask) -> Any:
        with MIGRATED["sqlite"](tmp_path) as url:
            return asyncio.run(asyncio.wait_for(run(url, ask), 60))

    return used


async def _post(client: httpx.AsyncClient, body: Any = JOB, **headers: str) -> httpx.Response:
    return await client.post("/v1/jobs", json=body, headers=headers or {"Idempotency-Key": "k"})


@pytest.mark.rows("A2", "A34", "A100", "A139", "A141")
def test_new_job_is_created(use: Callable[[Ask], Any]) -> None:
    answer = use(_post)
    expected = {**JOB, "status": "queued", "attempts": 0, "max_attempts": 5}
    assert (answer.status_code, {name: answer.json()[name] for name in expected}) == (201, expected)


@pytest.mark.rows("A33", "A112", "A139", "A141")
def test_known_key_returns_its_job(use: Callable[[Ask], Any]) -> None:
    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await _post(client), await _post(client, {**JOB, "payload": {}})]

    first, again = use(ask)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()


@pytest.mark.rows("A114", "A139", "A141")
@pytest.mark.parametrize("by_key", [False, True])
def test_job_is_shown(use: Callable[[Ask], Any], by_key: bool) -> None:
    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        created = await _post(client)
        return [created, await client.get(f"/v1/jobs/{'key:k' if by_key else created.json()['id']}")]

    created, shown = use(ask)
    assert (shown.status_code, shown.json()) == (200, created.json())


@pytest.mark.rows("A115", "A116", "A139", "A141")
@pytest.mark.parametrize(("reference", "status"), [(UNKNOWN_ID, 404), ("key:none", 404), ("not-a-uuid", 422)])
def test_job_that_is_not_there_is_refused(use: Callable[[Ask], Any], reference: str, status: int) -> None:
    answer = use(lambda client: client.get(f"/v1/jobs/{reference}"))
    assert (answer.status_code, answer.json()["status"]) == (status, status)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("type", {"payload": {}}),
    ("type", {**JOB, "type": ""}),
    ("type", {**JOB, "type": "t" * 129}),
    ("type", {**JOB, "type": "command"}),
    ("payload", {"type": "noop"}),
    ("payload", {**JOB, "payload": ["x"]}),
    ("max_attempts", {**JOB, "max_attempts": 0}),
    ("max_attempts", {**JOB, "max_attempts": 26}),
    ("queue", {**JOB, "queue": "mail"}),
    ("metadata.then[0].type", {**JOB, "metadata": {"then": [{"type": "no name", "payload": {}}]}}),
]


@pytest.mark.rows("A108", "A109", "A110", "A113", "A139", "A141")
@pytest.mark.parametrize(("field", "body"), WRONG)
def test_invalid_job_is_refused_by_its_field(use: Callable[[Ask], Any], field: str, body: dict[str, Any]) -> None:
    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await _post(client, body), await client.get("/v1/jobs/key:k")]

    answer, stored = use(ask)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert answer.json()["detail"].startswith(f"{field}: ")
    assert stored.status_code == 404


@pytest.mark.rows("A32", "A106", "A139", "A141")
@pytest.mark.parametrize("headers", [{"X-Other": "k"}, {"Idempotency-Key": ""}, {"Idempotency-Key": "k" * 513}])
def test_job_without_a_good_key_is_refused(use: Callable[[Ask], Any], headers: dict[str, str]) -> None:
    answer = use(lambda client: _post(client, **headers))
    assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key")


@pytest.mark.rows("A99", "A117", "A139", "A141")
def test_health_is_a_fixed_body(use: Callable[[Ask], Any]) -> None:
    answer = use(lambda client: client.get("/health"))
    assert (answer.status_code, answer.text) == (200, '{"status":"ok","service":"atlasqueue-api"}')
