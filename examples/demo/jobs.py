"""The application of the demo: one task, and command jobs where gzip is all they may start."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from examples.demo.measure import measure
from holdfast import Context, Holdfast, Retry, Settings

MEASURE = "source.measure"
LEASE = 3.0  # seconds: how long the jobs of the killed worker wait for another one
SETTINGS = f"""\
# The settings of the demo: nearly all of them only make a crash quick to get over.
url = "sqlite:///{{folder}}/demo.db"
processes = {{processes}}
concurrency = 4
lease = "{LEASE}s"
heartbeat = "0.5s"
sweep = "0.5s"
poll = "1s"
commands = "argv"
command_allow = ["gzip"]
"""


def make_app(config: Path) -> Holdfast:
    """The application by this settings file alone: the environment may speak of another, real queue."""
    app = Holdfast(settings=Settings.load(path=config, environ={}))
    log = executions_log(config.parent)

    @app.middleware
    async def note(job: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        """Log of executions: each execution appends one line."""
        append(log, f"{job.id} {os.getpid()}\n")
        return await call_next(job)

    @app.task(MEASURE, retry=Retry.fixed(0.2), max_attempts=3)
    def measure_source(path: str) -> dict[str, Any]:
        """Measure one file."""
        began = perf_counter()
        return {**asdict(measure(path)), "path": path, "seconds": perf_counter() - began}

    return app


def executions_log(folder: Path) -> Path:
    """Where each execution leaves its line."""
    return folder / "executions.log"


def append(path: Path, line: str) -> None:
    """Append a line in one write: several processes do."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
