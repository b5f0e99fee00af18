"""Queries of a transport about ready jobs: which, how many, and overtaken ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from holdfast.core.models import JobState, Overtaken
from holdfast.stores.common.named_sql import STATES
from holdfast.stores.postgres.encoding import NumberedStatement, is_id, span_us
from holdfast.stores.postgres.maintenance import PostgresMaintenance
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import PostgresPool
from holdfast.stores.postgres.queueing import PostgresQueueing


class PostgresTransportQueries:
    """``TransportQueries`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        queueing: PostgresQueueing,
        maintenance: PostgresMaintenance,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._sql = statements
        self.claim_ids = queueing.claim_ids
        self.claim_limited = queueing.claim_limited
        self.make_ready = maintenance.make_ready

    async def ready_queues(self) -> list[str]:
        rows = await self._pool.fetch(self._sql["ready_queues"])
        paused = {name for name, is_paused in await self._pool.fetch(self._sql["known_queues"]) if is_paused}
        return [queue for (queue,) in rows if queue not in paused]

    async def count_ready(self, max_counts: Mapping[str, int]) -> dict[str, int]:
        queues, numbers = list(max_counts), list(max_counts.values())
        return dict(await self._pool.fetch(self._sql["depths"], queues=queues, max_counts=numbers) if queues else ())

    async def oldest_ready(self, queue: str, *, limit: int, aged: timedelta) -> list[str]:
        rows = await self._pool.fetch(self._sql["oldest"], queue=queue, limit=limit, aged=span_us(aged))
        return [job_id for (job_id,) in rows]

    async def find_overtaken(self, queue: str, front: Sequence[str], *, margin: timedelta, limit: int) -> Overtaken:
        ids = list(filter(is_id, front))
        rows = await self._pool.fetch(self._sql["overtaken"], queue=queue, ids=ids, margin=span_us(margin), limit=limit)
        _, before, now = rows[0] if rows else ("", 0, 0)
        return Overtaken([job_id for job_id, _, _ in rows], before, now)

    async def locate_jobs(self, job_ids: Sequence[str]) -> dict[str, tuple[str, JobState]]:
        rows = await self._pool.fetch(self._sql["queues_and_states"], ids=list(filter(is_id, job_ids)))
        return {job_id: (queue, STATES[code]) for job_id, queue, code in rows}

    async def dead_queues(self) -> list[str]:
        return [queue for (queue,) in await self._pool.fetch(self._sql["dead_queues"])]

    async def newest_dead(self, queue: str, *, limit: int) -> list[str]:
        """Of a queue's dead jobs those that ended last, the first of them first."""
        rows = await self._pool.fetch(self._sql["newest_dead"], queue=queue, limit=limit)
        return [job_id for (job_id,) in reversed(rows)]

    async def wake_waiters(self, topics: Sequence[str]) -> None:
        self._notifications.notify_committed(topics)
