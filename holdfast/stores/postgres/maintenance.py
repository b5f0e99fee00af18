"""Family ``maintenance`` of PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from holdfast.core import waits
from holdfast.core.history import COUNT_DELAY, FIRST_WINDOW, HistoryInterval
from holdfast.core.models import ExpiredJob, Job, JobState
from holdfast.stores.common.named_sql import CODES
from holdfast.stores.common.requests import EXPIRY_ROUNDS, FORGOTTEN_AFTER, SWEEP_TIME
from holdfast.stores.postgres.dependencies import read_resolution
from holdfast.stores.postgres.encoding import NumberedStatement, shown_job, span_us
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Fetch, PostgresPool


class PostgresMaintenance:
    """Family ``maintenance`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        ready: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._sql = statements
        self._ready = ready

    async def promote_due(self, *, limit: int) -> int:
        return sum(map(len, (await self.make_ready(None, limit=limit)).values()))

    async def make_ready(self, queues: Sequence[str] | None, *, limit: int) -> dict[str, list[str]]:
        """The same for these queues, or every one; their ids by queue, in the order of claims."""
        if queues is None:
            rows = await self._pool.fetch(self._sql["promote_any_queue"], limit=limit, extra_time=SWEEP_TIME)
        else:
            rows = await self._pool.fetch(
                self._sql["promote_queues"], queues=[*queues], limit=limit, extra_time=SWEEP_TIME
            )
        ready: dict[str, list[str]] = {}
        for queue, _, _, job_id in sorted(rows, key=lambda row: row[1:]):
            ready.setdefault(queue, []).append(job_id)
        notify_ready(self._notifications, self._ready, set(ready))
        return ready

    async def expire_unstarted(self, *, limit: int) -> list[ExpiredJob]:
        ended: list[ExpiredJob] = []
        for _ in range(EXPIRY_ROUNDS):
            remaining = limit - len(ended)
            ended_now = await end_expired(self._pool, self._notifications, self._sql, limit=remaining)
            ended += ended_now.ended
            if ended_now.scanned < remaining or len(ended) >= limit:
                break
        return ended

    async def find_expired_leases(self, *, limit: int) -> list[Job]:
        return [
            shown_job(row)
            for row in await self._pool.fetch(self._sql["expired_leases"], limit=limit, extra_time=SWEEP_TIME)
        ]

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        pruned = 0
        for state, span in ended_for.items():
            pruned += await self._prune_state(JobState(state), span, limit - pruned)
        await self._pool.fetch(self._sql["detach_expired_keys"], limit=limit, extra_time=SWEEP_TIME)
        await self._pool.fetch(self._sql["prune_keys"], limit=limit, extra_time=SWEEP_TIME)
        await self._pool.fetch(self._sql["prune_workers"], span=span_us(FORGOTTEN_AFTER), extra_time=SWEEP_TIME)
        retention = span_us(waits.SIGNAL_RETENTION)
        await self._pool.fetch(self._sql["prune_signals"], span=retention, limit=limit, extra_time=SWEEP_TIME)
        await self._pool.fetch(self._sql["prune_buckets"], at=self._pool.instant, limit=limit, extra_time=SWEEP_TIME)
        return pruned

    async def _prune_state(self, state: JobState, span: timedelta, limit: int) -> int:
        async def run_in_transaction(fetch: Fetch) -> int:
            rows = await fetch(self._sql["prune_jobs"], state=CODES[state], span=span_us(span), limit=limit)
            depended_on = [job_id for job_id, _, has_dependents in rows if has_dependents]
            if depended_on:
                prunable = {
                    job_id for (job_id,) in await fetch(self._sql["prunable"], ids=depended_on, span=span_us(span))
                }
                rows = [row for row in rows if not row[2] or row[0] in prunable]
            with_key = [job_id for job_id, has_key, _ in rows if has_key]
            if with_key:
                await fetch(self._sql["delete_keys_of"], ids=with_key, ignore_lifetime=False)
            if rows:
                await fetch(self._sql["delete_jobs"], ids=[row[0] for row in rows])
            return len(rows)

        return await self._pool.transaction(run_in_transaction, extra_time=SWEEP_TIME)

    async def count_ended(self, *, limit: int) -> bool:
        async def run_in_transaction(fetch: Fetch) -> bool:
            found = await fetch(self._sql["history_mark"])
            if not found:
                await fetch(self._sql["history_begin"], first=span_us(FIRST_WINDOW))
                found = await fetch(self._sql["history_mark"])
            if not found:  # another sweeper counts
                return False
            ((counted_until,),) = found
            ((until, more),) = await fetch(
                self._sql["history_until"], counted_until=counted_until, limit=limit, lag=span_us(COUNT_DELAY)
            )
            if until <= counted_until:
                return False
            await fetch(self._sql["history_add"], counted_until=counted_until, until=until)
            await fetch(self._sql["history_move"], until=until)
            for interval in HistoryInterval:
                length, kept = interval.length_us, interval.retention_us + interval.length_us
                await fetch(self._sql["prune_history"], length=length, retention=kept)
            return bool(more)

        return await self._pool.transaction(run_in_transaction, extra_time=SWEEP_TIME)

    async def reannounce(self) -> int:
        return 0


class ExpiryRound(NamedTuple):
    """Result of ``end_expired``. ``scanned``: number of jobs it read; ``has_made_due``: others are due now."""

    ended: list[ExpiredJob]
    scanned: int
    has_made_due: bool


async def end_expired(
    pool: PostgresPool, notifications: PostgresNotifications, statements: Mapping[str, NumberedStatement], *, limit: int
) -> ExpiryRound:
    """Reads at most ``limit`` jobs whose ``expires`` has come, and ends those that no worker has claimed."""
    rows = await pool.fetch(statements["expire_jobs"], limit=limit, extra_time=SWEEP_TIME)
    ended = [ExpiredJob(*row[1:4]) for row in rows if row[1] is not None]
    resolution = read_resolution(row[4:] for row in rows)
    resolution.notify_committed(notifications, ended=[each.job_id for each in ended])
    return ExpiryRound(ended, max(row[0] for row in rows), bool(resolution.queues))


def notify_ready(notifications: PostgresNotifications, ready: Callable[[str], None], queues: set[str]) -> None:
    """Tells this process and others that queues have jobs that became ready."""
    for queue in queues:
        ready(queue)
    notifications.notify_committed({f"queue:{queue}" for queue in queues})
