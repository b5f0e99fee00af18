"""Backlog: what a claim costs in a large file, against the same in a small one (target 8)."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import uvloop

from benchmarks.harness import Line, Plan, percentile, times_at_most
from benchmarks.sqlite.filling import filled
from holdfast.core.models import JobState, Settlement
from holdfast.stores.base import ClaimRequest
from holdfast.stores.sqlite.store import SQLiteStore

TITLE = "Claim p99 (10 jobs a claim), against 10,000 waiting"
_CASES = (
    ("1 M waiting", {"waiting": 1_000_000}),
    ("3 M waiting", {"waiting": 3_000_000}),
    ("10,000 waiting, 1 M finished", {"waiting": 10_000, "ended": 1_000_000}),
    ("10,000 waiting, 3 M finished", {"waiting": 10_000, "ended": 3_000_000}),
    ("10,000 waiting, 1 M scheduled", {"waiting": 10_000, "scheduled": 1_000_000}),
    ("10,000 waiting in 1,000 queues, any of them", {"waiting": 10_000, "queues": 1000}),
)


def run(plan: Plan) -> list[Line]:
    """For each large file: its claims and those of a small one, alternating."""
    lines = []
    for what, sizes in _CASES:
        line = Line(what, "ms", other="10,000", target=times_at_most(1.2))
        middle = Line(f"{what}, p50", "ms", other="10,000")
        queue = "*" if "queues" in sizes else "default"
        with plan.place() as folder:
            large, small = folder / "large.db", folder / "small.db"
            shrunk = {key: value if key == "queues" else max(1000, value // 1000) for key, value in sizes.items()}
            filled(large, **(shrunk if plan.quick else sizes))
            filled(small, waiting=plan.size(10_000, 1000))
            claims = plan.size(300, 10)
            for _ in range(plan.rounds):
                ours = uvloop.run(_claims(large, queue, claims))
                theirs = uvloop.run(_claims(small, "default", claims))
                line.add(percentile(ours, 99), percentile(theirs, 99))
                middle.add(percentile(ours, 50), percentile(theirs, 50))
        lines += [line, middle]
    return lines


async def _claims(path: Path, queue: str, times: int) -> list[float]:
    """Milliseconds of each claim; what was claimed is settled in between, so the file keeps its shape."""
    store = SQLiteStore(str(path))
    await store.open()
    took = []
    for index in range(-5, times):
        started = time.perf_counter()
        claim = await store.queueing.claim(
            ClaimRequest("benchmark", {queue: 10}, limit=10, lease_for=timedelta(seconds=60))
        )
        if index >= 0:
            took.append((time.perf_counter() - started) * 1000)
        await store.queueing.settle(
            [Settlement(job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED) for job in claim.jobs]
        )
    await store.close()
    return took
