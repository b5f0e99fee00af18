"""Operations: what can be asked, in one table. Server, OpenAPI document and reference page are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.app import Holdfast
from holdfast.core.models import Job
from holdfast.core.redaction import Redaction
from holdfast.core.validation import check_name
from holdfast.views.documents import JobDocument, job_document
from holdfast.web.event_broadcast import EventBroadcasters
from holdfast.web.fields import Field, Form
from holdfast.web.http_metrics import RequestMetrics
from holdfast.web.long_poll import ClaimWaiters
from holdfast.web.principal import Principal, Scope
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.web.responses import ApiRequest, ApiResponse, Refusal, listed
from holdfast.web.unknown_tasks import UnknownTaskLog
from holdfast.web.wait_limits import WaitLimiter

_UNTOLD = msgspec.Raw(b"{}")
METRICS = "Metrics"
"""The group of operations that answer with metrics: a setting opens them to everybody."""


class RequestContext(msgspec.Struct, kw_only=True):
    """One request, understood: what an operation works on."""

    app: Holdfast
    caller: Principal
    meter: RequestMetrics
    hall: ClaimWaiters
    feeds: EventBroadcasters
    waiting: WaitLimiter
    strangers: UnknownTaskLog
    still: Callable[[], bool]  # whether who asks may still ask
    redaction: Redaction
    request: ApiRequest
    path: Mapping[str, str]
    query: Mapping[str, Any] = {}
    body: Mapping[str, Any] = {}
    warnings: Callable[[], list[str]] = list
    """What is to be seen to about the API itself."""
    changed: list[str] = []
    """Ids of the jobs, or workers, it changed: for the record."""
    verdicts: Mapping[str, int] = {}
    """Of settlements: how many came to what, for the record too."""

    @property
    def fleet(self) -> RemoteWorkers:
        """The workers over HTTP."""
        return self.hall.fleet

    def shown(self, job: Job, *, own: bool = False) -> JobDocument:
        """The job as this caller may see it. What others put in or got out is for those who may read; ``own``: it is
        the caller's, who put it in just now."""
        told = job_document(self.redaction.job(job))
        if own or self.caller.may("read"):
            return told
        return msgspec.structs.replace(told, payload=_UNTOLD, result=None, error=None, metadata=None)


def named_queue(call: RequestContext) -> str:
    """The queue the path names, if it is the caller's."""
    name = check_name("queue", call.path["queue"])
    call.caller.check_queue(name)
    return name


Handler = Callable[[RequestContext], Awaitable[ApiResponse]]


class ResponseSpec(NamedTuple):
    """One answer an operation may give: the type of its document, what it says, an example of it.

    ``texts``: media types in which the same may be told as text. ``stream``: it is the data of each event."""

    document: Any
    doc: str
    example: Any = None
    texts: tuple[str, ...] = ()
    stream: bool = False


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be asked.

    ``scope``: what a key must be allowed to do; None: anybody may ask. ``batch``: the body may be that much larger;
    ``results``: it may hold results of jobs. ``raw``: its handler reads the body's fields itself.
    ``quiet``: it changes nothing that would be recorded.
    """

    name: str
    method: str
    path: str
    scope: Scope | None
    group: str
    summary: str
    handler: Handler
    doc: str = ""
    query: tuple[Field, ...] = ()
    headers: tuple[Field, ...] = ()
    body: Form | None = None
    body_optional: bool = False
    raw: bool = False
    quiet: bool = False
    batch: bool = False
    results: bool = False
    answers: Mapping[int, ResponseSpec]
    refusals: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.removeprefix("/").split("/"))


class Routes:
    """Finds the operation a request means."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        self._literal: dict[tuple[str, ...], dict[str, Operation]] = {}
        self._patterns: dict[int, list[tuple[tuple[str, ...], dict[str, Operation]]]] = {}
        for operation in operations:
            self._methods(operation.segments)[operation.method] = operation

    def _methods(self, segments: tuple[str, ...]) -> dict[str, Operation]:
        if not any(part.startswith("{") for part in segments):
            return self._literal.setdefault(segments, {})
        patterns = self._patterns.setdefault(len(segments), [])
        for pattern, methods in patterns:
            if pattern == segments:
                return methods
        patterns.append((segments, {}))
        return patterns[-1][1]

    def find(self, method: str, segments: tuple[str, ...]) -> tuple[Operation, dict[str, str]]:
        """The operation and what stands in the places of its path; Refusal 404 or 405. Words go before places."""
        allowed: set[str] = set()
        for methods, path in self._matches(segments):
            operation = methods.get("GET" if method == "HEAD" else method)
            if operation is not None:
                return operation, path
            allowed.update(methods)
        if not allowed:
            remedy = "GET /openapi.json lists what there is"
            raise Refusal(404, "unknown_path", "there is nothing at this path", remedy)
        names = sorted(allowed)
        header = (b"allow", ", ".join(names).encode())
        remedy = f"use {listed(names)}"
        raise Refusal(405, "method_not_allowed", f"{method[:16]!r} is not possible here", remedy, header)

    def _matches(self, segments: tuple[str, ...]) -> list[tuple[dict[str, Operation], dict[str, str]]]:
        found: list[tuple[dict[str, Operation], dict[str, str]]] = []
        literal = self._literal.get(segments)
        if literal is not None:
            found.append((literal, {}))
        for pattern, methods in self._patterns.get(len(segments), ()):
            path = _fitted(pattern, segments)
            if path is not None:
                found.append((methods, path))
        return found


def _fitted(pattern: tuple[str, ...], segments: tuple[str, ...]) -> dict[str, str] | None:
    path: dict[str, str] = {}
    for part, segment in zip(pattern, segments, strict=True):
        if part.startswith("{") and segment:
            path[part[1:-1]] = segment
        elif part != segment:
            return None
    return path
