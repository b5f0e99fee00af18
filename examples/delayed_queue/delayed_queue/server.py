"""The HTTP API: schedule a job, look at one. Beside these routes stands the whole of Holdfast's API.

Every error of either is a problem document (RFC 9457), as Holdfast's API answers it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from delayed_queue.app import CALLBACK, app, wait_seconds
from holdfast import HoldfastError, Invalid
from holdfast.core.ids import as_ulid
from holdfast.core.models import to_datetime, to_microseconds
from holdfast.core.validation import LAST_INSTANT
from holdfast.telemetry.logs import configure_logs
from holdfast.views.documents import raw_json
from holdfast.web import create_app
from holdfast.web.messages import ApiRequest, ClientDisconnected, Refusal, answer_to, read_document
from holdfast.web.server import serve as served

api = create_app(app, exposed=True)  # `serve` refuses other hosts itself

_MAX_BODY = 1 << 20  # bytes
_BODY_TIMEOUT = 30.0  # seconds
_OTHERS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_FIELDS = ("payload", "dueTime", "delay")
_MIN_INSTANT, _MAX_INSTANT = 10**15, to_microseconds(LAST_INSTANT)  # 2001 to 2199; numbers below are another unit
_UNITS = {"seconds": (1_000_000, 1), "milliseconds": (1_000, 1), "nanoseconds": (1, 1_000)}
"""Microseconds of each unit, as a fraction."""


async def schedule(request: Request) -> Response:
    """POST /jobs: store a job; its id."""
    plain = ApiRequest(request.scope, request.receive)
    given = await read_document(plain, _MAX_BODY, _BODY_TIMEOUT, optional=False)
    handle = await api.app.enqueue(CALLBACK, {"payload": _payload(given)}, **_time(given))
    return _answer({"jobId": as_ulid(handle.id)})


def _payload(given: Mapping[str, Any]) -> Any:
    """Returns the payload of a submission. Invalid: it has none, what it has is wrong, or a field is unknown."""
    for name in given:
        if name not in _FIELDS:
            raise Invalid(name, given[name], f"there are {', '.join(_FIELDS)}", "is not known here")
    if "payload" not in given:
        raise Invalid("payload", None, "give any JSON value", "is missing")
    wait_seconds(given["payload"])
    return given["payload"]


def _time(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that say when a job is due: at once, at ``dueTime`` or after ``delay``."""
    due, delay = given.get("dueTime"), given.get("delay")
    if due is not None and delay is not None:
        raise Invalid("dueTime, delay", [due, delay], "give one of the two", "were given together")
    if delay is not None:
        return {"delay": _number("delay", delay, "give seconds from now")}
    return {} if due is None else {"run_at": to_datetime(_due_time(due))}


def _due_time(value: object) -> int:
    due = _number("dueTime", value, "give microseconds since 1970")
    if isinstance(due, int) and _MIN_INSTANT <= due <= _MAX_INSTANT:
        return due
    for unit, (times, by) in _UNITS.items():
        meant = due * times // by
        if _MIN_INSTANT <= meant <= _MAX_INSTANT:
            raise Invalid("dueTime", value, f"give microseconds since 1970: {meant:.0f}", f"is in {unit}")
    remedy = f"give microseconds since 1970, a whole number from {_MIN_INSTANT} to {_MAX_INSTANT}"
    raise Invalid("dueTime", value, remedy)


def _number(field: str, value: object, remedy: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(field, value, remedy, "is not a number")
    return value


async def show(request: Request) -> Response:
    """GET /jobs/{jobId}: a job as it stands, times as in its hash."""
    job = await api.app.get(request.path_params["job_id"])
    payload = msgspec.json.decode(raw_json(job.payload))
    if isinstance(payload, dict):  # else it was pushed into Redis by hand, and is shown as it stands
        payload = payload.get("payload", payload)
    document = {
        "jobId": as_ulid(job.id),
        "state": job.state,
        "payload": payload,
        "dueTime": job.run_at_us,
        "pickupTime": job.started_at_us,
        "attempts": job.attempts,
    }
    return _answer(document)


def _answer(document: Any) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    """Returns the problem document for an error, as Holdfast's own routes have it."""
    request_id = ApiRequest(request.scope, request.receive).id
    answer = answer_to(error, request_id)
    # It may name the store and its users: no client sees it.
    if answer.status >= 500 and not isinstance(error, ClientDisconnected):
        logging.getLogger(__name__).error("%s: %s", request_id, error)
    headers = {name.decode(): value.decode() for name, value in answer.headers} | {"x-request-id": request_id}
    return Response(answer.body, answer.status, headers, answer.media.decode())


def _only(method: str) -> Callable[[Request], Awaitable[Response]]:
    """Returns the answer to other methods at a path of ours, which Holdfast's API would not know at all."""

    async def refuse(request: Request) -> Response:
        detail = f"{request.method[:16]!r} is not possible here"
        raise Refusal(405, "method_not_allowed", detail, f"use {method}", (b"allow", method.encode()))

    return refuse


site = Starlette(
    routes=[
        Route("/jobs", schedule, methods=["POST"]),
        Route("/jobs", _only("POST"), methods=_OTHERS),
        Route("/jobs/{job_id}", show),
        Route("/jobs/{job_id}", _only("GET"), methods=_OTHERS),
        Mount("/", api),
    ],
    exception_handlers=dict.fromkeys((HoldfastError, Refusal, ClientDisconnected, Exception), _refused),
)


def serve(*, exposed: bool) -> int:
    """Answer on SERVER_PORT until SIGTERM or SIGINT; the exit code."""
    finish_logs = configure_logs(app.settings, app.events)
    try:
        return served(app, app.settings, exposed=exposed, site=site)
    finally:
        finish_logs()
