"""A proxy between the worker under test and the API: records exchanges and injects faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from holdfast.web.asgi import Api

_STOPPED = 0.1  # seconds until a signalled process has stopped
_UNAVAILABLE = b'{"type": "urn:holdfast:problem:unavailable", "title": "Away", "status": 503, "code": "unavailable"}'


class Exchange(NamedTuple):
    """One request of the worker, and its answer."""

    what: str  # "claims", "extend", "settle", "leave"
    at: float
    asked: Mapping[str, Any]
    status: int
    answered: Mapping[str, Any]


class Recorder:
    """An ASGI application around the API."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.given: list[Exchange] = []
        self.away = False
        """Answer nothing but 503."""
        self.swallow = False
        """Lose the answer of the next settlement, which is written all the same."""
        self.freeze: Callable[[], None] | None = None
        """Freezes the worker before the next claim that has brought jobs is answered."""

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/claims"):
            await self._api(scope, receive, send)
            return
        what = scope["path"].rpartition("/")[2]
        asked, answered = bytearray(), bytearray()
        answer: list[MutableMapping[str, Any]] = []

        async def heard() -> MutableMapping[str, Any]:
            message: MutableMapping[str, Any] = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def kept(message: MutableMapping[str, Any]) -> None:
            answered.extend(message.get("body", b""))
            answer.append(message)

        if self.away:
            await self._refuse(send)
            self._note(what, bytes(asked), 503, b"{}")
            return
        await self._api(scope, heard, kept)
        if not answer:  # the client has gone
            return
        lost = what == "settle" and self.swallow and answer[0]["status"] == 200
        self._note(what, bytes(asked), answer[0]["status"], bytes(answered))
        if lost:
            self.swallow = False
            await self._refuse(send)
            return
        if self.freeze is not None and what == "claims" and self.given[-1].answered.get("jobs"):
            freeze, self.freeze = self.freeze, None
            freeze()
            await asyncio.sleep(_STOPPED)
        for message in answer:
            await send(message)

    def _note(self, what: str, asked: bytes, status: int, answered: bytes) -> None:
        self.given.append(Exchange(what, time.monotonic(), _read(asked), status, _read(answered)))

    @staticmethod
    async def _refuse(send: Any) -> None:
        headers = [(b"content-type", b"application/problem+json"), (b"retry-after", b"1")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": _UNAVAILABLE})


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        read = json.loads(body)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
