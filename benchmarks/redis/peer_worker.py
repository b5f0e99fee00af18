"""A peer's side as a process: ``peer_worker NAME URL``. Same arguments and output as ``benchmarks.worker``.

How many of its jobs are done, and when, the server knows better.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import psutil
import uvloop

from benchmarks.redis.peers import STARTS, peer
from benchmarks.telling import listen, say


def main() -> None:
    """Work until stopped."""
    uvloop.run(_serve(*sys.argv[1:]))


async def _serve(name: str, url: str) -> None:
    side = peer(name, url)
    say({"ready": True})
    sys.stdin.readline()
    before = _figures()["cpu"]
    stop = asyncio.Event()
    threading.Thread(target=_listen, args=(before, stop, asyncio.get_running_loop()), daemon=True).start()
    working = asyncio.create_task(side.work())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # how it stops does not matter
    figures = _figures() | {"starts": STARTS}
    working.cancel()
    stopping.cancel()
    await asyncio.wait([working], timeout=20)
    say(figures)


def _listen(before: float, stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    listen(lambda: _figures() | {"cpu_before": before})
    loop.call_soon_threadsafe(stop.set)


def _figures() -> dict[str, Any]:
    children = (each.cpu_times() for each in psutil.Process().children(recursive=True))
    return {"cpu": time.process_time() + sum(each.user + each.system for each in children), "at": time.monotonic()}


if __name__ == "__main__":
    main()
