"""Job events and stats of PostgreSQL.

Transactions become visible in another order than they began or dated their rows. So a cursor holds a snapshot, and the
next page has the events that have become visible since. See docs/adr/0026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from holdfast.core.models import MICROSECOND, JobEvent, JobEvents
from holdfast.core.stats import CountGroup, JobStats
from holdfast.stores.common.event_cursor import FIRST_ID, EventPosition, not_a_mark, position_of
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.postgres.encoding import NumberedStatement, from_text
from holdfast.stores.postgres.pool import PostgresPool

LAG_US = 10_000_000
"""Microseconds from the begin of a statement until its transaction has its xid, at most: the longest statement."""
_AHEAD_US = 60_000_000  # how far ahead of the clock a cursor may be: the clock was set back
_SNAPSHOT = r"\d{1,17}\.\d{1,18}(?:\.\d{1,18}-\d{1,17}){0,2000}"
_JOB = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_MARK = re.compile(rf"({_SNAPSHOT})(?:~({_SNAPSHOT})~(\d{{1,17}})\.({_JOB})\.(\d{{1,18}}))?", re.ASCII)


class TransactionSnapshot(NamedTuple):
    """The finished transactions: xids below ``top`` that are not ``running``. ``running`` has the earliest instant that
    each of them can have written."""

    at: int
    top: int
    running: Mapping[int, int]

    @classmethod
    def read(cls, text: str) -> TransactionSnapshot:
        """Parses a snapshot; raises Invalid for text that PostgreSQL cannot have written."""
        at, top, *running = text.split(".")
        pairs = (each.split("-") for each in running)
        lows = {int(top) - int(below): int(at) - 1000 * int(age) for below, age in pairs}
        if not all(0 < xid < int(top) for xid in lows):
            raise not_a_mark(text)
        return cls(int(at), int(top), lows)

    def __str__(self) -> str:
        running = (f".{self.top - xid}-{-(-(self.at - low) // 1000)}" for xid, low in sorted(self.running.items()))
        return f"{self.at}.{self.top}" + "".join(running)

    @property
    def native(self) -> str:
        """Returns the snapshot as a ``pg_snapshot``."""
        running = sorted(self.running)
        return f"{min([self.top, *running])}:{self.top}:{','.join(map(str, running))}"

    def followed_by(self, at: int, top: int, running: list[int]) -> TransactionSnapshot:
        """Returns a later snapshot; a transaction that is new in it began after this one."""
        return TransactionSnapshot(at, top, {xid: self.running.get(xid, self.at - LAG_US) for xid in running})

    def earliest_visible(self, later: TransactionSnapshot) -> int:
        """Returns the earliest instant of rows that became visible between this snapshot and a later one."""
        finished = [low for xid, low in self.running.items() if xid not in later.running]
        return min([self.at - LAG_US, *finished])


class SnapshotCursor(NamedTuple):
    """Position of a reader: all events ``seen``, and those of the snapshot ``shown`` up to a position."""

    seen: TransactionSnapshot
    shown: TransactionSnapshot | None = None
    position: EventPosition = (0, FIRST_ID, 0)

    @classmethod
    def read(cls, text: str | int) -> SnapshotCursor:
        """Parses a cursor, or takes an instant with no transaction seen; raises Invalid for other text."""
        if isinstance(text, int):
            return cls(TransactionSnapshot(text + LAG_US, 1, {}))
        found = _MARK.fullmatch(text)
        if found is None:
            raise not_a_mark(text)
        if found[2] is None:
            return cls(TransactionSnapshot.read(found[1]))
        return cls(
            TransactionSnapshot.read(found[1]),
            TransactionSnapshot.read(found[2]),
            (int(found[3]), found[4], int(found[5])),
        )

    def __str__(self) -> str:
        if self.shown is None:
            return str(self.seen)
        at, job_id, claims = self.position
        return f"{self.seen}~{self.shown}~{at}.{job_id}.{claims}"

    def events_until(self, found: list[JobEvent], *, more: bool = False, gap: bool = False) -> JobEvents:
        """Returns the events up to this position, without attempts of jobs that are being deleted."""
        outside = self._replace(position=(self.position[0], FIRST_ID, 0))
        stored = [each for each in found if each.task]
        return JobEvents(events=stored, cursor=str(self), public_cursor=str(outside), more=more, is_exact=True, gap=gap)

    def is_gap(self, at: int, number: int, earliest: int) -> bool:
        """Returns True if the cursor is before ``earliest``, or was not issued by this server."""
        known = all(0 < each.top <= number for each in (self.seen, self.shown or self.seen))
        return not known or not earliest <= self.seen.at <= at + _AHEAD_US


class EventReader:
    """The verbs, over the store's named statements."""

    def __init__(self, pool: PostgresPool, statements: Mapping[str, NumberedStatement]) -> None:
        self._pool = pool
        self._sql = statements

    async def events(self, after: str | int | None, *, limit: int, max_age: timedelta) -> JobEvents:
        cursor = None if after is None else SnapshotCursor.read(after)
        ((at, number),) = await self._pool.fetch(self._sql["assign_xid"])
        earliest = at - max_age // MICROSECOND
        if cursor is None or cursor.is_gap(at, number, earliest):
            begin = await self._initial_snapshot(at, number, earliest)
            return SnapshotCursor(begin).events_until([], gap=cursor is not None)
        shown = cursor.shown or cursor.seen.followed_by(at, *await self._running())
        found = await self._between(cursor, shown, earliest - LAG_US, limit + 1)
        if len(found) > limit:
            return SnapshotCursor(cursor.seen, shown, position_of(found[limit - 1])).events_until(
                found[:limit], more=True
            )
        # After an earlier read's snapshot the present is not reached: another one shows what has ended since.
        return SnapshotCursor(shown).events_until(found, more=cursor.shown is not None)

    async def _initial_snapshot(self, at: int, number: int, earliest: int) -> TransactionSnapshot:
        """Returns the snapshot from which a new reader starts. A transaction writes no instant before its begin; if
        the role may not see the begin, or the clocks differ, ``earliest`` is the bound."""
        starts = dict(await self._pool.fetch(self._sql["running_transactions"], top=number))
        top, running = await self._running()
        older = {xid: starts.get(xid, earliest) for xid in running if xid < number}
        known = {xid: max(earliest, start if start <= at else 0) for xid, start in older.items()}
        return TransactionSnapshot(at, top, dict.fromkeys(running, at - LAG_US) | known)

    async def _running(self) -> tuple[int, list[int]]:
        """Returns the next xid and the running ones. A snapshot lists no xid above the highest finished one: so an xid
        is assigned before, and any unlisted transaction got its xid later."""
        ((native,),) = await self._pool.fetch(self._sql["snapshot"])
        _, top, running = native.split(":")
        return int(top), [int(xid) for xid in running.split(",") if xid]

    async def stats(self, *, recent: timedelta, max_count: int) -> JobStats:
        rows = await self._pool.fetch(self._sql["stats"], recent=recent // MICROSECOND, max_count=max_count)
        groups = [
            CountGroup(
                queue=queue,
                state=STATES[code],
                worker=worker,
                attempts=attempts,
                later=later,
                recent=lately,
                number=number,
                seconds=max(0.0, seconds),
                longest=max(0.0, longest),
                age=age,
            )
            for queue, code, worker, attempts, later, lately, number, seconds, longest, age in rows
        ]
        return JobStats(groups, max_count)

    async def _between(
        self, cursor: SnapshotCursor, shown: TransactionSnapshot, earliest: int, limit: int
    ) -> list[JobEvent]:
        seen, (at, job_id, claims) = cursor.seen, cursor.position
        rows = await self._pool.fetch(
            self._sql["events"],
            low=max(seen.earliest_visible(shown), at, earliest),
            at=at,
            job=job_id,
            claims=claims,
            seen=seen.native,
            shown=shown.native,
            top=shown.top,
            limit=limit,
        )
        return [_job_event(row) for row in rows]


def _job_event(row: Any) -> JobEvent:
    job_id, task, queue, code, claims, attempt, worker, started_at, ended_at, reason, error = row
    return JobEvent(
        job_id=job_id,
        task=task or "",
        queue=queue or "",
        state=STATES[code],
        claims=claims,
        attempt=attempt,
        worker=worker,
        started_at_us=started_at,
        ended_at_us=ended_at,
        reason=reason,
        error=None if error is None else from_text(error),
    )
