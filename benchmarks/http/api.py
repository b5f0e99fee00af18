"""The API as a process of its own: ready, it answers "where" with its port and its CPU seconds so far; it ends with its
standard input."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from benchmarks.application import Application
from benchmarks.telling import say
from holdfast.web.server import serve_in_loop


def main() -> None:
    """``api URL [KEYS]``."""
    uvloop.run(_serve(sys.argv[1], *sys.argv[2:]))


async def _serve(url: str, keys_file: str | None = None) -> None:
    app = Application(url, api_port=0, keys_file=keys_file)
    async with serve_in_loop(app, app.settings) as served:
        say({"ready": True})
        while await asyncio.to_thread(sys.stdin.readline):
            say({"port": int(served.address.rpartition(":")[2]), "cpu": time.process_time()})


if __name__ == "__main__":
    main()
