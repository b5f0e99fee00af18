"""Sending an answer that comes bit by bit."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.web.responses import ApiRequest, Send, Streamed

_LAST = 1.0  # seconds for the end of a stream to be taken away


async def send_stream(send: Send, request: ApiRequest, answer: Streamed, patience: float) -> None:
    """Send the chunks until they end, nobody is there any more, the server stops, or one takes longer than ``patience``
    seconds to be taken away."""
    sending = asyncio.create_task(_send_all(send, answer, patience))
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


async def _send_all(send: Send, answer: Streamed, patience: float) -> None:
    async for chunk in answer.chunks:
        if not chunk:
            continue
        async with asyncio.timeout(patience):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _left(request: ApiRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()
