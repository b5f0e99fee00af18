"""Forks programs from one process that has imported what they need: ``fork_server SOCKET MODULE…``.

A line of JSON with three descriptors on the socket starts ``python -m PROGRAM …``; one comes back with its pid, and one
with its exit code when it has ended. Nothing is imported here that reads the environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from typing import Any

_OUTPUTS = 2
"""Descriptors that come with a request: stdout and stderr."""


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Forks until the test process has left: then None; in a child the request it is to serve."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([channel.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 1024)
            _report_ended(channel)
        if channel.fileno() in readable:
            line, descriptors = _receive(channel)
            if not line:
                return None
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                channel.close()
                os.close(woken)
                os.close(wake)
                for number, descriptor in enumerate(descriptors, 1):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                request: dict[str, Any] = json.loads(line)
                return request
            for descriptor in descriptors:
                os.close(descriptor)
            _send(channel, {"pid": pid})


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Returns one line, of the only request under way, and its descriptors; nothing once the other end is closed."""
    line, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, _OUTPUTS)
    while line and not line.endswith(b"\n"):
        line += channel.recv(1 << 16)
    return line, descriptors


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


def _become(request: dict[str, Any]) -> None:
    """Makes this process what ``python -m`` would have started."""
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request["folder"], *added, *_INSTALLED]
    sys.argv = request["words"]
    sys.orig_argv = [sys.executable, "-m", *request["words"]]


def main() -> None:
    """Serve; in a child, run the program as ``python -m`` does."""
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _become(request)
        runpy.run_module(request["words"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _INSTALLED = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    main()
