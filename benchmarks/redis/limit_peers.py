"""Limits of ours on Redis, beside drains of SAQ and streaQ, which have none over all workers.

| peer | instead | source |
|---|---|---|
| SAQ | ``group_key``, on PostgreSQL only | ``Job`` in ``saq/job.py``, tobymao/saq#183 |
| streaQ | ``concurrency`` of one worker; ``unique``: a second running job of the task fails | its ``docs/task.rst`` |
"""

from __future__ import annotations

from benchmarks import limit_peers
from benchmarks.harness import Line, Plan
from benchmarks.limit_peers import Peer, Server
from benchmarks.redis import server

TITLE, SUBJECT = limit_peers.TITLE, limit_peers.SUBJECT


def run(plan: Plan) -> list[Line]:
    """A new namespace for each figure of ours, an empty server for each of a peer."""
    place = Server(server.namespace, server.database, lambda _url: server.rewrite_log())
    return limit_peers.lines(plan, place, [Peer("saq", "SAQ", {}), Peer("streaq", "streaQ", {})])
