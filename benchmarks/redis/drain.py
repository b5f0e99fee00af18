"""Drain: jobs queued beforehand, by one worker process and by two, as durable as the server is configured (target 4).

A peer's jobs count once they are acknowledged, which the server is asked for.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import uvloop

from benchmarks.application import fill, milliseconds
from benchmarks.drained import ONE_ATTEMPT, UNPREFETCHED, cpu_us, drained, rate_of, share_of_slowest
from benchmarks.harness import Line, Plan, at_least, percentile, times_at_least
from benchmarks.processes import children
from benchmarks.redis import server
from benchmarks.redis.peers import KNOWN, LOSING, peer
from benchmarks.redis.server import ALWAYS, EVERYSEC
from holdfast.core.models import JobFilter, JobState
from holdfast.stores import open_store

TITLE = "Drain, server and workers on one machine"
_QUICKEST = ("dramatiq", "taskiq-stream")
"""Of those that survive a kill: the others are far behind, and not asked again with two processes, or ``always``."""
SURVIVOR = "the quickest that survives a kill"
_LOOK = 0.005  # seconds between questions how much is left
_PATIENCE = 300.0  # seconds a peer may take


class Emptied(NamedTuple):
    """What a drain took: jobs a second, and microseconds of CPU a job."""

    rate: float
    worker_us: float
    server_us: float


def run(plan: Plan) -> list[Line]:
    """Alternate: ours and each peer; then two processes of ours and of the quickest; then the same on a server that
    syncs its log for each write."""
    one = Line("one worker process, everysec", "jobs/s", other=SURVIVOR, target=times_at_least(10))
    floor = Line("one worker process, everysec, in itself", "jobs/s", target=at_least(50_000))
    cpu = Line("CPU a job, worker", "µs", other=SURVIVOR)
    served = Line("CPU a job, server", "µs", other=SURVIVOR)
    known = peers(plan)
    each_one = {name: Line("one worker process, everysec", "jobs/s", other=name) for name in known}
    two = Line("two worker processes, everysec", "jobs/s", other=f"two of {SURVIVOR}", target=times_at_least(7))
    share = Line("the slower of two's share of the jobs", "%", target=at_least(30))
    claim = Line("claim p99, two workers", "ms")
    always = Line("one worker process, always", "jobs/s", other=SURVIVOR, target=times_at_least(12))
    once = Line(ONE_ATTEMPT, "jobs/s", other="our one")
    unprefetched = Line(UNPREFETCHED, "jobs/s", other="our one")
    quickest = _QUICKEST[:1] if plan.quick else _QUICKEST
    each_always = {name: Line("one worker process, always", "jobs/s", other=name) for name in quickest}
    for _ in range(plan.rounds):
        theirs = {name: _theirs(plan, name, 1, EVERYSEC) for name in known}
        ours, _, _ = _ours(plan, 1, EVERYSEC)
        best = max((theirs[name] for name in known if name not in LOSING), key=lambda each: each.rate)
        one.add(ours.rate, best.rate)
        floor.add(ours.rate)
        cpu.add(ours.worker_us, best.worker_us)
        served.add(ours.server_us, best.server_us)
        for name, line in each_one.items():
            line.add(ours.rate, theirs[name].rate)
        pair, even, claims = _ours(plan, plan.size(2, 1), EVERYSEC)
        two.add(pair.rate, max(_theirs(plan, name, plan.size(2, 1), EVERYSEC).rate for name in quickest))
        share.add(even)
        claim.add(claims)
        synced, _, _ = _ours(plan, 1, ALWAYS)
        rates = {name: _theirs(plan, name, 1, ALWAYS).rate for name in quickest}
        always.add(synced.rate, max(rates.values()))
        for name, rate in rates.items():
            each_always[name].add(synced.rate, rate)
        once.add(_ours(plan, 1, EVERYSEC, max_attempts=1)[0].rate, ours.rate)
        unprefetched.add(_ours(plan, 1, EVERYSEC, "--no-prefetch")[0].rate, ours.rate)
    by_us = [one, floor, cpu, served, two, share, claim, always, once, unprefetched]
    return [*by_us, *each_one.values(), *each_always.values()]


def peers(plan: Plan) -> tuple[str, ...]:
    """Whom it is compared to."""
    return _QUICKEST[:1] if plan.quick else KNOWN


def _ours(plan: Plan, workers: int, fsync: str, *options: str, max_attempts: int = 5) -> tuple[Emptied, float, float]:
    """What our workers say of a drain; also the slower one's share, and the milliseconds of a claim, p99."""
    jobs = plan.size(60_000, 500)
    with server.namespace(fsync) as url:
        uvloop.run(fill(url, jobs, max_attempts=max_attempts))
        server.rewrite_log(fsync)
        before = server.cpu_seconds(fsync)
        figures = drained("benchmarks.worker", url, workers, *options)
        spent = server.cpu_seconds(fsync) - before
        uvloop.run(_check(url, jobs))
    claims = percentile(milliseconds(took for each in figures for took in each["claims"]), 99)
    return Emptied(rate_of(figures), cpu_us(figures), spent / jobs * 1e6), share_of_slowest(figures), claims


async def _check(url: str, jobs: int) -> None:
    """A rate counts only if every job has succeeded."""
    store = open_store(url)
    await store.open()
    found = await store.query.count(JobFilter(states=(JobState.SUCCEEDED,)))
    await store.close()
    if found != jobs:
        raise RuntimeError(f"of {jobs} jobs {found} succeeded")


def _theirs(plan: Plan, name: str, workers: int, fsync: str) -> Emptied:
    """The same of a peer."""
    with server.database(fsync) as url, server.client(fsync) as client:
        side = peer(name, url)
        jobs = plan.size(side.jobs, 50)
        uvloop.run(side.fill(jobs))
        server.rewrite_log(fsync)
        with children(workers, "benchmarks.redis.peer_worker", name, url) as family:
            before = server.cpu_seconds(fsync)
            started = time.monotonic()
            for each in family:
                each.say("go")
            while side.left(client):
                if time.monotonic() - started > _PATIENCE:
                    raise RuntimeError(f"{name} has {side.left(client)} of {jobs} jobs left")
                time.sleep(_LOOK)
            seconds = time.monotonic() - started
            figures = [each.ask("mark") for each in family]
            served = server.cpu_seconds(fsync) - before
            for each in family:
                each.ask("stop")
    worked = sum(each["cpu"] - each["cpu_before"] for each in figures)
    return Emptied(jobs / seconds, worked / jobs * 1e6, served / jobs * 1e6)
