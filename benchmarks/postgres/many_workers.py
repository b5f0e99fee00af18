"""Many workers: eight processes that claim from one queue at once, a random number of jobs each time."""

from __future__ import annotations

from benchmarks.application import milliseconds
from benchmarks.drained import drained, rate_of, share_of_slowest
from benchmarks.harness import Line, Plan, percentile
from benchmarks.postgres import drain, server
from benchmarks.postgres.filling import filled

TITLE = "Eight processes claiming 1 to 500 jobs at a time, settling each batch"


def run(plan: Plan) -> list[Line]:
    """Alternate: one process, eight."""
    line = Line("eight processes", "jobs/s", other="one")
    share = Line("the slowest's share of the jobs (even: 12.5)", "%")
    claim = Line("claim p99", "ms", other="one")
    jobs, many = plan.size(200_000, 2000), plan.size(8, 2)
    for _ in range(plan.rounds):
        figures = {}
        for processes in (1, many):
            with server.database() as home:
                filled(home, waiting=jobs)
                figures[processes] = drained("benchmarks.claimer", home.url, processes)
                drain.check(home, jobs)
        line.add(rate_of(figures[many]), rate_of(figures[1]))
        share.add(share_of_slowest(figures[many]))
        ours, theirs = ([took for each in figures[number] for took in each["claims"]] for number in (many, 1))
        claim.add(percentile(milliseconds(ours), 99), percentile(milliseconds(theirs), 99))
    return [line, share, claim]
