"""Connections: so many at once, and none that takes for ever to send its request or to take its answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sized
from datetime import timedelta
from typing import Any, NamedTuple

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.settings.settings import Settings
from holdfast.web.messages import STOPPING, Refusal, answer_to, new_request_id
from holdfast.web.rate_limit import Proxies

HEAD_MOST = 64 * 1024
"""Bytes of a request's head; what is over the limit of headers and below this one is answered by the application."""
PIPELINED_MOST = 32
"""Requests of one connection that wait for the answer before theirs."""
_GOODBYE = 1.0  # seconds


class ConnectionLimits(NamedTuple):
    """Limits of connections."""

    most: int
    most_of_address: int
    head: float  # seconds
    body: float
    proxies: Proxies = Proxies(())
    """Whose connections are those of many clients."""

    @classmethod
    def from_settings(cls, settings: Settings) -> ConnectionLimits:
        """As the settings say."""
        return cls(
            most=settings.connections,
            most_of_address=settings.connections_per_address,
            head=settings.header_timeout / timedelta(seconds=1),
            body=settings.body_timeout / timedelta(seconds=1),
            proxies=Proxies(settings.trusted_proxies),
        )


class ConnectionRegistry:
    """The connections there are, by address. Where there are as many as there may be, the one that has been silent the
    longest gives way to the next: silent clients keep no other out, such as a health probe."""

    def __init__(self, bounds: ConnectionLimits) -> None:
        self.bounds = bounds
        self._present: Counter[str] = Counter()
        self._total = 0
        self._silent: dict[Connection, None] = {}  # those without a request, the oldest first

    def add_connection(self, address: str) -> bool:
        """Count one more; False where there are too many."""
        self._total += 1
        self._present[address] += 1
        few = self._present[address] <= self.bounds.most_of_address or self.bounds.proxies.is_trusted(address)
        return few and (self._total <= self.bounds.most or self._one_gave_way())

    def _one_gave_way(self) -> bool:
        oldest = next((each for each in self._silent if not each.transport.get_write_buffer_size()), None)
        if oldest is None:
            return False
        del self._silent[oldest]
        oldest.transport.abort()
        return True

    def falls_silent(self, connection: Connection) -> None:
        """It has no request, for now."""
        self._silent[connection] = None

    def set_idle(self, connection: Connection) -> None:
        """It has one, or is gone."""
        self._silent.pop(connection, None)

    def remove_connection(self, address: str) -> None:
        """Count one less."""
        self._total -= 1
        self._present[address] -= 1
        if not self._present[address]:
            del self._present[address]


def bounded_protocol(bounds: ConnectionLimits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, within these bounds; all connections of the class share them."""
    registry = ConnectionRegistry(bounds)

    class Bounded(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.registry = registry
            super().connection_made(transport)

    return Bounded


class BoundedFlowControl(FlowControl):
    """Reads nothing more while requests wait for the answer before theirs: an answer takes far more than its request,
    and a connection is to hold few of them."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """A connection."""

    registry: ConnectionRegistry
    _stopping: asyncio.Event
    _address = ""
    url = b""
    _head_size = 0
    _fields_size = 0  # of head and trailers of the request that arrives
    _unparsed = 0  # bytes since the parser had anything whole
    _in_body = False
    _answering = False
    _deadline: asyncio.TimerHandle | None = None
    _taking_deadline: asyncio.TimerHandle | None = None

    # ── coming and going ──────────────────────────────────────────────────────────────────────────────────────
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = BoundedFlowControl(transport, self.pipeline)
        self._stopping = asyncio.Event()
        self._address = self.client[0] if self.client else ""
        if self.registry.add_connection(self._address):
            self._expect(self.registry.bounds.head)
            self.registry.falls_silent(self)
        else:
            self._refuse(503, "too_many_connections", "there are too many connections", "close some, and try again")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._fields_size = self._unparsed = 0
        extensions: dict[str, Any] = {STOPPING: self._stopping}
        self.scope["extensions"] = extensions

    def shutdown(self) -> None:
        self._stopping.set()
        super().shutdown()
        self._part()

    def _part(self) -> None:
        """End a TLS connection that is closing and has nothing left to say: a client need not answer the goodbye, and
        would be waited for, half a minute."""
        if self.scheme == "https" and self.transport.is_closing() and self.transport.get_write_buffer_size() == 0:
            self.loop.call_later(_GOODBYE, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.remove_connection(self._address)
        self.registry.set_idle(self)
        self._stop_expecting()
        self._cancel_taking()
        super().connection_lost(exc)

    # ── a request's head, and what is left of a body whose answer went before it ──────────────────────────────
    def data_received(self, data: bytes) -> None:
        if self._deadline is None and not self._answering:
            self._expect(self.registry.bounds.body if self._in_body else self.registry.bounds.head)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_MOST + len(data):  # a field, path or chunk's extension that does not end
            self.transport.abort()
        if self._deadline is not None and not self._in_body:
            self._head_size += len(data)
            if self._head_size > HEAD_MOST:
                self._refuse_head()

    def _refuse_head(self) -> None:
        if len(self.url) > HEAD_MOST // 2:
            self._refuse(414, "path_too_long", "the path is too long", f"give at most {HEAD_MOST // 8:,} characters")
        else:
            self._refuse(431, "headers_too_large", "the headers are too large", f"send at most {HEAD_MOST:,} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._unparsed = 0
        self._fields_size += len(name) + len(value)
        if self._fields_size > HEAD_MOST and (self._answering or self._in_body):
            self._break_off()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == PIPELINED_MOST:
            self._break_off()
        self._in_body = self._answering = True
        self.registry.set_idle(self)
        self._stop_expecting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._unparsed = 0
        self._stop_expecting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answering = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            self._part()
            return
        if not self._answering:
            self.registry.falls_silent(self)
        self.flow.resume_reading()

    def _break_off(self) -> None:
        """End the connection, and by the error the parsing of received bytes. A refusal would be taken for the answer
        to a request before."""
        self.transport.abort()
        raise ConnectionAbortedError

    def _expect(self, seconds: float) -> None:
        self._head_size = 0
        self._deadline = self.loop.call_later(seconds, self._is_late)

    def _stop_expecting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        if self._in_body or not self._head_size:  # nothing that could be answered has begun
            self.transport.close()
        else:
            self._refuse(408, "headers_too_slow", "the head of the request did not arrive in time", "send it at once")

    # ── the taking of an answer ───────────────────────────────────────────────────────────────────────────────
    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking_deadline = self.loop.call_later(self.registry.bounds.body, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_taking()

    def _cancel_taking(self) -> None:
        if self._taking_deadline is not None:
            self._taking_deadline.cancel()
            self._taking_deadline = None

    # ── refusals before there is a request ────────────────────────────────────────────────────────────────────
    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", "this is no valid HTTP request", "send one")

    def _refuse(self, status: int, code: str, detail: str, remedy: str) -> None:
        if self.transport.is_closing():
            return
        request_id = new_request_id()
        answer = answer_to(Refusal(status, code, detail, remedy), request_id)
        head = [
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\n".encode(),
            b"content-type: " + answer.media + b"\r\n",
            f"content-length: {len(answer.body)}\r\nx-request-id: {request_id}\r\n".encode(),
            b"x-content-type-options: nosniff\r\nconnection: close\r\n",
            b"retry-after: 2\r\n" if status == 503 else b"",
            b"\r\n",
        ]
        self.transport.write(b"".join([*head, answer.body]))
        self.transport.close()


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
