"""A request and its answer: headers are bytes, read once and written once."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec

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
    once the whole body has arrived; ``over`` is called when nothing more is to be sent, however it ended.
    """

    __slots__ = (
        "added",
        "client",
        "headers",
        "id",
        "is_read",
        "method",
        "over",
        "path",
        "query",
        "receive",
        "repeated",
        "root_path",
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
        self.over: list[Callable[[], None]] = []
        self.set_mount(scope)
        self.is_read = False
        self.template: str | None = None
        self.headers: dict[bytes, bytes] = {}
        self.repeated: set[bytes] = set()
        for name, value in scope["headers"]:
            if name in self.headers:
                self.repeated.add(name)
            else:
                self.headers[name] = value
        said = self.headers.get(b"x-request-id")
        self.id = said.decode() if said is not None and _REQUEST_ID.fullmatch(said) else new_request_id()

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
    """Words for a sentence: ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
