"""Family ``limits`` of Redis, and the partitions of jobs that came without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec

from holdfast.core.limits import BucketUse, Limit, LimitChange, LimitTable, decode_limits, encode_limit
from holdfast.core.models import MICROSECOND, Job
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.connections.redis import Script, in_batches
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.claiming import PIECE
from holdfast.stores.redis.encoding import Kinds, decode_text, partition_field, span_us
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool

_PIECES_MOST = 50  # scripts of one ``assign_partitions``


def limits_of(texts: Iterable[bytes]) -> list[Limit]:
    """Limits by name, of ``REVISION DOCUMENT`` each. One that another program spoiled is left out."""
    limits: list[Limit] = []
    for text in texts:
        revision, _, document = text.partition(b" ")
        with suppress(msgspec.MsgspecError, ValueError):
            limits += decode_limits([(document, int(revision))])
    return sorted(limits, key=lambda limit: limit.name)


async def read_limits(pool: NamespacePool) -> list[Limit]:
    """All limits of a namespace, by name."""
    return limits_of(await pool.run_command("HVALS", pool.address.prefix + "limits"))


class PartitionAssigner:
    """Gives jobs their partitions: the scripts never look into a payload."""

    def __init__(self, pool: NamespacePool, scripts: Mapping[str, Script], kinds: Kinds) -> None:
        self._pool = pool
        self._scripts = scripts
        self._kinds = kinds

    async def assign_ready(self, worker: str, queue: str, *, isolated: bool) -> None:
        """Moves the first ready jobs of a queue that have no partition into theirs. ``alone``: quarantined ones."""
        common = (worker, 0, self._pool.address.task)
        found, texts = await self._pool.run(self._scripts["unassigned"], *common, queue, int(isolated))
        table = LimitTable(limits_of(texts))
        arguments: list[Argument] = []
        for job_id, kind, payload in found:
            _, _, name, task = self._kinds(kind)
            arguments += (job_id, _find_partition(table, task, name, decode_text(payload)))
        await self._pool.run(self._scripts["assign"], *common, queue, *arguments)

    async def find_partition(self, task: str, queue: str, payload: str) -> str:
        """Partition of a job by the limits there are now, as its hash holds it; "" for none."""
        return _find_partition(LimitTable(await read_limits(self._pool)), task, queue, payload)

    async def assign_again(self, jobs: Sequence[Job]) -> None:
        """Gives jobs whose payload has changed their partitions."""
        table = LimitTable(await read_limits(self._pool)) if jobs else LimitTable()
        await self.write_partitions(
            [(job.id, _find_partition(table, job.task, job.queue, job.payload)) for job in jobs]
        )

    async def write_partitions(self, jobs: Sequence[tuple[str, str]]) -> int:
        """Gives jobs the partitions that come with their ids; returns how many changed."""
        changed = 0
        for piece in in_batches(jobs, PIECE):
            arguments = [argument for job in piece for argument in job]
            changed += await self._pool.run(self._scripts["assign"], "", 0, self._pool.address.task, "", *arguments)
        return changed


def _find_partition(table: LimitTable, task: str, queue: str, payload: str) -> str:
    """Partition and weights of a job as its hash holds them. A payload that cannot be read has no keys."""
    try:
        partition, weights = table.find_partition(task, queue, payload)
    except (ValueError, RecursionError):
        partition, weights = table.find_partition(task, queue, "null")
    return partition_field(partition, weights)


class RedisLimits:
    """Family ``limits`` of Redis."""

    def __init__(
        self,
        pool: NamespacePool,
        notifications: RedisNotifications,
        scripts: Mapping[str, Script],
        query: RedisQuery,
        assigner: PartitionAssigner,
        cache: LimitCache,
    ) -> None:
        self._pool = pool
        self._notifications = notifications
        self._scripts = scripts
        self._query = query
        self._assigner = assigner
        self._cache = cache

    async def write_limit(self, change: LimitChange) -> int | None:
        document = "" if change.remove else encode_limit(change.limit)
        revision = await self._pool.run(
            self._scripts["write_limit"], change.limit.name, change.expected, document, synced=True
        )
        self._cache.mark_stale()
        if not revision:
            return None
        queue: bytes | str = ""
        while queue := await self._pool.run(self._scripts["free_parked"], queue, PIECE):
            pass
        self._notifications.notify_done({"queue:*"})
        return int(revision)

    async def read_limits(self) -> list[Limit]:
        return await read_limits(self._pool)

    async def assign_partitions(
        self, *, queue: str | None = None, task: str | None = None, after: str = "", limit: int = 1000
    ) -> tuple[int, str | None]:
        """Walks the index of submissions, some pieces a call: ``after`` is a number of submission."""
        table = LimitTable(await self.read_limits())
        behind, changed, looked, pieces, more = int(after or 0), 0, 0, 0, True
        while more and looked < limit and pieces < _PIECES_MOST:
            jobs, last, more = await self._query.find_waiting(queue, task, behind)
            pieces += 1
            if len(jobs) > limit - looked:
                jobs, more = jobs[: limit - looked], True
                last = jobs[-1][0]
            changed += await self._assigner.write_partitions(
                [(job.id, _find_partition(table, job.task, job.queue, job.payload)) for _, job in jobs]
            )
            looked, behind = looked + len(jobs), last
        self._notifications.notify_done({"queue:*"} if changed else ())
        return changed, str(behind) if more else None

    async def bucket_use(self, buckets: Sequence[str]) -> list[BucketUse]:
        uses: list[BucketUse] = []
        for piece in in_batches(buckets, PIECE):
            found = await self._pool.run(self._scripts["bucket_use"], *piece)
            uses += [
                BucketUse(bucket=bucket, used=int(used), free_at_us=int(free_at))
                for bucket, (used, free_at) in zip(piece, found, strict=True)
            ]
        return uses

    async def count_waiting(self, buckets: Sequence[str], *, most: int) -> list[int]:
        """``most`` bounds nothing: the numbers are kept."""
        key, numbers = self._pool.address.prefix + "unstarted", []
        for piece in in_batches(buckets, PIECE):
            numbers += await self._pool.run_command("HMGET", key, *piece)
        return [int(number or 0) for number in numbers]

    async def take_tokens(self, bucket: str, tokens: int) -> timedelta:
        return int(await self._pool.run(self._scripts["take_tokens"], bucket, tokens)) * MICROSECOND

    async def pause_buckets(self, buckets: Sequence[str], pause_for: timedelta) -> None:
        for piece in in_batches(buckets, PIECE):
            await self._pool.run(self._scripts["pause_buckets"], span_us(pause_for), *piece)
