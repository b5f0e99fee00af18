"""Workflows of ours and of DBOS, on SQLite with ``synchronous`` FULL; its files have the write-ahead log, too."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from benchmarks import workflows
from benchmarks.harness import Line, Plan

TITLE = workflows.TITLE

_FULL = 2


def run(plan: Plan) -> list[Line]:
    """A new file for each figure."""
    return workflows.lines(plan, functools.partial(_file, plan), functools.partial(_file_with_log, plan))


@contextmanager
def _file(plan: Plan) -> Iterator[str]:
    with plan.place() as folder:
        yield f"sqlite:///{folder}/jobs.db"


@contextmanager
def _file_with_log(plan: Plan) -> Iterator[str]:
    """An empty file with a write-ahead log, which DBOS keeps: it starts workflows half as quickly without."""
    with plan.place() as folder:
        path = folder / "dbos.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("pragma journal_mode=wal")
            (synchronous,) = connection.execute("pragma synchronous").fetchone()
        if synchronous != _FULL:
            raise RuntimeError(f"this SQLite is built with synchronous={synchronous}; DBOS would be less durable")
        yield f"sqlite:///{path}"
