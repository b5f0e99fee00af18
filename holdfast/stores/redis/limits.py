"""Family ``limits`` of Redis, and the partitions of jobs that came without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

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
)
from holdfast.core.models import MICROSECOND
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.stores.connections.redis import Script, split_parts
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.redis.claiming import MAX_PER_SCRIPT
from holdfast.stores.redis.encoding import Specs, decode_text, partition_field, span_us, split_documents
from holdfast.stores.redis.events import RedisQuery
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool

TRIES = 20
"""Calls of a script that writes partitions, if jobs or limits change meanwhile each time."""
CONFLICT = b"conflict"
"""Answer of a script: jobs or limits have changed since the partitions were found."""
_MAX_SCRIPTS = 50  # scripts of one ``assign_partitions``


def limits_of(texts: Iterable[bytes]) -> list[Limit]:
    """Limits by name, of ``REVISION DOCUMENT`` each."""
    return sorted(decode_limits(split_documents(texts)), key=lambda limit: limit.name)


async def read_limits(pool: NamespacePool) -> list[Limit]:
    """All limits of a namespace, by name."""
    return limits_of(await pool.run_command("HVALS", pool.address.prefix + "limits"))


class PartitionAssigner:
    """Gives jobs their partitions: the scripts never look into a payload."""

    def __init__(self, pool: NamespacePool, scripts: Mapping[str, Script], specs: Specs) -> None:
        self._pool = pool
        self._scripts = scripts
        self._specs = specs

    async def assign_ready(self, worker: str, queue: str, *, isolated: bool) -> None:
        """Moves the first ready jobs of a queue that have no partition into theirs. ``isolated``: quarantined ones."""
        common = (worker, 0, self._pool.address.task, queue)
        ids = await self._pool.run(self._scripts["find_unassigned"], *common, int(isolated))
        await self._assign(common, ids)

    async def find_partitions(
        self, ids: Sequence[Argument], *, queue: str | None = None, payload: str | None = None
    ) -> tuple[bytes, dict[Argument, tuple[bytes, str]]]:
        """Version of the limits; fingerprint and partition of each job, which gets this ``queue`` and ``payload``."""
        found, texts, version = await self._pool.run(self._scripts["partition_facts"], *ids)
        table = LimitTable(limits_of(texts))
        partitions = dict.fromkeys(ids, (b"-" if texts else b"", ""))
        for job_id, facts in zip(ids, found, strict=False):  # none without limits
            if facts is not None:
                _, _, name, task = self._specs(facts[0])
                text = decode_text(facts[1]) if payload is None else payload
                partitions[job_id] = facts[2], _find_partition(table, task, queue or name, text)
        return version, partitions

    async def write_partitions(self, ids: Sequence[str]) -> tuple[int, int]:
        """Gives jobs their partitions. Returns how many changed, and how many others changed all the time."""
        changed = left = 0
        for part in split_parts(ids, MAX_PER_SCRIPT):
            number, stale = await self._assign(("", 0, self._pool.address.task, ""), part)
            changed, left = changed + number, left + stale
        return changed, left

    async def _assign(self, common: Sequence[Argument], ids: Sequence[Argument]) -> tuple[int, int]:
        changed, stale = 0, len(ids)
        for _ in range(TRIES):
            version, partitions = await self.find_partitions(ids)
            jobs = [argument for job_id, found in partitions.items() for argument in (job_id, *found)]
            reply = await self._pool.run(self._scripts["assign"], *common, version, *jobs)
            if reply != CONFLICT:
                changed, stale = changed + reply[0], reply[1]
                if not stale:
                    break
        return changed, stale


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
        revision = await self._pool.run_keyed(
            self._scripts["write_limit"], change.limit.name, change.expected, document
        )
        self._cache.mark_stale()
        if not revision:
            return None
        if change.limit.values.rate is not None:
            await self._clamp_buckets(change.limit.name)
        queue: bytes | str = ""
        while queue := await self._pool.run(self._scripts["unblock_all_partitions"], queue, MAX_PER_SCRIPT):
            pass
        self._notifications.wake_local_waiters({"queue:*"})
        return int(revision)

    async def _clamp_buckets(self, limit: str) -> None:
        """Buckets keep the tokens that they have at this change. One that a claim reads first does so there."""
        key, cursor = self._pool.address.prefix + "buckets", b""
        while cursor != b"0":
            cursor, flat = await self._pool.run_command("HSCAN", key, cursor or b"0", "COUNT", MAX_PER_SCRIPT)
            names = [name for name in flat[::2] if name.partition(b"=")[0] == limit.encode()]
            for part in split_parts(names, MAX_PER_SCRIPT):
                await self._pool.run(self._scripts["clamp_buckets"], *part)

    async def read_limits(self) -> list[Limit]:
        return await read_limits(self._pool)

    async def assign_partitions(
        self, *, queue: str | None = None, task: str | None = None, after: str = "", limit: int = 1000
    ) -> Assigned:
        """Walks the index of submissions, some parts a call: ``after`` is a number of submission."""
        behind, changed, left, examined, scripts, more = int(after or 0), 0, 0, 0, 0, True
        while more and examined < limit and scripts < _MAX_SCRIPTS:
            jobs, last, more = await self._query.find_open(queue, task, behind)
            scripts += 1
            if len(jobs) > limit - examined:
                jobs, more = jobs[: limit - examined], True
                last = jobs[-1][0]
            number, stale = await self._assigner.write_partitions([job.id for _, job in jobs])
            changed, left, examined, behind = changed + number, left + stale, examined + len(jobs), last
        self._notifications.wake_local_waiters({"queue:*"} if changed else ())
        return Assigned(changed, str(behind) if more else None, left)

    async def bucket_use(self, buckets: Sequence[str]) -> list[BucketUse]:
        uses: list[BucketUse] = []
        limits = {limit.name: limit for limit in await self.read_limits()}
        for part in split_parts(buckets, MAX_PER_SCRIPT):
            now, *found = await self._pool.run(self._scripts["bucket_use"], *part)
            uses += [
                bucket_use(
                    bucket,
                    limits.get(split_bucket(bucket)[0]),
                    int(used),
                    BucketState(int(full_at), int(paused_until)),
                    int(now),
                )
                for bucket, (used, full_at, paused_until) in zip(part, found, strict=True)
            ]
        return uses

    async def count_unstarted(self, buckets: Sequence[str], *, max_count: int) -> list[int]:
        """``max_count`` bounds nothing: the numbers are kept."""
        key, numbers = self._pool.address.prefix + "unstarted", []
        for part in split_parts(buckets, MAX_PER_SCRIPT):
            numbers += await self._pool.run_command("HMGET", key, *part)
        return [int(number or 0) for number in numbers]

    async def take_tokens(self, bucket: str, tokens: int) -> timedelta:
        return int(await self._pool.run(self._scripts["take_tokens"], bucket, tokens)) * MICROSECOND

    async def pause_buckets(self, buckets: Sequence[str], pause_for: timedelta) -> None:
        for part in split_parts(buckets, MAX_PER_SCRIPT):
            await self._pool.run(self._scripts["pause_buckets"], span_us(pause_for), *part)
