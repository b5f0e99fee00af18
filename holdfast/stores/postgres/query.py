"""Family ``query`` of PostgreSQL: jobs, counts, queues, workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from msgspec.structs import replace

from holdfast.core.error_groups import FailedJob
from holdfast.core.errors import Busy, Invalid, TooBroad
from holdfast.core.history import HistoryInterval, HistoryRow
from holdfast.core.job_logs import LogPage
from holdfast.core.models import MICROSECOND, Attempt, Job, JobFilter, JobState, Page, QueueInfo
from holdfast.core.stats import CountRow, StateCounts, queues_of
from holdfast.core.workers import WorkerInfo, worker_of
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import line_page, line_place
from holdfast.stores.common.searches import (
    SearchParts,
    choose_counts,
    choose_searches,
    costs_its_page,
    is_unsuccessful,
    max_unended,
    may_read_all,
    sum_counts,
    unended_states,
)
from holdfast.stores.postgres.encoding import filter_parameters, is_id, shown_attempt, shown_job, shown_line, to_text
from holdfast.stores.postgres.events import EventReader
from holdfast.stores.postgres.pool import Rows, SearchKind

_NEWEST, _OLDEST = str(UUID(int=(1 << 128) - 1)), str(UUID(int=0))


class PostgresQuery(EventReader):
    """Family ``query`` of PostgreSQL."""

    async def get(self, job_id: str) -> Job | None:
        rows = await self._pool.fetch(self._sql["get"], id=job_id) if is_id(job_id) else []
        return shown_job(rows[0]) if rows else None

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        rows = await self._pool.fetch(self._sql["get_many"], ids=list(filter(is_id, job_ids))) if job_ids else []
        found = {row[0]: shown_job(row) for row in rows}
        return [found.get(job_id) for job_id in job_ids]

    async def summaries(self, job_ids: Sequence[str]) -> list[Job | None]:
        if not job_ids:
            return []
        rows = await self._pool.fetch(self._sql["summaries"], ids=list(filter(is_id, job_ids)))
        found = {row[0]: shown_job(row) for row in rows}
        return [found.get(job_id) for job_id in job_ids]

    async def by_key(self, key: str) -> Job | None:
        rows = await self._pool.fetch(self._sql["key_holder"], key=to_text(key))
        return await self.get(rows[0][0]) if rows else None

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        if not keys:
            return []
        texts = list(map(to_text, keys))
        holders = dict(await self._pool.fetch(self._sql["key_holders"], keys=texts))
        rows = await self._pool.fetch(self._sql["get_many"], ids=list(holders.values())) if holders else []
        jobs = {row[0]: shown_job(row) for row in rows}
        return [jobs.get(holders.get(text, "")) for text in texts]

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        """A page of jobs, newest first; the cursor is the last id that was looked at."""
        before, end = _NEWEST if cursor is None else _place(cursor), _OLDEST
        values = filter_parameters(where) | {"max_count": max_unended(where) + 1, "limit": limit + 1}
        searches = choose_searches(where, await self._count_unended(where))
        found: dict[str, Any] = {}
        if seconds is not None and may_read_all(where, searches):
            end = await self._find_in_parts(where, SearchParts(seconds), values, before, found)
        else:
            for search in searches:
                own: dict[str, Any] = {"before": before, "after": end}
                if search.states:
                    own |= {"states": search.state_codes, "state": search.state_codes[0]}
                found |= _by_id(await self._page(where, search.statement, values | own))
        newest = sorted(found, reverse=True)
        following = newest[limit - 1] if len(newest) > limit else end
        return Page([shown_job(found[each]) for each in newest[:limit]], following if following != _OLDEST else None)

    async def _find_in_parts(
        self, where: JobFilter, parts: SearchParts, values: dict[str, Any], before: str, found: dict[str, Any]
    ) -> str:
        """Adds jobs to ``found`` until it has a page, or the time is over; returns the id that it has reached."""
        limit, after = values["limit"], before
        while after != _OLDEST:
            before, after = after, await self._part_start(after, parts.size)
            own = {"before": before, "after": after, "limit": limit - len(found)}
            try:
                found |= _by_id(await self._page(where, "find", values | own))
            except (Busy, TooBroad):
                if not found:
                    raise
                return before
            if len(found) == limit or not parts.has_time():
                break
        return after

    async def _part_start(self, before: str, size: int) -> str:
        """Returns the id that stands so many jobs before another."""
        rows = await self._pool.fetch(self._sql["part_start"], before=before, size=size)
        return str(rows[0][0]) if rows else _OLDEST

    async def _count_unended(self, where: JobFilter) -> int:
        states = unended_states(where)
        if not states:
            return 0
        codes, bound = [CODES[each] for each in states], max_unended(where) + 1
        return int((await self._pool.fetch(self._sql["count_unended"], states=codes, max_count=bound))[0][0])

    async def _page(self, where: JobFilter, name: str, values: Mapping[str, Any]) -> Rows:
        if costs_its_page(where):
            return await self._pool.fetch(self._sql[name], **values)
        return await self._pool.search(self._sql[name], _search_kind(where), **values)

    async def count(self, where: JobFilter, *, limit: int | None = None, seconds: float | None = None) -> int:
        kind = _search_kind(where) if seconds is None else SearchKind.CHANGE
        number = (await self._count_by_state(where, kind, limit, seconds)).total
        return number if limit is None else min(number, limit)

    async def count_states(self, where: JobFilter) -> StateCounts:
        return await self._count_by_state(where, _search_kind(where))

    async def _count_by_state(
        self, where: JobFilter, kind: SearchKind, limit: int | None = None, seconds: float | None = None
    ) -> StateCounts:
        rows: list[Any] = []
        for each in choose_counts(where):
            values = filter_parameters(each.where) | each.parameters | {"limit": limit}
            rows += await self._pool.search(self._sql[each.statement], kind, seconds=seconds, **values)
        return sum_counts(rows)

    async def attempts(self, job_id: str) -> list[Attempt]:
        rows = await self._pool.fetch(self._sql["attempts"], id=job_id) if is_id(job_id) else []
        return [shown_attempt(row) for row in rows]

    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        claims, number = line_place(cursor)
        if not is_id(job_id):
            return LogPage([], None)
        rows = await self._pool.fetch(self._sql["logs"], id=job_id, claims=claims, number=number, limit=limit + 1)
        return line_page([shown_line(row) for row in rows], limit)

    async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
        return await self._count_queues(recent, max_count, (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED))

    async def queue_depths(self, *, max_count: int) -> list[QueueInfo]:
        return await self._count_queues(timedelta(0), max_count, (JobState.DEAD,))

    async def _count_queues(self, recent: timedelta, max_count: int, ended: Sequence[JobState]) -> list[QueueInfo]:
        named = [name for (name,) in await self._pool.fetch(self._sql["overview_queues"])]
        rows = await self._pool.fetch(
            self._sql["overview"],
            queues=named,
            max_counts=[max_count] * len(named),
            max_count=max_count,
            ended=[CODES[state] for state in ended],
            recent=recent // MICROSECOND,
        )
        counted = [CountRow(queue, STATES[code], *rest) for queue, code, *rest in rows]
        paused = dict(await self._pool.fetch(self._sql["known_queues"]))
        found = queues_of(counted, paused, recent=recent, max_count=max_count)
        ready = [name for name, queue in found.items() if JobState.QUEUED in queue.states]
        for name, run_in in await self._pool.fetch(self._sql["oldest_ready"], queues=ready) if ready else []:
            age = None if run_in is None else timedelta(microseconds=max(0, -run_in))
            found[name] = replace(found[name], oldest_ready=age)
        return list(found.values())

    async def read_history(self, since_us: int, interval: HistoryInterval) -> list[HistoryRow]:
        since = interval.floor_us(since_us)
        rows = await self._pool.fetch(self._sql["history"], length=interval.length_us, since=since)
        return [
            HistoryRow(start, queue, STATES[code], number, seconds, longest)
            for start, queue, code, number, seconds, longest in rows
        ]

    async def failed_jobs(self, limit: int) -> list[FailedJob]:
        return [FailedJob(*row) for row in await self._pool.fetch(self._sql["failed_jobs"], limit=limit)]

    async def workers(self) -> list[WorkerInfo]:
        return [worker_of(row) for row in await self._pool.fetch(self._sql["workers"])]

    async def any_finished(self, job_ids: Sequence[str]) -> bool:
        """Returns True if one of these jobs has ended, or is gone."""
        return not all(map(is_id, job_ids)) or bool(await self._pool.fetch(self._sql["ended_or_deleted"], ids=job_ids))

    async def server_time_us(self) -> int:
        ((now,),) = await self._pool.fetch(self._sql["server_time"])
        return int(now)


def _by_id(rows: Rows) -> dict[str, Any]:
    return {str(row[0]): row for row in rows}


def _search_kind(where: JobFilter) -> SearchKind:
    return SearchKind.UNSUCCESSFUL if is_unsuccessful(where) else SearchKind.OTHER


def _place(cursor: str) -> str:
    if not is_id(cursor):
        raise Invalid("cursor", cursor, "give the cursor of an earlier page, unchanged")
    return cursor
