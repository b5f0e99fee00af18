"""Holdfast in a FastAPI application: `pip install 'holdfast[fastapi]'`.

For any application: ``holdfast_lifespan``, the dependency ``HoldfastDep``, and ``job_status_router``.

For one that behaves like Holdfast's own API: ``add_holdfast_api`` (request ids, metrics, problem documents, limits),
``require_scope`` (keys and scopes) and ``StrictRoute`` (JSON within limits). Path operations submit and find jobs with
``submit_job`` and ``find_job``, and refuse requests with ``Refusal``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Annotated, Any, NoReturn
from uuid import UUID

try:
    from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response, Security
    from fastapi.exceptions import RequestValidationError
    from fastapi.routing import APIRoute
    from fastapi.security import APIKeyHeader, HTTPBearer
except ModuleNotFoundError as error:
    raise ImportError("holdfast.integrations.fastapi needs FastAPI; pip install 'holdfast[fastapi]'") from error

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, HoldfastError, Invalid, NotFound
from holdfast.core.models import JobState
from holdfast.core.redaction import Redaction
from holdfast.core.validation import MAX_KEY_LENGTH
from holdfast.views.documents import job_document, to_builtins
from holdfast.web.asgi import Api, hold_open
from holdfast.web.fields import missing_field
from holdfast.web.jobs import find_job
from holdfast.web.keys import Scope as KeyScope
from holdfast.web.messages import (
    BODY_PAYLOADS,
    CHECK_ID,
    PROBLEM,
    REQUEST,
    ApiRequest,
    Problem,
    Refusal,
    answer_to,
    common_headers,
    decode_body,
    new_request_id,
    read_body,
)
from holdfast.web.openapi import REFUSALS
from holdfast.web.routing import RequestContext
from holdfast.web.submissions import KEY_HEADER, header_key, submit_job

__all__ = [
    "HoldfastDep",
    "HoldfastMiddleware",
    "IdempotencyKey",
    "JobStatus",
    "Refusal",
    "RequestContext",
    "StrictRoute",
    "add_holdfast_api",
    "find_job",
    "get_holdfast",
    "holdfast_lifespan",
    "job_status_router",
    "problem_responses",
    "require_idempotency_key",
    "require_scope",
    "submit_job",
]

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any]]]
_API = "holdfast.api"  # key in the ASGI scope with the API of ``add_holdfast_api``
_BEARER, _HEADER = HTTPBearer(auto_error=False), APIKeyHeader(name="X-API-Key", auto_error=False)
_PROBLEM_SCHEMA = msgspec.json.schema_components([Problem])[1]["Problem"]


# ── any application ───────────────────────────────────────────────────────────────────────────────────────────────────
def holdfast_lifespan(
    app: Holdfast, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any] | None]] | None = None
) -> Lifespan:
    """Returns a lifespan that keeps the application open around that of the site: ``FastAPI(lifespan=…)``.

    The site starts without its store: calls raise ``Unavailable`` until the store is back.
    """

    @asynccontextmanager
    async def open_application(site: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with hold_open(app), lifespan(site) if lifespan is not None else nullcontext() as state:
            yield {**(state or {}), "holdfast": app}

    return open_application


async def get_holdfast(connection: HTTPConnection) -> Holdfast:
    """Returns the application of ``holdfast_lifespan``."""
    app: Holdfast | None = getattr(connection.state, "holdfast", None)
    if app is None:
        raise ConfigError("no application: use FastAPI(lifespan=holdfast_lifespan(app)); in tests `with TestClient(…)`")
    return app


HoldfastDep = Annotated[Holdfast, Depends(get_holdfast)]
"""The application, as a parameter of a path operation: ``async def order(app: HoldfastDep)``."""


class JobStatus(BaseModel):
    """Status of a job for its submitter: without payload, key and worker."""

    id: UUID
    task: str
    state: JobState
    result: Any = Field(description="What the task returned.")
    error: str | None = Field(description="Of the latest failed attempt.")
    attempts: int
    max_attempts: int | None = Field(description="null: no limit.")
    created_at: datetime
    run_at: datetime = Field(description="Not before this instant.")
    ended_at: datetime | None


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns descriptions of problem documents with these statuses, for ``responses=`` of a path operation."""
    content = {PROBLEM.decode(): {"schema": _PROBLEM_SCHEMA}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}


