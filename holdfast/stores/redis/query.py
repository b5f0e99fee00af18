"""Family ``query`` of Redis: jobs, counts, queues, workers, and statistics."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.error_groups import FailedJob
from holdfast.core.errors import Invalid, TooBroad
from holdfast.core.history import HistoryInterval, HistoryRow
from holdfast.core.job_logs import LogPage
from holdfast.core.models import MICROSECOND, NOT_STARTED, TERMINAL, Attempt, Job, JobFilter, JobState, Page, QueueInfo
from holdfast.core.stats import CountGroup, JobStats, StateCounts, covered_seconds, merge_groups
from holdfast.core.workers import WorkerCommand, WorkerHeartbeat, WorkerInfo
from holdfast.stores.common.requests import CHOICE_SECONDS, GLANCED, UNREADABLE, line_page, line_place
from holdfast.stores.common.searches import is_unsuccessful
from holdfast.stores.connections.redis import Script, split_parts
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.encoding import (
    Fields,
    Shown,
    Specs,
    decode_text,
    fields_of,
    matches_filter,
    shown_attempts,
    shown_jobs,
    shown_line,
    state_of,
    whole_number,
)
from holdfast.stores.redis.pool import NamespacePool

_PART = 200
_SCANNED = 500  # jobs that are looked at together, where only those of some states are returned
_NEWEST = 1 << 53  # behind every submission
_FEW = 10_000  # ended jobs that are rather sorted than looked for among all
_STATES = list(JobState)
_SAMPLE = 2_000  # ended jobs of a state that are looked at for how many end a second


class _Search:
    """A look through many jobs."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._ends = time.monotonic() + self._seconds

    def is_over(self) -> bool:
        """Returns True once it has taken as long as it may."""
        return time.monotonic() > self._ends

    def go_on(self) -> None:
        """TooBroad once it has taken longer than it may."""
        if self.is_over():
            raise TooBroad(self._seconds)


