"""Limits: what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import limits
from benchmarks.harness import Line, Plan
from benchmarks.postgres import server

TITLE = limits.TITLE


def run(plan: Plan) -> list[Line]:
    """A new database for each figure."""
    return limits.lines(plan, [_database] * plan.rounds)


@contextmanager
def _database() -> Iterator[Path | str]:
    with server.database() as home:
        yield home.url
