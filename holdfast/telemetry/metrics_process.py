"""A small HTTP server in a thread of its own, for a process that serves nothing else: metrics and health.

It answers while the process's event loop is blocked: that is when operators ask. Only reading is possible.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from holdfast.core.errors import ConfigError

_HEAD_WITHIN = 1.0  # seconds a request may take to arrive
_PATIENCE = 5.0  # and its answer to leave
_HEAD_MOST = 16 * 1024  # bytes
_CONNECTIONS_MOST = (
    64  # beyond them the oldest gives way: a client that asks at once is answered, however many keep silent
)
_TEXT = "text/plain; charset=utf-8"


class MetricsPage(NamedTuple):
    """Response for one path."""

    status: int
    body: bytes
    media: str


Pages = Mapping[str, Callable[[str], MetricsPage]]
"""Page makers by path; each gets the Accept header."""


class MetricsProcess:
    """Serves ``pages`` from ``start`` to ``stop``."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """ConfigError where the address cannot be listened on."""
        self._pages = pages
        self._socket = _listening(host, port)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._thread = threading.Thread(target=self._run, name="holdfast-sidecar", daemon=True)

    @property
    def address(self) -> str:
        """Returns the listening URL."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_PATIENCE)
        else:
            self._loop.close()
        self._socket.close()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=_HEAD_MOST)
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _CONNECTIONS_MOST:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_HEAD_WITHIN):
                head = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(_PATIENCE):
                writer.write(self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, sends no request, or takes no answer
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        page = self._page(method, path, _accepted(lines[1:]))
        headers = [
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
            f"Content-Type: {page.media}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        return "\r\n".join([*headers, "", ""]).encode("latin-1") + (b"" if method == "HEAD" else page.body)

    def _page(self, method: str, path: str, accept: str) -> MetricsPage:
        make = self._pages.get(path)
        if make is None:
            return MetricsPage(404, f"there are {', '.join(sorted(self._pages))}\n".encode(), _TEXT)
        if method not in ("GET", "HEAD"):
            return MetricsPage(405, b"only GET is possible\n", _TEXT)
        try:
            return make(accept)
        except ConfigError as error:
            return MetricsPage(501, f"{error}\n".encode(), _TEXT)


def _accepted(headers: list[str]) -> str:
    said = (header.partition(":") for header in headers)
    return ",".join(value.strip() for name, _, value in said if name.strip().lower() == "accept")


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(f"metrics_host, metrics_port: {problem}") from None
