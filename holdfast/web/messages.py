"""HTTP messages: a request with its body, and its answer, problem documents included.

Headers are bytes, read once and written once.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, MutableMapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.errors import (
    ConfigError,
    Conflict,
    HoldfastError,
    Invalid,
    NotFound,
    QueueFull,
    TooBroad,
    Unavailable,
    quote_value,
)
from holdfast.core.validation import MAX_NESTING
from holdfast.tasks.codec import RawText, decode_object
from holdfast.tasks.signature import Argument

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
PROBLEM = b"application/problem+json"
TEXT = b"text/plain; charset=utf-8"
REQUEST = "holdfast.request"
"""The key of a scope under which its request stands."""
STOPPING = "holdfast.stopping"
"""The extension by which our server says that it stops: an event."""
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./:-]*")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class ApiRequest:
    """A client's request. ``headers`` hold the first of each name; ``repeated`` names headers that came more than once.
    ``id`` is the client's own X-Request-Id where that is a sensible one; ``added`` goes to the answer's headers;
    ``template`` is the path of the operation that was found; ``stopping`` is set when a server that says so stops;
    ``root_path`` is where the API is mounted, ``path`` the rest as ``route_path`` returns it; ``is_read`` is True
    once the whole body has arrived; ``at_end`` is called when nothing more is to be sent, however it ended.
    ``show_problem`` turns a problem document into a page, for browsers.
    """

    __slots__ = (
        "added",
        "client",
        "headers",
        "id",
        "is_read",
        "method",
        "at_end",
        "path",
        "query",
        "receive",
        "repeated",
        "root_path",
        "show_problem",
        "stopping",
        "template",
    )

    def __init__(self, scope: Mapping[str, Any], receive: Receive) -> None:
        self.method: str = scope["method"]
        self.query: bytes = scope.get("query_string", b"")
        self.client: str = (scope.get("client") or ("",))[0]
        self.receive = receive
        self.stopping: asyncio.Event | None = (scope.get("extensions") or {}).get(STOPPING)
        self.added: list[Header] = []
        self.at_end: list[Callable[[], None]] = []
        self.set_mount(scope)
        self.is_read = False
        self.show_problem: Callable[[ApiResponse], ApiResponse] | None = None
        self.template: str | None = None
        self.headers: dict[bytes, bytes] = {}
        self.repeated: set[bytes] = set()
        for name, value in scope["headers"]:
            if name in self.headers:
                self.repeated.add(name)
            else:
                self.headers[name] = value
        given = self.headers.get(b"x-request-id")
        self.id = given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else new_request_id()

    def set_mount(self, scope: Mapping[str, Any]) -> None:
        """Reads from the scope where the API is mounted: a site may have middlewares of the API around itself."""
        self.root_path: str = scope.get("root_path", "").rstrip("/")
        self.path = route_path(scope)

    @property
    def shown_path(self) -> str:
        """The path for people."""
        return unquote(self.path)


def route_path(scope: Mapping[str, Any]) -> str:
    """Returns the path below where the application is mounted, percent-encoded: ``%2F`` in a segment is part of it."""
    root = scope.get("root_path", "").rstrip("/")
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(scope["path"])
    if root:
        for prefix in (root, quote(root)):
            if path == prefix or path.startswith(prefix + "/"):
                path = path[len(prefix) :]
                break
    if _PLAIN_PATH.fullmatch(path):
        return path
    return "/" + "/".join(quote(unquote(segment), safe="") for segment in path[1:].split("/"))


def new_request_id() -> str:
    """A name for a request that brought none."""
    return os.urandom(8).hex()


class ApiResponse(msgspec.Struct, frozen=True):
    """A response."""

    status: int
    body: bytes = b""
    media: bytes = JSON
    headers: tuple[Header, ...] = ()


class Streamed(ApiResponse, frozen=True, kw_only=True):
    """A streamed response, until the chunks end, the client goes or the server stops.

    ``chunk_timeout``: seconds the client may take for a chunk.
    """

    chunks: AsyncGenerator[bytes, None]
    chunk_timeout: float


class Refusal(Exception):
    """A request that is refused as HTTP, before its meaning matters."""

    def __init__(self, status: int, code: str, detail: str, remedy: str, *headers: Header) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.remedy, self.headers = status, code, detail, remedy, headers


_encode = msgspec.json.Encoder().encode


def json_response(status: int, value: Any, *headers: Header) -> ApiResponse:
    """An answer of JSON."""
    return ApiResponse(status, _encode(value), JSON, headers)


def join_words(words: Sequence[str]) -> str:
    """Joins words for a sentence: ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ── sending answers ───────────────────────────────────────────────────────────────────────────────────────────────────
