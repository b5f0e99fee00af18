"""The server all rows share, and new namespaces on it."""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from tests.support.redis import MAIN, Redis, installed


@cache
def _server() -> Redis:
    """Valkey, with an append-only log and ``appendfsync everysec``. It ends with this process."""
    server = Redis()
    server.start()
    atexit.register(server.close)
    return server


@contextmanager
def namespace() -> Iterator[str]:
    """The URL of an empty one, emptied again in the end."""
    with _server().fresh_namespace() as name:
        yield _server().url(namespace=name)


def used_bytes() -> int:
    """What the server's data takes."""
    with _server().client() as client:
        return int(client.info("memory")["used_memory"])


def version() -> str:
    """That of the server, started or not."""
    said = subprocess.check_output([installed(MAIN), "--version"], text=True)
    return next(word.removeprefix("v=") for word in said.split() if word.startswith("v="))
