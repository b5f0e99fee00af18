"""Holdfast in FastAPI applications: lifespan, dependency, transactions, status, and routes like those of our API."""

from __future__ import annotations

import asyncio
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import asyncpg
import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from holdfast import Holdfast, HoldfastError
from holdfast.integrations.fastapi import (
    HoldfastDep,
    IdempotencyKey,
    RequestContext,
    StrictRoute,
    add_holdfast_api,
    holdfast_lifespan,
    job_status_router,
    require_scope,
    submit_job,
)
from holdfast.web import create_app
from holdfast.web.server import serve_in_loop
from tests.support.pages import ROOT, blocks
from tests.support.postgres import Postgres
from tests.support.stores import MIGRATED
from tests.web.client import UNKNOWN_ID
from tests.web.keyed import Keys

KEY = {"Idempotency-Key": "k"}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    with MIGRATED[request.param](tmp_path) as url:
        yield url


def use(site: FastAPI, ask: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Runs the lifespan of a site, and requests inside it; the state reaches the requests as a server passes it on."""

    async def run() -> None:
        async with site.router.lifespan_context(site) as state:

            async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
                await site({**scope, "state": dict(state or {})}, receive, send)

            transport = httpx.ASGITransport(with_state)
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                await ask(client)

    asyncio.run(asyncio.wait_for(run(), 200))


# ── any application ───────────────────────────────────────────────────────────────────────────────────────────────
def test_lifespan_opens_the_application_around_the_sites_own(url: str) -> None:
    app = Holdfast(url)
    seen: list[int] = []

    @asynccontextmanager
    async def own(site: FastAPI) -> AsyncIterator[dict[str, str]]:
        assert isinstance(site, FastAPI)
        seen.append(await app.count())
        yield {"mine": "kept"}
        seen.append(await app.count())

    site = FastAPI(lifespan=holdfast_lifespan(app, own))

    @site.post("/mail")
    async def send(holdfast: HoldfastDep) -> dict[str, bool]:
        await holdfast.enqueue("mail", {})
        return {"same": holdfast is app}

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.post("/mail")).json() == {"same": True}

    use(site, ask)
    assert seen == [0, 1]


def test_site_starts_while_the_store_is_away() -> None:
    app = Holdfast("postgresql://nobody@127.0.0.1:9/none")
    site = FastAPI(lifespan=holdfast_lifespan(app))
    site.include_router(job_status_router(), prefix="/jobs")

    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.get(f"/jobs/{UNKNOWN_ID}")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")

    use(site, ask)


def test_server_ends_where_the_lifespan_of_its_site_fails(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", api_port=0)

    @asynccontextmanager
    async def own(_: FastAPI) -> AsyncIterator[None]:
        raise ArithmeticError
        yield

    async def run() -> None:
        site = FastAPI(lifespan=holdfast_lifespan(app, own))
        async with serve_in_loop(app, app.settings, site=site) as serving:
            await serving.wait_ended()

    with pytest.raises((HoldfastError, SystemExit)):  # uvicorn ends the program itself, or its server only
        asyncio.run(asyncio.wait_for(run(), 60))


def test_missing_lifespan_is_named() -> None:
    site = FastAPI()
    site.include_router(job_status_router())

    async def ask(client: httpx.AsyncClient) -> None:
        with pytest.raises(Exception, match="holdfast_lifespan"):
            await client.get(f"/{UNKNOWN_ID}")

    use(site, ask)


def test_status_router_shows_a_job_and_describes_itself(url: str) -> None:
    app = Holdfast(url, redacted="result.secret")
    site = FastAPI(lifespan=holdfast_lifespan(app))
    site.include_router(job_status_router(), prefix="/jobs")

    async def ask(client: httpx.AsyncClient) -> None:
        job = await app.enqueue("mail", {"to": "a@b.c"}, key="k")
        shown = (await client.get(f"/jobs/{job.id}")).json()
        assert {"id": job.id, "task": "mail", "state": "queued", "attempts": 0, "result": None}.items() <= shown.items()
        assert not {"payload", "key", "worker"} & shown.keys()
        missing = await client.get(f"/jobs/{UNKNOWN_ID}")
        assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
        assert missing.json()["request_id"] == missing.headers["x-request-id"]
        assert ("check the id or name" in missing.json()["remedy"], "/v1/" in missing.text) == (True, False)
        assert (await client.get("/jobs/key:k")).status_code == 422
        described = (await client.get("/openapi.json")).json()
        answers = described["paths"]["/jobs/{job_id}"]["get"]["responses"]
        shown = answers["200"]["content"]["application/json"]["schema"]
        assert shown == {"$ref": "#/components/schemas/JobStatus"}
        problem = answers["404"]["content"]["application/problem+json"]["schema"]["properties"]
        assert {"type", "title", "status", "detail", "code"} <= problem.keys()

    use(site, ask)


@asynccontextmanager
async def _sqlite_transaction(url: str) -> AsyncIterator[sqlite3.Connection]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        yield connection


@asynccontextmanager
async def _postgres_transaction(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


def test_job_shares_the_transaction_of_its_request(url: str) -> None:
    app = Holdfast(url)
    is_file = url.startswith("sqlite:")

    @app.task("mail")
    async def mail(number: int) -> None: ...

    async def begin() -> AsyncIterator[Any]:
        async with (_sqlite_transaction if is_file else _postgres_transaction)(url) as connection:
            yield connection

    transaction = Depends(begin, scope="function")
    site = FastAPI(lifespan=holdfast_lifespan(app))
    site.include_router(job_status_router(), prefix="/jobs")

    @site.post("/orders/{number}")
    async def order(number: int, connection: Any = transaction) -> UUID:
        job = await mail.options(connection=connection).enqueue(number)
        assert await app.count() == 0
        if number < 0:
            raise ArithmeticError
        return UUID(job.id)

    async def ask(client: httpx.AsyncClient) -> None:
        with pytest.raises(ArithmeticError):
            await client.post("/orders/-1")
        assert await app.count() == 0
        job_id = (await client.post("/orders/1")).json()
        assert (await client.get(f"/jobs/{job_id}")).json()["state"] == "queued"

    use(site, ask)


def test_documented_site_submits_in_its_session(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", postgres.url(postgres.create_database()))
    page = (ROOT / "docs" / "fastapi.md").read_text(encoding="utf-8")
    (tmp_path / "shop.py").write_text(next(block.text for block in blocks(page) if block.text.startswith("# shop.py")))
    shop = runpy.run_path(str(tmp_path / "shop.py"))

    async def ask(client: httpx.AsyncClient) -> None:
        async with shop["engine"].begin() as connection:
            await connection.execute(text("create table orders (number int primary key)"))
        job_id = (await client.post("/orders/1")).json()["job"]
        assert (await client.get(f"/jobs/{job_id}")).json()["task"] == "order.confirm"
        with pytest.raises(IntegrityError):
            await client.post("/orders/1")
        assert (await client.post("/newsletter")).status_code == 202
        assert await shop["jobs"].count() == 2
        await shop["engine"].dispose()

    use(shop["site"], ask)


def test_missing_fastapi_is_named_with_its_extra() -> None:
    code = "import sys; sys.modules['fastapi'] = None; import holdfast.integrations.fastapi"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'holdfast[fastapi]'" in done.stderr


# ── an application that answers as Holdfast's own API ─────────────────────────────────────────────────────────────
class Mail(BaseModel):
    to: str


def _site(app: Holdfast) -> FastAPI:
    api = create_app(app)
    router = APIRouter(prefix="/mails", route_class=StrictRoute)

    @router.post("", status_code=201)
    async def send(
        mail: Mail, key: IdempotencyKey, call: Annotated[RequestContext, Depends(require_scope("submit"))]
    ) -> dict[str, str]:
        handle, _ = await submit_job(call, call.app.draft_job("mail", mail.model_dump(), key=key))
        return {"id": handle.id}

    @router.get("/{name}")
    async def fail(name: str, call: Annotated[RequestContext, Depends(require_scope("read"))]) -> str:
        raise ArithmeticError(f"no mail {name} for {call.caller.name}")

    site = FastAPI(
        lifespan=holdfast_lifespan(api.app), routes=[Route("/metrics", api), Mount("/holdfast", api)], docs_url=None
    )
    site.include_router(router, prefix="/shop")
    add_holdfast_api(site, api)
    return site


BODIES = [
    (b'{"to": "a", "to": "b"}', "application/json", 422, "body"),
    (b'{"to": NaN}', "application/json", 422, "body"),
    (b'{"to": "\xff"}', "application/json", 422, "body"),
    (b"", "application/json", 422, "body"),
    (b'{"to": 5}', "application/json", 422, "to"),
    (b"{}", "application/json", 422, "to"),
    (b"{}", "text/plain", 415, None),
    (b'{"to": "%s"}' % (b"x" * 2_000_000), "application/json", 413, None),
]


def test_bodies_are_read_strictly_and_refused_by_problems(url: str) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        for body, media, status, field in BODIES:
            answer = await client.post("/shop/mails", content=body, headers={**KEY, "content-type": media})
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), body
            assert answer.json().get("field") == field, answer.text
        for headers in ([], [("Idempotency-Key", "")], [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]):
            answer = await client.post("/shop/mails", json={"to": "a"}, headers=headers)
            assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key")
        stored = await client.post("/shop/mails", json={"to": "é"}, headers={"Idempotency-Key": "é".encode()})
        assert stored.status_code == 201
        assert (await client.get("/holdfast/v1/jobs/key:%C3%A9")).json()["id"] == stored.json()["id"]

    use(_site(Holdfast(url)), ask)


def test_argument_that_does_not_fit_its_task_is_refused_by_a_problem(url: str) -> None:
    """The application of the site has the task, so the submission is checked before it is stored."""
    app = Holdfast(url)

    @app.task("mail")
    async def send(to: int) -> None: ...

    async def ask(client: httpx.AsyncClient) -> None:
        refused = await client.post("/shop/mails", json={"to": "a"}, headers=KEY)
        assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json")
        assert refused.json()["field"] == "payload.to"
        assert refused.json()["detail"].startswith("argument 'to' of task 'mail': 'a' ")

    use(_site(app), ask)


def test_site_counts_names_and_mounts_as_the_api(url: str) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        await client.post("/shop/mails", json={"to": "a"}, headers=KEY)
        failed = await client.get("/shop/mails/7", headers={"x-request-id": "mine"})
        assert (failed.status_code, failed.json()["code"]) == (500, "internal")
        assert (failed.json()["request_id"], failed.headers["x-request-id"]) == ("mine", "mine")
        listed = await client.get("/holdfast/v1/jobs")
        assert len(listed.json()["jobs"]) == 1
        assert len(listed.headers.get_list("x-request-id")) == 1
        assert (await client.get("/holdfast/openapi.json")).json()["servers"] == [{"url": "/holdfast"}]
        unknown = await client.get("/unknown")
        assert (unknown.status_code, unknown.headers["x-frame-options"]) == (404, "DENY")
        text = (await client.get("/metrics", headers={"accept": "text/plain"})).text
        counted = [
            line.split("{", 1)[1] for line in text.splitlines() if line.startswith("holdfast_http_requests_total{")
        ]
        assert sorted(counted) == [
            'method="GET",path_template="/openapi.json",status_code="200"} 1.0',
            'method="GET",path_template="/shop/mails/{name}",status_code="500"} 1.0',
            'method="GET",path_template="/v1/jobs",status_code="200"} 1.0',
            'method="GET",path_template="other",status_code="404"} 1.0',
            'method="POST",path_template="/shop/mails",status_code="201"} 1.0',
        ]

    use(_site(Holdfast(url)), ask)


def test_routes_of_a_site_need_keys_and_scopes(url: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    submitting, reading = keys.make("submit"), keys.make("read")

    async def ask(client: httpx.AsyncClient) -> None:
        statuses = {}
        for name, key in {"none": "", "submit": submitting, "read": reading}.items():
            headers = {**KEY, "Authorization": f"Bearer {key}"} if key else KEY
            statuses[name] = (await client.post("/shop/mails", json={"to": "a"}, headers=headers)).status_code
        assert statuses == {"none": 401, "submit": 201, "read": 403}
        described = (await client.get("/openapi.json")).json()
        assert described["paths"]["/shop/mails"]["post"]["security"] == [{"HTTPBearer": []}, {"APIKeyHeader": []}]

    use(_site(Holdfast(url, keys_file=str(keys.path))), ask)


def test_client_that_leaves_during_its_body_is_not_answered(url: str) -> None:
    site = _site(Holdfast(url))
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/shop/mails", "headers": headers, "query_string": b""}

    async def ask(_: httpx.AsyncClient) -> None:
        await site(scope, receive, send)

    use(site, ask)
    assert sent == []


# ── a worker in the site ──────────────────────────────────────────────────────────────────────────────────────────
def test_lifespan_runs_a_worker_that_stops_with_the_site(url: str) -> None:
    app = Holdfast(url)

    @app.task("double")
    async def double(number: int) -> int:
        return 2 * number

    @asynccontextmanager
    async def run_worker(_: FastAPI) -> AsyncIterator[None]:
        async with app.worker(concurrency=2):
            yield

    site = FastAPI(lifespan=holdfast_lifespan(app, run_worker))

    @site.get("/double/{number}")
    async def read_double(number: int) -> int:
        return await (await double.enqueue(number)).result(timeout=60)

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.get("/double/21")).json() == 42
        assert len(await app.workers()) == 1

    use(site, ask)
    assert app.sync.workers() == []
    app.sync.close()
