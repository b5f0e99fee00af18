"""Suspended jobs, on PostgreSQL: CPU of an idle worker and of its server, and claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import suspended
from benchmarks.harness import Line, Plan
from benchmarks.postgres import server
from benchmarks.postgres.filling import filled

TITLE = suspended.TITLE


def run(plan: Plan) -> list[Line]:
    """A new database for each kind of suspended jobs, and one without."""
    return suspended.lines(plan, _database, server.cpu_seconds)


@contextmanager
def _database(**sizes: int) -> Iterator[str]:
    with server.database() as home:
        filled(home, **sizes)
        yield home.url
