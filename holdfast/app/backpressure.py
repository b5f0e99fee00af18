"""Back-pressure: a submission beyond the depth of a limit is refused, of its queue, its task or a value of its key."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from holdfast.core.errors import QueueFull
from holdfast.core.limits import Limit, split_bucket
from holdfast.core.models import NOT_STARTED, Job, NewJob, UniqueKey
from holdfast.stores.base import Store
from holdfast.stores.common.limit_cache import LimitCache

_COUNTED_FOR = 1.0
"""Seconds for which counts are believed, together with the jobs that this process has submitted since."""
_MAX_COUNTS = 10_000  # that are kept between submissions
_COUNTS = 3  # counts of one submission, while jobs of this process are stored during each
_MAX_LOOKUP = 100  # jobs that are asked for together: each may have a large payload
_NO_JOBS: Counter[str] = Counter()
_QUEUE = "queue "  # begins the names of queues, and of no bucket

_Depths = list[tuple[str, int]]
"""Queue and buckets that bound a job, and how many jobs may wait there."""


class QueueDepths:
    """Numbers of unstarted jobs that limits bound, as one process knows them: of queues, and of buckets."""

    def __init__(self, store: Callable[[], Awaitable[Store]], as_stored: Callable[[NewJob], str]) -> None:
        """``as_stored``: returns the payload as the store will have it, which decides on its bucket there."""
        self._store = store
        self._as_stored = as_stored
        self._limits = LimitCache(self._read_limits)
        self._counted_at = -_COUNTED_FOR
        self._counts: dict[str, int] = {}
        self._passed: Counter[str] = Counter()  # jobs that were let through since ``_counted_at``
        self._pending: Counter[str] = Counter()  # jobs that were let through, and are neither stored nor refused yet
        self._releases = 0

    async def reserve_room(self, jobs: Sequence[NewJob]) -> Counter[str]:
        """Counts new jobs as unstarted, by queue and bucket, until ``release_room``. Raises `QueueFull` without room.

        A count may be a second old: by as many jobs as other processes submit meanwhile, it may be exceeded.
        """
        table = await self._limits.current_limits()
        if not table.has_depths:
            return _NO_JOBS
        bounded = [(job, list(table.find_depths(job, self._as_stored))) for job in jobs]
        wanted = Counter(name for _, depths in bounded for name, _ in depths)
        most = dict(each for _, depths in bounded for each in depths)
        if time.monotonic() - self._counted_at >= _COUNTED_FOR or len(self._counts) > _MAX_COUNTS:
            self._counted_at, self._counts, self._passed = time.monotonic(), {}, Counter()
        counts = self._counts
        await self._count_lacking(wanted, most)
        if _find_lacking(wanted, most, counts):
            wanted -= await self._count_known([each for each in bounded if _may_be_known(each[0])])
        for name in _find_lacking(wanted, most, counts):
            limit, value = split_bucket(name)
            full = f"{'' if limit.startswith(_QUEUE) else 'limit '}{limit} is full"
            of_key = "" if value is None else f" for {value}"
            too_many = f" and {wanted[name]} are too many" if counts[name] < most[name] else ""
            later = "try again later" if wanted[name] <= most[name] else f"submit at most {most[name]:,} at once"
            raise QueueFull(f"{full}{of_key}: {counts[name]:,} of {most[name]:,} jobs wait{too_many}; {later}", name)
        self._passed.update(wanted)
        self._pending.update(wanted)
        self._counts |= {name: self._counts[name] + wanted[name] for name in wanted if name in self._counts}
        return wanted

    def release_room(self, reserved: Counter[str]) -> None:
        """The jobs are stored, or are not going to be."""
        if reserved:
            self._pending -= reserved
            self._releases += 1

    def mark_stale(self) -> None:
        """Reads the limits again at the next submission: this process changed one."""
        self._limits.mark_stale()

    async def _count_lacking(self, wanted: Mapping[str, int], most: Mapping[str, int]) -> None:
        """Counts where there is no count, or no room by the last one.

        Counts again if this process stored jobs meanwhile: they may have been counted twice, as pending and as stored.
        """
        counts, passed = self._counts, self._passed
        for _ in range(_COUNTS):
            lacking = _find_lacking(wanted, most, counts)
            if not lacking:
                return
            releases, before = self._releases, {name: passed[name] - self._pending[name] for name in lacking}
            numbers = await self._count(lacking, most)
            counts |= {name: number + passed[name] - before[name] for name, number in numbers.items()}
            if releases == self._releases:
                return

    async def _count(self, names: Sequence[str], most: Mapping[str, int]) -> dict[str, int]:
        store, found = await self._store(), dict.fromkeys(names, 0)
        queues = [name for name in names if name.startswith(_QUEUE)]
        if queues:
            for each in await store.query.queue_depths(max_count=max(most[name] for name in queues) + 1):
                if _QUEUE + each.name in found:
                    found[_QUEUE + each.name] = sum(each.states.get(state, 0) for state in NOT_STARTED)
        if len(queues) < len(names):
            buckets = [name for name in names if not name.startswith(_QUEUE)]
            numbers = await store.limits.count_unstarted(buckets, max_count=max(most[name] for name in buckets) + 1)
            found.update(zip(buckets, numbers, strict=True))
        return found

    async def _count_known(self, bounded: Sequence[tuple[NewJob, _Depths]]) -> Counter[str]:
        """Counts submissions that are answered with a job that exists: by its id, its key or its unique key."""
        store = await self._store()
        known: Counter[str] = Counter()
        for start in range(0, len(bounded), _MAX_LOOKUP):
            chunk = bounded[start : start + _MAX_LOOKUP]
            by_id = await store.query.summaries([job.id for job, _ in chunk])
            by_key = await store.query.by_keys([job.key or job.id for job, _ in chunk])
            by_unique = await store.query.by_keys([job.unique.key if job.unique else job.id for job, _ in chunk])
            now_us = await store.health.server_time_us() if any(by_unique) else 0
            for (job, depths), same, named, holder in zip(chunk, by_id, by_key, by_unique, strict=True):
                is_unique_held = holder is not None and job.unique is not None and _holds(holder, job.unique, now_us)
                if same or (job.key and named) or is_unique_held:
                    known.update(name for name, _ in depths)
        return known

    async def _read_limits(self) -> list[Limit]:
        return await (await self._store()).limits.read_limits()


def _may_be_known(job: NewJob) -> bool:
    return job.has_client_id or job.key is not None or job.unique is not None


def _holds(holder: Job, unique: UniqueKey, now_us: int) -> bool:
    """Returns True if the job that took the key last keeps a submission with this policy out."""
    window = holder.options_or_default.unique.window_us if holder.options_or_default.unique else None
    return holder.state in unique.states or (window is not None and holder.created_at_us + window > now_us)


def _find_lacking(wanted: Mapping[str, int], most: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Names without room for the jobs, or without a count."""
    return [name for name, number in wanted.items() if counts.get(name, most[name]) + number > most[name]]
