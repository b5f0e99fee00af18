"""History of ended jobs: how many ended in each minute and in each hour, by queue and state. Pure.

Sweepers count ended jobs some time after their ends (``COUNT_DELAY``): nothing is written with a job. Each end is
counted once, whether a worker, a sweep, the API or an operator has ended the job. Not counted: a job that is deleted or
replayed before, and one that a handler's own transaction completes (``context.complete``) and commits only after that
time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.models import MICROSECOND, JobState
from holdfast.core.validation import format_duration

COUNT_DELAY = timedelta(seconds=40)
"""Earliest count of a job after its end: longer than a statement of the store takes, whose end becomes visible late."""
COUNTED = timedelta(seconds=110)
"""Latest count of a job after its end, where a worker sweeps: it counts once a minute."""
_SHORTEST = timedelta(minutes=5)
FIRST_WINDOW = timedelta(hours=1)
"""Time before the first count from which ended jobs are counted."""


class HistoryInterval(StrEnum):
    """Length of time for which ended jobs are counted together."""

    MINUTE = "minute"
    HOUR = "hour"

    @property
    def length_us(self) -> int:
        """Its length in microseconds."""
        return 60_000_000 if self is HistoryInterval.MINUTE else 3_600_000_000

    @property
    def retention_us(self) -> int:
        """Retention of its counts in microseconds: 6 hours of minutes, 31 days of hours."""
        return (6 if self is HistoryInterval.MINUTE else 31 * 24) * 3_600_000_000

    def floor_us(self, instant_us: int) -> int:
        """Returns the beginning of the interval in which an instant lies."""
        return instant_us - instant_us % self.length_us


class HistoryRow(msgspec.Struct, frozen=True, gc=False):
    """Number of a queue's jobs that ended in a state within an interval, and how many seconds their last attempts took:
    in all, and the longest."""

    start_us: int
    queue: str
    state: JobState
    number: int
    seconds: float
    longest: float


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that ended within a interval."""

    start_us: int
    succeeded: int = 0
    dead: int = 0
    cancelled: int = 0
    mean_seconds: float | None = None
    """Mean length of the last attempts of those that succeeded; None: none did."""
    longest_seconds: float | None = None


class History(msgspec.Struct, frozen=True):
    """Counts of ended jobs between two instants."""

    interval: HistoryInterval
    since_us: int
    until_us: int
    rows: list[HistoryRow]

    def to_points(self, allows: Callable[[str], bool] = lambda queue: True) -> list[HistoryPoint]:
        """Returns a point for each interval, also where nothing ended, of the allowed queues together.

        The last minutes, of which not all is counted, are left out.
        """
        allowed = {queue for queue in {row.queue for row in self.rows} if allows(queue)}
        found: dict[int, list[HistoryRow]] = {}
        for row in self.rows:
            if row.queue in allowed:
                found.setdefault(row.start_us, []).append(row)
        until_us = self.until_us
        if self.interval is HistoryInterval.MINUTE:
            until_us = self.interval.floor_us(until_us - COUNTED // MICROSECOND)
        starts = range(self.interval.floor_us(self.since_us), until_us, self.interval.length_us)
        return [_point(start_us, found.get(start_us, [])) for start_us in starts]


def choose_interval(span: timedelta) -> HistoryInterval:
    """Returns the interval for so long a history: minutes up to 6 h, hours up to 31 d. Invalid: longer, or nothing."""
    for interval in HistoryInterval:
        if _SHORTEST <= span <= timedelta(microseconds=interval.retention_us):
            return interval
    raise Invalid("since", format_duration(span), "give a span from 5m to 31d: by minutes up to 6h, then by hours")


def _point(start_us: int, rows: list[HistoryRow]) -> HistoryPoint:
    succeeded = [row for row in rows if row.state is JobState.SUCCEEDED]
    number = sum(row.number for row in succeeded)
    return HistoryPoint(
        start_us=start_us,
        succeeded=number,
        dead=sum(row.number for row in rows if row.state is JobState.DEAD),
        cancelled=sum(row.number for row in rows if row.state is JobState.CANCELLED),
        mean_seconds=sum(row.seconds for row in succeeded) / number if number else None,
        longest_seconds=max((row.longest for row in succeeded), default=None),
    )
