"""PgQueuer's side as a process: one worker on one connection. Same arguments and output as ``benchmarks.worker``.

``settled`` counts what its log holds: completions whose transaction has been committed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

from benchmarks.postgres.peer import BATCH, STARTS, noop, stamp
from benchmarks.telling import listen, say


class _Counting(Queries):
    """Its calls, and how many completions were committed, and when."""

    settled = 0
    settled_at = 0.0
    cpu_then = 0.0

    async def log_jobs(self, job_status: Any) -> None:
        await super().log_jobs(job_status)
        self.settled += len(job_status)
        self.settled_at = time.monotonic()
        self.cpu_then = time.process_time()


def main() -> None:
    """``peer_worker URL [--drain]``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--drain", action="store_true")
    uvloop.run(_serve(parser.parse_args()))


async def _serve(arguments: argparse.Namespace) -> None:
    connection = await asyncpg.connect(arguments.url)
    driver = AsyncpgDriver(connection)
    queries = _Counting(driver)
    peer = PgQueuer(driver, queries=queries)
    peer.entrypoint("noop")(noop)
    peer.entrypoint("stamp")(stamp)
    say({"ready": True})
    sys.stdin.readline()
    started = time.monotonic(), time.process_time()
    listening = threading.Thread(target=_listen, args=(queries, peer, asyncio.get_running_loop()), daemon=True)
    listening.start()
    mode = QueueExecutionMode.drain if arguments.drain else QueueExecutionMode.continuous
    await peer.run(batch_size=BATCH, mode=mode)
    say(_figures(queries) | {"started_at": started[0], "cpu_before": started[1], "starts": STARTS})
    await connection.close()


def _listen(queries: _Counting, peer: PgQueuer, loop: asyncio.AbstractEventLoop) -> None:
    listen(lambda: _figures(queries))
    if not loop.is_closed():
        loop.call_soon_threadsafe(peer.shutdown.set)


def _figures(queries: _Counting) -> dict[str, Any]:
    return {
        "cpu": time.process_time(),
        "at": time.monotonic(),
        "settled": queries.settled,
        "settled_at": queries.settled_at,
        "cpu_then": queries.cpu_then,
    }


if __name__ == "__main__":
    main()
