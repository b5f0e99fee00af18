"""Idle: what a worker process costs that has nothing to do (target 7)."""

from __future__ import annotations

from benchmarks.harness import Line, Plan, at_most
from benchmarks.idle import watched

TITLE = "An idle worker process"


def run(plan: Plan) -> list[Line]:
    """Let a worker settle down, then watch it."""
    cpu = Line("CPU", "%", target=at_most(0.5))
    memory = Line("resident memory", "MB", target=at_most(70))
    calls = Line("store calls", "1/s", target=at_most(1))
    lines = [cpu, memory, calls]
    for _ in range(1 if plan.quick else max(1, plan.rounds - 1)):
        with plan.place() as folder:
            figures = watched(plan, lambda: 0.0, "benchmarks.worker", folder / "jobs.db")
        for name, line in (("cpu", cpu), ("memory", memory), ("calls", calls)):
            line.add(figures[name])
    return lines
