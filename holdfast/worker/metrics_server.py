"""Health and metrics of a worker process, on a port for probes and scrapers.

The server runs in its own thread, so it answers while the event loop of the worker is blocked. It is read-only.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import NamedTuple

import msgspec

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.events import MetricsServed
from holdfast.core.validation import is_loopback
from holdfast.settings.settings import Settings
from holdfast.tasks.command_policy import COMMAND
from holdfast.telemetry.metric_types import expose_metrics
from holdfast.telemetry.metrics import Metrics
from holdfast.worker.context import WorkerState

_JSON = "application/json"


class MetricsServer:
    """Counts and serves the metrics of the worker while entered, if the settings name a port."""

    def __init__(self, shared: WorkerState) -> None:
        self._shared = shared
        self._metrics: Metrics | None = None
        self._server: PageServer | None = None

    def __enter__(self) -> None:
        """Raises Unavailable if the port is taken, ConfigError if other hosts reach it without a setting for it."""
        shared, settings = self._shared, self._shared.settings
        if settings.metrics_port is None:
            return
        _check_exposure(settings)
        pages = {
            "/": self._metrics_page,
            "/metrics": self._metrics_page,
            "/metrics/": self._metrics_page,
            "/health": self._readiness_page,
            "/health/ready": self._readiness_page,
            "/health/live": self._liveness_page,
        }
        self._server = PageServer(settings.metrics_host, settings.metrics_port, pages)
        self._metrics = metrics = Metrics(
            shared.events, labels=settings.metrics_labels, tasks=self._tasks, task_field=settings.task_field
        )
        metrics.set_gauge("worker_active_jobs", lambda: len(shared.running))
        metrics.set_gauge("worker_buffered_jobs", lambda: len(shared.buffer))
        metrics.set_gauge("worker_slots", lambda: shared.settings.concurrency)
        metrics.set_gauge("worker_faults", lambda: shared.active_faults)
        metrics.set_gauge("worker_healthy", lambda: float(health_of(shared).healthy))
        self._server.start()
        shared.emit(MetricsServed(address=self._server.address, worker_id=shared.worker_id))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.stop()
        if self._metrics is not None:
            self._metrics.close()

    def _tasks(self) -> list[str]:
        """Returns the names of all tasks that this worker can run."""
        commands = [] if self._shared.settings.commands == "off" else [COMMAND]
        return [*self._shared.app.registry.task_names(), *commands]

    # ── pages: rendered in the server's thread ────────────────────────────────────────────────────────────────────
    def _metrics_page(self, accept: str) -> MetricsPage:
        assert self._metrics is not None  # noqa: S101 - made before the server starts
        body, media = expose_metrics(self._metrics.read(), prefix=self._shared.settings.metrics_prefix, accept=accept)
        return MetricsPage(200, body, media)

    def _readiness_page(self, _accept: str) -> MetricsPage:
        health = health_of(self._shared)
        return self._health_page(health, passed=health.healthy)

    def _liveness_page(self, _accept: str) -> MetricsPage:
        health = health_of(self._shared)
        return self._health_page(health, passed=health.live)

    def _health_page(self, health: WorkerHealth, *, passed: bool) -> MetricsPage:
        given = {
            "status": "ok" if passed else health.status,
            "service": "holdfast-worker",
            "worker": self._shared.worker_id,
        }
        return MetricsPage(200 if passed else 503, msgspec.json.encode(given), _JSON)


def _check_exposure(settings: Settings) -> None:
    if not settings.metrics_open and not is_loopback(settings.metrics_host):
        raise ConfigError(
            f"metrics_host: {settings.metrics_host} can be reached by others, and this port asks for no key, though it "
            "names tasks and queues: listen on 127.0.0.1, or set metrics_open if they may read it, or if something "
            "before it decides who reaches it"
        )


class WorkerHealth(NamedTuple):
    """``live``: the event loop runs callbacks. ``healthy``: the store also answers its claims and heartbeats."""

    live: bool
    healthy: bool
    status: str
    """``ok``, or the problem."""


def health_of(shared: WorkerState) -> WorkerHealth:
    """Returns the health of the worker now. Call it from any thread."""
    settings, now = shared.settings, shared.clock.monotonic()
    within = settings.health_within.total_seconds()
    live = time.monotonic() - shared.loop_answered_at <= within  # real time, whatever clock the worker uses
    if shared.stopping.is_set():
        return WorkerHealth(live, False, "stopping")
    if not live:
        return WorkerHealth(False, False, "blocked")
    if shared.fetched_at is None or shared.heartbeat_at is None:
        return WorkerHealth(True, False, "starting")
    healthy = now - shared.heartbeat_at <= within + settings.heartbeat.total_seconds()
    if not shared.is_at_capacity:  # else it claims nothing now
        healthy &= now - shared.fetched_at <= within + settings.poll.total_seconds()
    return WorkerHealth(True, healthy, "ok" if healthy else "store_away")


# ── the server ────────────────────────────────────────────────────────────────────────────────────────────────────────
_HEAD_TIMEOUT = 1.0  # seconds a request may take to arrive
_SEND_TIMEOUT = 5.0  # seconds the response may take to be sent
_MAX_HEAD = 16 * 1024  # bytes
_MAX_CONNECTIONS = 64  # the oldest is closed for one more: silent clients block no other
_TEXT = "text/plain; charset=utf-8"


class MetricsPage(NamedTuple):
    """Response for one path."""

    status: int
    body: bytes
    media: str


Pages = Mapping[str, Callable[[str], MetricsPage]]
"""Functions that render a page, by path; each gets the Accept header."""


class PageServer:
    """A thread that serves ``pages`` from ``start`` to ``stop``."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Raises Unavailable if the port is taken, ConfigError if it cannot listen on the address."""
        self._pages = pages
        self._socket = _open_socket(host, port)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._thread = threading.Thread(target=self._run, name="holdfast-metrics", daemon=True)

    @property
    def address(self) -> str:
        """Returns the listening URL."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and closes the socket."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_SEND_TIMEOUT)
        else:
            self._loop.close()
        self._socket.close()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._handle_connection, sock=self._socket, limit=_MAX_HEAD)
        await self._stop.wait()
        server.close()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(_SEND_TIMEOUT):
                writer.write(self._respond(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has disconnected, sends no request, or reads no response
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _respond(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        page = self._page(method, path, _accept_header(lines[1:]))
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


def _accept_header(headers: list[str]) -> str:
    given = (header.partition(":") for header in headers)
    return ",".join(value.strip() for name, _, value in given if name.strip().lower() == "accept")


def _open_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            remedy = "try again when its holder has stopped (a worker of this host?), or give another metrics_port"
            raise Unavailable(f"metrics_port: {problem}; {remedy}") from None
        raise ConfigError(f"metrics_host, metrics_port: {problem}") from None
