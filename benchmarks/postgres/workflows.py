"""Workflows of ours and of DBOS, on PostgreSQL with ``fsync`` and ``synchronous_commit`` on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import workflows
from benchmarks.harness import Line, Plan
from benchmarks.postgres import server

TITLE = workflows.TITLE


def run(plan: Plan) -> list[Line]:
    """A new database for each figure."""
    return workflows.lines(plan, _database, _database)


@contextmanager
def _database() -> Iterator[str]:
    with server.database() as home:
        server.checkpoint()
        yield home.url
