"""Backlog: what a claim costs in a large table, against the same in a small one (target 8)."""

from __future__ import annotations

import time
from datetime import timedelta

import uvloop

from benchmarks.harness import Line, Plan, percentile, times_at_most
from benchmarks.postgres import server
from benchmarks.postgres.filling import filled
from holdfast.core.models import JobState, Settlement
from holdfast.stores.base import ClaimRequest
from holdfast.stores.postgres.store import PostgresStore

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
                    ours, theirs = uvloop.run(_alternating(home.url, queue, small.url, plan.size(300, 10)))
                line.add(percentile(ours, 99), percentile(theirs, 99))
                middle.add(percentile(ours, 50), percentile(theirs, 50))
        lines += [line, middle]
    return lines


async def _alternating(large: str, queue: str, small: str, times: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each claim; what was claimed is settled in between, so the tables keep their shapes."""
    stores = PostgresStore(large), PostgresStore(small)
    took: tuple[list[float], list[float]] = [], []
    for store in stores:
        await store.open()
    for index in range(-20, times):
        for store, name, figures in zip(stores, (queue, "default"), took, strict=True):
            started = time.perf_counter()
            claim = await store.queueing.claim(
                ClaimRequest("benchmark", {name: 10}, limit=10, lease_for=timedelta(seconds=60))
            )
            if index >= 0:
                figures.append((time.perf_counter() - started) * 1000)
            if len(claim.jobs) < 10:
                raise RuntimeError(f"a claim found {len(claim.jobs)} of 10 jobs")
            await store.queueing.settle(
                [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in claim.jobs]
            )
    for store in stores:
        await store.close()
    return took
