"""Sends answers: whole, or chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from typing import Any

from holdfast.web.request_body import CLOSE, drain
from holdfast.web.responses import ApiRequest, ApiResponse, Header, Send, Streamed

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
    headers = [
        *common_headers(request, own),
        *answer.headers,
    ]
    if answer.status != 204:
        headers.append((b"content-type", answer.media))
    if answer.status != 204 and not isinstance(answer, Streamed):
        headers.append((b"content-length", str(len(answer.body)).encode()))
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def send_stream(send: Send, request: ApiRequest, answer: Streamed) -> None:
    """Sends the chunks until they end, the client disconnects, the server stops, or the client takes one too slowly."""
    sending = asyncio.create_task(_send_all(send, answer))
    ends = [asyncio.create_task(_left(request))]
    if request.stopping is not None:
        ends.append(asyncio.create_task(_is_set(request.stopping)))
    try:
        await asyncio.wait([sending, *ends], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (sending, *ends):
            each.cancel()
        await asyncio.wait([sending, *ends])
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


async def _left(request: ApiRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()
