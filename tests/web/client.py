"""A client of the API in this process, and what a worker would do beside it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import httpx

from holdfast import Holdfast
from holdfast.core.lifecycle import Failed, Lost, Outcome, Succeeded, decide
from holdfast.core.models import Job
from holdfast.core.retry import Retry
from holdfast.stores.base import ClaimRequest
from holdfast.web import create_app

T = TypeVar("T")

JSON = {"content-type": "application/json"}
UNKNOWN_ID = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"


class Api:
    """Asks, and checks what holds for every answer: no error of ours, a problem document where it is a refusal."""

    def __init__(self, url: str, *, hurried: bool = False, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self.served = create_app(Holdfast(url, **settings))
        self.app = self.served.app
        if not hurried:  # a machine that others use, too, is slow, and no test but those of time is to fail for it
            self.app.call_deadline = 20.0
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(self.served), base_url="http://api")

    def __enter__(self) -> Api:
        self._runner.__enter__()
        self.run(self.app.open_store())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._close())
        self._runner.__exit__(kind, error, trace)

    async def _close(self) -> None:
        await self._client.aclose()
        await self.app.close()

    def run(self, call: Awaitable[T], *, seconds: float = 50) -> T:
        """Await on the loop the store was opened on."""

        async def awaited() -> T:
            async with asyncio.timeout(seconds):
                return await call

        return self._runner.run(awaited())

    @staticmethod
    async def until(found: Callable[[], Awaitable[object]]) -> None:
        """Return once that is so."""
        while not await found():  # noqa: ASYNC110 - what changes is in a store
            await asyncio.sleep(0.01)

    # ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def raw(self, method: str, path: str, **provided: Any) -> httpx.Response:
        """Ask."""
        return await self._client.request(method, path, **provided)

    async def send(self, method: str, path: str, **provided: Any) -> httpx.Response:
        """Ask, and check the answer's form."""
        answer = await self.raw(method, path, **provided)
        check_form(answer)
        return answer

    def ask(self, method: str, path: str, **provided: Any) -> httpx.Response:
        """The same for a test that is not async."""
        return self.run(self.send(method, path, **provided))

    def get(self, path: str, **query: Any) -> Any:
        """The document of an answer that is no refusal."""
        return _document(self.ask("GET", path, params=query or None), 200)

    def post(self, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
        """The same for a JSON body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = None if body is None else json.dumps(body)
        given = JSON if body is not None else {}
        return _document(self.ask("POST", path, content=content, headers={**given, **named}), status)

    def refused(self, method: str, path: str, status: int, **provided: Any) -> dict[str, Any]:
        """The problem of an answer that refuses with this status."""
        answer = self.ask(method, path, **provided)
        assert answer.status_code == status, answer.text
        problem: dict[str, Any] = answer.json()
        return problem

    def submit(self, status: int = 201, **provided: Any) -> dict[str, Any]:
        """Submit a job of task work, unless another is named."""
        document: dict[str, Any] = self.post("/v1/jobs", {"task": "work", "payload": {}, **provided}, status)
        return document

    def count(self) -> int:
        """How many jobs are stored."""

        async def ask() -> int:
            return await self.app.count()

        return self.run(ask())

    # ── what a worker would do ────────────────────────────────────────────────────────────────────────────────────
    async def claim(self, job_id: str, lease_for: timedelta = timedelta(minutes=1)) -> Job:
        """Take this very job, as worker-1."""
        store = await self.app.open_store()
        claim = await store.queueing.claim(
            ClaimRequest("worker-1", {"*": 1}, limit=1, lease_for=lease_for, ids=[job_id])
        )
        return claim.jobs[0]

    async def end(self, job_id: str, outcome: Outcome) -> None:
        """Take this very job and let it end so."""
        expired = timedelta(microseconds=1)
        job = await (self.claim(job_id, expired) if isinstance(outcome, Lost) else self.claim(job_id))
        store = await self.app.open_store()
        await store.queueing.settle([decide(job, outcome, Retry.fixed(3600), random.Random(0))])

    def succeed(self, job_id: str, result: str | None = None) -> None:
        """Let this job succeed."""
        self.run(self.end(job_id, Succeeded(result=result)))

    def dead(self, error: str = "it broke", **provided: Any) -> str:
        """The id of a new dead letter."""
        job_id: str = self.submit(**provided)["id"]
        self.run(self.end(job_id, Failed(error=error, retryable=False)))
        return job_id


def check_form(answer: httpx.Response) -> None:
    """What holds for every answer."""
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    assert answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == answer.status_code
        assert problem["type"] == f"urn:holdfast:problem:{problem['code']}"
        assert problem["request_id"] == answer.headers["x-request-id"]
        assert {"title", "detail"} <= set(problem)
        assert len(problem.get("value", "")) <= 64


def _document(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    return json.loads(answer.content) if answer.content else None
