"""Back-pressure: a submission to a queue that holds as many waiting jobs as its limit allows is refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from holdfast.core.errors import QueueFull
from holdfast.core.limits import Limit, LimitTable
from holdfast.core.models import NOT_STARTED, NewJob
from holdfast.stores.base import Store
from holdfast.stores.common.limit_cache import LimitCache

_COUNTED_FOR = 1.0
"""Seconds for which a count is believed, together with the jobs that this process has submitted since."""


class QueueDepths:
    """The depths of limited queues, as one process knows them."""

    def __init__(self, store: Callable[[], Awaitable[Store]]) -> None:
        self._store = store
        self._limits = LimitCache(self._read_limits)
        self._counted_at = -_COUNTED_FOR
        self._depths: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()  # jobs that were let through, ever

    async def check(self, jobs: Sequence[NewJob]) -> None:
        """Raises `QueueFull` if one of the queues has no room for its jobs, and counts them otherwise.

        The count may be a second old: by as much as other processes submit meanwhile, a queue may become deeper.
        """
        table = await self._limits.current_limits()
        if not table.depths:
            return
        wanted = Counter(job.queue for job in jobs if job.queue in table.depths)
        if not wanted:
            return
        if time.monotonic() - self._counted_at >= _COUNTED_FOR or self._full(table, wanted) is not None:
            await self._count(table)
        full = self._full(table, wanted)
        if full is not None:
            depth, most = self._depths[full], table.depths[full]
            number = f" and {wanted[full]} are too many" if depth < most else ""
            raise QueueFull(f"queue {full} is full: {depth:,} of {most:,} jobs wait{number}; try again later")
        self._depths.update(wanted)
        self._passed.update(wanted)

    def mark_stale(self) -> None:
        """Reads the limits again at the next submission: this process changed one."""
        self._limits.mark_stale()

    def _full(self, table: LimitTable, wanted: Counter[str]) -> str | None:
        """The first queue without room."""
        return next((name for name, number in wanted.items() if self._depths[name] + number > table.depths[name]), None)

    async def _count(self, table: LimitTable) -> None:
        store = await self._store()
        counted_at, passed = time.monotonic(), self._passed.copy()
        queues = await store.query.queue_depths(most=max(table.depths.values()) + 1)
        self._depths = self._passed - passed  # let through meanwhile
        for each in queues:
            self._depths[each.name] += sum(each.states.get(state, 0) for state in NOT_STARTED)
        self._counted_at = counted_at

    async def _read_limits(self) -> list[Limit]:
        return await (await self._store()).limits.read_limits()