def job_status_router() -> APIRouter:
    """Returns a router with ``GET /{job_id}``: ``include_router(job_status_router(), prefix="/jobs")``.

    A caller who knows the id of a job sees its result: add ``dependencies=`` to restrict access.
    """
    router = APIRouter()

    @router.get("/{job_id}", response_model=JobStatus, responses=problem_responses(404, 503))
    async def get_job_status(job_id: UUID, app: HoldfastDep, request: Request) -> JobStatus | Response:
        """Returns where a job stands."""
        try:
            job = await app.get(str(job_id))
        except HoldfastError as error:
            return _problem(request, error)
        return JobStatus.model_validate(to_builtins(job_document(Redaction(app.settings.redacted).redact_job(job))))

    return router


def _problem(request: Request, error: HoldfastError) -> Response:
    request_id = request.scope[REQUEST].id if REQUEST in request.scope else new_request_id()
    is_missing = type(error) is NotFound
    answer = answer_to(Refusal(404, error.code, str(error), CHECK_ID) if is_missing else error, request_id)
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, answer.status, {**headers, "x-request-id": request_id}, answer.media.decode())


# ── an application that behaves like Holdfast's own API ───────────────────────────────────────────────────────────────
def add_holdfast_api(site: FastAPI, api: Api) -> None:
    """Adds the middlewares of the API to the site; validation errors become problem documents."""
    site.add_middleware(HoldfastMiddleware, api=api)
    site.add_exception_handler(RequestValidationError, _refuse_values)


class HoldfastMiddleware:
    """The middlewares of an API around a FastAPI application; responses get the API's headers."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._site = app
        self._api = api
        self._stack = api.add_middlewares(self._respond)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stack({**scope, _API: self._api}, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: ApiRequest | None = scope.get(REQUEST)
        if request is None:
            await self._site(scope, receive, send)
            return

        async def send_completed(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.template = request.template or _path_template(scope)
                own = dict(message["headers"])
                if b"x-request-id" not in own:  # else the response is the API's own
                    message = {**message, "headers": [*message["headers"], *common_headers(request, own)]}
            await send(message)

        try:
            await self._site(scope, receive, send_completed)
        except Exception:
            request.template = request.template or _path_template(scope)
            raise


def _path_template(scope: Scope) -> str | None:
    """Returns the path of the route with prefixes of routers, which FastAPI 0.137 moved to a separate context."""
    route = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
    return getattr(route, "path_format", None)


def _refuse_values(_request: Request, error: Any) -> NoReturn:
    """Raises Invalid for the first value of a RequestValidationError."""
    first = error.errors()[0]
    place, *path = map(str, first["loc"])
    field = ".".join(path) or place
    if first["type"] == "missing":
        raise missing_field(field) from None
    raise Invalid(field, first["input"], first["msg"][:1].lower() + first["msg"][1:]) from None


def require_scope(scope: KeyScope) -> Callable[..., Awaitable[RequestContext]]:
    """Returns a dependency that admits callers whose key has this scope: ``Depends(require_scope("submit"))``.

    Its value has the application and the caller; functions of ``holdfast.web`` take it.
    """

    async def authorize_caller(
        request: Request, _bearer: Annotated[Any, Security(_BEARER)], _header: Annotated[Any, Security(_HEADER)]
    ) -> RequestContext:
        api: Api = request.scope[_API]
        return api.authorize_call(request.scope[REQUEST], request.scope["endpoint"].__name__, scope)

    return authorize_caller


async def require_idempotency_key(
    request: Request,
    _text: Annotated[str, Header(alias=KEY_HEADER, json_schema_extra={"minLength": 1, "maxLength": MAX_KEY_LENGTH})],
) -> str:
    """Returns the idempotency key of the header; refuses a repeated header or one that is not UTF-8."""
    return header_key(request.scope[REQUEST]) or ""


IdempotencyKey = Annotated[str, Depends(require_idempotency_key)]
"""The idempotency key of the header, as a parameter of a path operation: requests without one are refused."""


class StrictRoute(APIRoute):
    """Reads a JSON body like Holdfast's API: an object in UTF-8 within limits of size, depth and time, each key
    once. ``APIRouter(route_class=StrictRoute)``, on a site with ``add_holdfast_api``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def read_and_handle(request: Request) -> Response:
            settings = request.scope[_API].app.settings
            limit, timeout = settings.payload_limit * BODY_PAYLOADS, settings.body_timeout.total_seconds()
            body = await read_body(request.scope[REQUEST], limit, timeout)
            decode_body(body, limit)
            messages = iter([{"type": "http.request", "body": body}])

            async def receive_again() -> Message:
                return next(messages, None) or await request.receive()

            return await handle(Request(request.scope, receive_again))

        return read_and_handle
