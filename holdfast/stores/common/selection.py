"""Selections of jobs that an operator changes: chosen first, and then changed in one write, on every store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.core.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE
from holdfast.core.models import BulkResult, JobFilter, JobState, ReplayRate
from holdfast.stores.base import AT_ONCE, Selection


class Chosen(NamedTuple):
    """Jobs an operation is to try."""

    ids: list[str]
    more: bool  # whether more would match
    guard: Mapping[str, Any] | None  # what a filter chose them by, which must still hold; None: they were named


def select_ids(ids: Sequence[str], limit: int) -> Chosen:
    """Jobs chosen by id."""
    once = list(dict.fromkeys(ids))
    return Chosen(once[:limit], len(once) > limit, None)


class SelectionAdmin(ABC):
    """The verbs of ``Admin`` that take a selection, over a store's choice and its writes."""

    async def cancel(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        chosen = await self._choose(selection, CANCELLABLE, limit, unasked=True)
        return await self._cancel(chosen) if chosen.ids else BulkResult([], [])

    async def replay(
        self,
        selection: Selection,
        *,
        force: bool = False,
        payload: str | None = None,
        limit: int = 1000,
        pace: ReplayRate = AT_ONCE,
    ) -> BulkResult:
        chosen = await self._choose(selection, REPLAYABLE | {JobState.SUCCEEDED} if force else REPLAYABLE, limit)
        if not chosen.ids:
            return BulkResult([], [])
        return await self._replay(chosen, force=force, payload=payload, pace=pace)

    async def delete(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        chosen = await self._choose(selection, DELETABLE, limit)
        return await self._delete(chosen) if chosen.ids else BulkResult([], [])

    async def _choose(
        self, selection: Selection, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen:
        if not isinstance(selection, JobFilter):
            return select_ids(selection, limit)
        return await self._choose_matching(selection, legal, limit, unasked=unasked)

    @abstractmethod
    async def _choose_matching(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, unasked: bool
    ) -> Chosen:
        """Chooses jobs that a filter matches, read outside of any transaction: that may take long, and no caller waits
        for it.

        Only ever states the operation accepts; ``unasked`` leaves out running jobs that were asked to stop already, so
        that a series of calls ends.
        """

    @abstractmethod
    async def _cancel(self, chosen: Chosen) -> BulkResult:
        """End waiting jobs; flag running ones and notify their workers."""

    @abstractmethod
    async def _replay(self, chosen: Chosen, *, force: bool, payload: str | None, pace: ReplayRate) -> BulkResult:
        """Back to queued with a new budget, or to scheduled where its turn comes later."""

    @abstractmethod
    async def _delete(self, chosen: Chosen) -> BulkResult:
        """Remove jobs with their keys, tags and history."""
