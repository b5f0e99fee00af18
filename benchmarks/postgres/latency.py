"""Latency: from the return of a submission to the start of its handler, on an idle worker elsewhere (target 6)."""

from __future__ import annotations

import uvloop

from benchmarks import latency
from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_most, percentile
from benchmarks.postgres import peer, server
from benchmarks.processes import Child, child

TITLE = "Submit returned → handler start, idle worker in another process"


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer."""
    middle = Line("p50", "ms", other="PgQueuer", target=at_most(1.2))
    worst = Line("p99", "ms", other="PgQueuer", target=at_most(3))
    timer = Line("for comparison: how late a plain timer is here, p99", "ms")
    jobs = plan.size(300, 5)
    for _ in range(plan.rounds):
        with server.database() as home, child("benchmarks.worker", home.url) as worker:
            ours = uvloop.run(_ours(home.url, worker, jobs))
        with server.database() as home:
            uvloop.run(peer.install(home.url))
            with child("benchmarks.postgres.peer_worker", home.url) as worker:
                theirs = uvloop.run(_theirs(home.url, worker, jobs))
        timer.add(percentile([latency.late() for _ in range(jobs)], 99))
        middle.add(percentile(ours, 50), percentile(theirs, 50))
        worst.add(percentile(ours, 99), percentile(theirs, 99))
    return [middle, worst, timer]


async def _ours(url: str, worker: Child, jobs: int) -> list[float]:
    async with Application(url) as app:
        return await latency.measured(lambda number: app.stamp.enqueue(n=number), worker, jobs)


async def _theirs(url: str, worker: Child, jobs: int) -> list[float]:
    async with peer.queries(url) as queries:
        return await latency.measured(lambda number: queries.enqueue("stamp", peer.payload(number)), worker, jobs)
