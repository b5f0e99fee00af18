"""Family ``limits`` of PostgreSQL, and the claim of jobs under limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from holdfast.core.limits import (
    Assigned,
    BucketState,
    BucketUse,
    Limit,
    LimitChange,
    LimitTable,
    bucket_use,
    decode_limits,
    encode_limit,
    split_bucket,
    token_change,
)
from holdfast.stores.base import ClaimRequest
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.common.requests import CHOICE_SECONDS, MIN_CLAIM_RATE, SWEEP_TIME
from holdfast.stores.postgres.encoding import NumberedStatement, from_text, is_id, span_us, text_or_none, to_text
from holdfast.stores.postgres.notifications import PostgresNotifications
from holdfast.stores.postgres.pool import Fetch, PostgresPool, Rows, SearchKind

MAX_ASSIGNED = 500
"""Jobs without a partition that one step of a claim gives theirs."""
_ASSIGNING_TRIES = 4  # steps of one claim
_NO_ID = "00000000-0000-0000-0000-000000000000"
_UNASSIGNED = 16  # column of ``claim_limited``
_PAUSES = (0, 0.05, 0.2, 0.5)  # seconds before each try at jobs that other transactions held


class PostgresLimits:
    """Family ``limits`` of PostgreSQL."""

    def __init__(
        self,
        pool: PostgresPool,
        notifications: PostgresNotifications,
        statements: Mapping[str, NumberedStatement],
        cache: LimitCache,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._sql = statements
        self._cache = cache

    async def write_limit(self, change: LimitChange) -> int | None:
        async def run_in_transaction(fetch: Fetch) -> int | None:
            await fetch(self._sql["lock_limits"])
            old = {each.name: each for each in stored_limits(await fetch(self._sql["limits"]))}.get(change.limit.name)
            rows = await self._write_row(fetch, change)
            if rows:
                await fetch(self._sql["unblock_all_partitions"])
            if rows and (tokens := token_change(old, change.limit)):
                await fetch(self._sql["clamp_buckets"], name=to_text(change.limit.name), **tokens)
            return int(rows[0][0]) if rows else None

        revision = await self._pool.transaction(run_in_transaction, extra_time=SWEEP_TIME)
        if revision is not None:
            self._cache.mark_stale()
            self._notifications.notify_committed({"queue:*", "due:*"})
        return revision

    async def _write_row(self, fetch: Fetch, change: LimitChange) -> Rows:
        limit, expected = change.limit, change.expected
        if change.remove:
            return await fetch(self._sql["remove_limit"], name=to_text(limit.name), expected=expected)
        if not expected:
            return await fetch(self._sql["add_limit"], **_limit_columns(limit))
        return await fetch(self._sql["replace_limit"], expected=expected, **_limit_columns(limit))

    async def read_limits(self) -> list[Limit]:
        return stored_limits(await self._pool.fetch(self._sql["limits"]))

    async def assign_partitions(
        self, *, queue: str | None = None, task: str | None = None, after: str = "", limit: int = 1000
    ) -> Assigned:
        rows = await self._pool.search(
            self._sql["jobs_to_assign"],
            SearchKind.CHANGE,
            seconds=CHOICE_SECONDS,
            queue=queue,
            task=task,
            after=after if is_id(after) else _NO_ID,
            limit=limit,
        )
        ids, changed = [job_id for job_id, _ in rows], 0
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            number, ids = await assign_partitions(self._pool, self._sql, ids)
            changed += number
            if not ids:
                break
        self._notifications.notify_committed({f"{kind}:{queue}" for _, queue in rows for kind in ("queue", "due")})
        return Assigned(changed, rows[-1][0] if len(rows) == limit else None, len(ids))

    async def bucket_use(self, buckets: Sequence[str]) -> list[BucketUse]:
        limits = {limit.name: limit for limit in await self.read_limits()}
        rows = await self._pool.fetch(self._sql["bucket_use"], buckets=[to_text(bucket) for bucket in buckets])
        return [
            bucket_use(bucket, limits.get(split_bucket(bucket)[0]), used, BucketState(full_at, paused_until), now_us)
            for bucket, (used, full_at, paused_until, now_us) in zip(buckets, rows, strict=True)
        ]

    async def count_unstarted(self, buckets: Sequence[str], *, max_count: int) -> list[int]:
        names = [to_text(bucket) for bucket in buckets]
        return [n for (n,) in await self._pool.fetch(self._sql["count_unstarted"], buckets=names, max_count=max_count)]

    async def take_tokens(self, bucket: str, tokens: int) -> timedelta:
        ((wait_us,),) = await self._pool.fetch(
            self._sql["take_tokens"], at=self._pool.instant, bucket=to_text(bucket), tokens=tokens
        )
        return timedelta(microseconds=wait_us)

    async def pause_buckets(self, buckets: Sequence[str], pause_for: timedelta) -> None:
        names = [to_text(bucket) for bucket in buckets]

        async def run_in_transaction(fetch: Fetch) -> None:
            await fetch(self._sql["lock_limits"])  # a claim writes several buckets too
            await fetch(self._sql["pause_buckets"], buckets=names, span=span_us(pause_for))

        await self._pool.transaction(run_in_transaction)


class LimitedClaims:
    """Claims of jobs under limits."""

    def __init__(self, pool: PostgresPool, statements: Mapping[str, NumberedStatement]) -> None:
        self._pool = pool
        self._sql = statements

    async def claim(
        self,
        request: ClaimRequest,
        slots: Mapping[str, int],
        max_jobs: int,
        *,
        promote: bool,
        skip_due_until: int,
        any_queue: bool,
        on_uncertain: Callable[[], object],
    ) -> Rows:
        """Rows of ``claim_limited``. Jobs of these queues that came without a partition get theirs first."""
        rows: Rows = []
        for step in range(_ASSIGNING_TRIES + 1):
            rows = await self._pool.fetch(
                self._sql["claim_limited"],
                on_uncertain=on_uncertain,
                extra_time=max_jobs / MIN_CLAIM_RATE,
                at=self._pool.instant,
                queues=list(slots),
                slots=list(slots.values()),
                max_jobs=max_jobs,
                worker=request.worker,
                lease_for=span_us(request.lease_for),
                promote=promote,
                any_queue=any_queue,
                assign=step < _ASSIGNING_TRIES,
                isolated=request.isolated,
                skip_due_until=skip_due_until,
            )
            unassigned = rows[0][_UNASSIGNED]
            if not unassigned:
                break
            await self._assign(unassigned)
        return rows

    async def _assign(self, queues: Sequence[str]) -> None:
        rows = await self._pool.fetch(self._sql["jobs_without_partition"], queues=queues, limit=MAX_ASSIGNED)
        await assign_partitions(self._pool, self._sql, [job_id for (job_id,) in rows])


async def assign_partitions(
    pool: PostgresPool, statements: Mapping[str, NumberedStatement], ids: Sequence[str]
) -> tuple[int, list[str]]:
    """Gives jobs their partitions in a transaction of their own; returns the same as ``update_partitions``."""
    return await pool.transaction(lambda fetch: update_partitions(fetch, statements, ids))


async def update_partitions(
    fetch: Fetch, statements: Mapping[str, NumberedStatement], ids: Sequence[str]
) -> tuple[int, list[str]]:
    """Gives jobs the partitions that the limits say, which no writer changes before this transaction ends.

    Returns how many changed, and the jobs that other transactions hold.
    """
    await fetch(statements["lock_limits_shared"])
    table = LimitTable(stored_limits(await fetch(statements["limits"])))
    columns: dict[str, Any] = {"ids": [], "versions": [], "partitions": [], "weights": []}
    for job_id, version, task, queue, payload, *before in await fetch(statements["partition_facts"], ids=ids):
        partition, weights = table.find_partition(task, queue, from_text(payload))
        if [text_or_none(partition), weights] != before:
            for name, value in zip(columns, (job_id, version, text_or_none(partition), weights), strict=True):
                columns[name].append(value)
    if not columns["ids"]:
        return 0, []
    changed = {job_id for (job_id,) in await fetch(statements["set_partitions"], **columns)}
    return len(changed), [job_id for job_id in columns["ids"] if job_id not in changed]


def stored_limits(rows: Iterable[Sequence[Any]]) -> list[Limit]:
    """Limits from their rows."""
    return decode_limits((from_text(document), revision) for document, revision in rows)


def _limit_columns(limit: Limit) -> dict[str, Any]:
    """A limit as the parameters of the statements that write it."""
    values = limit.values
    shares = {key: share for key, share in values.shares.items() if "\0" not in key}  # no bucket's name holds one
    return {
        "name": to_text(limit.name),
        "queue": limit.queue if limit.has_buckets else None,  # else its jobs have no partition
        "task": limit.task,
        "per_key": limit.by is not None,
        "concurrency": values.concurrency,
        "interval_us": values.interval_us,
        "burst": values.burst,
        "shares": to_text(json.dumps(shares)) if shares else None,
        "document": to_text(encode_limit(limit)),
    }
