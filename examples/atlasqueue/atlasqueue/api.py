"""The HTTP API: Holdfast's own under AtlasQueue's names, and 503 for a submission of which Redis could not be told."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from holdfast import Holdfast
from holdfast.web import create_app

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
_NAMES = {"task": "type", "state": "status"}
_MAX_BODY = 1024 * 1024
_REPLACED = (b"content-type", b"content-length", b"location")


def site(app: Holdfast) -> Site:
    """The ASGI application: to be served by ``python -m atlasqueue api``."""
    api = create_app(app, checks_hosts=True)

    async def answer(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        path, method = scope.get("path", ""), scope.get("method")
        if path.split("/")[:3] != ["", "v1", "jobs"] or method not in ("GET", "POST"):
            await api(scope, receive, send)
            return
        said: list[Message] = []

        async def keep(message: Message) -> None:
            said.append(message)

        if method == "POST":
            receive = _renamed_body(receive)
        await api({**scope, "query_string": _renamed_query(scope["query_string"])}, receive, keep)
        submitted = (method, path) == ("POST", "/v1/jobs")
        for message in _renamed_answer(said) if not submitted or _was_heard(said) else _unheard(said[0]):
            await send(message)

    return answer


def _renamed_query(query: bytes) -> bytes:
    return re.sub(rb"(^|&)status=", rb"\1state=", re.sub(rb"(^|&)type=", rb"\1task=", query))


def _renamed_body(receive: Receive) -> Receive:
    """The same body with ``task`` in place of ``type``; a body that is no object, or too large, is passed on."""

    async def receive_renamed() -> Message:
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > _MAX_BODY or not message.get("more_body"):
                return {**message, "body": _renamed_fields(body) if len(body) <= _MAX_BODY else body}

    return receive_renamed


def _renamed_fields(body: bytes) -> bytes:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return body
    if "type" not in fields or "task" in fields:
        return body
    named = (("task" if name == "type" else name, value) for name, value in fields.items())
    return b"{%s}" % b",".join(msgspec.json.encode(name) + b":" + bytes(value) for name, value in named)


def _renamed_answer(said: Sequence[Message]) -> Sequence[Message]:
    """The same answer with ``type`` and ``status`` in place of ``task`` and ``state``."""
    start, body = said[0], b"".join(message.get("body", b"") for message in said)
    media = dict(start["headers"]).get(b"content-type", b"")
    if not body or b"json" not in media:
        return said
    body = msgspec.json.encode(_renamed(msgspec.json.decode(body)))
    headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return {**start, "headers": headers}, {"type": "http.response.body", "body": body}


def _renamed(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    told = {_NAMES.get(name, name): value for name, value in document.items()}
    if told.get("field") in _NAMES:  # of a problem document
        told["field"] = _NAMES[told["field"]]
    lists = {name: [_renamed(each) for each in told[name]] for name in ("jobs", "history") if name in told}
    return told | lists


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
