"""Due: many jobs due in the same second (target 10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import due
from benchmarks.harness import Line, Plan

TITLE = due.TITLE


def run(plan: Plan) -> list[Line]:
    """A new file each round."""
    return due.lines(plan, [_file(plan) for _ in range(plan.rounds)])


@contextmanager
def _file(plan: Plan) -> Iterator[Path | str]:
    with plan.place() as folder:
        yield folder / "jobs.db"
