"""The limits of a store as one process knows them, to give submitted jobs their partitions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from holdfast.core.limits import Limit, LimitTable
from holdfast.core.models import NewJob

REFRESH = 5.0
"""Seconds for which limits that were read are used again."""


class LimitCache:
    """Limits, read again when they are older than ``REFRESH``."""

    def __init__(self, read: Callable[[], Awaitable[list[Limit]]]) -> None:
        self._read = read
        self._read_at = -REFRESH
        self.table = LimitTable()
        """The limits as they were read last; stale while ``is_stale``."""

    @property
    def is_stale(self) -> bool:
        """Returns True if the limits must be read before they are used."""
        return time.monotonic() - self._read_at >= REFRESH

    def set_limits(self, limits: Sequence[Limit]) -> LimitTable:
        """Keeps limits that were just read."""
        self._read_at = time.monotonic()
        self.table = LimitTable(limits)
        return self.table

    def mark_stale(self) -> None:
        """Reads the limits again at their next use: this process changed one."""
        self._read_at = -REFRESH

    async def current_limits(self) -> LimitTable:
        """Returns the limits, read again if they are stale."""
        return self.set_limits(await self._read()) if self.is_stale else self.table

    async def bind(self, jobs: Sequence[NewJob]) -> Sequence[NewJob]:
        """Returns the jobs, with partitions where they are under limits."""
        return (await self.current_limits()).bind(jobs)
