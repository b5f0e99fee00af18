"""Snapshot: a drain while an old snapshot is held elsewhere, as by a report or a backup: no vacuum helps (target 9)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.drained import drained, rate_of
from benchmarks.harness import Line, Plan, times_at_least
from benchmarks.postgres import drain, server
from benchmarks.postgres.filling import filled
from benchmarks.postgres.server import Database

TITLE = "Drain with a snapshot held throughout"


def run(plan: Plan) -> list[Line]:
    """Alternate: without, with. ``--full`` has jobs for about a minute."""
    line = Line("one worker process", "jobs/s", other="without", target=times_at_least(0.8))
    seconds = Line("for how long", "s")
    jobs = plan.size(300_000, 1000, 2_500_000)
    for _ in range(plan.rounds):
        without = _drained(jobs, pinned=False)
        rate = _drained(jobs, pinned=True)
        line.add(rate, without)
        seconds.add(jobs / rate)
    return [line, seconds]


def _drained(jobs: int, *, pinned: bool) -> float:
    with server.database() as home:
        filled(home, waiting=jobs)
        if pinned:
            with _snapshot(home):
                figures = drained("benchmarks.worker", home.url, 1)
        else:
            figures = drained("benchmarks.worker", home.url, 1)
        drain.check(home, jobs)
    return rate_of(figures)


@contextmanager
def _snapshot(home: Database) -> Iterator[None]:
    with psycopg.connect(home.url) as connection:
        connection.execute("begin isolation level repeatable read")
        connection.execute("select count(*) from holdfast.queue")
        yield
        connection.rollback()
