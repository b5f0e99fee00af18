"""Limits of ours and of Procrastinate, DBOS and SAQ, on PostgreSQL.

| peer | limits over all workers | source |
|---|---|---|
| Procrastinate | ``lock``: one running job for each | ``procrastinate_fetch_job_v2`` in its ``schema.sql`` |
| DBOS | concurrency and rate, of a queue or of each partition | ``DBOS.register_queue`` in its reference |
| SAQ | ``group_key``: one running job for each | ``Job`` in ``saq/job.py`` |

Procrastinate and SAQ limit no queue and no rate. SAQ 0.26 claims several jobs of a group in one batch: tobymao/saq#298.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks import limit_peers
from benchmarks.harness import Line, Plan
from benchmarks.limit_peers import Peer, Server
from benchmarks.postgres import server

TITLE, SUBJECT = limit_peers.TITLE, limit_peers.SUBJECT

_PEERS = [
    Peer("procrastinate", "Procrastinate", {"keys": "lock"}),
    Peer("dbos", "DBOS", {"queue": "global_concurrency", "keys": "partition_concurrency", "rate": "limiter"}),
    Peer("saq", "SAQ", {"keys": "group_key (not within a batch)"}),
]


def run(plan: Plan) -> list[Line]:
    """A new database for each figure."""
    return limit_peers.lines(plan, Server(_database, _database, _settle), _PEERS)


@contextmanager
def _database() -> Iterator[str]:
    with server.database() as home:
        yield home.url


def _settle(url: str) -> None:
    """Gives the planner statistics, as autovacuum does on a server that runs for longer than a benchmark."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("analyze")
    server.checkpoint()
