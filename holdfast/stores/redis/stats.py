"""Figures of all jobs: the ids of each structure, so many at most, and outlines of their jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

from holdfast.core.models import MICROSECOND, Job, JobState
from holdfast.core.stats import CountGroup, JobStats, merge_groups
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.query import Read

_PIECE = 200


class Counting:
    """A count."""

    def __init__(self, links: NamespacePool, read: Read, most: int) -> None:
        self._links = links
        self._read = read
        self._most = most
        self._prefix = links.address.prefix
        _, self._schedule, self._ready, self._leases, _ = links.address.keys

    async def count_groups(self, recent: timedelta) -> JobStats:
        """Counts the jobs of each kind."""
        now_us = await self._read.server_time_us()
        since = now_us - recent // MICROSECOND
        flat = await self._links.run_command("ZRANGEBYSCORE", self._prefix + "setbacks", since, "+inf")
        set_back = {member.partition(b" ")[2].decode("utf-8", "replace") for member in flat}
        groups: list[CountGroup] = []
        seen: set[str] = set()
        async for ids in self._structures():
            fresh = [job_id for job_id in dict.fromkeys(ids) if job_id not in seen]
            seen.update(fresh)
            for start in range(0, len(fresh), _PIECE):
                jobs = await self._read.summaries(fresh[start : start + _PIECE])
                groups += [_group(job, now_us, since, set_back) for job in jobs if job is not None]
                groups = merge_groups(groups)
        return JobStats(groups, self._most)

    async def _structures(self) -> AsyncIterator[list[str]]:
        last, ended = self._most - 1, self._prefix + "ended:"
        yield await self._ids("ZRANGE", self._leases, 0, last)
        yield await self._ids("ZREVRANGE", ended + "dead", 0, last)
        yield await self._ids("ZREVRANGE", ended + "cancelled", 0, last)
        entries = await self._ids("LRANGE", ended + "succeeded", -self._most, -1)
        yield [entry.partition(":")[2] for entry in entries]
        yield await self._scheduled()
        yield await self._queued()

    async def _scheduled(self) -> list[str]:
        found: list[str] = []
        for queue in await self._ids("ZRANGE", self._prefix + "due", 0, _last_of(self._most)):
            key = self._schedule if queue == "default" else f"{self._schedule}:{queue}"
            if len(found) >= self._most:
                break
            found += await self._ids("ZRANGE", key, 0, _last_of(self._most - len(found)))
        return found

    async def _queued(self) -> list[str]:
        found: list[str] = []
        for queue in await self._ids("ZRANGE", self._prefix + "queues", 0, _last_of(self._most)):
            levels = ["0", *await self._ids("ZRANGE", f"{self._prefix}levels:{queue}", 0, -1)]
            for level in levels:
                key = self._ready if level == "0" else f"{self._ready}@{level}"
                key = key if queue == "default" else f"{key}:{queue}"
                if len(found) < self._most:
                    found += await self._ids("LRANGE", key, 0, _last_of(self._most - len(found)))
            if len(found) < self._most:
                found += await self._ids(
                    "ZRANGE", f"{self._prefix}quarantine:{queue}", 0, _last_of(self._most - len(found))
                )
        return found

    async def _ids(self, *words: str | int) -> list[str]:
        return [each.decode("utf-8", "replace") for each in await self._links.run_command(*words)]


def _last_of(number: int) -> int:
    """The place of the last of so many, from 0."""
    return number - 1


def _group(job: Job, now_us: int, since: int, set_back: set[str]) -> CountGroup:
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
        recent=happened >= since or job.id in set_back,
        number=1,
        seconds=took,
        longest=took,
        age=0.0 if ended is None else (now_us - ended) / 1e6,
    )
