"""ASGI middlewares around the router: requests and their metrics, traces, problem documents, admission."""

from __future__ import annotations

import traceback
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.app import Holdfast
from holdfast.core.errors import Unavailable
from holdfast.core.events import RequestFailed, StoreTrouble
from holdfast.telemetry.spans import Spans
from holdfast.web.authentication import Authenticator
from holdfast.web.problems import RETRY_AFTER, answer_to
from holdfast.web.request_body import Gone
from holdfast.web.request_records import RequestMetrics
from holdfast.web.responses import REQUEST, ApiRequest, Refusal
from holdfast.web.streaming import send_answer

_TROUBLE_INTERVAL = 5.0  # seconds in which the same trouble with the store is logged once,
_MAX_TROUBLES = 10  # and so many different ones
_MAX_HEADERS = 32 * 1024  # bytes of all headers
_MAX_PATH = 8 * 1024


class RequestMiddleware:
    """Reads the request's head, puts it into the scope, and measures the answer."""

    def __init__(self, app: ASGIApp, meter: RequestMetrics) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = ApiRequest(scope, receive)
        meter, started = self._meter, self._meter.request_started()

        async def send_measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                meter.request_answered(request, started, message["status"])
            await send(message)

        try:
            await self._app({**scope, REQUEST: request}, receive, send_measured)
        except Gone:
            meter.request_answered(request, started)
        finally:
            meter.request_ended()
            for each in request.over:
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
        except Gone:
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
            await send_answer(send, request, answer)

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

    def __init__(self, app: ASGIApp, gate: Authenticator) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request: ApiRequest = scope[REQUEST]
        _check_size(scope, request)
        preflight = self._gate.authenticate_request(scope, request)
        if preflight is not None:
            await send_answer(send, request, preflight)
            return
        await self._app(scope, receive, send)


def _check_size(scope: Scope, request: ApiRequest) -> None:
    if len(request.path) > _MAX_PATH:
        raise Refusal(414, "path_too_long", "the path is too long", f"give at most {_MAX_PATH:,} characters")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > _MAX_HEADERS:
        raise Refusal(431, "headers_too_large", "the headers are too large", f"send at most {_MAX_HEADERS:,} bytes")
