"""Cursors of job events for stores in which events become visible in their order: SQLite and Redis.

A cursor is an instant and a position among the events of that instant. A clock may be set back a little, as by a
failover to a replica: the last second is read again.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import NamedTuple

from holdfast.core.errors import Invalid
from holdfast.core.models import MICROSECOND, JobEvent, JobEvents

OVERLAP_US = 1_000_000
"""Span that is read again, in case the clock was set back."""
LAST = "ffffffff-ffff-ffff-ffff-ffffffffffff"
"""Sorts behind every job of an instant."""
FIRST_ID = "00000000-0000-0000-0000-000000000000"
"""Sorts before every job of an instant."""
_MARK = re.compile(r"(\d{1,17})\.(\d{1,17})(?:\.([0-9a-f-]{36})\.(\d{1,16}))?", re.ASCII)

EventPosition = tuple[int, str, int]
"""Instant, job and claims of an event."""


class EventCursor(NamedTuple):
    """Position of a reader: that of an event, or an instant up to which it has read all events."""

    read_at_us: int
    at: int
    job_id: str | None = None
    claims: int = 0

    @classmethod
    def read(cls, text: str | int) -> EventCursor:
        """Parses a cursor, or takes an instant; raises Invalid for other text."""
        if isinstance(text, int):
            return cls(text, text)
        found = _MARK.fullmatch(text)
        if found is None:
            raise not_a_mark(text)
        return cls(int(found[1]), int(found[2]), found[3], int(found[4] or 0))

    def __str__(self) -> str:
        position = "" if self.job_id is None else f".{self.job_id}.{self.claims}"
        return f"{self.read_at_us}.{self.at}{position}"

    def start_position(self, earliest_us: int) -> EventPosition:
        """Returns the position behind which to read on; never before the earliest instant."""
        position = (self.at - OVERLAP_US, "", 0) if self.job_id is None else (self.at, self.job_id, self.claims)
        return max(position, (earliest_us - OVERLAP_US, "", 0))

    def events_until(self, events: list[JobEvent], *, more: bool = False, gap: bool = False) -> JobEvents:
        """Returns the events up to this position."""
        outside = self if self.job_id in (None, LAST) else self._replace(job_id=FIRST_ID, claims=0)
        return JobEvents(events=events, cursor=str(self), public_cursor=str(outside), more=more, gap=gap)

    def is_gap(self, now_us: int, max_age: timedelta) -> bool:
        """Returns True if the cursor is older than ``max_age``, or was not issued by this store."""
        return not now_us - max_age // MICROSECOND <= self.read_at_us <= now_us + OVERLAP_US * 60


def position_of(event: JobEvent) -> EventPosition:
    """Returns the position of an event in the feed."""
    return event.ended_at_us, event.job_id, event.claims


def slice_events(cursor: EventCursor, found: list[JobEvent], limit: int, now_us: int) -> JobEvents:
    """Returns the first ``limit`` of the events found behind a cursor, in order. ``found`` may have one more."""
    if len(found) > limit:
        return EventCursor(now_us, *position_of(found[limit - 1])).events_until(found[:limit], more=True)
    if not found:
        return cursor._replace(read_at_us=now_us).events_until([])
    return EventCursor(now_us, max(cursor.at, found[-1].ended_at_us)).events_until(found)


def not_a_mark(text: str) -> Invalid:
    """Returns the error for an invalid cursor."""
    return Invalid("after", text, "give the id of an event, unchanged")
