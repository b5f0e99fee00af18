"""Limits: what they cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import limits
from benchmarks.harness import Line, Plan

TITLE = limits.TITLE


def run(plan: Plan) -> list[Line]:
    """A new file for each figure."""
    return limits.lines(plan, [functools.partial(_file, plan)] * plan.rounds)


@contextmanager
def _file(plan: Plan) -> Iterator[Path | str]:
    with plan.place() as folder:
        yield f"sqlite:///{folder}/jobs.db"
