"""The ASGI application of the HTTP API: middlewares, router, and the call of an operation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.app import Holdfast, WithDeadline
from holdfast.core.errors import Unavailable
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
from holdfast.web.long_poll import ClaimWaiters
from holdfast.web.middleware import AdmissionMiddleware, ProblemMiddleware, RequestMiddleware, TraceMiddleware
from holdfast.web.openapi import with_description
from holdfast.web.principal import Scope as KeyScope
from holdfast.web.rate_limit import WaitLimiter
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.web.request_body import BODY_PAYLOADS, Gone, read_document
from holdfast.web.request_records import RequestMetrics, UnknownTaskLog
from holdfast.web.responses import REQUEST, ApiRequest, ApiResponse
from holdfast.web.routing import Operation, RequestContext, router_of

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

_CALL_DEADLINE = 1.5  # seconds a request waits for the store: 503 comes within two
_BATCH = 20  # payload limits the body of a batch may be as long as


class Api:
    """The HTTP API of one application, made by ``holdfast.web.create_app``."""

    def __init__(self, app: Holdfast, *, checks_hosts: bool = False) -> None:
        self.app = app = WithDeadline(app, _CALL_DEADLINE)
        """The application with the store of this API, for routes beside it."""
        self._gate = Authenticator(app, checks_hosts=checks_hosts)
        self._audit = Audit(app)
        self._redaction = Redaction(app.settings.redacted)
        self._meter = RequestMetrics(app)
        self._fleet = RemoteWorkers(app)
        self._feeds = EventBroadcasters(app)
        self._waiting = WaitLimiter(app.settings)
        self._unknown_tasks = UnknownTaskLog(app)
        self._claim_waiters: WeakKeyDictionary[asyncio.AbstractEventLoop, ClaimWaiters] = WeakKeyDictionary()
        self._router = router_of(OPERATIONS, self._respond, lambda _: hold_open(self.app))
        self._stack = self.add_middlewares(self._route)

    def add_middlewares(self, site: ASGIApp) -> ASGIApp:
        """Returns the site inside the API's middlewares: request ids, metrics, traces, problem documents, admission.

        The API may be a part of the site: it notices that the middlewares have been passed.
        """
        stack: ASGIApp = AdmissionMiddleware(site, self._gate)
        stack = ProblemMiddleware(stack, self.app)
        if self.app.spans is not None:
            stack = TraceMiddleware(stack, self.app.spans)
        return RequestMiddleware(stack, self._meter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if REQUEST in scope:
            scope[REQUEST].set_mount(scope)
            await self._route({**scope}, receive, send)
        else:
            await self._stack(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = scope.get(REQUEST)
        if request is not None:
            scope.update({"path": request.path, "root_path": "", "path_params": {}})  # of a copy that is ours
        await self._router(scope, receive, send)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────
    async def _respond(self, request: ApiRequest, operation: Operation, path: Mapping[str, str]) -> ApiResponse:
        request.template = operation.path
        call = self.authorize_call(request, operation.name, operation.scope, operation.group, path)
        if operation.method == "GET" or operation.quiet:
            await self._read(call, operation)
            return await operation.handler(call)
        return await self._changed(call, operation)

    def authorize_call(
        self,
        request: ApiRequest,
        name: str,
        scope: KeyScope | None,
        group: str = "",
        path: Mapping[str, str] | None = None,
    ) -> RequestContext:
        """Returns the context of an operation with this name; raises Refusal if the caller lacks the scope."""
        return RequestContext(
            app=self.app,
            caller=self._gate.authorize_operation(request, name, scope, group),
            meter=self._meter,
            waiters=self._waiters_here(),
            feeds=self._feeds,
            waiting=self._waiting,
            unknown_tasks=self._unknown_tasks,
            still=lambda: self._gate.still_good(request),
            redaction=self._redaction,
            request=request,
            path=path or {},
            warnings=self._warnings,
        )

    async def _changed(self, call: RequestContext, operation: Operation) -> ApiResponse:
        """The answer of an operation that may change something, which is recorded before and after."""
        try:
            await self._read(call, operation)
        except Gone:
            raise
        except Exception as error:
            self._audit.record_refusal(call, operation, error)
            raise
        await self._audit.record_request(call, operation)
        try:
            answer = await operation.handler(call)
        except Exception as error:
            await self._audit.record_result(call, operation, error)
            raise
        await self._audit.record_result(call, operation, answer)
        return answer

    def _warnings(self) -> list[str]:
        return [*self._gate.list_warnings(), *self._audit.list_warnings()]

    async def _read(self, call: RequestContext, operation: Operation) -> None:
        """Read the request but for its path."""
        call.query = read_query(call.request.query, operation.query)
        if operation.body is not None:
            call.body = await self._body(call.request, operation, operation.body)

    async def _body(self, request: ApiRequest, operation: Operation, form: Form) -> Mapping[str, Any]:
        settings = self.app.settings
        limit = settings.payload_limit * (_BATCH if operation.batch else BODY_PAYLOADS)
        if operation.results:
            limit = max(limit, settings.result_limit * BODY_PAYLOADS)
        patience = settings.body_timeout.total_seconds()
        said = await read_document(request, limit, patience, optional=operation.body_optional)
        return said if operation.raw else form.read(said)

    def _waiters_here(self) -> ClaimWaiters:
        """Returns the waiting claims of the running event loop: requests may come on several."""
        loop = asyncio.get_running_loop()
        waiters = self._claim_waiters.get(loop)
        if waiters is None:
            waiters = self._claim_waiters[loop] = ClaimWaiters(self._fleet)
        return waiters


@asynccontextmanager
async def hold_open(app: Holdfast) -> AsyncIterator[None]:
    """Keeps the store open. If it is away, requests are answered 503 until the first that finds it opens it."""
    try:
        await app.__aenter__()
        leave: Callable[[], Awaitable[None]] = app.__aexit__
    except Unavailable:
        leave = app.close
    try:
        yield
    finally:
        await leave()
