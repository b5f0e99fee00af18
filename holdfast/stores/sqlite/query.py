"""Reading: on a connection of its own, so that no reader ever waits for a writer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property

import msgspec
from msgspec.structs import replace

from holdfast.core.error_groups import FailedJob
from holdfast.core.errors import Invalid
from holdfast.core.history import HistoryInterval, HistoryRow
from holdfast.core.job_logs import LogLine, LogPage
from holdfast.core.models import MICROSECOND, TERMINAL, Attempt, Job, JobEvents, JobFilter, JobState, Page, QueueInfo
from holdfast.core.stats import CountRow, JobStats, StateCounts, queues_of
from holdfast.core.workers import WorkerInfo, worker_of
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import line_page, line_place
from holdfast.stores.common.searches import (
    SearchParts,
    choose_counts,
    choose_searches,
    costs_its_page,
    max_unended,
    may_read_all,
    sum_counts,
    unended_states,
)
from holdfast.stores.sqlite.encoding import as_json, filter_parameters, read_job
from holdfast.stores.sqlite.events import EventReader
from holdfast.stores.sqlite.opened import SqliteFamily

_decode_attempt = msgspec.json.Decoder(Attempt).decode
_NEWEST = 1 << 62


class SqliteQuery(SqliteFamily):
    """Family ``query`` of SQLite: each verb reads on a connection of its own."""

    @cached_property
    def _jobs(self) -> JobReader:
        return JobReader(self._sql)

    @cached_property
    def _events(self) -> EventReader:
        return EventReader(self._sql)

    async def get(self, job_id: str) -> Job | None:
        return await self._opened().read(lambda reader: self._jobs.get(reader, job_id))

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        return await self._opened().read(lambda reader: self._jobs.get_many(reader, job_ids))

    async def summaries(self, job_ids: Sequence[str]) -> list[Job | None]:
        return await self._opened().read(lambda reader: self._jobs.summaries(reader, job_ids))

    async def by_key(self, key: str) -> Job | None:
        return await self._opened().read(lambda reader: self._jobs.by_key(reader, key))

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        return await self._opened().read(lambda reader: [self._jobs.by_key(reader, key) for key in keys])

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        def search(reader: sqlite3.Connection) -> Page:
            return self._jobs.find(reader, where, limit=limit, cursor=cursor, seconds=seconds)

        opened = self._opened()
        return await (opened.read(search) if costs_its_page(where) else opened.search(search, where))

    async def count(self, where: JobFilter, *, limit: int | None = None, seconds: float | None = None) -> int:
        found = await self._opened().search(
            lambda reader: self._jobs.count_states(reader, where, limit), where, seconds=seconds
        )
        return found.total if limit is None else min(found.total, limit)

    async def count_states(self, where: JobFilter) -> StateCounts:
        return await self._opened().search(lambda reader: self._jobs.count_states(reader, where), where)

    async def attempts(self, job_id: str) -> list[Attempt]:
        return await self._opened().read(lambda reader: self._jobs.attempts(reader, job_id))

    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        return await self._opened().read(lambda reader: self._jobs.logs(reader, job_id, limit=limit, cursor=cursor))

    async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
        return await self._opened().read(lambda reader: self._jobs.queues(reader, self._now(), recent, max_count))

    async def queue_depths(self, *, max_count: int) -> list[QueueInfo]:
        """The queues that have unfinished or dead jobs, and the paused ones."""
        return await self._opened().read(lambda reader: self._jobs.queue_depths(reader, self._now(), max_count))

    async def workers(self) -> list[WorkerInfo]:
        return await self._opened().read(lambda reader: self._jobs.workers(reader, self._now()))

    async def stats(self, *, recent: timedelta, max_count: int) -> JobStats:
        now_us = self._now()
        return await self._opened().read(lambda reader: self._events.stats(reader, now_us, recent, max_count))

    async def read_history(self, since_us: int, interval: HistoryInterval) -> list[HistoryRow]:
        values = {"length": interval.length_us, "since": interval.floor_us(since_us)}
        rows = await self._opened().read(lambda reader: reader.execute(self._sql["history"], values).fetchall())
        return [
            HistoryRow(start, queue, STATES[code], number, seconds, longest)
            for start, queue, code, number, seconds, longest in rows
        ]

    async def failed_jobs(self, limit: int) -> list[FailedJob]:
        rows = await self._opened().read(lambda reader: reader.execute(self._sql["failed_jobs"], (limit,)).fetchall())
        return [FailedJob(id, queue, task, group, bool(is_dead), at) for id, queue, task, group, is_dead, at in rows]

    async def events(self, after: str | int | None, *, limit: int, max_age: timedelta) -> JobEvents:
        now_us = self._now()
        return await self._opened().read(
            lambda reader: self._events.events(reader, now_us, after, limit=limit, max_age=max_age)
        )


class JobReader:
    """The verbs, over the store's named statements."""

    def __init__(self, statements: Mapping[str, str]) -> None:
        self._sql = statements

    def get(self, reader: sqlite3.Connection, job_id: str) -> Job | None:
        """One job by id."""
        row = reader.execute(self._sql["get"], {"id": job_id}).fetchone()
        return None if row is None else read_job(row[0])

    def summaries(self, reader: sqlite3.Connection, job_ids: Sequence[str]) -> list[Job | None]:
        """Returns these jobs without payload and result."""
        return self._by_ids(reader, "summaries", job_ids)

    def get_many(self, reader: sqlite3.Connection, job_ids: Sequence[str]) -> list[Job | None]:
        """Returns these jobs, whole."""
        return self._by_ids(reader, "get_many", job_ids)

    def _by_ids(self, reader: sqlite3.Connection, statement: str, job_ids: Sequence[str]) -> list[Job | None]:
        jobs = [read_job(job_json) for (job_json,) in reader.execute(self._sql[statement], {"ids": as_json(job_ids)})]
        found = {job.id: job for job in jobs}
        return [found.get(job_id) for job_id in job_ids]

    def by_key(self, reader: sqlite3.Connection, key: str) -> Job | None:
        """The job a key stands for."""
        holder = reader.execute(self._sql["key_holder"], (key,)).fetchone()
        return None if holder is None else self.get(reader, holder[0])

    def find(
        self, reader: sqlite3.Connection, where: JobFilter, *, limit: int, cursor: str | None, seconds: float | None
    ) -> Page:
        """A page of jobs, newest first; the cursor is the place in the order of submission."""
        before, end = _NEWEST if cursor is None else _place(cursor), 0
        values = filter_parameters(where) | {"max_count": max_unended(where) + 1, "limit": limit + 1}
        searches = choose_searches(where, self._count_unended(reader, where))
        found: dict[int, str] = {}
        if seconds is not None and may_read_all(where, searches):
            end = self._find_in_parts(reader, SearchParts(seconds), values, limit + 1, before, found)
        else:
            for search in searches:
                own: dict[str, object] = {"before": before, "after": end}
                if search.states:
                    own |= {"states": as_json(search.state_codes), "state": search.state_codes[0]}
                found |= reader.execute(self._sql[search.statement], values | own)
        rows = sorted(found.items(), reverse=True)
        following = rows[limit - 1][0] if len(rows) > limit else end
        return Page(jobs=[read_job(text) for _, text in rows[:limit]], cursor=str(following) if following else None)

    def _find_in_parts(
        self,
        reader: sqlite3.Connection,
        parts: SearchParts,
        values: Mapping[str, object],
        limit: int,
        before: int,
        found: dict[int, str],
    ) -> int:
        """Adds jobs to ``found`` until it has so many, or the time is over; returns the place that it has reached."""
        after = min(before, int(reader.execute(self._sql["newest_job"]).fetchone()[0]) + 1)
        while after > 0:
            before, after = after, max(0, after - parts.size)
            own = {"before": before, "after": after, "limit": limit - len(found)}
            found |= reader.execute(self._sql["find"], {**values, **own})
            if len(found) == limit or not parts.has_time():
                break
        return after

    def _count_unended(self, reader: sqlite3.Connection, where: JobFilter) -> int:
        states = unended_states(where)
        if not states:
            return 0
        own = {"states": as_json(CODES[each] for each in states), "max_count": max_unended(where) + 1}
        return int(reader.execute(self._sql["count_unended"], own).fetchone()[0])

    def count_states(self, reader: sqlite3.Connection, where: JobFilter, limit: int | None = None) -> StateCounts:
        """Counts the jobs that match by state, with each statement up to ``limit``."""
        own: dict[str, object] = {"limit": -1 if limit is None else limit}
        rows = [
            reader.execute(self._sql[each.statement], filter_parameters(each.where) | each.parameters | own).fetchone()
            for each in choose_counts(where)
        ]
        return sum_counts(rows)

    def attempts(self, reader: sqlite3.Connection, job_id: str) -> list[Attempt]:
        """The attempts of a job that did not succeed."""
        return [_decode_attempt(attempt) for (attempt,) in reader.execute(self._sql["attempts"], {"id": job_id})]

    def logs(self, reader: sqlite3.Connection, job_id: str, *, limit: int, cursor: str | None) -> LogPage:
        """A page of a job's log lines."""
        claims, number = line_place(cursor)
        values = {"id": job_id, "claims": claims, "number": number, "limit": limit + 1}
        return line_page([LogLine(*row) for row in reader.execute(self._sql["logs"], values)], limit)

    def queues(self, reader: sqlite3.Connection, now_us: int, recent: timedelta, max_count: int) -> list[QueueInfo]:
        """Every queue with its counts."""
        return self._count_queues(reader, now_us, recent, max_count, has_ended=True)

    def queue_depths(self, reader: sqlite3.Connection, now_us: int, max_count: int) -> list[QueueInfo]:
        """The queues in which something is going on."""
        return self._count_queues(reader, now_us, timedelta(0), max_count, has_ended=False)

    def _count_queues(
        self, reader: sqlite3.Connection, now_us: int, recent: timedelta, max_count: int, *, has_ended: bool
    ) -> list[QueueInfo]:
        """``has_ended``: with queues in which every job has succeeded or was cancelled."""
        values = {
            "queues": json.dumps([name for (name,) in reader.execute(self._sql["overview_queues"])]),
            "max_count": max_count,
            "has_ended": has_ended,
            "now": now_us,
            "since": now_us - recent // MICROSECOND,
        }
        counted = [
            CountRow(queue, STATES[code], *rest) for queue, code, *rest in reader.execute(self._sql["overview"], values)
        ]
        paused = {name: bool(flag) for name, flag in reader.execute(self._sql["known_queues"])}
        found = queues_of(counted, paused, recent=recent, max_count=max_count)
        for name, queue in found.items():
            if JobState.QUEUED in queue.states:
                found[name] = replace(queue, oldest_ready=self._oldest_ready(reader, name, now_us))
        return list(found.values())

    def _oldest_ready(self, reader: sqlite3.Connection, queue: str, now_us: int) -> timedelta | None:
        (run_at,) = reader.execute(self._sql["oldest_ready"], {"queue": queue}).fetchone()
        return None if run_at is None else timedelta(microseconds=max(0, now_us - run_at))

    def workers(self, reader: sqlite3.Connection, now_us: int) -> list[WorkerInfo]:
        """Every registered worker, the longest running first."""
        return [worker_of(row) for row in reader.execute(self._sql["workers"], {"now": now_us})]

    def any_finished(self, reader: sqlite3.Connection, job_ids: list[str]) -> bool:
        """Returns True if one of these jobs has ended, or is gone."""
        for job_id in job_ids:
            row = reader.execute(self._sql["job_state"], {"id": job_id}).fetchone()
            if row is None or STATES[row[0]] in TERMINAL:
                return True
        return False


def _place(cursor: str) -> int:
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise Invalid("cursor", cursor, "give the cursor of an earlier page, unchanged")
    return int(cursor)
