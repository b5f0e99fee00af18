"""Atlas Jobs' routes, and beside them the whole of Holdfast's API."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from atlas_jobs import counts
from atlas_jobs.words import status
from holdfast import Holdfast, HoldfastError, Invalid, Job, JobState
from holdfast.core.dependencies import NEVER_US
from holdfast.core.models import Attempt, to_datetime
from holdfast.tasks.codec import RawText
from holdfast.telemetry.metric_types import wants_json
from holdfast.web import create_app

RECENT_MINUTES = 5
_MAX_MINUTES = 1440  # a day
_LARGEST = 1 << 20  # bytes of a body
_PATIENCE = 30.0  # seconds a body may take to arrive
_KIND_OF_ERROR = re.compile(r"^(?!timeout: still running after |expired: no worker began it in time)[^\W\d]\w*: ")
"""The type of the exception, with which Holdfast begins an error; its own texts have none."""
_NAMES_JSON = re.compile(r"(^|,)\s*application/json\s*(;|,|$)", re.IGNORECASE)


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a submission. Without ``max_attempts`` a job has those of the settings."""

    job_type: str
    payload: msgspec.Raw = msgspec.Raw(b'""')
    max_attempts: int | None = None
    idempotency_key: str | None = None


_CAMEL = {"jobType": "job_type", "maxAttempts": "max_attempts", "idempotencyKey": "idempotency_key"}
"""Aliases of the fields, as clients of the original write them."""


def site(app: Holdfast) -> Starlette:
    """The ASGI application."""
    routes = _Routes(app)
    errors = (HTTPException, HoldfastError, msgspec.DecodeError, UnicodeDecodeError)
    return Starlette(
        routes=[
            Route("/jobs", routes.submit, methods=["POST"]),
            Route("/jobs/{job_id}", routes.show),
            Route("/debug/workers", routes.by_worker),
            Route("/debug/workers/summary", routes.by_status),
            Route("/metrics", routes.metrics),
            Mount("/", routes.holdfast),
        ],
        exception_handlers=dict.fromkeys(errors, _refused),
    )


class _Routes:
    """What each of them answers."""

    def __init__(self, app: Holdfast) -> None:
        self.holdfast = create_app(app, exposed=True)  # the server refuses other hosts itself
        self._app = self.holdfast.app

    async def submit(self, request: Request) -> Response:
        body = await _body(request)
        try:
            wanted = _wanted(body)
        except RecursionError:
            raise Invalid("body", RawText(f"{len(body)} bytes"), "nest it less", "are nested too deeply") from None
        header = request.headers.get("Idempotency-Key")
        options: dict[str, Any] = {"key": wanted.idempotency_key if header is None else header}
        if wanted.max_attempts is not None:
            options["max_attempts"] = wanted.max_attempts
        try:
            draft = self._app.draft_job(wanted.job_type, {"payload": _text(wanted.payload)}, **options)
        except Invalid as error:
            names = {"task": "job_type", "key": "idempotency_key" if header is None else "Idempotency-Key"}
            if error.field not in names:
                raise
            raise Invalid(names[error.field], error.value, error.remedy) from None
        handle = await self._app.submit(draft)
        return _answer(201 if handle.created else 200, await self._job(handle.id))

    async def show(self, request: Request) -> Response:
        return _answer(200, await self._job(_uuid(request.path_params["job_id"])))

    async def _job(self, job_id: str) -> dict[str, Any]:
        job = await self._app.get(job_id)
        return shown(job, await self._app.attempts(job_id) if job.claims else [])

    async def by_worker(self, request: Request) -> Response:
        return _answer(200, counts.by_worker(await self._app.stats(most=counts.MAX_COUNTED)))

    async def by_status(self, request: Request) -> Response:
        return _answer(200, counts.by_status(await self._app.stats(most=counts.MAX_COUNTED)))

    async def metrics(self, request: Request) -> ASGIApp:
        """JSON; to a Prometheus, which prefers its own formats, what Holdfast has for it."""
        accept = ", ".join(request.headers.getlist("accept"))
        if not wants_json(accept if _NAMES_JSON.search(accept) else f"{accept}, application/json;q=0.001"):
            return self.holdfast
        minutes = _minutes(request.query_params)
        figures = await self._app.stats(minutes=minutes, most=counts.MAX_COUNTED)
        return _answer(200, counts.metrics(figures, minutes))


def shown(job: Job, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """A job by the names of Atlas Jobs' columns, as the view ``jobs`` has it."""
    changed = [job.created_at_us, job.started_at_us, job.ended_at_us, *(each.ended_at_us for each in attempts)]
    return {
        "job_id": job.id,
        "status": status(job.state),
        "job_type": job.task,
        "payload": _payload(job.payload),
        "attempt_count": job.failures,
        "max_attempts": job.max_attempts,
        "idempotency_key": job.key,
        "last_error": None if job.error is None else _KIND_OF_ERROR.sub("", job.error),
        "next_run_at": None if job.state is JobState.WAITING or job.run_at_us >= NEVER_US else job.run_at,
        "worker_id": job.worker,
        "created_at": job.created_at,
        "updated_at": to_datetime(max(each for each in changed if each is not None)),
    }


def _payload(stored: str) -> Any:
    """Returns the argument ``payload``; all arguments of a job without it, which another program submitted."""
    try:
        arguments = msgspec.json.decode(stored)
    except (msgspec.DecodeError, RecursionError):
        return stored
    return arguments.get("payload", stored) if isinstance(arguments, dict) else stored


async def _body(request: Request) -> bytes:
    """The body, as JSON and within limits: a page of another site cannot send that without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "Content-Type: send application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_PATIENCE):
            async for piece in request.stream():
                body += piece
                if len(body) > _LARGEST:
                    raise HTTPException(413, f"body: give at most {_LARGEST} bytes", {"connection": "close"})
    except TimeoutError:
        raise HTTPException(408, f"body: send it within {_PATIENCE:g} s", {"connection": "close"}) from None
    return bytes(body)


def _wanted(body: bytes) -> Wanted:
    """Returns a submission. Its fields may have their names in camel case."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for camel, snake in _CAMEL.items():
        if camel not in given:
            continue
        value = given.pop(camel)
        both = [msgspec.json.decode(each) for each in (given.setdefault(snake, value), value)]
        if both[0] != both[1]:
            raise Invalid(f"{snake}, {camel}", both, "give one of the two", "differ")
    return msgspec.json.decode(msgspec.json.encode(given), type=Wanted)


def _answer(status: int, document: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException():
            return _answer(error.status_code, {"error": error.detail}, error.headers)
        case HoldfastError() if error.http_status < 500:
            return _answer(error.http_status, {"error": str(error)})
        case HoldfastError():  # it may name the store and its users: that is for the log
            logging.getLogger(__name__).error("%s", error)
            retry = {"retry-after": "2"} if error.http_status == 503 else None
            return _answer(error.http_status, {"error": "this cannot be done just now; the log says why"}, retry)
    return _answer(400, {"error": f"body: {error}"})


def _text(payload: msgspec.Raw) -> str:
    """A text as it is; any other value as the client wrote it down."""
    raw = bytes(payload)
    text = msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
    if "\0" in text:
        raise Invalid("payload", text, "leave out the character NUL: a TEXT of PostgreSQL cannot hold it")
    return text


def _uuid(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise Invalid("job_id", text, "give a UUID") from None


def _minutes(query: Mapping[str, str]) -> int:
    text = query.get("minutes", str(RECENT_MINUTES))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MAX_MINUTES:
        raise Invalid("minutes", text, f"give a whole number from 1 to {_MAX_MINUTES}")
    return int(text)
