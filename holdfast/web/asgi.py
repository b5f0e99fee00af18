"""The ASGI application: what every request passes through, from its first byte to its answer."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

from holdfast.app import Holdfast, WithDeadline
from holdfast.core.errors import Unavailable
from holdfast.core.events import RequestFailed, StoreTrouble
from holdfast.core.redaction import Redaction
from holdfast.web import (
    bulk,
    claims,
    dead_letters,
    docs,
    event_stream,
    health,
    heartbeats,
    job_logs,
    jobs,
    metrics,
    queues,
    settlements,
    submissions,
)
from holdfast.web.audit import Audit
from holdfast.web.authentication import Authenticator
from holdfast.web.event_broadcast import EventBroadcasters
from holdfast.web.fields import Form, read_query
from holdfast.web.http_metrics import RequestMetrics
from holdfast.web.long_poll import ClaimWaiters
from holdfast.web.openapi import with_description
from holdfast.web.problems import RETRY_AFTER, answer_to
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.web.request_body import Gone, read_document
from holdfast.web.responses import ApiRequest, ApiResponse, Receive, Refusal, Send, Streamed
from holdfast.web.routing import Operation, RequestContext, Routes
from holdfast.web.streaming import send_stream
from holdfast.web.unknown_tasks import UnknownTaskLog
from holdfast.web.wait_limits import WaitLimiter

OPERATIONS = with_description(
    (
        *submissions.OPERATIONS,
        *jobs.OPERATIONS,
        *bulk.OPERATIONS,
        *dead_letters.OPERATIONS,
        *queues.OPERATIONS,
        *event_stream.OPERATIONS,
        *claims.OPERATIONS,
        *heartbeats.OPERATIONS,
        *settlements.OPERATIONS,
        *job_logs.OPERATIONS,
        *metrics.OPERATIONS,
        *health.OPERATIONS,
        *docs.OPERATIONS,
    )
)
"""Everything that can be asked."""

_PATIENCE = 1.5  # seconds a request waits for the store, whatever is the matter with it: 503 comes within two
_SPELL = 5.0  # seconds in which the same trouble with the store is told once,
_TROUBLES_MOST = 10  # and so many different ones
_HEADERS_MOST = 32 * 1024  # bytes of all headers
_PATH_MOST = 8 * 1024
_SINGLE, _BATCH = 4, 20  # payload limits a body may be as long as
_SECURE = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def asgi(app: Holdfast) -> Api:
    """Returns the HTTP API of this application, to be served, or mounted in any ASGI application.

    It has a store of its own, whose calls have a deadline; the application stays as it is. Served by itself it opens
    this store at the start and closes it at the end. Mounted, it opens the store with the first request; closing the
    application closes it.
    """
    return Api(app)


class Api:
    """Made by ``asgi``."""

    def __init__(self, app: Holdfast, *, checks_hosts: bool = False) -> None:
        self.app = app = WithDeadline(app, _PATIENCE)
        """The application with the store of this API, for routes beside it."""
        self._gate = Authenticator(app, checks_hosts=checks_hosts)
        self._audit = Audit(app)
        self._redaction = Redaction(app.settings.redacted)
        self._meter = RequestMetrics(app)
        self._troubles: set[str] = set()
        self._troubles_until = 0.0
        self._routes = Routes(OPERATIONS)
        self._fleet = RemoteWorkers(app)
        self._feeds = EventBroadcasters(app)
        self._waiting = WaitLimiter(app.settings)
        self._strangers = UnknownTaskLog(app)
        self._halls: WeakKeyDictionary[asyncio.AbstractEventLoop, ClaimWaiters] = WeakKeyDictionary()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case _:  # no operation is a web socket
                await receive()
                await send({"type": "websocket.close", "code": 1000})

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────
    async def _http(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = ApiRequest(scope, receive, segments_of(scope))
        meter, started = self._meter, self._meter.begin()
        try:
            answer = await self._spanned(scope, request)
            meter.answered(request, started, answer.status)
            await self._send(send, request, answer)
        except Gone:
            meter.answered(request, started)
        finally:
            meter.end()
            for each in request.over:
                each()

    async def _send(self, send: Send, request: ApiRequest, answer: ApiResponse) -> None:
        await send(_start(request, answer))
        if isinstance(answer, Streamed):
            await send_stream(send, request, answer, 2 * self.app.settings.body_timeout.total_seconds())
        else:
            await send({"type": "http.response.body", "body": b"" if request.method == "HEAD" else answer.body})

    async def _spanned(self, scope: Mapping[str, Any], request: ApiRequest) -> ApiResponse:
        """The answer; where there are traces, within a span, but for what probes ask."""
        spans = self.app.spans
        if spans is None or request.segments[0] != "v1":
            return await self._answered(scope, request)
        with spans.request(request.method, request.headers) as told:
            answer = await self._answered(scope, request)
            told(request.template, answer.status)
            return answer

    async def _answered(self, scope: Mapping[str, Any], request: ApiRequest) -> ApiResponse:
        try:
            return await self._answer(scope, request)
        except Gone:
            raise
        except Exception as error:
            answer = answer_to(error, request.id)
            if answer.status == 500:
                self._tell_failure(request, error)
            elif isinstance(error, Unavailable):
                self._tell_trouble(request, str(error))
            return answer

    async def _answer(self, scope: Mapping[str, Any], request: ApiRequest) -> ApiResponse:
        _check_size(scope)
        told = self._gate.enter(scope, request)
        if told is not None:
            return told
        operation, path = self._routes.find(request.method, request.segments)
        request.template = operation.path
        caller = self._gate.admit(request, operation)
        call = RequestContext(
            app=self.app,
            caller=caller,
            meter=self._meter,
            hall=self._hall(),
            feeds=self._feeds,
            waiting=self._waiting,
            strangers=self._strangers,
            still=lambda: self._gate.still_good(request),
            redaction=self._redaction,
            request=request,
            path=path,
            warnings=self._warnings,
        )
        if operation.method == "GET" or operation.quiet:
            await self._read(call, operation)
            return await operation.handler(call)
        return await self._changed(call, operation)

    async def _changed(self, call: RequestContext, operation: Operation) -> ApiResponse:
        """The answer of an operation that may change something, which is recorded before and after."""
        try:
            await self._read(call, operation)
        except Gone:
            raise
        except Exception as error:
            self._audit.refused(call, operation, error)
            raise
        await self._audit.asked(call, operation)
        try:
            answer = await operation.handler(call)
        except Exception as error:
            await self._audit.done(call, operation, error)
            raise
        await self._audit.done(call, operation, answer)
        return answer

    def _warnings(self) -> list[str]:
        return [*self._gate.warnings(), *self._audit.warnings()]

    async def _read(self, call: RequestContext, operation: Operation) -> None:
        """Read what the request says beside its path."""
        call.query = read_query(call.request.query, operation.query)
        if operation.body is not None:
            call.body = await self._body(call.request, operation, operation.body)

    async def _body(self, request: ApiRequest, operation: Operation, form: Form) -> Mapping[str, Any]:
        settings = self.app.settings
        limit = settings.payload_limit * (_BATCH if operation.batch else _SINGLE)
        if operation.results:
            limit = max(limit, settings.result_limit * _SINGLE)
        patience = settings.body_timeout.total_seconds()
        said = await read_document(request, limit, patience, optional=operation.body_optional)
        return said if operation.raw else form.read(said)

    def _hall(self) -> ClaimWaiters:
        """Where claims wait in this event loop: requests may come on several."""
        loop = asyncio.get_running_loop()
        hall = self._halls.get(loop)
        if hall is None:
            hall = self._halls[loop] = ClaimWaiters(self._fleet)
        return hall

    def _tell_failure(self, request: ApiRequest, error: Exception) -> None:
        if self.app.events.listens(RequestFailed):
            text = "".join(traceback.format_exception(error))
            path = "/" + "/".join(request.segments)
            self.app.events.emit(
                RequestFailed(request_id=request.id, method=request.method, path=path[:200], error=text)
            )

    def _tell_trouble(self, request: ApiRequest, error: str) -> None:
        """Say that the store is away: not for every request, for there may be thousands."""
        now = self.app.clock.monotonic()
        if now >= self._troubles_until:
            self._troubles_until = now + _SPELL
            self._troubles.clear()
        if error not in self._troubles and len(self._troubles) < _TROUBLES_MOST:
            self._troubles.add(error)
            self.app.events.emit(StoreTrouble(service="api", error=error, retry_in=RETRY_AFTER, request_id=request.id))

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.app.__aenter__()
        except Unavailable:
            entered = False  # requests are answered 503, and the first that finds the store opens it
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        else:
            entered = True
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if entered:
            await self.app.__aexit__()
        else:
            await self.app.close()
        await send({"type": "lifespan.shutdown.complete"})


def segments_of(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of the path below where the application is mounted. ``%2F`` in a part is part of it."""
    root = scope.get("root_path", "").rstrip("/")
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(scope["path"])
    mounted = quote(root)
    for prefix in (root, mounted):
        if prefix and (path == prefix or path.startswith(prefix + "/")):
            path = path[len(prefix) :]
            break
    return tuple(unquote(part) for part in path[1:].split("/"))


def _check_size(scope: Mapping[str, Any]) -> None:
    if len(scope["path"]) > _PATH_MOST:
        raise Refusal(414, "path_too_long", "the path is too long", f"give at most {_PATH_MOST:,} characters")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > _HEADERS_MOST:
        raise Refusal(431, "headers_too_large", "the headers are too large", f"send at most {_HEADERS_MOST:,} bytes")


def _start(request: ApiRequest, answer: ApiResponse) -> dict[str, Any]:
    own = {name for name, _ in answer.headers}
    headers = [
        *(header for header in _SECURE if header[0] not in own),
        (b"x-request-id", request.id.encode()),
        *request.added,
        *answer.headers,
    ]
    if answer.status != 204:
        headers.append((b"content-type", answer.media))
    if answer.status != 204 and not isinstance(answer, Streamed):
        headers.append((b"content-length", str(len(answer.body)).encode()))
    return {"type": "http.response.start", "status": answer.status, "headers": headers}
