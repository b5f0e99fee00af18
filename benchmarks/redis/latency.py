"""Latency: from the return of a submission to the start of its handler, on an idle worker elsewhere (target 6)."""

from __future__ import annotations

import uvloop

from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_most, percentile
from benchmarks.latency import late, measured
from benchmarks.processes import Child, child
from benchmarks.redis import server
from benchmarks.redis.peers import peer

TITLE = "Submit returned → handler start, idle worker in another process"
_PEER = "taskiq-stream"


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer."""
    middle = Line("p50", "ms", other=_PEER, target=at_most(0.3))
    worst = Line("p99", "ms", other=_PEER, target=at_most(1))
    timer = Line("for comparison: how late a plain timer is here, p99", "ms")
    jobs = plan.size(300, 5)
    for _ in range(plan.rounds):
        with server.namespace() as url, child("benchmarks.worker", url) as worker:
            ours = uvloop.run(_ours(url, worker, jobs))
        with server.database() as url:
            uvloop.run(peer(_PEER, url).fill(0))  # makes what its worker reads
            with child("benchmarks.redis.peer_worker", _PEER, url) as worker:
                theirs = uvloop.run(_theirs(url, worker, jobs))
        timer.add(percentile([late() for _ in range(jobs)], 99))
        middle.add(percentile(ours, 50), percentile(theirs, 50))
        worst.add(percentile(ours, 99), percentile(theirs, 99))
    return [middle, worst, timer]


async def _ours(url: str, worker: Child, jobs: int) -> list[float]:
    async with Application(url) as app:
        return await measured(lambda number: app.stamp.enqueue(n=number), worker, jobs)


async def _theirs(url: str, worker: Child, jobs: int) -> list[float]:
    async with peer(_PEER, url).submitting() as submit:
        return await measured(lambda number: submit("stamp", number), worker, jobs)
