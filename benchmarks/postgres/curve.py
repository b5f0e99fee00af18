"""Latency at each rate of single submissions, beside PgQueuer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from benchmarks.application import fill
from benchmarks.curve import Queue, run_curve
from benchmarks.harness import Line, Plan
from benchmarks.postgres import peer, server

TITLE = "Submit returned → handler start, single submissions at random gaps"


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer."""
    ours = Queue("Holdfast", _our_store, lambda url: ("benchmarks.worker", url))
    theirs = Queue("PgQueuer", _peer_store, lambda url: ("benchmarks.postgres.peer_worker", url))
    return run_curve(plan, ours, theirs, limit=5)


@contextmanager
def _our_store() -> Iterator[str]:
    with server.database() as home:
        uvloop.run(fill(home.url, 0))
        yield home.url


@contextmanager
def _peer_store() -> Iterator[str]:
    with server.database() as home:
        uvloop.run(peer.install(home.url))
        yield home.url
