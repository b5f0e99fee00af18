"""Limits of connections: their number, and timeouts for reading requests and writing answers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sized
from datetime import timedelta
from typing import Any, NamedTuple

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.settings.settings import Settings
from holdfast.web.messages import STOPPING, Refusal, answer_to, new_request_id
from holdfast.web.rate_limit import Proxies

MAX_HEAD = 64 * 1024
"""Bytes of a request's head. The application answers heads below this and over its limit of headers."""
MAX_PIPELINED = 32
"""Pipelined requests of one connection that may wait for earlier answers."""
_TLS_CLOSE_TIMEOUT = 1.0  # seconds
_ACCEPT_PAUSE = 0.2  # seconds until the next try to accept a connection


class ConnectionLimits(NamedTuple):
    """Limits of connections."""

    max_connections: int
    max_per_address: int
    head: float  # seconds
    body: float
    proxies: Proxies = Proxies(())
    """Trusted proxies: exempt from ``max_per_address``, since they carry many clients."""

    @classmethod
    def from_settings(cls, settings: Settings) -> ConnectionLimits:
        """Returns the limits of the settings."""
        return cls(
            max_connections=settings.connections,
            max_per_address=settings.connections_per_address,
            head=settings.header_timeout / timedelta(seconds=1),
            body=settings.body_timeout / timedelta(seconds=1),
            proxies=Proxies(settings.trusted_proxies),
        )


