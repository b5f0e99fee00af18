"""The HTTP API: schedule a job, look at one. Beside these routes stands the whole of Holdfast's API."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from delayed_queue.app import app, callback
from holdfast import HoldfastError, Invalid
from holdfast.job import as_ulid, instant
from holdfast.observe.logs import configure_logs
from holdfast.web import asgi
from holdfast.web.serve import serve as served

_LARGEST = 1 << 20  # bytes of a body
_PATIENCE = 30.0  # seconds a body may take to arrive
_INSTANTS = range(10**15, 10**16)  # microseconds since 1970, of 2001 to 2286. Others are mostly another unit


class Wanted(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The body of a submission. Without a time the job is due at once."""

    payload: Any
    due_time: int | None = None  # microseconds since 1970
    delay: float | None = None  # seconds from now


async def schedule(request: Request) -> Response:
    """POST /jobs: store a job; its id."""
    wanted = msgspec.json.decode(await _body(request), type=Wanted)
    due = wanted.due_time
    if due is not None and due not in _INSTANTS:
        raise Invalid("dueTime", due, "give microseconds since 1970, 16 digits")
    run_at = None if due is None else instant(due)
    handle = await callback.options(run_at=run_at, delay=wanted.delay).enqueue(wanted.payload)
    return _answer(200, {"jobId": as_ulid(handle.id)})


async def show(request: Request) -> Response:
    """GET /jobs/{jobId}: a job as it stands, times as in its hash."""
    job = await app.get(request.path_params["job_id"])
    document = {
        "jobId": as_ulid(job.id),
        "state": job.state,
        "payload": msgspec.json.decode(job.payload)["payload"],
        "dueTime": job.run_at_us,
        "pickupTime": job.started_at_us,
        "attempts": job.attempts,
    }
    return _answer(200, document)


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


def _answer(status: int, document: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException():
            return _answer(error.status_code, {"error": error.detail}, dict(error.headers or {}))
        case HoldfastError() if error.http_status < 500:
            return _answer(error.http_status, {"error": str(error)})
        case HoldfastError():  # it may name the store and its users: that is for the log
            logging.getLogger(__name__).error("%s", error)
            retry = {"retry-after": "2"} if error.http_status == 503 else {}
            return _answer(error.http_status, {"error": "this cannot be done just now; the log says why"}, retry)
    return _answer(400, {"error": f"body: {error}"})


site = Starlette(
    routes=[
        Route("/jobs", schedule, methods=["POST"]),
        Route("/jobs/{job_id}", show),
        Mount("/", asgi(app)),
    ],
    exception_handlers=dict.fromkeys((HTTPException, HoldfastError, msgspec.DecodeError), _refused),
)


def serve(*, exposed: bool) -> int:
    """Answer on SERVER_PORT until SIGTERM or SIGINT; the exit code."""
    finish_logs = configure_logs(app.settings, app.events)
    try:
        return served(app, app.settings, exposed=exposed, site=site)
    finally:
        finish_logs()
