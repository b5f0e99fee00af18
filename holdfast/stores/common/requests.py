"""Requests that the verb families of every store receive: claims, selections of jobs, and errors of corrupt jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.job_logs import LogLine, LogPage
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE
from holdfast.core.models import BulkResult, JobFilter, JobState, ReplayRate, States
from holdfast.core.validation import check_texts
from holdfast.stores.base import AT_ONCE, EVERY_QUEUE, Selection

FORGOTTEN_AFTER = timedelta(days=1)
"""How long a worker that fell silent is still listed."""

EXPIRY_ROUNDS = 20
"""Batches of one call that ends expired jobs: most of a batch may have begun long ago."""

GLANCED = frozenset(set(JobState) - {JobState.SUCCEEDED, JobState.CANCELLED})
"""States that ``queue_depths`` counts: all but succeeded and cancelled jobs."""

HEARTBEAT_RETRY_SHARE = 0.25
"""Of a lease: how long a heartbeat waits for a server that is away, so that there is time for another."""

UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""Exceptions of reading JSON that another program corrupted: other content than ours, or nested too deep."""

CHOICE_SECONDS = 8.0
"""Seconds that a change by a filter may look for its jobs if a caller waits: it is rare, and has to be done."""
SWEEP_TIME = 8.5
"""Seconds more than others that upkeep may take where a store is patient for a moment only: no caller waits for it."""
_JOBS_A_SECOND, _CHARACTERS_A_SECOND = 2500, 4e6  # that every store writes, with room to spare
MIN_CLAIM_RATE = 100
"""Jobs a second that every store hands over, whatever their size."""

_LAST_LINE = (1 << 31) - 1


def remaining_slots(capacity: Mapping[str, int], claimed: Iterable[str]) -> dict[str, int]:
    """Returns the capacity that is left after a job of each of these queues was claimed."""
    remaining = dict(capacity)
    for queue, number in Counter(claimed).items():
        name = queue if queue in capacity else EVERY_QUEUE
        if name in remaining:
            remaining[name] = max(0, remaining[name] - number)
    return remaining


def find_extra_time(jobs: int, characters: int = 0) -> float:
    """Seconds more that a call may take for writing so many jobs with so many characters in all."""
    return jobs / _JOBS_A_SECOND + characters / _CHARACTERS_A_SECOND


def line_place(cursor: str | None) -> tuple[int, int]:
    """The claims and the number of the last log line that is known already."""
    if cursor is None:
        return 0, 0
    parts = cursor.split("-")
    if len(parts) != 2 or not all(each.isascii() and each.isdecimal() and len(each) <= 16 for each in parts):
        raise Invalid("cursor", cursor, "give the cursor of an earlier page, unchanged")
    return int(parts[0]), min(int(parts[1]), _LAST_LINE)


def line_page(lines: list[LogLine], limit: int) -> LogPage:
    """A page of ``limit`` lines, of which one more was asked for."""
    last = lines[limit - 1] if len(lines) > limit else None
    return LogPage(lines[:limit], None if last is None else f"{last.claims}-{last.number}")


def jobs_of_topics(topics: Sequence[str]) -> list[str]:
    """Returns the jobs whose ends these topics name; ``job:*`` names none."""
    return [topic.removeprefix("job:") for topic in topics if topic.startswith("job:") and topic != "job:*"]


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
        chosen = await self._choose(selection, CANCELLABLE, limit, uncancelled=True)
        return await self._cancel(chosen) if chosen.ids else BulkResult([], [])

    async def replay(
        self,
        selection: Selection,
        *,
        force: bool = False,
        payload: str | None = None,
        from_step: int | None = None,
        limit: int = 1000,
        pace: ReplayRate = AT_ONCE,
    ) -> BulkResult:
        chosen = await self._choose(selection, REPLAYABLE | {JobState.SUCCEEDED} if force else REPLAYABLE, limit)
        if not chosen.ids:
            return BulkResult([], [])
        return await self._replay(chosen, force=force, payload=payload, from_step=from_step, pace=pace)

    async def delete(self, selection: Selection, *, limit: int = 1000, states: States = None) -> BulkResult:
        check_texts("states", states or (), tuple(JobState))
        legal = DELETABLE if states is None else DELETABLE & frozenset(states)
        chosen = await self._choose(selection, legal, limit)
        return await self._delete(chosen, states) if chosen.ids else BulkResult([], [])

    async def _choose(
        self, selection: Selection, legal: frozenset[JobState], limit: int, *, uncancelled: bool = False
    ) -> Chosen:
        if not isinstance(selection, JobFilter):
            return select_ids(selection, limit)
        return await self._choose_matching(selection, legal, limit, uncancelled=uncancelled)

    @abstractmethod
    async def _choose_matching(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, uncancelled: bool
    ) -> Chosen:
        """Chooses jobs that a filter matches, read outside of any transaction: that may take long, and no caller waits
        for it.

        Only ever states the operation accepts; ``uncancelled`` leaves out running jobs that were asked to stop, so
        that a series of calls ends.
        """

    @abstractmethod
    async def _cancel(self, chosen: Chosen) -> BulkResult:
        """End jobs that have not started; flag running ones and notify their workers."""

    @abstractmethod
    async def _replay(
        self, chosen: Chosen, *, force: bool, payload: str | None, from_step: int | None, pace: ReplayRate
    ) -> BulkResult:
        """Back to queued with all attempts, or to scheduled where it is due later."""

    @abstractmethod
    async def _delete(self, chosen: Chosen, states: States) -> BulkResult:
        """Remove jobs with their keys, tags and history; only those in ``states`` when it writes."""
