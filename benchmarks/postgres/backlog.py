"""Backlog: what a claim costs in a large table, against the same in a small one (target 8)."""

from __future__ import annotations

import uvloop

from benchmarks.claims import alternate_claims
from benchmarks.harness import Line, Plan, percentile, times_at_most
from benchmarks.postgres import server
from benchmarks.postgres.filling import filled

TITLE = "Claim p99 (10 jobs a claim), against 10,000 waiting"


def run(plan: Plan) -> list[Line]:
    """For each large table: its claims and those of a small one, one of each in turn."""
    large = plan.size(1_000_000, 1000, 10_000_000)
    named = f"{large // 1_000_000} M" if large >= 1_000_000 else f"{large:,}"
    few = plan.size(10_000, 1000)
    cases = (
        (f"{named} waiting", {"waiting": large}),
        (f"10,000 waiting, {named} finished", {"waiting": few, "ended": large}),
        ("10,000 waiting in 1,000 queues, any of them", {"waiting": few, "queues": 1000}),
    )
    lines = []
    for what, sizes in cases:
        line = Line(what, "ms", other="10,000", target=times_at_most(1.2))
        middle = Line(f"{what}, p50", "ms", other="10,000")
        queue = "*" if "queues" in sizes else "default"
        with server.database() as home:
            filled(home, **sizes)
            for _ in range(plan.rounds):  # three of them leave a few of 10,000
                with server.database() as small:
                    filled(small, waiting=few)
                    ours, theirs = uvloop.run(
                        alternate_claims({home.url: queue, small.url: "default"}, plan.size(300, 10))
                    )
                line.add(percentile(ours, 99), percentile(theirs, 99))
                middle.add(percentile(ours, 50), percentile(theirs, 50))
        lines += [line, middle]
    return lines
