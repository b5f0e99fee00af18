"""The operations of the API, in one table. Server, OpenAPI document and reference page are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from starlette.routing import Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from holdfast.app import Holdfast
from holdfast.core.models import Job
from holdfast.core.redaction import Redaction
from holdfast.core.validation import check_name
from holdfast.views.documents import JobDocument, job_document
from holdfast.web.event_broadcast import EventBroadcasters
from holdfast.web.fields import BodySchema, Field
from holdfast.web.keys import Principal
from holdfast.web.keys import Scope as KeyScope
from holdfast.web.long_poll import PendingClaims
from holdfast.web.messages import REQUEST, ApiRequest, ApiResponse, Refusal, join_words, send_answer
from holdfast.web.rate_limit import WaitLimiter
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.web.request_records import RequestMetrics, UnknownTaskLog

_REDACTED = msgspec.Raw(b"{}")
METRICS = "Metrics"
"""The group of operations that answer with metrics: a setting opens them to all."""


class RequestContext(msgspec.Struct, kw_only=True):
    """A request as an operation receives it."""

    app: Holdfast
    caller: Principal
    request_metrics: RequestMetrics
    pending_claims: PendingClaims
    broadcasters: EventBroadcasters
    wait_limiter: WaitLimiter
    unknown_tasks: UnknownTaskLog
    is_still_authorized: Callable[[], bool]  # False once the caller's key is not valid, or allows less
    redaction: Redaction
    request: ApiRequest
    path: Mapping[str, str]
    query: Mapping[str, Any] = {}
    body: Mapping[str, Any] = {}
    warnings: Callable[[], list[str]] = list
    """Warnings about the API itself."""
    changed: list[str] = []
    """Ids of the changed jobs or workers, for the audit record."""
    verdicts: Mapping[str, int] = {}
    """Number of settlements by verdict, for the audit record."""

    @property
    def remote_workers(self) -> RemoteWorkers:
        """Workers that use the HTTP API."""
        return self.pending_claims.remote_workers

    def visible_job(self, job: Job, *, own: bool = False) -> JobDocument:
        """Returns the job as the caller may see it: without payload and result if its key lacks the scope ``read``.
        ``own``: the caller has just submitted the job, and sees both."""
        document = job_document(self.redaction.redact_job(job))
        if own or self.caller.has_scope("read"):
            return document
        return msgspec.structs.replace(document, payload=_REDACTED, result=None, error=None, metadata=None)


def named_queue(call: RequestContext) -> str:
    """Returns the queue of the path; refuses one that the caller's key does not allow."""
    name = check_name("queue", call.path["queue"])
    call.caller.check_queue(name)
    return name


Handler = Callable[[RequestContext], Awaitable[ApiResponse]]


class ResponseSpec(NamedTuple):
    """An answer of an operation: document type, meaning and example.

    ``texts``: media types of its text form. ``stream``: the document is the data of each event.
    """

    document: Any
    doc: str
    example: Any = None
    texts: tuple[str, ...] = ()
    stream: bool = False


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of the API.

    ``scope``: scope that a key needs; None: no key is needed. ``batch``: the body may be that much larger;
    ``results``: it may hold results of jobs. ``raw``: its handler reads the body's fields itself.
    ``quiet``: it changes nothing that would be recorded.
    """

    name: str
    method: str
    path: str
    scope: KeyScope | None
    group: str
    summary: str
    handler: Handler
    doc: str = ""
    query: tuple[Field, ...] = ()
    headers: tuple[Field, ...] = ()
    body: BodySchema | None = None
    body_optional: bool = False
    raw: bool = False
    quiet: bool = False
    batch: bool = False
    results: bool = False
    answers: Mapping[int, ResponseSpec]
    refusals: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """Returns True if calls have audit records: they may change something."""
        return self.method != "GET" and not self.quiet


HOT_PATHS = (
    "/v1/claims",
    "/v1/claims/settle",
    "/v1/claims/extend",
    "/v1/jobs",
    "/v1/jobs/batch",
    "/v1/jobs/cancel",
    "/v1/jobs/delete",
    "/v1/jobs/replay",
    "/v1/jobs/counts",
    "/v1/jobs/{job_id}",
    "/health/live",
    "/health",
    "/health/ready",
)
"""The first routes, as the router tries one after the other. Fixed paths precede a pattern that would fit them."""

Respond = Callable[[ApiRequest, Operation, Mapping[str, str]], Awaitable[ApiResponse]]


def router_of(operations: Sequence[Operation], respond: Respond, lifespan: Lifespan[Any]) -> Router:
    """Returns the router of these operations, the most frequent first."""
    methods: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        methods.setdefault(operation.path, {})[operation.method] = operation
    routes = [Route(path, PathEndpoint(methods[path], respond)) for path in sorted(methods, key=_rank)]
    return Router(routes, redirect_slashes=False, default=_refuse_unknown_path, lifespan=lifespan)


def _rank(path: str) -> tuple[int, int]:
    return (HOT_PATHS.index(path) if path in HOT_PATHS else len(HOT_PATHS), path.count("{"))


class PathEndpoint:
    """The ASGI application of one path: answers by the operation of the method."""

    def __init__(self, methods: Mapping[str, Operation], respond: Respond) -> None:
        self._methods = {**methods, **({"HEAD": methods["GET"]} if "GET" in methods else {})}
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: ApiRequest = scope[REQUEST]
        operation = self._methods.get(request.method)
        if operation is None:
            raise self._method_not_allowed(request.method)
        path = {name: unquote(value) for name, value in scope["path_params"].items()}
        await send_answer(send, request, await self._respond(request, operation, path))

    def _method_not_allowed(self, method: str) -> Refusal:
        names = sorted(self._methods)
        header = (b"allow", ", ".join(names).encode())
        detail = f"{method[:16]!r} is not possible here"
        return Refusal(405, "method_not_allowed", detail, f"use {join_words(names)}", header)


async def _refuse_unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":  # no operation is one
        await receive()
        await send({"type": "websocket.close", "code": 1000})
        return
    remedy = "GET /openapi.json lists what there is"
    raise Refusal(404, "unknown_path", "there is nothing at this path", remedy)
