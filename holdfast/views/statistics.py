"""Documents of job statistics, for CLI and HTTP API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.history import History, HistoryInterval
from holdfast.core.models import JobState
from holdfast.core.stats import CountGroup, JobStats
from holdfast.views.documents import Counted
from holdfast.views.formatting import format_timestamp

OTHERS = "others"
"""Name of the entry for all workers beyond the listed ones."""
_MAX_WORKERS = 100

Counts = Annotated[dict[str, int], Meta(description="How many jobs are in each state; every state is named.")]


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's jobs."""

    name: str
    counts: Counts


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that a worker took last; of ``null`` the unclaimed ones, of ``others`` those of all the workers
    that are not listed."""

    worker: str | None
    counts: Counts


class RecentStatsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs to which something happened lately: they were submitted, taken or ended, or an attempt failed."""

    minutes: int
    counts: Counts
    by_worker: list[WorkerCounts]
    ended_per_second: Annotated[float, Meta(description="Of those that ended.", ge=0)]
    mean_seconds: Annotated[
        float | None, Meta(description="How long the last attempt of those that succeeded took; null: none did.")
    ]
    longest_seconds: float | None


class FiguresDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the jobs of each kind."""

    counts: Counts
    at_least: Annotated[
        list[JobState],
        Meta(description="States of which there are, or may be, more: only `most` of them were looked at."),
    ]
    most: Annotated[int, Meta(description="How many jobs of a state are looked at.", ge=1)]
    scheduled_for_retry: Annotated[int, Meta(description="Jobs that failed and whose next attempt is not due.", ge=0)]
    attempts: Annotated[dict[str, Counted], Meta(description="How many jobs had so many attempts.")]
    by_queue: list[QueueCounts]
    by_worker: list[WorkerCounts]
    recent: RecentStatsDocument


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that ended within a minute or an hour."""

    start: Annotated[str, Meta(description="The beginning of this time.")]
    succeeded: int
    dead: int
    cancelled: int
    mean_seconds: Annotated[
        float | None, Meta(description="How long the last attempt of those that succeeded took; null: none did.")
    ]
    longest_seconds: float | None


class HistoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of ended jobs, from one instant to the present. Jobs are counted about a minute after their ends."""

    interval: HistoryInterval
    points: list[HistoryEntry]


def history_document(history: History, allows: Callable[[str], bool] = lambda queue: True) -> HistoryDocument:
    """Returns the document of the allowed queues' history."""
    return HistoryDocument(
        interval=history.interval,
        points=[
            HistoryEntry(
                start=format_timestamp(point.start_us),
                succeeded=point.succeeded,
                dead=point.dead,
                cancelled=point.cancelled,
                mean_seconds=None if point.mean_seconds is None else round(point.mean_seconds, 6),
                longest_seconds=None if point.longest_seconds is None else round(point.longest_seconds, 6),
            )
            for point in history.to_points(allows)
        ],
    )


def figures_document(figures: JobStats, minutes: int) -> FiguresDocument:
    """Returns the document of the counts."""
    attempts = figures.count_by(lambda group: group.attempts)
    return FiguresDocument(
        counts=_counts(figures),
        at_least=[state for state in JobState if state in figures.at_least],
        most=figures.most,
        scheduled_for_retry=figures.count_jobs(lambda group: group.later and group.state is JobState.FAILED),
        attempts={str(number): attempts[number] for number in sorted(attempts)},
        by_queue=[
            QueueCounts(name=queue, counts=_counts(figures.for_queues(queue.__eq__)))
            for queue in sorted(figures.count_by(lambda group: group.queue))
        ],
        by_worker=_by_worker(figures.groups),
        recent=_recent(figures, minutes),
    )


def _recent(figures: JobStats, minutes: int) -> RecentStatsDocument:
    lately = [group for group in figures.groups if group.recent]
    succeeded = [group for group in lately if group.state is JobState.SUCCEEDED]
    number = sum(group.number for group in succeeded)
    return RecentStatsDocument(
        minutes=minutes,
        counts=_counts(figures, lambda group: group.recent),
        by_worker=_by_worker(lately),
        ended_per_second=round(figures.ended_per_second(timedelta(minutes=minutes)), 6),
        mean_seconds=round(sum(group.seconds for group in succeeded) / number, 6) if number else None,
        longest_seconds=round(max(group.longest for group in succeeded), 6) if number else None,
    )


def _counts(figures: JobStats, which: Callable[[CountGroup], bool] = lambda group: True) -> dict[str, int]:
    return _named(figures.count_by(lambda group: group.state, which))


def _named(counts: Mapping[JobState, int]) -> dict[str, int]:
    return {state.value: counts.get(state, 0) for state in JobState}


def _by_worker(groups: list[CountGroup]) -> list[WorkerCounts]:
    """Returns the workers with the most jobs first."""
    found: dict[str | None, Counter[JobState]] = {}
    for group in groups:
        found.setdefault(group.worker, Counter())[group.state] += group.number
    ordered = sorted(found, key=lambda worker: (-found[worker].total(), worker or ""))
    listed = [WorkerCounts(worker=worker, counts=_named(found[worker])) for worker in ordered[:_MAX_WORKERS]]
    rest: Counter[JobState] = Counter()
    for worker in ordered[_MAX_WORKERS:]:
        rest += found[worker]
    return [*listed, WorkerCounts(worker=OTHERS, counts=_named(rest))] if rest else listed
