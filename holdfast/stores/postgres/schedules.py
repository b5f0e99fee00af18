"""Family ``schedules`` of PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.core.schedule import DueSchedules, Schedule, ScheduleChange, decode_schedules, encode_schedule
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.postgres.dependencies import NOTHING_RESOLVED, Resolution
from holdfast.stores.postgres.encoding import NumberedStatement, from_text, to_text
from holdfast.stores.postgres.maintenance import notify_ready
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Fetch, PostgresPool, Rows
from holdfast.stores.postgres.submission import insert_related


class PostgresSchedules:
    """Family ``schedules`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        ready: Callable[[str], None],
        limit_cache: LimitCache,
    ) -> None:
        self._limit_cache = limit_cache
        self._pool = pool
        self._notifications = notifications
        self._sql = statements
        self._ready = ready

    async def write_schedule(self, change: ScheduleChange) -> int | None:
        jobs = await self._limit_cache.bind(change.jobs) if change.jobs else ()

        async def run_in_transaction(fetch: Fetch) -> tuple[int | None, Resolution]:
            if jobs:
                await fetch(self._sql["bound_lock_wait"])
            rows = await self._write_row(fetch, change)
            if not rows:
                return None, NOTHING_RESOLVED
            _, resolution = await insert_related(self._sql, jobs, fetch, self._pool.instant)
            return int(rows[0][0]), resolution

        revision, resolution = await self._pool.transaction(run_in_transaction)
        resolution.notify_committed(self._notifications)
        if revision is not None and change.jobs:
            notify_ready(self._notifications, self._ready, {job.queue for job in change.jobs})
        return revision

    async def _write_row(self, fetch: Fetch, change: ScheduleChange) -> Rows:
        schedule, expected = change.schedule, change.expected
        if change.remove:
            return await fetch(self._sql["remove_schedule"], name=schedule.name, expected=expected)
        values = {"name": schedule.name, "next_at": schedule.due_us, "document": to_text(encode_schedule(schedule))}
        if not expected:
            return await fetch(self._sql["add_schedule"], **values)
        return await fetch(self._sql["replace_schedule"], expected=expected, **values)

    async def read_schedules(self, name: str | None = None, *, after: str = "", limit: int = 1000) -> list[Schedule]:
        if name is None:
            return _schedules(await self._pool.fetch(self._sql["schedules"], after=after, limit=limit))
        return _schedules(await self._pool.fetch(self._sql["schedule"], name=name))

    async def due_schedules(self, *, limit: int) -> DueSchedules:
        ((now_us, next_us),) = await self._pool.fetch(self._sql["next_schedule"])
        rows = await self._pool.fetch(self._sql["due_schedules"], limit=limit)
        return DueSchedules(_schedules(rows), now_us, next_us)


def _schedules(rows: Rows) -> list[Schedule]:
    return decode_schedules((from_text(document), revision) for document, revision in rows)
