"""``python -m atlas_jobs``: one instance, which answers HTTP and runs jobs in one process."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import uvloop

from atlas_jobs.server import serving
from holdfast import Holdfast, HoldfastError
from holdfast.telemetry.logs import configure_logs
from holdfast.worker import run_worker
from holdfast.worker.process import handle_stop_signals, ignore_rest_of_burst

Served = Callable[[Holdfast], AbstractAsyncContextManager[None]]


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code. ATLAS_SCHEDULING_ENABLED=false leaves the jobs to other instances."""
    parser = argparse.ArgumentParser(prog="python -m atlas_jobs")
    parser.add_argument("--exposed", action="store_true", help="serve all other hosts")
    exposed = parser.parse_args().exposed
    try:
        from atlas_jobs.app import app  # here, so that a wrong setting gives no traceback

        finish_logs = configure_logs(app.settings, app.events)
        try:
            return _run(app, functools.partial(serving, exposed=exposed))
        finally:
            finish_logs()
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(app: Holdfast, served: Served) -> int:
    if os.environ.get("ATLAS_SCHEDULING_ENABLED", "").strip().lower() in ("false", "0", "no", "off"):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(_only_answer(app, served))
            ignore_rest_of_burst()
        return 0
    app.lifespan(served)
    return run_worker(app, app.settings)


async def _only_answer(app: Holdfast, served: Served) -> None:
    stopping = asyncio.Event()
    handle_stop_signals(lambda _: stopping.set())
    async with app, served(app):
        await stopping.wait()


if __name__ == "__main__":
    sys.exit(main())
