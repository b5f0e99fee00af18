"""Console: how fast its pages are, and the cost of ten open ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from benchmarks import console
from benchmarks.application import fill
from benchmarks.console import Filled
from benchmarks.content import add_rest, write_rows
from benchmarks.harness import Line, Plan
from benchmarks.postgres import server

TITLE = "console: 1 M jobs, 200 queues, 10,000 dead jobs of 300 errors"
_WORDS = {
    "job": "holdfast.job",
    "attempt": "holdfast.attempt",
    "tag": "holdfast.tag",
    "key_table": "holdfast.key",
    "history": "holdfast.history",
    "of_job": "job_id",
    "of_tagged": "job_id",
    "key": "id",
    "newline": "chr(10)",
    "more": ", has_key, tagged",
    "more_values": ", n % 20 = 0, n % 50 = 0",
    "id": "(lpad(to_hex(at / 1000), 12, '0') || '7' || lpad(to_hex(n % 4096), 3, '0') || '8' "
    "|| lpad(to_hex(n), 15, '0'))::uuid",
    "group": "lpad(to_hex(n / 100 % 300), 12, '0')",
    "numbers": "select n from generate_series(1, {jobs}) n",
}


def run(plan: Plan) -> list[Line]:
    """Fills a new database."""
    return console.lines(plan, _filled, plan.size(1_000_000, 2000))


@contextmanager
def _filled(_: Plan, jobs: int) -> Iterator[Filled]:
    with server.database() as home:
        uvloop.run(fill(home.url, 0))
        write_rows(home.execute, _WORDS, jobs)
        home.execute("vacuum (analyze)")
        server.checkpoint()
        story = uvloop.run(add_rest(home.url))
        [(middle,)] = home.execute("select id::text from holdfast.job where seq = %s", jobs // 2)
        yield Filled(home.url, story, middle, server.cpu_seconds)
