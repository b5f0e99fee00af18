"""Latency at each rate of single submissions, beside Huey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from benchmarks.application import fill
from benchmarks.curve import Queue, run_curve
from benchmarks.harness import Line, Plan

TITLE = "Submit returned → handler start, single submissions at random gaps"
_MANY = 10**9  # tasks: until it is stopped


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer."""

    @contextmanager
    def our_store() -> Iterator[str]:
        with plan.place() as folder:
            url = f"sqlite:///{folder}/jobs.db"
            uvloop.run(fill(url, 0))
            yield url

    @contextmanager
    def peer_store() -> Iterator[str]:
        with plan.place() as folder:
            yield f"{folder}/huey.db"

    ours = Queue("Holdfast", our_store, lambda url: ("benchmarks.worker", url))
    theirs = Queue("Huey", peer_store, lambda path: ("benchmarks.sqlite.peer_worker", path, str(_MANY)))
    return run_curve(plan, ours, theirs, limit=3)
