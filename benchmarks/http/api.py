"""The API as a process of its own: ready, it answers "where" with its port; it ends with its standard input."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from benchmarks.application import Application
from benchmarks.telling import say
from holdfast.web.server import serve_in_loop


def main() -> None:
    """``api URL``."""
    uvloop.run(_serve(sys.argv[1]))


async def _serve(url: str) -> None:
    app = Application(url, api_port=0)
    async with serve_in_loop(app, app.settings) as served:
        say({"ready": True})
        while await asyncio.to_thread(sys.stdin.readline):
            say({"port": int(served.address.rpartition(":")[2])})


if __name__ == "__main__":
    main()
