"""``python -m tests.examples.starved FOLDER``: a worker that at first has no descriptor left for a command."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from queuectl.app import open_app
from queuectl.config import Place

from holdfast import Context, Holdfast
from holdfast.core.events import JobSucceeded
from holdfast.telemetry.logs import configure_logs
from holdfast.worker import Worker


def starve_first(app: Holdfast) -> None:
    """Leaves no file descriptor free while the first attempt runs."""
    has_starved = False

    @app.middleware
    async def starve(job: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        nonlocal has_starved
        if has_starved:
            return await call_next(job)
        has_starved = True
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            return await call_next(job)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main(folder: Path) -> None:
    """Work until a job has succeeded."""
    app = open_app(Place(folder / "queuectl.db", folder / "queuectl.json"))
    starve_first(app)
    finish_logs = configure_logs(app.settings, app.events)
    asyncio.run(_work(app))
    finish_logs()


async def _work(app: Holdfast) -> None:
    worker = Worker(app)
    app.events.subscribe(lambda _: worker.stop(), JobSucceeded)
    async with app:
        await worker.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
