"""Job events and stats of SQLite: one process writes at a time, so events become visible in their order."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from holdfast.core.models import MICROSECOND, JobEvent, JobEvents
from holdfast.core.stats import CountGroup, JobStats
from holdfast.stores.common.event_cursor import LAST, EventCursor, slice_events
from holdfast.stores.common.named_sql import STATES


class EventReader:
    """The verbs, over the store's named statements."""

    def __init__(self, statements: Mapping[str, str]) -> None:
        self._sql = statements

    def events(
        self, reader: sqlite3.Connection, now_us: int, after: str | int | None, *, limit: int, max_age: timedelta
    ) -> JobEvents:
        """Returns the events after a cursor."""
        if after is None:
            return self._from_now(reader, now_us)
        cursor = EventCursor.read(after)
        if cursor.is_gap(now_us, max_age):
            return self._from_now(reader, now_us, gap=True)
        at, job_id, claims = cursor.start_position(now_us - max_age // MICROSECOND)
        values = {"at": at, "job": job_id, "claims": claims, "limit": limit + 1}
        found = [_job_event(row) for row in reader.execute(self._sql["events"], values)]
        return slice_events(cursor, found, limit, now_us)

    def stats(self, reader: sqlite3.Connection, now_us: int, recent: timedelta, max_count: int) -> JobStats:
        """Counts the jobs of each kind."""
        values = {"now": now_us, "since": now_us - recent // MICROSECOND, "max_count": max_count}
        groups = [
            CountGroup(
                queue=queue,
                state=STATES[code],
                worker=worker,
                attempts=attempts,
                later=bool(later),
                recent=bool(lately),
                number=number,
                seconds=max(0.0, seconds),
                longest=max(0.0, longest),
                age=age,
            )
            for queue, code, worker, attempts, later, lately, number, seconds, longest, age in reader.execute(
                self._sql["stats"], values
            )
        ]
        return JobStats(groups, max_count)

    def _from_now(self, reader: sqlite3.Connection, now_us: int, *, gap: bool = False) -> JobEvents:
        """Starts behind the last event, not at now: a caller's open transaction may add an earlier one."""
        (last,) = reader.execute(self._sql["last_ended"]).fetchone()
        return EventCursor(now_us, last or 0, LAST).events_until([], gap=gap)


def _job_event(row: tuple[Any, ...]) -> JobEvent:
    job_id, task, queue, code, claims, attempt, worker, started_at, ended_at, reason, error = row
    return JobEvent(
        job_id=job_id,
        task=task,
        queue=queue,
        state=STATES[code],
        claims=claims,
        attempt=attempt,
        worker=worker,
        started_at_us=started_at,
        ended_at_us=ended_at,
        reason=reason,
        error=error,
    )
