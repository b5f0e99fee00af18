"""Latency at each rate of single submissions, beside taskiq on a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from benchmarks.curve import Queue, run_curve
from benchmarks.harness import Line, Plan
from benchmarks.redis import server
from benchmarks.redis.peers import peer

TITLE = "Submit returned → handler start, single submissions at random gaps"
_PEER = "taskiq-stream"


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer."""
    ours = Queue("Holdfast", server.namespace, lambda url: ("benchmarks.worker", url))
    theirs = Queue(_PEER, _peer_store, lambda url: ("benchmarks.redis.peer_worker", _PEER, url))
    return run_curve(plan, ours, theirs, limit=2)


@contextmanager
def _peer_store() -> Iterator[str]:
    with server.database() as url:
        uvloop.run(peer(_PEER, url).fill(0))  # makes what its worker reads
        yield url
