"""The HTTP side: the standard library's server in threads of its own, in front of the routes on the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import TimeoutError as Late
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import msgspec

from atlas_jobs.api import Answer, Api, Request
from atlas_jobs.table import Table
from holdfast import ConfigError, Holdfast

PORT = 8080
_HOST = "127.0.0.1"
_PATIENCE = 30.0  # seconds a request may take, and a silent client may keep its connection
_LARGEST = 1 << 20  # bytes of a body


@asynccontextmanager
async def serving(app: Holdfast) -> AsyncIterator[None]:
    """Answer requests on SERVER_PORT while this lasts."""
    async with Table.opened(app.settings.url) as table:
        server = _Server(_port(os.environ.get("SERVER_PORT") or str(PORT)), Api(app, table))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="atlas-http")
        thread.start()
        try:
            yield
        finally:
            await asyncio.to_thread(server.shutdown)
            thread.join()
            server.server_close()


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text[:9]) > 65535:
        raise ConfigError(f"SERVER_PORT: {text!r} is not valid; give a port, 0 to 65535")
    return int(text)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, port: int, api: Api) -> None:
        self.api = api
        self.loop = asyncio.get_running_loop()
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(f"SERVER_PORT: cannot listen on {_HOST}:{port}: {error.strerror}") from None

    def ask(self, request: Request) -> Answer:
        """The answer of the routes, which run on the event loop."""
        answer = asyncio.run_coroutine_threadsafe(self.api.answer(request), self.loop)
        try:
            return answer.result(_PATIENCE)
        except Late:
            answer.cancel()
            return Answer(503, {"error": f"no answer within {_PATIENCE:g} s; try again"})


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _PATIENCE

    def do_GET(self) -> None:
        """GET."""
        self._answer()

    def do_POST(self) -> None:
        """POST."""
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        length = self.headers.get("Content-Length") or "0"
        if not length.isascii() or not length.isdigit() or len(length) > 12:
            self.close_connection = True  # what follows is no request
            self._tell(Answer(400, {"error": f"Content-Length: {length!r} is no number of bytes"}))
            return
        body, rest = self.rfile.read(min(int(length), _LARGEST)), int(length) - _LARGEST
        while rest > 0 and (piece := self.rfile.read(min(rest, _LARGEST))):  # who still speaks does not hear an answer
            rest -= len(piece)
        if int(length) > _LARGEST:
            self._tell(Answer(413, {"error": f"Content-Length: give at most {_LARGEST}"}))
            return
        query, key = dict(parse_qsl(parts.query, keep_blank_values=True)), self.headers.get("Idempotency-Key")
        self._tell(self.server.ask(Request(self.command, parts.path, query, key, body)))

    def _tell(self, answer: Answer) -> None:
        body = msgspec.json.encode(answer.document)
        self.send_response(HTTPStatus(answer.status))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing: what happens to jobs is in Holdfast's own log."""