_LAST = 1.0  # seconds for the end of a stream to be taken away
_SECURE = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


async def send_answer(send: Send, request: ApiRequest, answer: ApiResponse) -> None:
    """Sends the answer with the headers that every answer has."""
    await send(_start(request, answer))
    if isinstance(answer, Streamed):
        await send_stream(send, request, answer)
        return
    body = b"" if request.method == "HEAD" else answer.body
    if CLOSE in answer.headers and answer.status != 408:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await drain(request)
        body = b""
    await send({"type": "http.response.body", "body": body})


def common_headers(request: ApiRequest, own: Container[bytes]) -> list[Header]:
    """Returns the headers of every answer, but for its ``own``, which it has already."""
    headers = (*_SECURE, (b"x-request-id", request.id.encode()), *request.added)
    return [header for header in headers if header[0] not in own]


def _start(request: ApiRequest, answer: ApiResponse) -> dict[str, Any]:
    own = {name for name, _ in answer.headers}
    headers = [*common_headers(request, own), *answer.headers]
    if answer.status != 204:
        headers.append((b"content-type", answer.media))
    if answer.status != 204 and not isinstance(answer, Streamed):
        headers.append((b"content-length", str(len(answer.body)).encode()))
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def send_stream(send: Send, request: ApiRequest, answer: Streamed) -> None:
    """Sends the chunks until they end, the client disconnects, the server stops, or the client takes one too slowly."""
    sending = asyncio.create_task(_send_all(send, answer))
    ended = asyncio.create_task(wait_request_end(request))
    try:
        await asyncio.wait([sending, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (sending, ended):
            each.cancel()
        await asyncio.wait([sending, ended])
        await answer.chunks.aclose()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST):
            await send({"type": "http.response.body", "body": b""})
    if not sending.cancelled() and not isinstance(sending.exception(), TimeoutError):
        sending.result()


async def _send_all(send: Send, answer: Streamed) -> None:
    async for chunk in answer.chunks:
        if not chunk:
            continue
        async with asyncio.timeout(answer.chunk_timeout):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def wait_request_end(request: ApiRequest) -> None:
    """Returns when the client has gone, or the server stops."""
    ends = [asyncio.ensure_future(wait_disconnected(request))]
    if request.stopping is not None:
        ends.append(asyncio.ensure_future(_is_set(request.stopping)))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in ends:
            each.cancel()


async def wait_disconnected(request: ApiRequest) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()


# ── problem documents ─────────────────────────────────────────────────────────────────────────────────────────────────
RETRY_AFTER = 2
"""Seconds after which a client may try again where the store was away."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its remedy (RFC 9457)."""

    type: Annotated[str, Meta(description="A name for the kind of problem.", examples=["urn:holdfast:problem:invalid"])]
    title: Annotated[str, Meta(description="The status in words.", examples=["Unprocessable Content"])]
    status: Annotated[int, Meta(examples=[422])]
    detail: Annotated[
        str,
        Meta(
            description="What is wrong this time, for people.",
            examples=["priority: 101 is not valid; give a whole number from -100 to 100"],
        ),
    ]
    code: Annotated[str, Meta(description="The stable word for it, for programs.", examples=["invalid"])]
    request_id: Annotated[str, Meta(description="As in the header X-Request-Id.", examples=["6f1c2a9e0b7d4c35"])]
    field: Annotated[
        str | UnsetType, Meta(description="What is wrong, where it is a value.", examples=["priority"])
    ] = UNSET
    value: Annotated[
        str | UnsetType, Meta(description="The value, quoted and cut to 64 characters.", examples=["101"])
    ] = UNSET
    remedy: Annotated[
        str | UnsetType, Meta(description="What to do.", examples=["give a whole number from -100 to 100"])
    ] = UNSET
    stored: Annotated[
        list[str | None] | UnsetType,
        Meta(
            description="There where a batch was refused after it was stored, or a part of it: the ids of the jobs it "
            "stored, in its order, null for those it did not store. Send those again, once the conflict that `detail` "
            "names is mended, and none of the others."
        ),
    ] = UNSET


_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # older Pythons call them otherwise
CHECK_ID = "check the id or name; it may also be in another store"  # the remedy for NotFound outside of the API
_UNAVAILABLE = "the store is away, busy or full"
_MISSET = "the settings of Holdfast and its store do not go together as they are: the log has why under this request_id"
_BROKEN = "something went wrong in Holdfast itself; its log has the cause under this request_id"


def answer_to(error: Exception, request_id: str) -> ApiResponse:
    """The answer to a request that ended in this error.

    What is not about the request tells nothing of itself: addresses, files, users and statements are in the log.
    """
    match error:
        case Refusal():
            return problem_response(
                error.status, error.code, error.detail, request_id, *error.headers, remedy=error.remedy
            )
        case Invalid():
            field = error.field.place if isinstance(error.field, Argument) else error.field
            given = {"field": field, "value": quote_value(error.value), "remedy": error.remedy}
            return problem_response(error.http_status, error.code, str(error), request_id, **given)
        case Conflict() if any(error.stored):
            return problem_response(error.http_status, error.code, str(error), request_id, stored=list(error.stored))
        case Unavailable():
            return _unavailable(error, request_id)
        case TooBroad():
            return problem_response(error.http_status, error.code, str(error), request_id, remedy=error.remedy)
        case NotFound():
            remedy = "GET /v1/jobs, queues, workers, schedules and limits of Holdfast's API list what there is"
            return problem_response(error.http_status, error.code, str(error), request_id, remedy=remedy)
        case ConfigError():
            remedy = "tell its operator; `holdfast doctor` says what is wrong"
            return problem_response(500, error.code, _MISSET, request_id, remedy=remedy)
        case QueueFull():
            retry = (b"retry-after", str(RETRY_AFTER).encode())
            remedy = "send it again later; more workers empty the queue sooner"
            return problem_response(error.http_status, error.code, str(error), request_id, retry, remedy=remedy)
        case HoldfastError() if error.http_status < 500:
            return problem_response(error.http_status, error.code, str(error), request_id)
    return problem_response(500, "internal", _BROKEN, request_id, remedy="tell its operator")


def _unavailable(error: Unavailable, request_id: str) -> ApiResponse:
    retry = (b"retry-after", str(RETRY_AFTER).encode())
    detail = f"{_UNAVAILABLE}; {error.outcome}" if error.outcome else _UNAVAILABLE
    if any(error.stored):
        remedy, stored = "send those again whose place in stored is null, and none of the others", list(error.stored)
        return problem_response(
            503, error.code, f"{detail}; a part is stored", request_id, retry, remedy=remedy, stored=stored
        )
    remedy = "try again; with an idempotency key or an id that is harmless"
    return problem_response(503, error.code, detail, request_id, retry, remedy=remedy)


def problem_response(
    status: int, code: str, detail: str, request_id: str, *headers: Header, **given: Any
) -> ApiResponse:
    """A problem document as an answer."""
    body = Problem(
        type=f"urn:holdfast:problem:{code}",
        title=_TITLES.get(status) or HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        request_id=request_id,
        **given,
    )
    return ApiResponse(status, _encode(body), PROBLEM, headers)


# ── bodies of requests ────────────────────────────────────────────────────────────────────────────────────────────────
CLOSE: Header = (b"connection", b"close")
"""Header for an answer before the body was read to its end: the connection cannot be used for another request."""
BODY_PAYLOADS = 4
"""A body with one payload may be as long as so many payloads."""
MAX_DRAINED = 16 * 1024 * 1024
"""Bytes of a refused body that are still read."""
_DRAIN_TIMEOUT = 2.0  # seconds
_AROUND = 4  # levels a body may have around a payload
_MAX_FIELDS = 200  # of a form


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete: there is no client to answer."""


async def read_document(request: ApiRequest, limit: int, timeout: float, *, optional: bool) -> dict[str, Any]:
    """The JSON object of the body. ``timeout``: seconds for it to arrive. ``optional``: none at all is ``{}``."""
    body = await read_body(request, limit, timeout)
    return {} if optional and not body else decode_body(body, limit)


async def read_body(request: ApiRequest, limit: int, timeout: float) -> bytes:
    """Reads the body of a request for JSON; refuses another media type."""
    if b"content-encoding" in request.headers:
        raise Refusal(415, "unsupported_encoding", "a compressed body is not read", "send it as it is", CLOSE)
    media, announced = request.headers.get(b"content-type", b""), not is_bare(request)
    if announced:
        _check_media(media)
    body = await _read(request, limit, timeout)
    if body and not announced:
        _check_media(media)
    return body


async def read_form(request: ApiRequest, limit: int, timeout: float) -> list[tuple[str, str]]:
    """Returns the fields of a form that a browser sends, in their order."""
    media = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media != b"application/x-www-form-urlencoded":
        raise Refusal(415, "unsupported_media_type", "the body is no form", "send the form of the page", CLOSE)
    body = await _read(request, limit, timeout)
    try:
        return parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise Invalid("body", RawText(f"{len(body):,} bytes"), "percent-encode UTF-8") from None


def decode_body(body: bytes, limit: int) -> dict[str, Any]:
    """The JSON object of a body: each key once, and nothing that other JSON parsers read otherwise."""
    if not body:
        raise Invalid("body", RawText("nothing"), "send a JSON object", code="body_required")
    return decode_object(body, limit, "body", MAX_NESTING + _AROUND)


def is_bare(request: ApiRequest) -> bool:
    """Returns True if the request announces no body."""
    length = request.headers.get(b"content-length", b"0").strip()
    return length in (b"", b"0") and b"transfer-encoding" not in request.headers


def _check_media(header: bytes) -> None:
    media, _, rest = header.partition(b";")
    parameter = rest.strip().lower().replace(b'"', b"")
    if media.strip().lower() != b"application/json" or parameter not in (b"", b"charset=utf-8"):
        detail = "the body's Content-Type is not application/json"
        raise Refusal(415, "unsupported_media_type", detail, "send Content-Type: application/json", CLOSE)


async def _read(request: ApiRequest, limit: int, timeout: float) -> bytes:
    announced = request.headers.get(b"content-length", b"0").strip()
    if announced.isdigit() and (len(announced) > 12 or int(announced) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout):
            return await _gather(request, limit)
    except TimeoutError:
        detail = f"the body did not arrive within {timeout:g} s"
        raise Refusal(408, "body_too_slow", detail, "send it at once", CLOSE) from None


async def _gather(request: ApiRequest, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        request.is_read = not message.get("more_body", False)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if request.is_read:
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def drain(request: ApiRequest) -> None:
    """Reads the rest of a refused body, within bounds: closing before it arrives would reset the answer."""
    left = MAX_DRAINED
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT):
            while not request.is_read and left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                request.is_read = not message.get("more_body", False)


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "too_large", f"the body is over {limit:,} bytes", f"send at most {limit:,} bytes", CLOSE)
