"""Atlas Jobs' counts, from Holdfast's figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atlas_jobs.words import status
from holdfast.core.stats import CountGroup, JobStats

Counts = dict[str, int]
Which = Callable[[CountGroup], bool]

MAX_COUNTED = 1_000_000
"""Jobs of each state that are counted at most; Atlas' counts are of all there are."""
_UNCLAIMED = "unassigned"
"""Stands for the worker of unclaimed jobs."""


def everything(group: CountGroup) -> bool:
    """Whatever it is."""
    return True


def by_status(figures: JobStats, which: Which = everything) -> Counts:
    """How many jobs in each status."""
    return dict(sorted(figures.count_by(lambda group: status(group.state), which).items()))


def by_worker(figures: JobStats, which: Which = everything) -> dict[str, Counts]:
    """How many jobs in each status, by who claimed them last."""
    found: dict[str, Counts] = {}
    numbers = figures.count_by(lambda group: (group.worker or _UNCLAIMED, status(group.state)), which)
    for (worker, word), number in sorted(numbers.items()):
        found.setdefault(worker, {})[word] = number
    return found


def metrics(figures: JobStats, minutes: int) -> dict[str, Any]:
    """All counts, of one instant; ``recent`` are the jobs that changed within so many minutes."""
    failures = figures.count_by(lambda group: group.failures)
    return {
        "statusCounts": by_status(figures),
        "byWorker": by_worker(figures),
        "attemptDistribution": {str(number): failures[number] for number in sorted(failures)},
        "scheduledForRetry": figures.count_jobs(lambda group: group.later),
        "recent": {
            "minutes": minutes,
            "statusCounts": by_status(figures, lambda group: group.recent),
            "byWorker": by_worker(figures, lambda group: group.recent),
        },
    }