class ConnectionRegistry:
    """Open connections, counted by address. At the limit, the connection that has been idle longest is closed for a new
    one: idle clients cannot block others, such as a health probe."""

    def __init__(self, bounds: ConnectionLimits) -> None:
        self.bounds = bounds
        self._by_address: Counter[str] = Counter()
        self._total = 0
        self._idle: dict[Connection, None] = {}  # connections without a request, longest idle first

    def add_connection(self, address: str) -> bool:
        """Counts a new connection; returns False if there are too many."""
        self._total += 1
        self._by_address[address] += 1
        few = self._by_address[address] <= self.bounds.max_per_address or self.bounds.proxies.is_trusted(address)
        return few and (self._total <= self.bounds.max_connections or self._close_oldest_idle())

    def _close_oldest_idle(self) -> bool:
        oldest = next((each for each in self._idle if each.close_idle()), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        return True

    def set_idle(self, connection: Connection) -> None:
        """Marks a connection as idle: it has no request."""
        self._idle[connection] = None

    def set_active(self, connection: Connection) -> None:
        """Marks a connection as active: it has a request, or is closed."""
        self._idle.pop(connection, None)

    def remove_connection(self, address: str) -> None:
        """Stops counting a connection."""
        self._total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def bounded_protocol(bounds: ConnectionLimits) -> type[Connection]:
    """Returns uvicorn's protocol class with these limits, shared by all connections of the class."""

    class Bounded(Connection):
        registry = ConnectionRegistry(bounds)

    return Bounded


class BoundedFlowControl(FlowControl):
    """Flow control that pauses reading while pipelined requests wait: answers take more memory than requests."""

    def __init__(self, transport: asyncio.Transport, unsent: Sized) -> None:
        super().__init__(transport)
        self._unsent = unsent

    def resume_reading(self) -> None:
        if not self._unsent:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """A connection."""

    registry: ConnectionRegistry
    handshake: asyncio.Task[None] | None = None
    """The TLS handshake, which began before the connection was made."""
    _stopping: asyncio.Event
    _address = ""
    url = b""
    _head_size = 0
    _fields_size = 0  # bytes of header fields and trailers of the current request
    _unparsed = 0  # bytes since the parser last completed an element
    _in_body = False
    _answering = False
    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    # ── opening and closing ──────────────────────────────────────────────────────────────────────────────────────
    async def shake_hands(self, accepted: socket.socket, address: str, context: ssl.SSLContext) -> None:
        """Makes a TLS connection of an accepted socket. It counts from here on, and is idle."""
        self._address = address
        admitted = self.registry.add_connection(address)
        try:
            if admitted:
                self.registry.set_idle(self)
                await self.loop.connect_accepted_socket(
                    lambda: self, accepted, ssl=context, ssl_handshake_timeout=self.registry.bounds.head
                )
        except OSError:  # not TLS, too slow, or gone
            return
        finally:
            if not admitted:
                accepted.close()
            if self.scheme is None:  # else it was made, and is counted until it is lost
                self.registry.set_active(self)
                self.registry.remove_connection(address)

    def close_idle(self) -> bool:
        """Closes the connection for another one. Returns False if it has something to send."""
        if self.scheme is None and self.handshake is not None:
            return self.handshake.cancel()
        if self.transport.get_write_buffer_size():
            return False
        self.transport.abort()
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = BoundedFlowControl(transport, self.pipeline)
        self._stopping = asyncio.Event()
        self._address = self.client[0] if self.client else ""
        if self.handshake is not None or self.registry.add_connection(self._address):
            self._start_deadline(self.registry.bounds.head)
            self.registry.set_idle(self)
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
        self._abort_closing_tls()

    def _abort_closing_tls(self) -> None:
        """Aborts a closing TLS connection whose data is sent, after a moment: else it waits half a minute for clients
        that do not answer the close."""
        if self.scheme == "https" and self.transport.is_closing() and self.transport.get_write_buffer_size() == 0:
            self.loop.call_later(_TLS_CLOSE_TIMEOUT, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.remove_connection(self._address)
        self.registry.set_active(self)
        self._cancel_deadline()
        self._cancel_write_deadline()
        super().connection_lost(exc)

    # ── request heads, and bodies that are read after their answer ──────────────────────────────
    def data_received(self, data: bytes) -> None:
        if self._deadline is None and not self._answering:
            self._start_deadline(self.registry.bounds.body if self._in_body else self.registry.bounds.head)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD + len(data):  # an endless field, path or chunk extension
            self.transport.abort()
        if self._deadline is not None and not self._in_body:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse_head()

    def _refuse_head(self) -> None:
        if len(self.url) > MAX_HEAD // 2:
            self._refuse(414, "path_too_long", "the path is too long", f"give at most {MAX_HEAD // 8:,} characters")
        else:
            self._refuse(431, "headers_too_large", "the headers are too large", f"send at most {MAX_HEAD:,} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._unparsed = 0
        self._fields_size += len(name) + len(value)
        if self._fields_size > MAX_HEAD and (self._answering or self._in_body):
            self._abort()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == MAX_PIPELINED:
            self._abort()
        self._in_body = self._answering = True
        self.registry.set_active(self)
        self._cancel_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._unparsed = 0
        self._cancel_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answering = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_closing_tls()
            return
        if not self._answering:
            self.registry.set_idle(self)
        self.flow.resume_reading()

    def _abort(self) -> None:
        """Aborts the connection; the error stops the parser. A refusal would answer an earlier request."""
        self.transport.abort()
        raise ConnectionAbortedError

    def _start_deadline(self, seconds: float) -> None:
        self._head_size = 0
        self._deadline = self.loop.call_later(seconds, self._deadline_passed)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        if self._in_body or not self._head_size:  # no request to answer has begun
            self.transport.close()
        else:
            self._refuse(408, "headers_too_slow", "the head of the request did not arrive in time", "send it at once")

    # ── writing an answer ───────────────────────────────────────────────────────────────────────────────
    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.registry.bounds.body, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_deadline()

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

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


class TlsListener:
    """Accepts TLS connections. A server of asyncio counts none, and bounds none, before its handshake is done.

    ``make_connection``: returns the protocol of a new connection.
    """

    def __init__(
        self, listener: socket.socket, make_connection: Callable[[], Connection], context: ssl.SSLContext
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._make_connection = make_connection
        self._context = context
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="holdfast-tls")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, (address, *_) = await loop.sock_accept(self._listener)
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # too many files are open, or the client has gone
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            connection = self._make_connection()
            connection.handshake = loop.create_task(connection.shake_hands(accepted, address, self._context))
            self._handshakes.add(connection.handshake)
            connection.handshake.add_done_callback(self._handshakes.discard)

    def close(self) -> None:
        """Accepts no more, and ends handshakes that are under way."""
        for each in (self._accepting, *self._handshakes):
            each.cancel()

    async def wait_closed(self) -> None:
        """Returns at once: its connections are the server's."""


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
