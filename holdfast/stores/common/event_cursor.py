"""Marks in the feed of endings for stores in which later endings are seen later: one writer, or scripts one by one.

There an instant, and a place among its endings, are the position of a reader. What sets a clock back a little, as a
takeover by a replica may, is met by reading the last moments again.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import NamedTuple

from holdfast.core.errors import Invalid
from holdfast.core.models import MICROSECOND, JobEvent, JobEvents

OVERLAP_US = 1_000_000
"""What is read again, in case the clock was set back."""
LAST = "ffffffff-ffff-ffff-ffff-ffffffffffff"
"""Behind every job of an instant."""
FIRST_ID = "00000000-0000-0000-0000-000000000000"
"""Before every job of an instant."""
_MARK = re.compile(r"(\d{1,17})\.(\d{1,17})(?:\.([0-9a-f-]{36})\.(\d{1,16}))?", re.ASCII)

Place = tuple[int, str, int]
"""Instant, job and claims of an ending."""


class EventCursor(NamedTuple):
    """Position of a reader of events: a place, or an instant where no more was there."""

    read_at_us: int
    at: int
    job_id: str | None = None
    claims: int = 0

    @classmethod
    def read(cls, text: str | int) -> EventCursor:
        """From its text, or an instant; Invalid for other text."""
        if isinstance(text, int):
            return cls(text, text)
        found = _MARK.fullmatch(text)
        if found is None:
            raise not_a_mark(text)
        return cls(int(found[1]), int(found[2]), found[3], int(found[4] or 0))

    def __str__(self) -> str:
        position = "" if self.job_id is None else f".{self.job_id}.{self.claims}"
        return f"{self.read_at_us}.{self.at}{position}"

    def start_place(self, earliest_us: int) -> Place:
        """Behind which place to go on; never before the earliest instant."""
        position = (self.at - OVERLAP_US, "", 0) if self.job_id is None else (self.at, self.job_id, self.claims)
        return max(position, (earliest_us - OVERLAP_US, "", 0))

    def events_until(self, endings: list[JobEvent], *, more: bool = False, gap: bool = False) -> JobEvents:
        """Returns the events up to this position."""
        outside = self if self.job_id in (None, LAST) else self._replace(job_id=FIRST_ID, claims=0)
        return JobEvents(endings=endings, mark=str(self), public_cursor=str(outside), more=more, gap=gap)

    def is_gap(self, now_us: int, max_age: timedelta) -> bool:
        """Returns True if that is too long ago, or in no past of this store."""
        return not now_us - max_age // MICROSECOND <= self.read_at_us <= now_us + OVERLAP_US * 60


def place_of(ending: JobEvent) -> Place:
    """Returns the position of an event in the feed."""
    return ending.ended_at_us, ending.job_id, ending.claims


def slice_events(mark: EventCursor, found: list[JobEvent], limit: int, now_us: int) -> JobEvents:
    """The first ``limit`` endings found behind a mark, in order; there may be more of it."""
    if len(found) > limit:
        return EventCursor(now_us, *place_of(found[limit - 1])).events_until(found[:limit], more=True)
    if not found:
        return mark._replace(read_at_us=now_us).events_until([])
    return EventCursor(now_us, max(mark.at, found[-1].ended_at_us)).events_until(found)


def not_a_mark(text: str) -> Invalid:
    """Returns the error for an invalid mark."""
    return Invalid("after", text, "give the id of an event, unchanged")
