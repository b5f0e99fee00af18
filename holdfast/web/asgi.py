"""The ASGI application of the HTTP API: middlewares, router, and the call of an operation."""

from __future__ import annotations

import asyncio
import functools
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.app import Holdfast
from holdfast.app.submitter import Submitter
from holdfast.core.errors import Unavailable
from holdfast.core.events import RequestFailed, StoreTrouble
from holdfast.core.redaction import Redaction
from holdfast.stores import ExternalTransactions
from holdfast.stores.base import Store
from holdfast.web import (
    batches,
    bulk,
    claims,
    dead_letters,
    editing,
    error_groups,
    event_stream,
    faults,
    heartbeats,
    jobs,
    limits,
    monitoring,
    openapi,
    queues,
    schedules,
    settlements,
    submissions,
    workflows,
)
from holdfast.web.audit import Audit
from holdfast.web.authentication import Authenticator
from holdfast.web.console import is_console_path
from holdfast.web.console.sessions import check_secret
from holdfast.web.event_broadcast import EventBroadcasters
from holdfast.web.fields import BodySchema, read_query
from holdfast.web.keys import FindUser, Principal
from holdfast.web.keys import Scope as KeyScope
from holdfast.web.long_poll import PendingClaims
from holdfast.web.messages import (
    BODY_PAYLOADS,
    REQUEST,
    RETRY_AFTER,
    ApiRequest,
    ApiResponse,
    ClientDisconnected,
    Refusal,
    answer_to,
    read_document,
    send_answer,
)
from holdfast.web.openapi import with_description
from holdfast.web.rate_limit import WaitLimiter
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.web.request_records import RequestMetrics, UnknownTaskLog
from holdfast.web.routing import Operation, RequestContext, router_of

if TYPE_CHECKING:
    from holdfast.telemetry.spans import Spans
    from holdfast.web.console.site import Console

OPERATIONS = with_description(
    (
        *submissions.OPERATIONS,
        *jobs.OPERATIONS,
        *editing.OPERATIONS,
        *bulk.OPERATIONS,
        *dead_letters.OPERATIONS,
        *error_groups.OPERATIONS,
        *queues.OPERATIONS,
        *schedules.OPERATIONS,
        *limits.OPERATIONS,
        *faults.OPERATIONS,
        *workflows.OPERATIONS,
        *batches.OPERATIONS,
        *event_stream.OPERATIONS,
        *claims.OPERATIONS,
        *heartbeats.OPERATIONS,
        *settlements.OPERATIONS,
        *monitoring.OPERATIONS,
        *openapi.OPERATIONS,
    )
)
"""All operations of the API."""

_CALL_DEADLINE = 1.5  # seconds a request waits for the store: the answer is 503 within two
_BATCH = 20  # limit of a batch's body, in payload limits


