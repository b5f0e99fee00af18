"""Idle, on any store: what a worker process costs that has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from benchmarks.harness import Plan
from benchmarks.processes import child


def watched(plan: Plan, counted: Callable[[], float], module: str, *arguments: object) -> dict[str, float]:
    """Let a worker settle down, then watch it: CPU in per cent, memory in MB, store calls a second, and by how much
    what ``counted`` answers grows a second."""
    with child(module, *arguments) as worker:
        worker.say("go")
        time.sleep(plan.size(5.0, 0.3))
        before, then = worker.ask("mark"), counted()
        time.sleep(plan.size(30.0, 0.2))
        after, now = worker.ask("mark"), counted()
        memory = psutil.Process(worker.pid).memory_info().rss / 1e6
        worker.ask("stop")
    seconds = after["at"] - before["at"]
    return {
        "cpu": (after["cpu"] - before["cpu"]) / seconds * 100,
        "memory": memory,
        "calls": (sum(after.get("calls", {}).values()) - sum(before.get("calls", {}).values())) / seconds,
        "counted": (now - then) / seconds,
    }
