"""Workflows of ours; DBOS has no store for Redis."""

from __future__ import annotations

from benchmarks import workflows
from benchmarks.harness import Line, Plan
from benchmarks.redis import server

TITLE = workflows.TITLE


def run(plan: Plan) -> list[Line]:
    """A new namespace for each figure."""
    return workflows.lines(plan, server.namespace, None)
