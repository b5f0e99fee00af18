"""Console: how fast its pages are, and the cost of ten open ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvloop

from benchmarks import console
from benchmarks.application import Application
from benchmarks.console import Filled
from benchmarks.content import add_rest, write_rows
from benchmarks.harness import Line, Plan

TITLE = "console: 1 M jobs, 200 queues, 10,000 dead jobs of 300 errors"
_WORDS = {
    "job": "holdfast_job",
    "attempt": "holdfast_attempt",
    "tag": "holdfast_tag",
    "key_table": "holdfast_key",
    "history": "holdfast_history",
    "of_job": "job_seq",
    "of_tagged": "seq",
    "key": "seq",
    "newline": "char(10)",
    "more": ", has_key",
    "more_values": ", n % 20 = 0",
    "id": "printf('%08x-%04x-7%03x-8%03x-%012x', at / 1000 >> 16, at / 1000 & 65535, n % 4096, n % 4096, n)",
    "group": "printf('%012x', n / 100 % 300)",
    "numbers": "with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < {jobs}) "
    "select n from numbers",
}


def run(plan: Plan) -> list[Line]:
    """Fills a new file."""
    return console.lines(plan, _filled, plan.size(1_000_000, 2000))


@contextmanager
def _filled(plan: Plan, jobs: int) -> Iterator[Filled]:
    with plan.place() as folder:
        path = folder / "jobs.db"
        uvloop.run(_create(f"sqlite:///{path}"))
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("pragma synchronous=off")
            write_rows(connection.execute, _WORDS, jobs)
            connection.execute("pragma synchronous=full")
            connection.execute("pragma wal_checkpoint(truncate)").fetchall()
        story = uvloop.run(add_rest(f"sqlite:///{path}"))
        yield Filled(f"sqlite:///{path}", story, str(jobs // 2), lambda: 0.0)


async def _create(url: str) -> None:
    async with Application(url) as app:
        await app.count()
