"""Job events of Redis: scripts run one by one, so events become visible in their order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from holdfast.core.models import MICROSECOND, Attempt, Job, JobEvent, JobEvents, JobState
from holdfast.core.stats import JobStats
from holdfast.stores.common.event_cursor import LAST, OVERLAP_US, EventCursor, position_of
from holdfast.stores.redis.encoding import decode_text, shown_attempts
from holdfast.stores.redis.query import RedisReader, StatsReader

_PAGE_SIZE = 400  # of each kind, more where that many ended at one instant


class RedisQuery(RedisReader):
    """Family ``query`` of Redis."""

    async def events(self, after: str | int | None, *, limit: int, max_age: timedelta) -> JobEvents:
        """Returns the events after a cursor. A page ends with an instant: it may exceed ``limit``."""
        if after is None:
            return _from_now(await self.server_time_us())
        cursor = EventCursor.read(after)
        behind, _, _ = cursor.start_position(0)
        back = max_age // MICROSECOND + OVERLAP_US
        size = _PAGE_SIZE
        while True:
            now_us, gone, *kinds = await self._pool.run(self._scripts["events"], behind, size, back)
            if cursor.is_gap(int(now_us), max_age):
                return _from_now(int(now_us), gap=True)
            until, more = _until(kinds, size)
            if until is not None:
                break
            size *= 2  # one script can end any number of jobs at one instant
        found = sorted(await self._events_of(kinds, until), key=position_of)
        if more:
            return EventCursor(int(now_us), until, LAST).events_until(found, more=True, gap=bool(gone))
        drained = EventCursor(int(now_us), until) if until else cursor._replace(read_at_us=int(now_us))
        return drained.events_until(found, gap=bool(gone))

    async def stats(self, *, recent: timedelta, max_count: int) -> JobStats:
        return await StatsReader(self._pool, self, max_count).count_groups(recent)

    async def _events_of(self, kinds: Sequence[Any], until: int) -> list[JobEvent]:
        """Returns the events up to an instant, without jobs that were replayed or deleted since."""
        ended, failures = _ended_of(kinds), _failures_of(kinds[3])
        wanted = [each for each in ended if each[1] <= until]
        attempts = [each for each in failures if each[1] <= until]
        ids = list(dict.fromkeys([job_id for job_id, *_ in (*wanted, *attempts)]))
        jobs = dict(zip(ids, await self.summaries(ids), strict=True))
        found = []
        for job_id, at, state in wanted:
            job = jobs[job_id]
            if job is not None and job.state is state and job.ended_at_us == at:
                found.append(_event_of(job, job, job.attempts))
        for job_id, _, attempt in attempts:
            job = jobs[job_id]
            if job is not None:
                found.append(_event_of(job, attempt, attempt.attempt))
        return found


def _from_now(now_us: int, *, gap: bool = False) -> JobEvents:
    return EventCursor(now_us, now_us, LAST).events_until([], gap=gap)


def _until(kinds: Sequence[Any], size: int) -> tuple[int | None, bool]:
    """Returns the instant up to which all events were read, 0 without events, and True if there are more behind it.

    The instant is None if it has ``size`` entries of a kind or more.
    """
    instants = [
        [_instant(each.partition(b":")[0]) for each in kinds[0]],
        *([_instant(each) for each in kind[1::2]] for kind in kinds[1:3]),
        [_instant(each) for each in kinds[3][1::3]],
    ]
    every = sorted(each for kind in instants for each in kind)
    # Where a kind was cut off, there may be more of its last instant.
    cut = [kind[-1] for kind in instants if len(kind) >= size]
    if not cut:
        return (every[-1] if every else 0), False
    return max([each for each in every if 0 < each < min(cut)], default=None), True


def _instant(text: bytes) -> int:
    """Returns an instant; 0 for text of another program."""
    return int(text) if text.isdigit() else 0


def _ended_of(kinds: Sequence[Any]) -> list[tuple[str, int, JobState]]:
    found = []
    for entry in kinds[0]:
        at, _, job_id = entry.partition(b":")
        found.append((decode_text(job_id), _instant(at), JobState.SUCCEEDED))
    for kind, state in ((kinds[1], JobState.DEAD), (kinds[2], JobState.CANCELLED)):
        found += [(decode_text(job_id), _instant(at), state) for job_id, at in zip(kind[::2], kind[1::2], strict=True)]
    return found


def _failures_of(flat: Sequence[Any]) -> list[tuple[str, int, Attempt]]:
    return [
        (decode_text(job_id), _instant(at), attempt)
        for job_id, at, record in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        for attempt in shown_attempts([record] if record else [])
    ]


def _event_of(job: Job, ended: Job | Attempt, attempt: int) -> JobEvent:
    """Returns the event of a job's end, or of one of its attempts."""
    return JobEvent(
        job_id=job.id,
        task=job.task,
        queue=job.queue,
        state=ended.state,
        claims=ended.claims,
        attempt=attempt,
        worker=ended.worker,
        started_at_us=ended.started_at_us,
        ended_at_us=ended.ended_at_us or 0,
        reason=ended.reason,
        error=ended.error,
    )
