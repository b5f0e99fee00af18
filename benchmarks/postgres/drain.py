"""Drain: jobs queued beforehand, by one worker process and by two; every completion committed (targets 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from benchmarks.application import fill, milliseconds
from benchmarks.drained import ONE_ATTEMPT, UNPREFETCHED, Figures, cpu_us, drained, rate_of, share_of_slowest
from benchmarks.harness import Line, Plan, at_least, at_most, percentile, times_at_least
from benchmarks.postgres import bare, peer, server
from benchmarks.postgres.server import Database

TITLE = "Drain, server and workers on one machine"


def run(plan: Plan) -> list[Line]:
    """Alternate: one of ours, one of theirs, two of ours, two of theirs, a bare loop."""
    one = Line("one worker process", "jobs/s", other="PgQueuer", target=times_at_least(3))
    cpu = Line("CPU a job, worker", "µs", other="PgQueuer", target=at_most(12))
    served = Line("CPU a job, server", "µs", other="PgQueuer")
    two = Line("two worker processes", "jobs/s", other="PgQueuer's two", target=times_at_least(2.5))
    isolated = Line("two worker processes, against one", "jobs/s", other="our one", target=times_at_least(1))
    share = Line("the slower of two's share of the jobs", "%", other="PgQueuer", target=at_least(30))
    claim = Line("claim p99, two workers", "ms")
    floor = Line("one worker process, against claims and updates in a loop", "jobs/s", other="asyncpg")
    once = Line(ONE_ATTEMPT, "jobs/s", other="our one")
    unprefetched = Line(UNPREFETCHED, "jobs/s", other="our one")
    jobs = plan.size(50_000, 500)
    for _ in range(plan.rounds):
        first, first_cpu = ours(jobs, 1)
        their_first, their_cpu = theirs(jobs, 1)
        pair, _ = ours(jobs, plan.size(2, 1))
        their_pair, _ = theirs(jobs, plan.size(2, 1))
        one.add(rate_of(first), rate_of(their_first))
        cpu.add(cpu_us(first), cpu_us(their_first))
        served.add(first_cpu, their_cpu)
        two.add(rate_of(pair), rate_of(their_pair))
        isolated.add(rate_of(pair), rate_of(first))
        share.add(share_of_slowest(pair), share_of_slowest(their_pair))
        claim.add(percentile(milliseconds(took for each in pair for took in each["claims"]), 99))
        floor.add(rate_of(first), bare.measured(jobs, bare.cycled, 500)["both"])
        once.add(rate_of(ours(jobs, 1, max_attempts=1)[0]), rate_of(first))
        unprefetched.add(rate_of(ours(jobs, 1, "--no-prefetch")[0]), rate_of(first))
    return [one, cpu, served, two, isolated, share, claim, floor, once, unprefetched]


def ours(jobs: int, workers: int, *options: str, max_attempts: int = 5) -> tuple[Figures, float]:
    """What our workers say of a drain, and the server's CPU microseconds a job."""
    with server.database() as home:
        uvloop.run(fill(home.url, jobs, max_attempts=max_attempts))
        return _emptied(home, "benchmarks.worker", jobs, workers, check, *options)


def theirs(jobs: int, workers: int) -> tuple[Figures, float]:
    """The same of the peer's."""
    with server.database() as home:
        uvloop.run(peer.install(home.url, jobs))
        return _emptied(home, "benchmarks.postgres.peer_worker", jobs, workers, _check_theirs)


def _emptied(
    home: Database, module: str, jobs: int, workers: int, check: Callable[[Database, int], None], *options: str
) -> tuple[Figures, float]:
    server.checkpoint()
    before = server.cpu_seconds()
    figures = drained(module, home.url, workers, *options)
    spent = server.cpu_seconds() - before
    check(home, jobs)
    return figures, spent / jobs * 1e6


def check(home: Database, jobs: int) -> None:
    """A rate counts only if every job has succeeded, and none was claimed twice."""
    _right(home.execute("select count(*) from holdfast.job where state = 5 and claims = 1"), jobs)


def _check_theirs(home: Database, jobs: int) -> None:
    _right(home.execute("select count(distinct job_id) from pgqueuer_log where status = 'successful'"), jobs)


def _right(found: list[tuple[int]], jobs: int) -> None:
    if found != [(jobs,)]:
        raise RuntimeError(f"of {jobs} jobs {found[0][0]} were run once and succeeded")