class RedisReader:
    """The reads of family ``query`` but for events and statistics (events.py)."""

    def __init__(self, pool: NamespacePool, scripts: Mapping[str, Script], specs: Specs) -> None:
        self._pool = pool
        self._scripts = scripts
        self._specs = specs
        self._prefix = pool.address.prefix

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def get(self, job_id: str) -> Job | None:
        found = await self._show([job_id])
        return found[0][1] if found else None

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        found = {job.id: job for _, job in await self._show(list(filter(None, dict.fromkeys(job_ids))))}
        return [found.get(job_id) for job_id in job_ids]

    async def summaries(self, job_ids: Sequence[str]) -> list[Job | None]:
        found: dict[str, Job] = {}
        for part in split_parts(job_ids, _PART):
            found |= {job.id: msgspec.structs.replace(job, payload="{}") for _, job in await self._outlined(part)}
        return [found.get(job_id) for job_id in job_ids]

    async def by_key(self, key: str) -> Job | None:
        return (await self.by_keys([key]))[0]

    async def by_keys(self, keys: Sequence[str]) -> list[Job | None]:
        holders: list[str] = []
        for part in split_parts(keys, _PART):
            found = await self._pool.run_command("HMGET", self._prefix + "keys", *part)
            holders += ["" if each is None else decode_text(each).partition(" ")[2] for each in found]
        return await self.get_many(holders)

    async def find(
        self, where: JobFilter, *, limit: int = 50, cursor: str | None = None, seconds: float | None = None
    ) -> Page:
        """A page of jobs, newest first; the cursor is the place of the last job that was looked at."""
        before, end = _NEWEST if cursor is None else _submission_of(cursor), None
        few = await self._few(where, self._search())
        if few is not None:
            found = [each for each in few if each[0] < before][: limit + 1]
            shown = await self._show([job.id for _, job in found[:limit]])
            jobs = [job for _, job in shown if matches_filter(job, where)]  # others have written since
        else:
            found, end = await self._find_newest(where, before, limit + 1, _Search(seconds))
            jobs = [job for _, job in found[:limit]]
        following = found[limit - 1][0] if len(found) > limit else end
        return Page(jobs=jobs, cursor=None if following is None else str(following))

    async def count(self, where: JobFilter, *, limit: int | None = None, seconds: float | None = None) -> int:
        number = (await self._count_by_state(where, self._search(seconds), math.inf if limit is None else limit)).total
        return number if limit is None else min(number, limit)

    async def count_states(self, where: JobFilter) -> StateCounts:
        return await self._count_by_state(where, self._search(), math.inf)

    async def _count_by_state(self, where: JobFilter, search: _Search, limit: float) -> StateCounts:
        """Counts up to ``limit``: states and queue by the counters that the server keeps, else among the jobs."""
        numbers: Counter[JobState] = Counter()
        if where == JobFilter(states=where.states, queue=where.queue):
            for (state, queue), number in (await self._counted())[0].items():
                if (not where.states or state in where.states) and where.queue in (None, queue):
                    numbers[state] += number
            return StateCounts({state: numbers[state] for state in JobState})
        created: int | None = None
        async for found in self._matching(where, search):
            numbers.update(job.state for job in found)
            instants = [job.created_at_us for job in found] + ([] if created is None else [created])
            created = min(instants, default=None)
            if numbers.total() >= limit:
                break
        return StateCounts({state: numbers[state] for state in JobState}, created)

    async def _matching(self, where: JobFilter, search: _Search) -> AsyncIterator[list[Job]]:
        few = await self._few(where, search)
        if few is not None:
            yield [job for _, job in few]
            return
        # The oldest first: a job that a running one has added is read after it, and not missed.
        async for _, jobs in self._scan("oldest", 0, search, where.states):
            yield [job for _, job in jobs if matches_filter(job, where)]

    def _search(self, seconds: float | None = None) -> _Search:
        """Returns a search limited to these seconds; without a limit if no caller waits."""
        usual = self._pool.search_for
        return _Search(usual if usual is None or seconds is None else seconds)

    async def find_oldest(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, uncancelled: bool
    ) -> list[Job]:
        """The first jobs that match, in one of these states."""
        asked = frozenset(where.states) & legal if where.states else legal
        if not asked:
            return []
        where = msgspec.structs.replace(where, states=tuple(asked))
        search = self._search(CHOICE_SECONDS)
        few = await self._few(where, search)
        if few is not None:
            return [job for _, job in reversed(few)][:limit]
        found: list[Job] = []
        async for _, jobs in self._scan("oldest", 0, search, where.states):
            found += [job for _, job in jobs if matches_filter(job, where) and not (uncancelled and job.cancelling)]
            if len(found) >= limit:
                break
        return found[:limit]

    async def find_open(self, queue: str | None, task: str | None, behind: int) -> tuple[list[Shown], int, bool]:
        """Open jobs of a queue or task behind a submission; the last submission read; True if there are more."""
        rows, last, more = await self._pool.run(self._scripts["scan"], "oldest", behind, _PART, 0)
        where = JobFilter(states=(*NOT_STARTED, JobState.RUNNING), queue=queue, tasks=() if task is None else (task,))
        return [each for each in self._found(rows) if matches_filter(each[1], where)], int(last), bool(more)

    async def _find_newest(
        self, where: JobFilter, before: int, limit: int, part: _Search
    ) -> tuple[list[Shown], int | None]:
        """At most ``limit`` jobs that match, and the place at which the search goes on; None if no job is left."""
        found: list[Shown] = []
        everything = where == JobFilter()
        async for following, jobs in self._scan(
            "newest", before, self._search(), where.states, has_payloads=everything
        ):
            if everything:
                found += jobs
            else:
                ids = [job.id for _, job in jobs if matches_filter(job, where)]
                found += [each for each in await self._show(ids) if matches_filter(each[1], where)]
            if len(found) >= limit or part.is_over():
                return found[:limit], following
        return found, None

    async def _scan(
        self, order: str, edge: int, search: _Search, states: Sequence[JobState], *, has_payloads: bool = False
    ) -> AsyncIterator[tuple[int | None, list[Shown]]]:
        """Jobs in these states from a place on, part by part, each with the place at which the next begins."""
        count, more = _SCANNED if states else _PART, 1
        while more:
            search.go_on()
            rows, last, more = await self._pool.run(
                self._scripts["scan"], order, edge, count, int(has_payloads), *states
            )
            edge = int(last)
            yield edge if more else None, self._found(rows)

    async def _show(self, ids: Sequence[Argument]) -> list[Shown]:
        found: list[Shown] = []
        for part in split_parts(ids, _PART):
            found += self._found(await self._pool.run(self._scripts["jobs"], *part))
        return found

    async def _outlined(self, ids: Sequence[Argument]) -> list[Shown]:
        return self._found(await self._pool.run(self._scripts["summaries"], *ids))

    def _found(self, rows: list[Any]) -> list[Shown]:
        return shown_jobs(rows, self._specs)

    async def _few(self, where: JobFilter, search: _Search) -> list[Shown] | None:
        """Outlines of all that match, newest first, where only unsuccessful ones are asked for and these are few."""
        if not is_unsuccessful(where):
            return None
        ids: list[bytes] = []
        for state in set(where.states):
            ids += await self._pool.run_command("ZRANGE", f"{self._prefix}ended:{state}", 0, _FEW)
        if len(ids) > _FEW:
            return None
        found: list[Shown] = []
        for part in split_parts(ids, _PART):
            search.go_on()
            found += [each for each in await self._outlined(part) if matches_filter(each[1], where)]
        return sorted(found, key=lambda each: each[0], reverse=True)

    async def attempts(self, job_id: str) -> list[Attempt]:
        return shown_attempts(await self._pool.run_command("LRANGE", f"{self._prefix}attempts:{job_id}", 0, -1))

    async def read_history(self, since_us: int, interval: HistoryInterval) -> list[HistoryRow]:
        found = await self._pool.run(self._scripts["history"], interval.length_us, interval.retention_us, since_us)
        return [row for start, fields in found for row in _history_rows(int(start), fields)]

    async def failed_jobs(self, limit: int) -> list[FailedJob]:
        found: list[FailedJob] = []
        for state in (JobState.DEAD, JobState.FAILED):
            skipped, read = 0, _PART
            while skipped < limit and read == _PART:
                count = min(_PART, limit - skipped)
                read, rows = await self._pool.run(self._scripts["failed_jobs"], state.value, skipped, count)
                skipped += read
                found += [self._failed_job(row, state) for row in rows]
        return list({job.job_id: job for job in found}.values())  # one may end, or fail again, between two scripts

    def _failed_job(self, row: Sequence[Any], state: JobState) -> FailedJob:
        job_id, spec, group, at = row
        _, _, queue, task = self._specs(spec)
        return FailedJob(decode_text(job_id), queue, task, decode_text(group), state is JobState.DEAD, int(at))

    async def logs(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> LogPage:
        claims, number = line_place(cursor)
        key = f"{self._prefix}lines:{job_id}"
        entries = await self._pool.run_command("XRANGE", key, f"({claims}-{number}", "+", "COUNT", limit + 1)
        return line_page([shown_line(entry) for entry in entries], limit)

    async def limited_ids(self, queue: str, limit: int) -> list[str]:
        """Ids of ready jobs under limits of a queue, up to ``limit``."""
        return [decode_text(each) for each in await self._pool.run(self._scripts["limited_ids"], queue, limit)]

    async def any_finished(self, job_ids: Sequence[str]) -> bool:
        """Returns True if one of these jobs has ended, or is gone."""
        states = await self._pool.run(self._scripts["states"], *job_ids)
        return any(each is None or state_of(each[0]) in TERMINAL for each in states)

    # ── queues and workers ────────────────────────────────────────────────────────────────────────────────────
    async def _counted(self) -> tuple[dict[tuple[JobState, str], int], set[str]]:
        flat, paused = await self._pool.run(self._scripts["queues"])
        counts = {}
        for field, number in fields_of(flat).items():
            state, _, queue = field.partition(b":")
            if (known := state_of(state)) is not None:
                counts[known, decode_text(queue)] = whole_number(number)
        return counts, {decode_text(queue) for queue in paused}

    async def count_waiting(self) -> dict[str, int]:
        """Returns the number of jobs in state ``waiting`` of each queue that has any."""
        counts, _ = await self._counted()
        return {queue: number for (state, queue), number in counts.items() if state is JobState.WAITING and number > 0}

    async def queues(self, *, recent: timedelta, max_count: int) -> list[QueueInfo]:
        """Every queue with its counts, which the server keeps: they cost the same at any size."""
        rates: defaultdict[str, float] = defaultdict(float)
        for state in TERMINAL:
            for queue, rate in (await self._ended(state, recent, min(max_count, _SAMPLE))).items():
                rates[queue] += rate
        return [msgspec.structs.replace(queue, ended_per_second=rates[queue.name]) for queue in await self._queues()]

    async def _ended(self, state: JobState, recent: timedelta, max_count: int) -> dict[str, float]:
        """Returns the rate a second at which jobs of each queue reached this state."""
        numbers: Counter[str] = Counter()
        scanned, found, age_us = 0, _PART, 0
        while scanned < max_count and found == _PART and age_us < recent // MICROSECOND:
            words = (state.value, scanned, recent // MICROSECOND)
            found, age, ended = await self._pool.run(self._scripts["recent"], *words)
            scanned, age_us = scanned + found, int(age)
            for queue, number in fields_of(ended).items():
                numbers[decode_text(queue)] += int(number)
        seconds = covered_seconds(recent, age_us / 1e6, is_complete=found < _PART)
        return {queue: number / seconds for queue, number in numbers.items()}

    async def _queues(self) -> list[QueueInfo]:
        counts, paused = await self._counted()
        states: dict[str, dict[str, int]] = {queue: {} for queue in paused}
        for (state, queue), number in counts.items():
            states.setdefault(queue, {})[state.value] = number
        names = sorted(states)
        ages: list[Any] = []
        for part in split_parts(names, 50):
            ages += await self._pool.run(self._scripts["queues"], *part)
        return [
            QueueInfo(
                name=name,
                paused=name in paused,
                states=states[name],
                oldest_ready=None if age is None else timedelta(microseconds=int(age)),
            )
            for name, age in zip(names, ages, strict=True)
        ]

    async def queue_depths(self, *, max_count: int) -> list[QueueInfo]:
        shown = [
            msgspec.structs.replace(
                queue, states={state: number for state, number in queue.states.items() if number and state in GLANCED}
            )
            for queue in await self._queues()
        ]
        return [queue for queue in shown if queue.states or queue.paused]

    async def workers(self) -> list[WorkerInfo]:
        found = []
        for flat, alive in await self._pool.run(self._scripts["workers"]):
            with suppress(*UNREADABLE, ValueError, KeyError):  # of another job
                found.append(_worker_of(fields_of(flat), alive))
        return sorted(found, key=lambda info: info.started_at_us)

    async def server_time_us(self) -> int:
        return int(await self._pool.run(self._scripts["now"]))


def _worker_of(fields: Fields, alive: int) -> WorkerInfo:
    given = {name.decode(): value.decode() for name, value in fields.items()}
    known = {name: given[name] for name in WorkerHeartbeat.__struct_fields__ if name in given}
    heartbeat = msgspec.convert(known, WorkerHeartbeat, strict=False)
    return WorkerInfo(
        heartbeat=heartbeat,
        started_at_us=int(given["started"]),
        seen_at_us=int(given["seen"]),
        alive=bool(alive),
        command=WorkerCommand(given.get("command", "none")),
    )


def _submission_of(cursor: str) -> int:
    if not cursor.isascii() or not cursor.isdecimal() or len(cursor) > 16 or int(cursor) > _NEWEST:
        raise Invalid("cursor", cursor, "give the cursor of an earlier page, unchanged")
    return int(cursor)


class StatsReader:
    """Counts jobs for ``stats``: at most ``max_count`` of each kind."""

    def __init__(self, pool: NamespacePool, read: RedisReader, max_count: int) -> None:
        self._pool = pool
        self._read = read
        self._max_count = max_count
        self._prefix = pool.address.prefix
        _, self._schedule, self._ready, self._leases, _ = pool.address.keys

    async def count_groups(self, recent: timedelta) -> JobStats:
        """Counts the jobs of each kind."""
        now_us = await self._read.server_time_us()
        since = now_us - recent // MICROSECOND
        flat = await self._pool.run_command("ZRANGEBYSCORE", self._prefix + "failures", since, "+inf")
        failed = {member.partition(b" ")[2].decode("utf-8", "replace") for member in flat}
        groups: list[CountGroup] = []
        seen: set[str] = set()
        async for ids in self._structures():
            fresh = [job_id for job_id in dict.fromkeys(ids) if job_id not in seen]
            seen.update(fresh)
            for start in range(0, len(fresh), _PART):
                jobs = await self._read.summaries(fresh[start : start + _PART])
                groups += [
                    _group(job, now_us, since, failed)
                    for job in jobs
                    if job is not None and job.state is not JobState.WAITING
                ]
                groups = merge_groups(groups)
        return JobStats(groups + await self._waiting(), self._max_count)

    async def _waiting(self) -> list[CountGroup]:
        """The numbers of waiting jobs, of which only those with a deadline are in a structure."""
        groups: list[CountGroup] = []
        left = self._max_count
        for queue, number in sorted((await self._read.count_waiting()).items()):
            if left > 0:
                groups.append(_waiting_group(queue, min(number, left)))
                left -= number
        return groups

    async def _structures(self) -> AsyncIterator[list[str]]:
        last, ended = self._max_count - 1, self._prefix + "ended:"
        yield await self._ids("ZRANGE", self._leases, 0, last)
        yield await self._ids("ZREVRANGE", ended + "dead", 0, last)
        yield await self._ids("ZREVRANGE", ended + "cancelled", 0, last)
        entries = await self._ids("LRANGE", ended + "succeeded", -self._max_count, -1)
        yield [entry.partition(":")[2] for entry in entries]
        yield await self._scheduled()
        yield await self._queued()

    async def _scheduled(self) -> list[str]:
        found: list[str] = []
        for queue in await self._ids("ZRANGE", self._prefix + "due", 0, _last_of(self._max_count)):
            key = self._schedule if queue == "default" else f"{self._schedule}:{queue}"
            if len(found) >= self._max_count:
                break
            found += await self._ids("ZRANGE", key, 0, _last_of(self._max_count - len(found)))
        return found

    async def _queued(self) -> list[str]:
        found: list[str] = []
        for queue in await self._ids("ZRANGE", self._prefix + "queues", 0, _last_of(self._max_count)):
            priorities = ["0", *await self._ids("ZRANGE", f"{self._prefix}priorities:{queue}", 0, -1)]
            for priority in priorities:
                key = self._ready if priority == "0" else f"{self._ready}@{priority}"
                key = key if queue == "default" else f"{key}:{queue}"
                if len(found) < self._max_count:
                    found += await self._ids("LRANGE", key, 0, _last_of(self._max_count - len(found)))
            if len(found) < self._max_count:
                found += await self._ids(
                    "ZRANGE", f"{self._prefix}quarantine:{queue}", 0, _last_of(self._max_count - len(found))
                )
        for queue in await self._ids("ZRANGE", self._prefix + "partitioned_queues", 0, _last_of(self._max_count)):
            if len(found) < self._max_count:
                found += await self._read.limited_ids(queue, self._max_count - len(found))
        return found

    async def _ids(self, *words: str | int) -> list[str]:
        return [each.decode("utf-8", "replace") for each in await self._pool.run_command(*words)]


def _last_of(number: int) -> int:
    """The place of the last of so many, from 0."""
    return number - 1


def _waiting_group(queue: str, number: int) -> CountGroup:
    return CountGroup(
        queue=queue,
        state=JobState.WAITING,
        worker=None,
        attempts=0,
        later=False,
        recent=False,
        number=number,
        seconds=0.0,
        longest=0.0,
        age=0.0,
    )


def _group(job: Job, now_us: int, since: int, failed: set[str]) -> CountGroup:
    happened = max(job.created_at_us, job.started_at_us or 0, job.ended_at_us or 0)
    waits = job.state in (JobState.SCHEDULED, JobState.FAILED)
    ended, started = job.ended_at_us, job.started_at_us
    took = 0.0 if ended is None or started is None else max(0, ended - started) / 1e6
    return CountGroup(
        queue=job.queue,
        state=job.state,
        worker=job.worker,
        attempts=job.attempts,
        later=waits and job.run_at_us > now_us,
        recent=happened >= since or job.id in failed,
        number=1,
        seconds=took,
        longest=took,
        age=0.0 if ended is None else (now_us - ended) / 1e6,
    )


def _history_rows(start_us: int, fields: Sequence[bytes]) -> list[HistoryRow]:
    rows = []
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        with suppress(ValueError):  # not ours
            state, _, queue = decode_text(name).partition(" ")
            number, total_us, longest_us = map(int, value.split())
            rows.append(HistoryRow(start_us, queue, JobState(state), number, total_us / 1e6, longest_us / 1e6))
    return sorted(rows, key=lambda row: (row.queue, _STATES.index(row.state)))
