"""The HTTP API: schedule a job, look at one. The standard library's server, a thread for each client."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from delayed_queue.app import app, callback
from holdfast import ConfigError, HoldfastError, Invalid, NotFound
from holdfast.job import as_ulid, instant

HOST, PORT = "127.0.0.1", 8080
_LARGEST = 1 << 20  # bytes of a body
_PATIENCE = 30.0  # seconds a silent client may keep its connection
_INSTANTS = range(10**15, 10**16)  # microseconds since 1970, of 2001 to 2286. Others are mostly another unit


class Wanted(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The body of a submission. Without a time the job is due at once."""

    payload: Any
    due_time: int | None = None  # microseconds since 1970
    delay: float | None = None  # seconds from now


def schedule(body: bytes) -> dict[str, Any]:
    """Store a job; what the client is told."""
    wanted = msgspec.json.decode(body, type=Wanted)
    due = wanted.due_time
    if due is not None and due not in _INSTANTS:
        raise Invalid("dueTime", due, "give microseconds since 1970, 16 digits")
    run_at = None if due is None else instant(due)
    handle = callback.options(run_at=run_at, delay=wanted.delay).sync.enqueue(wanted.payload)
    return {"jobId": as_ulid(handle.id)}


def show(job_id: str) -> dict[str, Any]:
    """A job as it stands, times as in its hash."""
    job = app.sync.get(job_id)
    return {
        "jobId": as_ulid(job.id),
        "state": job.state,
        "payload": msgspec.json.decode(job.payload)["payload"],
        "dueTime": job.run_at_us,
        "pickupTime": job.started_at_us,
        "attempts": job.attempts,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _PATIENCE

    def do_POST(self) -> None:
        """POST /jobs. A body that is too large is heard to its end: who is still speaking does not hear an answer."""
        length = self.headers.get("Content-Length") or "0"
        if not length.isascii() or not length.isdigit() or len(length) > 12:
            self.close_connection = True  # what follows is no request
            self._tell(400, {"error": f"Content-Length: {length!r} is no number of bytes"})
            return
        body, rest = self.rfile.read(min(int(length), _LARGEST)), int(length) - _LARGEST
        while rest > 0 and (piece := self.rfile.read(min(rest, _LARGEST))):
            rest -= len(piece)
        if int(length) > _LARGEST:
            self._tell(413, {"error": f"Content-Length: {length} is not valid; give at most {_LARGEST}"})
        else:
            self._answer(body)

    def do_GET(self) -> None:
        """GET /jobs/{jobId}."""
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        try:
            self._tell(200, self._routed(body))
        except msgspec.DecodeError as error:
            self._tell(400, {"error": f"body: {error}"})
        except HoldfastError as error:
            self._tell(error.http_status, {"error": str(error)})

    def _routed(self, body: bytes) -> dict[str, Any]:
        match self.command, self.path.strip("/").split("/"):
            case "POST", ["jobs"]:
                return schedule(body)
            case "GET", ["jobs", job_id]:
                return show(job_id)
        raise NotFound(f"there is no {self.command} {self.path}")

    def _tell(self, status: int, document: Mapping[str, Any]) -> None:
        body = msgspec.json.encode(document)
        self.send_response(HTTPStatus(status))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing: what happens to jobs stands in the workers' log."""


def serve() -> None:
    """Answer on SERVER_PORT until SIGTERM or SIGINT. A Redis that is not there or not ours is told at once."""
    port = server_port()
    app.sync.opened()
    try:
        server = ThreadingHTTPServer((HOST, port), _Handler)
    except OSError as error:
        raise ConfigError(f"SERVER_PORT: cannot listen on {HOST}:{port}: {error.strerror}") from None
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    answering = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="http")
    answering.start()
    print(f"answering on http://{HOST}:{port}", flush=True)
    told.wait()
    server.shutdown()
    answering.join()
    server.server_close()
    app.sync.close()


def server_port() -> int:
    """The port that SERVER_PORT says; ConfigError where it is none."""
    text = os.environ.get("SERVER_PORT") or str(PORT)
    if not text.isascii() or not text.isdigit() or int(text[:9]) > 65535:
        raise ConfigError(f"SERVER_PORT: {text!r} is not valid; give a port, 0 to 65535")
    return int(text)
