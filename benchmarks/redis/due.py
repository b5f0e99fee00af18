"""Due: many jobs due in the same second (target 10)."""

from __future__ import annotations

from benchmarks import due
from benchmarks.harness import Line, Plan
from benchmarks.redis import server

TITLE = due.TITLE


def run(plan: Plan) -> list[Line]:
    """A new namespace each round."""
    return due.lines(plan, [server.namespace() for _ in range(plan.rounds)])
