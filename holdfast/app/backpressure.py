"""Back-pressure: a submission beyond the depth of a limit is refused, of its queue, its task or a value of its key."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from holdfast.core.errors import QueueFull
from holdfast.core.limits import Limit, split_bucket
from holdfast.core.models import NOT_STARTED, NewJob
from holdfast.stores.base import Store
from holdfast.stores.common.limit_cache import LimitCache

_COUNTED_FOR = (
    1.0  # seconds for which counts are believed, together with the jobs that this process has submitted since
)
_MAX_COUNTS = 10_000  # that are kept between submissions
_QUEUE = "queue "  # begins the names of queues, and of no bucket


class QueueDepths:
    """Numbers of waiting jobs that limits bound, as one process knows them: of queues, and of buckets."""

    def __init__(self, store: Callable[[], Awaitable[Store]]) -> None:
        self._store = store
        self._limits = LimitCache(self._read_limits)
        self._counted_at = -_COUNTED_FOR
        self._counts: dict[str, int] = {}
        self._passed: Counter[str] = Counter()  # jobs that were let through since ``_counted_at``

    async def check(self, jobs: Sequence[NewJob]) -> None:
        """Raises `QueueFull` if a limit has no room for its jobs, and counts them otherwise.

        A count may be a second old: by as many jobs as other processes submit meanwhile, it may be exceeded.
        """
        table = await self._limits.current_limits()
        if not table.has_depths:
            return
        found = [each for job in jobs for each in table.find_depths(job)]
        wanted, most = Counter(name for name, _ in found), dict(found)
        if time.monotonic() - self._counted_at >= _COUNTED_FOR or len(self._counts) > _MAX_COUNTS:
            self._counted_at, self._counts, self._passed = time.monotonic(), {}, Counter()
        counts, passed = self._counts, self._passed
        if lacking := _find_lacking(wanted, most, counts):
            before = passed.copy()
            counts |= {name: n + passed[name] - before[name] for name, n in (await self._count(lacking, most)).items()}
        for name in _find_lacking(wanted, most, counts):
            limit, value = split_bucket(name)
            full = f"{'' if limit.startswith(_QUEUE) else 'limit '}{limit} is full"
            of_key = "" if value is None else f" for {value}"
            too_many = f" and {wanted[name]} are too many" if counts[name] < most[name] else ""
            raise QueueFull(f"{full}{of_key}: {counts[name]:,} of {most[name]:,} jobs wait{too_many}; try again later")
        passed.update(wanted)
        counts |= {name: counts[name] + number for name, number in wanted.items()}

    def mark_stale(self) -> None:
        """Reads the limits again at the next submission: this process changed one."""
        self._limits.mark_stale()

    async def _count(self, names: Sequence[str], most: Mapping[str, int]) -> dict[str, int]:
        store, found = await self._store(), dict.fromkeys(names, 0)
        queues = [name for name in names if name.startswith(_QUEUE)]
        if queues:
            for each in await store.query.queue_depths(most=max(most[name] for name in queues) + 1):
                found[_QUEUE + each.name] = sum(each.states.get(state, 0) for state in NOT_STARTED)
        if len(queues) < len(names):
            buckets = [name for name in names if not name.startswith(_QUEUE)]
            numbers = await store.limits.count_waiting(buckets, most=max(most[name] for name in buckets) + 1)
            found.update(zip(buckets, numbers, strict=True))
        return found

    async def _read_limits(self) -> list[Limit]:
        return await (await self._store()).limits.read_limits()


def _find_lacking(wanted: Mapping[str, int], most: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Names without room for the jobs, or without a count."""
    return [name for name, number in wanted.items() if counts.get(name, most[name]) + number > most[name]]
