"""Queries of a transport to the store whose ready jobs it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from holdfast.core.models import Claim, ClaimByIds, JobState, Overtaken
from holdfast.stores.base import ClaimRequest, Store


class TransportQueries(Protocol):
    """Queries of a transport to its store: the ids of ready jobs, and jobs by their ids."""

    async def claim_ids(self, request: ClaimRequest) -> ClaimByIds:
        """``claim`` of the ids in ``request.ids``, each in its canonical form. Makes no due job ready; if one is due,
        ``next_due`` is 0. ``unclaimed``: ready jobs that were not, with their queues. ``paused``: all paused queues."""

    async def claim_limited(self, request: ClaimRequest) -> Claim | None:
        """``claim`` of jobs under limits alone, which are not claimed by their ids. None: the latest claim saw no such
        jobs, or due jobs must be made ready first."""

    async def make_ready(self, queues: Sequence[str] | None, *, limit: int) -> dict[str, list[str]]:
        """Make due jobs of these queues (None: of every queue) ready; their ids by queue, in the order of claims."""

    async def ready_queues(self) -> list[str]:
        """The queues that have ready jobs and are not paused."""

    async def count_ready(self, max_counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of ready jobs of each of these queues, counted up to the number given with it."""

    async def oldest_ready(self, queue: str, *, limit: int, aged: timedelta) -> list[str]:
        """Of the first ``limit`` ready jobs of a queue, those that have been so for ``aged`` at least."""

    async def find_overtaken(self, queue: str, front: Sequence[str], *, margin: timedelta, limit: int) -> Overtaken:
        """Of each priority the oldest ready jobs of a queue that were so more than ``margin`` before any ready one of
        ``front`` was: at most ``limit`` ready jobs, and at most ``limit`` suspects."""

    async def locate_jobs(self, job_ids: Sequence[str]) -> dict[str, tuple[str, JobState]]:
        """Queue and state of each of these jobs that exists."""

    async def dead_queues(self) -> list[str]:
        """The queues that have dead jobs."""

    async def newest_dead(self, queue: str, *, limit: int) -> list[str]:
        """Of a queue's dead jobs the ``limit`` that ended last, in the order of their ends."""

    async def wake_waiters(self, topics: Sequence[str]) -> None:
        """Wakes the waiters for these topics, in any process. Beside those of ``wait`` there is ``due:QUEUE``: when
        its next job falls due may have changed, or it was resumed."""


class TransportableStore(Store, Protocol):
    """A store whose ready jobs a transport can carry."""

    @property
    def transport_queries(self) -> TransportQueries: ...
