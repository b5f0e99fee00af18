"""Due: many jobs due in the same second (target 10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import due
from benchmarks.harness import Line, Plan
from benchmarks.postgres import server

TITLE = due.TITLE


def run(plan: Plan) -> list[Line]:
    """A new database each round."""
    return due.lines(plan, [_database() for _ in range(plan.rounds)])


@contextmanager
def _database() -> Iterator[Path | str]:
    with server.database() as home:
        yield home.url
