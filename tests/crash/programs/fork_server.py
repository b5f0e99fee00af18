"""Forks the workers of a fleet from one process that has imported the package: ``fork_server SOCKET MODULE…``.

A line of JSON on the socket starts a program, which leads a session of its own; one comes back with its pid, and one
with its exit code when it has ended. Nothing is imported here that reads the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Forks until the fleet has left: then None; in a child the request it is to serve."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests = channel.makefile("rb")
    while True:
        readable, _, _ = select.select([channel.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 1024)
            _report_ended(channel)
        if channel.fileno() in readable:
            line = requests.readline()
            if not line:
                return None
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                channel.close()
                os.close(woken)
                os.close(wake)
                request: dict[str, Any] = json.loads(line)
                return request
            _send(channel, {"pid": pid})


def _report_ended(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _send(channel, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _send(channel: socket.socket, document: dict[str, int]) -> None:
    channel.sendall(json.dumps(document).encode() + b"\n")


def main() -> None:
    """Serve; in a child, run the program as ``python -m`` does."""
    for module in sys.argv[2:]:
        importlib.import_module(module)
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        os.setsid()
        os.environ.update(request["environment"])
        sys.argv = [request["program"], *request["arguments"]]
        runpy.run_module(request["program"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
