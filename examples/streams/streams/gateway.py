"""The gateway, a FastAPI application: the only address that clients use.

It keeps no state. Each request goes to the service that owns the job. Holdfast checks bodies; it has no store here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import httpx
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from holdfast import Holdfast, Settings
from holdfast.integrations.fastapi import StrictRoute
from holdfast.web import create_app
from streams.sites import StrictBody, create_site

SERVICES = {
    "users": os.environ.get("USERS_URL", "http://users:8000"),
    "notifications": os.environ.get("NOTIFICATIONS_URL", "http://notifications:8000"),
}
"""Base URL of each service."""
TIMEOUT = 5.0  # seconds for an answer of a service


def refuse_nul(text: str) -> str:
    """Returns the text; PostgreSQL cannot store NUL characters."""
    if "\0" in text:
        raise PydanticCustomError("nul", "give text without NUL characters")
    return text


Text = Annotated[str, AfterValidator(refuse_nul)]


class NewUser(StrictBody):
    """A user to be created."""

    email: Text = Field(min_length=3, max_length=320, examples=["ada@example.com"])
    name: Text = Field(min_length=1, max_length=200, examples=["Ada"])


@asynccontextmanager
async def open_client(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
    """Lifespan: one connection pool for all requests."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as http:
        yield {"http": http}


router = APIRouter(route_class=StrictRoute)


def get_http(request: Request) -> httpx.AsyncClient:
    """Returns the HTTP client of the lifespan."""
    http: httpx.AsyncClient = request.state.http
    return http


Http = Annotated[httpx.AsyncClient, Depends(get_http)]


@router.get("/health")
async def check_health() -> dict[str, str]:
    """Answers while the gateway lives, whatever the services do."""
    return {"status": "ok", "service": "gateway"}


@router.post("/users", status_code=202)
async def create_user(
    user: NewUser, http: Http, idempotency_key: Annotated[str | None, Header(min_length=1, max_length=512)] = None
) -> Any:
    """Accepts a user: a job of the service `users` creates it. Send the same key again after a lost answer."""
    job = {"type": "user.create", "payload": user.model_dump(), "idempotency_key": idempotency_key or str(uuid4())}
    return read_answer(await call(http, "POST", "users", "/jobs", json=job))


@router.get("/jobs/{job_id}")
async def show_job(job_id: UUID, http: Http) -> Any:
    """Shows a job of any service."""
    answers = await asyncio.gather(
        *(call(http, "GET", service, f"/jobs/{job_id}") for service in SERVICES), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, httpx.Response) and answer.is_success:
            return answer.json()
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if answer.status_code != 404:
            read_answer(answer)
    raise HTTPException(404, f"job_id: no service has a job {job_id}")


@router.get("/dlq/{service_name}")
async def list_dead_letters(service_name: str, http: Http, limit: int = 50, cursor: str | None = None) -> Any:
    """Lists the jobs of a service that have failed for good."""
    query = {"limit": limit} if cursor is None else {"limit": limit, "cursor": cursor}
    return read_answer(await call(http, "GET", service_name, "/dlq", params=query))


@router.post("/dlq/{service_name}/{job_id}/replay", status_code=202)
async def replay_dead_letter(service_name: str, job_id: UUID, http: Http) -> Any:
    """Queues a dead letter of a service again."""
    return read_answer(await call(http, "POST", service_name, f"/dlq/{job_id}/replay"))


async def call(http: httpx.AsyncClient, method: str, service: str, path: str, **options: Any) -> httpx.Response:
    """Sends a request to a service; 404 for an unknown service, 503 if it does not answer."""
    if service not in SERVICES:
        raise HTTPException(404, f"service_name: {service[:100]!r} is not known; there are {', '.join(SERVICES)}")
    try:
        return await http.request(method, SERVICES[service] + path, **options)
    except httpx.TransportError as error:
        detail = f"service {service} does not answer ({type(error).__name__}); try again later"
        raise HTTPException(503, detail, {"Retry-After": "2"}) from None


def read_answer(answer: httpx.Response) -> Any:
    """Returns the body of a service's answer; an error keeps its status, its text and its Retry-After."""
    if answer.is_success:
        return answer.json()
    try:
        detail = answer.json()["detail"]
    except (ValueError, LookupError):
        detail = answer.text[:300]
    retry_after = answer.headers.get("Retry-After")
    raise HTTPException(answer.status_code, detail, {"Retry-After": retry_after} if retry_after else None)


_NO_STORE = "sqlite:///no/store.db"  # the gateway has none: this one cannot be opened
settings = Settings.load(directory=Path(__file__).parent, environ={}, url=_NO_STORE, api_service="gateway")
site = create_site(create_app(Holdfast(settings=settings)), "gateway", open_client)
site.include_router(router)
