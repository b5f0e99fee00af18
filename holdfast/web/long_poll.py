"""Long polling of claims: one reader of the store for all waiting claims, in the order they came.

Each waiting for itself would have every one of them claim for every job; and what a transport delivers is delivered to
the process, not to one of its claims.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from datetime import timedelta

import msgspec

from holdfast.core.clock import wait_first
from holdfast.core.errors import HoldfastError
from holdfast.core.events import ApiStopping, Event
from holdfast.core.models import Claim, Job
from holdfast.stores.base import ClaimRequest
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.worker.reporting import emit_claim

_BREATH = 0.01  # seconds at least between two rounds for the sake of what is due
_WARY = 60.0  # seconds for which it is remembered that a job waits to be run alone


class RemoteClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a claim. ``tasks``: those the worker knows; None: it takes every one. ``idle``: it has no job."""

    worker: str
    capacity: Mapping[str, int]
    limit: int
    lease_for: timedelta
    tasks: frozenset[str] | None = None
    idle: bool = False


class ClaimResult(msgspec.Struct, frozen=True):
    """Result of a claim. ``alone``: its one job runs with no other beside it. ``quarantined``: such a job waits."""

    jobs: list[Job]
    isolated: bool = False
    quarantined: bool = False
    next_due: timedelta | None = None


class WaitingClaim:
    """A claim that waits."""

    __slots__ = ("ask", "left", "taken")

    def __init__(self, ask: RemoteClaimRequest) -> None:
        self.ask = ask
        self.left = False
        self.taken: asyncio.Future[ClaimResult] = asyncio.get_running_loop().create_future()


class ClaimWaiters:
    """The claims that wait in one event loop."""

    def __init__(self, fleet: RemoteWorkers) -> None:
        self.fleet = fleet
        self._app = fleet.app
        self._places: dict[WaitingClaim, None] = {}
        self._came = asyncio.Event()
        self._minding: asyncio.Task[None] | None = None
        self._quarantined_at = -math.inf
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._app.events.subscribe(self._stopping, ApiStopping)

    # ── taking ────────────────────────────────────────────────────────────────────────────────────────────────
    async def take(self, ask: RemoteClaimRequest) -> ClaimResult:
        """Takes the jobs that are ready now; call it shielded, since they must reach a caller."""
        if not any(ask.capacity.values()):
            return ClaimResult([])
        clock = self._app.clock
        wary = clock.monotonic() - self._quarantined_at < _WARY
        if ask.idle and wary:
            taken = await self._take_alone(ask)
            if taken.jobs:
                return taken
            self._quarantined_at = -math.inf
        claim = await self._claim(ask)
        if claim.quarantined:
            self._quarantined_at = clock.monotonic()
            if ask.idle and not claim.jobs:
                return await self._take_alone(ask)
        jobs = await self._without_unknown(ask, claim.jobs)
        return ClaimResult(jobs, quarantined=claim.quarantined, next_due=claim.next_due)

    async def _take_alone(self, ask: RemoteClaimRequest) -> ClaimResult:
        claim = await self._claim(ask, isolated=True)
        jobs = await self._without_unknown(ask, claim.jobs)
        return ClaimResult(jobs, isolated=bool(jobs), quarantined=claim.quarantined, next_due=claim.next_due)

    async def _claim(self, ask: RemoteClaimRequest, *, isolated: bool = False) -> Claim:
        store = await self._app.open_store()
        claim = await store.queueing.claim(
            ClaimRequest(
                ask.worker,
                ask.capacity,
                limit=1 if isolated else ask.limit,
                lease_for=ask.lease_for,
                isolated=isolated,
                shared_worker_id=True,
            )
        )
        emit_claim(self._app.events, claim, ask.worker, ask.lease_for)
        return claim

    async def _without_unknown(self, ask: RemoteClaimRequest, jobs: list[Job]) -> list[Job]:
        if ask.tasks is None:
            return jobs
        unknown = [job for job in jobs if job.task not in ask.tasks]
        if unknown:
            await self.fleet.settle_unknown(ask.worker, unknown, ask.tasks)
        return [job for job in jobs if job.task in ask.tasks]

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    def enqueue_claim(self, ask: RemoteClaimRequest) -> WaitingClaim:
        """Wait in turn; ``taken`` of the place has the result."""
        place = WaitingClaim(ask)
        if self._closed:
            place.taken.set_result(ClaimResult([]))
            return place
        self._places[place] = None
        self._came.set()
        if self._minding is None or self._minding.done():
            self._minding = asyncio.create_task(self._mind(), name="holdfast-claims")
        return place

    def renew(self, place: WaitingClaim, ask: RemoteClaimRequest) -> None:
        """It asks for something else from now on."""
        if ask != place.ask:
            place.ask = ask
            self._came.set()

    def _stopping(self, event: Event) -> None:
        """The API is about to end: answers all waiting claims."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._closed = True
        places, self._places = self._places, {}
        for place in places:
            place.taken.set_result(ClaimResult([]))

    async def cancel_claim(self, place: WaitingClaim) -> ClaimResult:
        """Wait no longer. Jobs being taken for it this very moment are its own still."""
        place.left = True
        if place in self._places:
            del self._places[place]
            place.taken.set_result(ClaimResult([]))
        return await asyncio.shield(place.taken)

    async def _mind(self) -> None:
        """While a claim waits: a round of claims, then the store's news."""
        while self._places:
            self._came.clear()
            try:
                due = await self._round()
                if self._places:
                    await self._notifications(due)
            except HoldfastError as error:
                for place in list(self._places):
                    del self._places[place]
                    place.taken.set_exception(error)

    async def _round(self) -> float:
        """Claim for each that waits; seconds until the next job falls due."""
        due = math.inf
        in_vain: set[tuple[frozenset[str], bool]] = set()
        for place in list(self._places):
            like = frozenset(queue for queue, slots in place.ask.capacity.items() if slots), place.ask.idle
            if place not in self._places or like in in_vain:
                continue
            del self._places[place]  # a client that leaves now waits for its result
            try:
                taken = await self.take(place.ask)
            except BaseException as error:
                place.taken.set_exception(error if isinstance(error, HoldfastError) else HoldfastError(str(error)))
                raise
            if taken.jobs or place.left or self._closed:
                place.taken.set_result(taken)
                continue
            self._places[place] = None
            in_vain.add(like)
            if taken.next_due is not None:
                due = min(due, taken.next_due.total_seconds())
        return due

    async def _notifications(self, due: float) -> None:
        """Until something may be ready, something falls due, or another claim has come."""
        clock, poll = self._app.clock, self._app.settings.poll.total_seconds()
        store = await self._app.open_store()
        topics = sorted(
            {f"queue:{queue}" for place in self._places for queue, slots in place.ask.capacity.items() if slots}
        )
        most = max(_BREATH, min(poll, due))
        waits: list[asyncio.Future[object]] = [asyncio.ensure_future(self._came.wait())]
        if topics:
            waits.append(asyncio.ensure_future(store.queueing.wait(topics, timeout=most + 1)))
        try:
            await clock.run_bounded(wait_first(*waits), most)
        finally:
            for each in waits:
                each.cancel()