class Api:
    """The HTTP API of one application, made by ``holdfast.web.create_app``."""

    def __init__(
        self,
        app: Holdfast,
        *,
        checks_hosts: bool = False,
        local_console: bool = False,
        console_user: FindUser | None = None,
    ) -> None:
        self.app = app = WithDeadline(app, _CALL_DEADLINE)
        """The application with the store of this API, for routes beside it."""
        self._authenticator = Authenticator(app, checks_hosts=checks_hosts)
        self._audit = Audit(app)
        self._redaction = Redaction(app.settings.redacted)
        self._request_metrics = RequestMetrics(app)
        self._remote_workers = RemoteWorkers(app)
        self._broadcasters = EventBroadcasters(app)
        self._wait_limiter = WaitLimiter(app.settings)
        self._unknown_tasks = UnknownTaskLog(app)
        self._pending_claims: WeakKeyDictionary[asyncio.AbstractEventLoop, PendingClaims] = WeakKeyDictionary()
        self._router = router_of(OPERATIONS, self._respond, lambda _: hold_open(self.app))
        if app.settings.keys_file is not None:
            check_secret(Path(app.settings.keys_file))
        self._console: Console | None = None
        self._local_console = local_console
        self._console_user = console_user
        self._stack = self.add_middlewares(self._route)

    def add_middlewares(self, site: ASGIApp) -> ASGIApp:
        """Returns the site inside the API's middlewares: request ids, metrics, traces, problem documents, admission.

        The API may be a part of the site: it notices that the middlewares have been passed.
        """
        stack: ASGIApp = AdmissionMiddleware(site, self._authenticator)
        stack = ProblemMiddleware(stack, self.app)
        if self.app.spans is not None:
            stack = TraceMiddleware(stack, self.app.spans)
        return RequestMiddleware(stack, self._request_metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if REQUEST in scope:
            scope[REQUEST].set_mount(scope)
            await self._route({**scope}, receive, send)
        else:
            await self._stack(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = scope.get(REQUEST)
        if request is not None:
            if is_console_path(request.path):
                await self._open_console()(scope, request, send)
                return
            scope.update({"path": request.path, "root_path": "", "path_params": {}})  # of a copy that is ours
        await self._router(scope, receive, send)

    def _open_console(self) -> Console:
        """Returns the console; imports it with its first request, as it needs Jinja2."""
        if self._console is None:
            try:
                from holdfast.web.console.site import Console
            except ModuleNotFoundError as error:
                remedy = "pip install 'holdfast[web]'"
                raise Refusal(404, "no_console", f"the console needs {error.name}", remedy) from None
            self._console = Console(
                self.app,
                OPERATIONS,
                self._authenticator,
                self.open_operation,
                self.run_operation,
                is_local=self._local_console,
                find_user=self._console_user,
            )
        return self._console

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────
    async def _respond(self, request: ApiRequest, operation: Operation, path: Mapping[str, str]) -> ApiResponse:
        request.template = operation.path
        caller = self._authenticator.identify_caller(request, operation.scope, operation.group)
        call = self.open_operation(request, caller, None, path, operation)
        return await self.run_operation(call, operation, lambda: self._read(call, operation))

    async def run_operation(
        self, call: RequestContext, operation: Operation, read_input: Callable[[], Awaitable[None]]
    ) -> ApiResponse:
        """Runs an authorized operation. ``read_input`` sets the query and the body of the call."""
        if not operation.is_recorded:
            await read_input()
            return await operation.handler(call)
        return await self._run_audited(call, operation, read_input)

    def authorize_call(self, request: ApiRequest, name: str, scope: KeyScope | None) -> RequestContext:
        """Returns the context of an operation with this name; raises Refusal if the caller lacks the scope."""
        caller = self._authenticator.identify_caller(request, scope)
        self._authenticator.check_scope(request, caller, name, scope)
        return self._make_context(request, caller, None, {})

    def open_operation(
        self,
        request: ApiRequest,
        caller: Principal,
        is_still_authorized: Callable[[], bool] | None,
        path: Mapping[str, str],
        operation: Operation,
    ) -> RequestContext:
        """Returns the context of an operation; raises Refusal, which is recorded, if the caller lacks its scope.

        ``is_still_authorized``: None: asks for the key that the request presents."""
        call = self._make_context(request, caller, is_still_authorized, path)
        try:
            self._authenticator.check_scope(request, caller, operation.name, operation.scope)
        except Refusal as refusal:
            if operation.is_recorded:
                self._audit.record_refusal(call, operation, refusal)
            raise
        return call

    def _make_context(
        self, request: ApiRequest, caller: Principal, is_authorized: Callable[[], bool] | None, path: Mapping[str, str]
    ) -> RequestContext:
        return RequestContext(
            app=self.app,
            caller=caller,
            request_metrics=self._request_metrics,
            pending_claims=self._pending_claims_here(),
            broadcasters=self._broadcasters,
            wait_limiter=self._wait_limiter,
            unknown_tasks=self._unknown_tasks,
            is_still_authorized=is_authorized
            or functools.partial(self._authenticator.is_still_authorized, request, caller),
            redaction=self._redaction,
            request=request,
            path=path,
            warnings=self._warnings,
        )

    async def _run_audited(
        self, call: RequestContext, operation: Operation, read_input: Callable[[], Awaitable[None]]
    ) -> ApiResponse:
        """Runs an operation that may change data; writes audit records before and after."""
        try:
            await read_input()
        except ClientDisconnected:
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
        return [*self._authenticator.list_warnings(), *self._audit.list_warnings()]

    async def _read(self, call: RequestContext, operation: Operation) -> None:
        """Parses the query and the body of the request."""
        call.query = read_query(call.request.query, operation.query)
        if operation.body is not None:
            call.body = await self._body(call.request, operation, operation.body)

    async def _body(self, request: ApiRequest, operation: Operation, schema: BodySchema) -> Mapping[str, Any]:
        settings = self.app.settings
        limit = settings.payload_limit * (_BATCH if operation.batch else BODY_PAYLOADS)
        if operation.results:
            limit = max(limit, settings.result_limit * BODY_PAYLOADS)
        timeout = settings.body_timeout.total_seconds()
        given = await read_document(request, limit, timeout, optional=operation.body_optional)
        return given if operation.raw else schema.read(given)

    def _pending_claims_here(self) -> PendingClaims:
        """Returns the pending claims of the running event loop: requests may come on several."""
        loop = asyncio.get_running_loop()
        claims = self._pending_claims.get(loop)
        if claims is None:
            claims = self._pending_claims[loop] = PendingClaims(self._remote_workers)
        return claims


@asynccontextmanager
async def hold_open(app: Holdfast) -> AsyncIterator[None]:
    """Keeps the store open. If it is away at first, requests get 503 until one of them can open it."""
    try:
        await app.__aenter__()
        leave: Callable[[], Awaitable[None]] = app.__aexit__
    except Unavailable:
        leave = app.close
    try:
        yield
    finally:
        await leave()


# ── middlewares ───────────────────────────────────────────────────────────────────────────────────────────────────────
_TROUBLE_INTERVAL = 5.0  # seconds in which the same store error is logged once
_MAX_TROUBLES = 10  # different store errors logged in that time
_MAX_HEADERS = 32 * 1024  # bytes of all headers
_MAX_PATH = 8 * 1024


class RequestMiddleware:
    """Reads the request's head, puts it into the scope, and measures the answer."""

    def __init__(self, app: ASGIApp, request_metrics: RequestMetrics) -> None:
        self._app = app
        self._request_metrics = request_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = ApiRequest(scope, receive)
        request_metrics, started = self._request_metrics, self._request_metrics.request_started()

        async def send_measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_metrics.request_answered(request, started, message["status"])
            await send(message)

        try:
            await self._app({**scope, REQUEST: request}, receive, send_measured)
        except ClientDisconnected:
            request_metrics.request_answered(request, started)
        finally:
            request_metrics.request_ended()
            for each in request.at_end:
                each()


class TraceMiddleware:
    """Puts requests for `/v1` into spans, each until its answer begins."""

    def __init__(self, app: ASGIApp, spans: Spans) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: ApiRequest | None = scope.get(REQUEST)
        if request is None or not request.path.startswith("/v1"):
            await self._app(scope, receive, send)
            return
        with ExitStack() as span:
            set_answer = span.enter_context(self._spans.request_span(request.method, request.headers))

            async def send_traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    set_answer(request.template, message["status"])
                    span.close()
                await send(message)

            await self._app(scope, receive, send_traced)


class ProblemMiddleware:
    """Answers errors by problem documents, and logs all but the client's."""

    def __init__(self, app: ASGIApp, holdfast: Holdfast) -> None:
        self._app = app
        self._events = holdfast.events
        self._clock = holdfast.clock
        self._troubles: set[str] = set()
        self._troubles_until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def send_noted(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except ClientDisconnected:
            raise
        except Exception as error:
            if is_started:
                raise
            request: ApiRequest = scope[REQUEST]
            answer = answer_to(error, request.id)
            if answer.status == 500:
                self._emit_failure(request, error)
            elif isinstance(error, Unavailable):
                self._emit_trouble(request, str(error))
            await send_answer(send, request, answer if request.show_problem is None else request.show_problem(answer))

    def _emit_failure(self, request: ApiRequest, error: Exception) -> None:
        if self._events.has_subscriber(RequestFailed):
            text = "".join(traceback.format_exception(error))
            path = request.shown_path[:200]
            self._events.emit(RequestFailed(request_id=request.id, method=request.method, path=path, error=text))

    def _emit_trouble(self, request: ApiRequest, error: str) -> None:
        """Emits an event about the store, once for many requests."""
        now = self._clock.monotonic()
        if now >= self._troubles_until:
            self._troubles_until = now + _TROUBLE_INTERVAL
            self._troubles.clear()
        if error not in self._troubles and len(self._troubles) < _MAX_TROUBLES:
            self._troubles.add(error)
            self._events.emit(StoreTrouble(service="api", error=error, retry_in=RETRY_AFTER, request_id=request.id))


class AdmissionMiddleware:
    """Refuses requests that are too large, call another host or come too often; answers preflights of browsers."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request: ApiRequest = scope[REQUEST]
        _check_size(scope, request)
        preflight = self._authenticator.admit_request(scope, request)
        if preflight is not None:
            await send_answer(send, request, preflight)
            return
        await self._app(scope, receive, send)


def _check_size(scope: Scope, request: ApiRequest) -> None:
    if len(request.path) > _MAX_PATH:
        raise Refusal(414, "path_too_long", "the path is too long", f"give at most {_MAX_PATH:,} characters")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > _MAX_HEADERS:
        raise Refusal(431, "headers_too_large", "the headers are too large", f"send at most {_MAX_HEADERS:,} bytes")


# ── the deadline of the store ─────────────────────────────────────────────────────────────────────────────────────────
class WithDeadline(Holdfast):
    """A view of an application, with a store of its own whose calls take at most ``call_deadline`` seconds.

    Everything else is the application's: settings, tasks, events, clocks, and methods that its class overrides.
    Closing the application closes this store.
    """

    def __new__(cls, app: Holdfast, call_deadline: float) -> WithDeadline:
        """Derives from the class of the application too, so that methods which that class overrides are called."""
        own = type(app)
        return super().__new__(cls if issubclass(cls, own) else type(cls.__name__, (cls, own), {}))

    def __init__(self, app: Holdfast, call_deadline: float) -> None:
        self._app = app
        self.call_deadline = call_deadline
        self.views = weakref.WeakSet()
        self._store = None
        self._making = threading.Lock()
        self._users = 0
        self._own_submitter = Submitter(self.open_store, lambda: self.settings, app.events, app.spans, app._as_stored)
        self.external_tx = ExternalTransactions(self.open_store, self._await_or_block)
        app.views.add(self)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the application that this view does not set."""
        return getattr(self._app, name)

    @property
    def _submitter(self) -> Submitter:  # type: ignore[override]
        """The submitter of this view, unless a test has replaced the application's."""
        shared = self._app._submitter
        return self._own_submitter if type(shared) is Submitter else shared

    def new_store(self, call_deadline: float | None = None) -> Store:
        """Returns a new, unopened store on the same jobs, with this deadline."""
        return self._app.new_store(self.call_deadline if call_deadline is None else call_deadline)
