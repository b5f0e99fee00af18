"""The peer on the same kind of file: Huey, durable as Holdfast is (``fsync``: synchronous=FULL in WAL mode).

Huey takes a task out of the file before it runs it: what runs when its process dies is lost. It writes twice a job
where Holdfast writes three times.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from huey import SqliteHuey
from huey.consumer import Consumer

STARTS: list[tuple[int, float]] = []
"""Of each ``stamp`` task in this process: its number, and the monotonic clock when it started."""

POLL = 0.01  # seconds; Huey's own default is ten times that


class Peer:
    """A Huey on one file with the tasks of ``application.py``."""

    def __init__(self, path: Path) -> None:
        self.huey: Any = SqliteHuey(filename=str(path), fsync=True)
        self.noop = self.huey.task(name="noop")(noop)
        self.stamp = self.huey.task(name="stamp")(stamp)

    def consumer(self) -> Any:
        """One worker thread, polling quickly. Two and four threads were tried: neither was faster throughout."""
        return Consumer(self.huey, workers=1, periodic=False, initial_delay=POLL, max_delay=POLL, backoff=1.0)


def noop(n: int) -> None:
    """Count, so that the last one is noticed."""
    STARTS.append((n, 0.0))


def stamp(n: int) -> None:
    """Tell when task ``n`` started."""
    STARTS.append((n, time.monotonic()))
