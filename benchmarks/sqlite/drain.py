"""Drain: jobs queued beforehand, by one worker process and by two; every completion committed (targets 5)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import uvloop

from benchmarks.application import fill, milliseconds
from benchmarks.drained import ONE_ATTEMPT, UNPREFETCHED, Figures, cpu_us, drained, rate_of, share_of_slowest
from benchmarks.harness import Line, Plan, at_least, at_most, percentile, times_at_least
from benchmarks.processes import child
from benchmarks.sqlite.peer import Peer

TITLE = "Drain, synchronous=FULL"


def run(plan: Plan) -> list[Line]:
    """Alternate: one of ours, two of ours, the peer."""
    one = Line("one worker process", "jobs/s", target=times_at_least(15))
    cpu = Line("CPU a job, whole process", "µs", target=at_most(18))
    two = Line("two worker processes", "jobs/s", other="our one", target=times_at_least(0.85))
    share = Line("the slower worker's share of the jobs", "%", target=at_least(35))
    claim = Line("claim p99, two workers", "ms", target=at_most(25))
    once = Line(ONE_ATTEMPT, "jobs/s", other="our one")
    unprefetched = Line(UNPREFETCHED, "jobs/s", other="our one")
    jobs, theirs = plan.size(50_000, 500), plan.size(5_000, 50)
    for _ in range(plan.rounds):
        isolated = emptied(plan, jobs, 1)
        rate, spent = rate_of(isolated), cpu_us(isolated)
        peer_rate, peer_spent = _peer(plan, theirs)
        pair = emptied(plan, jobs, 2)
        one.add(rate, peer_rate)
        cpu.add(spent, peer_spent)
        two.add(rate_of(pair), rate)
        share.add(share_of_slowest(pair))
        claim.add(percentile(milliseconds(took for each in pair for took in each["claims"]), 99))
        once.add(rate_of(emptied(plan, jobs, 1, max_attempts=1)), rate)
        unprefetched.add(rate_of(emptied(plan, jobs, 1, "--no-prefetch")), rate)
    return [one, cpu, two, share, claim, once, unprefetched]


def emptied(plan: Plan, jobs: int, workers: int, *options: str, max_attempts: int = 5) -> Figures:
    """The figures of ``workers`` processes that emptied a new file together."""
    with plan.place() as folder:
        path = folder / "jobs.db"
        uvloop.run(fill(path, jobs, max_attempts=max_attempts))
        figures = drained("benchmarks.worker", path, workers, *options)
        _check(path, jobs)
    return figures


def _check(path: Path, jobs: int) -> None:
    """A rate counts only if every job has succeeded, and none was claimed twice."""
    connection = sqlite3.connect(path)
    try:
        (found,) = connection.execute("select count(*) from holdfast_job where state = 5 and claims = 1").fetchall()
    finally:
        connection.close()
    if found != (jobs,):
        raise RuntimeError(f"of {jobs} jobs {found[0]} were run once and succeeded")


def _peer(plan: Plan, tasks: int) -> tuple[float, float]:
    with plan.place() as folder:
        path = folder / "huey.db"
        peer = Peer(path)
        for index in range(tasks):
            peer.noop(index)
        peer.huey.storage.close()
        with child("benchmarks.sqlite.peer_worker", path, tasks) as consumer:
            figures = consumer.ask("go")
    return tasks / (figures["ended_at"] - figures["started_at"]), figures["cpu_seconds"] / tasks * 1e6
