"""Suspended jobs, on SQLite: CPU of an idle worker, and claims."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import suspended
from benchmarks.harness import Line, Plan
from benchmarks.sqlite.filling import filled

TITLE = suspended.TITLE


def run(plan: Plan) -> list[Line]:
    """A new file for each kind of suspended jobs, and one without."""
    return suspended.lines(plan, functools.partial(_file, plan))


@contextmanager
def _file(plan: Plan, **sizes: int) -> Iterator[str]:
    with plan.place() as folder:
        filled(folder / "jobs.db", **sizes)
        yield f"sqlite:///{folder}/jobs.db"
