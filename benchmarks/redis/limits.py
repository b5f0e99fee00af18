"""Limits: what they cost."""

from __future__ import annotations

from benchmarks import limits
from benchmarks.harness import Line, Plan
from benchmarks.redis import server

TITLE = limits.TITLE


def run(plan: Plan) -> list[Line]:
    """A new namespace for each figure."""
    return limits.lines(plan, [server.namespace] * plan.rounds)
