"""The machine a run was made on: figures without it say nothing."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.postgres.server import version as server_version
from benchmarks.redis.server import allocator
from benchmarks.redis.server import version as redis_version
from holdfast.stores.sqlite.connection import file_system


def facts(folder: Path) -> dict[str, Any]:
    """Processor, kernel, versions, and how long a write to ``folder`` takes to be safe."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "sqlite": sqlite3.sqlite_version,
        "postgres": server_version(),
        "valkey": f"{redis_version()} with {Path(allocator()).name}",
        "huey": version("huey"),
        "pgqueuer": version("pgqueuer"),
        "file_system": file_system(folder),
        "fsync_us": fsync_us(folder),
    }


def fsync_us(folder: Path, times: int = 200) -> float:
    """The median microseconds of writing one page and having it on the disk."""
    path = folder / "fsync"
    took = []
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for index in range(times):
            started = time.perf_counter()
            os.pwrite(file, bytes(4096), index % 16 * 4096)
            os.fsync(file)
            took.append(time.perf_counter() - started)
    finally:
        os.close(file)
        path.unlink()
    return round(statistics.median(took) * 1e6, 1)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
