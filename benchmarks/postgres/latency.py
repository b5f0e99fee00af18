"""Latency: from the return of a submission to the start of its handler, on an idle worker elsewhere (target 6).

First at an even pace, beside the peer; then at random gaps, for each of several rates.
"""

from __future__ import annotations

import uvloop

from benchmarks import latency
from benchmarks.application import Application
from benchmarks.harness import Line, Plan, at_most, percentile
from benchmarks.postgres import peer, server
from benchmarks.processes import Child, child

TITLE = "Submit returned → handler start, idle worker in another process"

_RATES = {5: 60, 20: 200, 50: 400, 100: 600, 300: 1500, 1000: 4000}
"""Submissions a second, and the number of jobs submitted at that rate."""


def run(plan: Plan) -> list[Line]:
    """Alternate: ours, the peer."""
    middle = Line("p50", "ms", other="PgQueuer", target=at_most(1.2))
    worst = Line("p99", "ms", other="PgQueuer", target=at_most(3))
    timer = Line("for comparison: how late a plain timer is here, p99", "ms")
    jobs = plan.size(300, 5)
    paced = {
        rate: (Line(f"{rate} a second, p50", "ms"), Line(f"{rate} a second, p99", "ms", target=at_most(5)))
        for rate in _RATES
    }
    rates = {rate: plan.size(number, 5) for rate, number in _RATES.items()}
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
        with server.database() as home, child("benchmarks.worker", home.url) as worker:
            for rate, delays in uvloop.run(_swept(home.url, worker, rates)).items():
                for line, share in zip(paced[rate], (50, 99), strict=True):
                    line.add(percentile(delays, share))
    return [middle, worst, timer, *(line for pair in paced.values() for line in pair)]


async def _ours(url: str, worker: Child, jobs: int) -> list[float]:
    async with Application(url) as app:
        return await latency.measured(lambda number: app.stamp.enqueue(n=number), worker, jobs)


async def _theirs(url: str, worker: Child, jobs: int) -> list[float]:
    async with peer.queries(url) as queries:
        return await latency.measured(lambda number: queries.enqueue("stamp", peer.payload(number)), worker, jobs)


async def _swept(url: str, worker: Child, rates: dict[int, int]) -> dict[int, list[float]]:
    async with Application(url) as app:
        return await latency.swept(lambda number: app.stamp.enqueue(n=number), worker, rates)
