"""Family ``schedules`` of Redis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.core.models import NewJob
from holdfast.core.schedule import DueSchedules, Schedule, ScheduleChange, decode_schedules, encode_schedule
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.connections.redis import Script
from holdfast.stores.redis.encoding import refused_submission, split_documents
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.server_info import EvictionWatch
from holdfast.stores.redis.submission import encode_submission


class RedisSchedules:
    """Family ``schedules`` of Redis."""

    def __init__(
        self,
        pool: NamespacePool,
        notifications: RedisNotifications,
        scripts: Mapping[str, Script],
        eviction: EvictionWatch,
        limits: LimitCache,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._scripts = scripts
        self._eviction = eviction
        self._limits = limits

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        """One script, so at most as many jobs as ``schedule.MAX_CATCH_UP``."""
        await self._eviction.refuse_evicting(self._pool)
        schedule = change.schedule
        jobs = await self._limits.bind(change.jobs)
        revision, stored = await self._pool.run_keyed(
            self._scripts["write_schedule"],
            schedule.name,
            change.expected,
            "" if change.remove or schedule.due_us is None else schedule.due_us,
            "" if change.remove else encode_schedule(schedule),
            *encode_submission(jobs, {}, in_one_piece=self._pool.address.in_one_piece),
        )
        if isinstance(stored, bytes):
            raise refused_submission(stored)
        if not revision:
            return None
        self._note_stored(change.jobs, stored)
        return int(revision)

    def _note_stored(self, jobs: Sequence[NewJob], stored: list[Any]) -> None:
        if len(stored) > len(jobs):
            entry, last = stored.pop(), len(jobs) - 1 - stored[::-1].index(1)
            self._pool.note_stored(entry, jobs[last].id)
        self._notifications.wake_local_waiters({f"queue:{job.queue}" for job in jobs})

    async def read_schedules(self, name: str | None = None, *, after: str = "", limit: int = 1000) -> list[Schedule]:
        if name is not None:
            return _schedules(await self._pool.run(self._scripts["schedules"], "one", name))
        found = _schedules(await self._pool.run_command("HVALS", f"{self._pool.address.prefix}schedules"))
        return sorted((each for each in found if each.name > after), key=lambda each: each.name)[:limit]

    async def due_schedules(self, *, limit: int) -> DueSchedules:
        due, now_us, next_us = await self._pool.run(self._scripts["schedules"], "due", limit)
        return DueSchedules(_schedules(due), int(now_us), int(float(next_us)) if next_us else None)


def _schedules(entries: Iterable[bytes | None]) -> list[Schedule]:
    return decode_schedules(split_documents(entries))
