"""Logs and metrics: what telling of it costs a drain (target 12)."""

from __future__ import annotations

from benchmarks.drained import rate_of
from benchmarks.harness import Line, Plan, times_at_least
from benchmarks.sqlite.drain import emptied

TITLE = "Drain with metrics and log lines, one worker process"


def run(plan: Plan) -> list[Line]:
    """Alternate: silent, with metrics, at INFO with the lines of single jobs at DEBUG, both, and with every line."""
    metrics = Line("metrics", "jobs/s", other="silent", target=times_at_least(0.9))
    normal = Line("log level INFO (default)", "jobs/s", other="silent", target=times_at_least(0.9))
    both = Line("metrics, and log level INFO", "jobs/s", other="silent", target=times_at_least(0.9))
    every = Line("a line for each step of each job", "jobs/s", other="silent", target=times_at_least(0.6))
    jobs = plan.size(50_000, 500)
    for _ in range(plan.rounds):
        silent = rate_of(emptied(plan, jobs, 1))
        metrics.add(rate_of(emptied(plan, jobs, 1, "--metrics")), silent)
        normal.add(rate_of(emptied(plan, jobs, 1, "--log-level", "INFO")), silent)
        both.add(rate_of(emptied(plan, jobs, 1, "--metrics", "--log-level", "INFO")), silent)
        every.add(rate_of(emptied(plan, jobs, 1, "--log-level", "INFO", "--job-log-level", "INFO")), silent)
    return [metrics, normal, both, every]
