"""Reading a body: at most so many bytes, in at most so long, of JSON in UTF-8 and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from holdfast.core.errors import Invalid
from holdfast.core.validation import DEPTH_LIMIT
from holdfast.tasks.codec import Words, decode_object
from holdfast.web.responses import ApiRequest, Header, Refusal

CLOSE: Header = (b"connection", b"close")
"""With an answer to a body that was not read to its end: what follows on the connection is no request."""
BODY_PAYLOADS = 4
"""A body with one payload may be as long as so many payloads."""
MAX_DRAINED = 16 * 1024 * 1024
"""Bytes of a refused body that are still read."""
_DRAIN_TIMEOUT = 2.0  # seconds
_AROUND = 4  # levels a body may have around a payload


class Gone(Exception):
    """The client went away before its request was complete: there is no client to answer."""


async def read_document(request: ApiRequest, limit: int, patience: float, *, optional: bool) -> dict[str, Any]:
    """The JSON object of the body. ``patience``: seconds for it to arrive. ``optional``: none at all is ``{}``."""
    body = await read_body(request, limit, patience)
    return {} if optional and not body else decode_body(body, limit)


async def read_body(request: ApiRequest, limit: int, patience: float) -> bytes:
    """Reads the body of a request for JSON; refuses another media type."""
    if b"content-encoding" in request.headers:
        raise Refusal(415, "unsupported_encoding", "a compressed body is not read", "send it as it is", CLOSE)
    media, announced = request.headers.get(b"content-type", b""), not is_bare(request)
    if announced:
        _check_media(media)
    body = await _read(request, limit, patience)
    if body and not announced:
        _check_media(media)
    return body


def decode_body(body: bytes, limit: int) -> dict[str, Any]:
    """The JSON object of a body: each key once, and nothing that other JSON parsers read otherwise."""
    if not body:
        raise Invalid("body", Words("nothing"), "send a JSON object", code="body_required")
    return decode_object(body, limit, "body", DEPTH_LIMIT + _AROUND)


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


async def _read(request: ApiRequest, limit: int, patience: float) -> bytes:
    announced = request.headers.get(b"content-length", b"0").strip()
    if announced.isdigit() and (len(announced) > 12 or int(announced) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(patience):
            return await _gather(request, limit)
    except TimeoutError:
        detail = f"the body did not arrive within {patience:g} s"
        raise Refusal(408, "body_too_slow", detail, "send it at once", CLOSE) from None


async def _gather(request: ApiRequest, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise Gone
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
