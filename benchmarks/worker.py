"""Our side as a process: one worker on one store.

Says it is ready, starts its worker at ``go``, gives its figures at ``mark``, and stops at ``stop`` or the end of its
input. With ``--drain`` the worker stops by itself once there is nothing left to run. In the end its figures once more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import uvloop

from benchmarks.application import STARTS, Application, Meter
from benchmarks.telling import listen, say
from holdfast.telemetry.logs import configure_logs
from holdfast.worker.metrics_server import MetricsServer
from holdfast.worker.worker import Worker


def main() -> None:
    """Run one worker as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="a SQLite file, or a store's URL")
    parser.add_argument("--drain", action="store_true")
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--no-prefetch", action="store_true", help="hold no more jobs than run at once")
    parser.add_argument("--queue", help="serve this one only (default: all)")
    parser.add_argument("--log-level", help="write log lines to a temporary file, from this level on")
    parser.add_argument("--job-log-level", default="DEBUG")
    parser.add_argument("--metrics", action="store_true", help="count, and tell it on a port")
    arguments = parser.parse_args()
    with tempfile.TemporaryFile("w", encoding="utf-8") as logs:
        uvloop.run(_serve(arguments, logs))


async def _serve(arguments: argparse.Namespace, logs: TextIO) -> None:
    meter = Meter()
    app = Application(
        arguments.store if "://" in arguments.store else Path(arguments.store),
        meter=meter,
        concurrency=arguments.concurrency,
        prefetch=not arguments.no_prefetch,
        queues=arguments.queue,
        log_level=arguments.log_level,
        job_log_level=arguments.job_log_level,
        log_format="json",
        metrics_port=0 if arguments.metrics else None,
    )
    stop_logs = configure_logs(app.settings, app.events, stream=logs) if arguments.log_level else None
    worker = Worker(app, drain=arguments.drain)
    with MetricsServer(worker.shared):
        started = await _work(app, worker, meter)
    if stop_logs is not None:
        stop_logs()
    say(_figures(meter) | {"started_at": started[0], "cpu_before": started[1], "starts": STARTS})


async def _work(app: Application, worker: Worker, meter: Meter) -> tuple[float, float]:
    """Work from the word on; when that was, and what CPU time had been spent."""
    async with app:
        await app.count()
        say({"ready": True})
        sys.stdin.readline()
        started = time.monotonic(), time.process_time()
        listening = threading.Thread(target=_listen, args=(meter, worker, asyncio.get_running_loop()), daemon=True)
        listening.start()
        await worker.run()
    return started


def _listen(meter: Meter, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
    listen(lambda: _figures(meter))
    if not loop.is_closed():
        loop.call_soon_threadsafe(worker.stop)


def _figures(meter: Meter) -> dict[str, Any]:
    return {
        "cpu": time.process_time(),
        "at": time.monotonic(),
        "calls": dict(meter.calls),
        "claims": meter.claims,
        "settled": meter.settled,
        "settled_at": meter.settled_at,
        "cpu_then": meter.cpu_then,
    }


if __name__ == "__main__":
    main()
