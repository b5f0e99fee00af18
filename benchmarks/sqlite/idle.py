"""Idle: what a worker process costs that has nothing to do (target 7)."""

from __future__ import annotations

import time

import psutil

from benchmarks.harness import Line, Plan, at_most
from benchmarks.processes import child

TITLE = "An idle worker process"


def run(plan: Plan) -> list[Line]:
    """Let a worker settle down, then watch it."""
    cpu = Line("CPU", "%", target=at_most(0.5))
    memory = Line("resident memory", "MB", target=at_most(70))
    calls = Line("store calls", "1/s", target=at_most(1))
    lines = [cpu, memory, calls]
    for _ in range(1 if plan.quick else max(1, plan.rounds - 1)):
        with plan.place() as folder, child("benchmarks.worker", folder / "jobs.db") as worker:
            worker.say("go")
            time.sleep(plan.size(3.0, 0.1))
            before = worker.ask("mark")
            time.sleep(plan.size(20.0, 0.2))
            after = worker.ask("mark")
            memory.add(psutil.Process(worker.pid).memory_info().rss / 1e6)
            worker.ask("stop")
        seconds = after["at"] - before["at"]
        cpu.add((after["cpu"] - before["cpu"]) / seconds * 100)
        calls.add((sum(after["calls"].values()) - sum(before["calls"].values())) / seconds)
    return lines
