"""The HTTP API: Holdfast's own, and AtlasQueue's answer to a submission of which Redis could not be told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from holdfast import Holdfast
from holdfast.web.asgi import Api

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Site = Callable[[Mapping[str, Any], Receive, Send], Awaitable[None]]

RETRY_AFTER = b"2"
_PROBLEM = {
    "type": "urn:atlasqueue:problem:unheard",
    "title": "Service Unavailable",
    "status": 503,
    "detail": "the job is stored, and Redis could not be told of it: a sweep will find it",
    "code": "unheard",
    "remedy": "send it again with the same Idempotency-Key: it stays one job",
}
_REPLACED = (b"content-type", b"content-length", b"location")


def site(app: Holdfast) -> Site:
    """The ASGI application: to be served by ``python -m atlasqueue api``."""
    api = Api(app, checks_hosts=True)

    async def answer(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if (scope.get("method"), scope.get("path")) != ("POST", "/v1/jobs"):
            await api(scope, receive, send)
            return
        said: list[Message] = []

        async def keep(message: Message) -> None:
            said.append(message)

        await api(scope, receive, keep)
        for message in said if _was_heard(said) else _unheard(said[0]):
            await send(message)

    return answer


def _was_heard(said: Sequence[Message]) -> bool:
    """Whether the answer is any but that of a job of which Redis could not be told."""
    body = b"".join(message.get("body", b"") for message in said)
    return b'"wake_up"' not in body or "wake_up" not in msgspec.json.decode(body)


def _unheard(start: Message) -> Sequence[Message]:
    """503 in place of the answer that begins so."""
    body = msgspec.json.encode({**_PROBLEM, "request_id": dict(start["headers"])[b"x-request-id"].decode()})
    headers = [
        *((name, value) for name, value in start["headers"] if name not in _REPLACED),
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", RETRY_AFTER),
    ]
    return {**start, "status": 503, "headers": headers}, {"type": "http.response.body", "body": body}
