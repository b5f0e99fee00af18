"""A real HTTP server that receives alerts."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Keeps every message that is posted to it."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answer = 204
        self.arrived = threading.Event()
        self.hangs = threading.Event()
        self.hangs.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.paths.append(self.path)
                receiver.headers.append(dict(self.headers.items()))
                receiver.messages.append(json.loads(body))
                receiver.arrived.set()
                receiver.hangs.wait(30)
                self.send_response(receiver.answer)
                if receiver.answer == 302:
                    self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook"

    def states(self) -> list[str]:
        return [message["state"] for message in self.messages]

    def close(self) -> None:
        self.hangs.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
