"""Drains: worker processes, ours or a peer's, empty a store that was filled before, and what that took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.processes import children

ONE_ATTEMPT, UNPREFETCHED = "one worker process, max_attempts = 1", "one worker process, prefetch = false"
"""Drains beside the usual one, whose workers hold no more jobs than they run at once."""

Figures = list[dict[str, Any]]
"""Final report of each worker process."""


def drained(module: str, store: Path | str, workers: int, *options: object) -> Figures:
    """The figures of ``workers`` processes that emptied one store together."""
    with children(workers, module, store, "--drain", *options) as family:
        for each in family:
            each.say("go")
        return [each.heard() for each in family]


def rate_of(figures: Figures) -> float:
    """Jobs a second, from the first start to the last committed completion."""
    seconds = max(each["settled_at"] for each in figures) - min(each["started_at"] for each in figures)
    return float(sum(each["settled"] for each in figures) / seconds)


def cpu_us(figures: Figures) -> float:
    """Microseconds of CPU a job, of every thread of every worker."""
    spent = sum(each["cpu_then"] - each["cpu_before"] for each in figures)
    return float(spent / sum(each["settled"] for each in figures) * 1e6)


def share_of_slowest(figures: Figures) -> float:
    """Per cent of the jobs that the process with the fewest ran."""
    settled = [each["settled"] for each in figures]
    return float(min(settled) / sum(settled) * 100)
