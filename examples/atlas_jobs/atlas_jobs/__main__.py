"""``python -m atlas_jobs``: one instance, which answers HTTP and runs jobs in one process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from atlas_jobs.app import app
from atlas_jobs.server import serving
from holdfast import HoldfastError
from holdfast.observe.logs import configure_logs
from holdfast.worker import run_worker


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code. ATLAS_SCHEDULING_ENABLED=false leaves the jobs to other instances."""
    finish_logs = configure_logs(app.settings, app.events)
    try:
        if os.environ.get("ATLAS_SCHEDULING_ENABLED", "").strip().lower() in ("false", "0", "no", "off"):
            asyncio.run(_only_answer())
            return 0
        app.lifespan(serving)
        return run_worker(app, app.settings)
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        finish_logs()


async def _only_answer() -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with app, serving(app):
        await told.wait()


if __name__ == "__main__":
    sys.exit(main())
