"""Long polling of claims: one task claims for all pending claims in turn; one that got nothing goes behind the others.

If each waited for itself, every new job would cause a claim by each of them. And a transport delivers to the process,
not to one of its claims.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextvars import Context
from datetime import timedelta

import msgspec

from holdfast.core.clock import wait_first
from holdfast.core.errors import HoldfastError, StoreReplaced, Unavailable
from holdfast.core.events import ApiStopping, Event, StoreTrouble
from holdfast.core.models import Claim, Job
from holdfast.stores.base import ClaimRequest
from holdfast.web.remote_workers import RemoteWorkers
from holdfast.worker.reporting import emit_claim

_MAX_SEARCH = 5.0  # seconds for which a claim that meets only unknown tasks gives them back and claims again
OUTAGE_PAUSE = 0.5  # seconds until a pending claim asks again a store that is away
_MIN_PAUSE = 0.01  # seconds between two rounds, even if a job is due
_QUARANTINE_MEMORY = 60.0  # seconds to expect a quarantined job after one was seen


class RemoteClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a claim. ``tasks``: those of the worker; None: all. ``is_idle``: the worker runs no job.

    ``wildcard_queues``: those that share the slots of `*`.
    """

    worker: str
    capacity: Mapping[str, int]
    wildcard_queues: frozenset[str] = frozenset()
    limit: int
    lease_for: timedelta
    tasks: frozenset[str] | None = None
    is_idle: bool = False

    @property
    def queues_with_slots(self) -> frozenset[str]:
        """The queues that have free slots."""
        return frozenset(queue for queue, slots in self.capacity.items() if slots)


class ClaimResult(msgspec.Struct, frozen=True):
    """Result of a claim. ``isolated``: its one job must run alone. ``has_quarantined``: such a job waits.

    ``claimed_at``: monotonic instant at which the claim was sent to the store. No lease began earlier.
    """

    jobs: list[Job]
    claimed_at: float | None = None
    isolated: bool = False
    has_quarantined: bool = False
    next_due: timedelta | None = None


class PendingClaim:
    """A claim that waits."""

    __slots__ = ("is_cancelled", "request", "result")

    def __init__(self, request: RemoteClaimRequest) -> None:
        self.request = request
        self.is_cancelled = False
        self.result: asyncio.Future[ClaimResult] = asyncio.get_running_loop().create_future()


class PendingClaims:
    """The pending claims of one event loop."""

    def __init__(self, remote_workers: RemoteWorkers) -> None:
        self.remote_workers = remote_workers
        self._app = remote_workers.app
        self._pending: dict[PendingClaim, None] = {}
        self._changed = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._quarantined_at = -math.inf
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._app.events.subscribe(self._stopping, ApiStopping)

    # ── claiming ────────────────────────────────────────────────────────────────────────────────────────────────
    async def claim_now(self, request: RemoteClaimRequest) -> ClaimResult:
        """Claims ready jobs. Call it shielded: a cancelled claim would lose its jobs."""
        if not any(request.capacity.values()):
            return ClaimResult([])
        clock = self._app.clock
        expects_quarantined = clock.monotonic() - self._quarantined_at < _QUARANTINE_MEMORY
        if request.is_idle and expects_quarantined:
            result = await self._claim_isolated(request)
            if result.jobs:
                return result
            self._quarantined_at = -math.inf
        search_until = clock.monotonic() + _MAX_SEARCH
        while True:
            claimed_at = clock.monotonic()
            claim = await self._claim(request)
            if claim.has_quarantined:
                self._quarantined_at = clock.monotonic()
                if request.is_idle and not claim.jobs:
                    return await self._claim_isolated(request)
            jobs = await self._without_unknown(request, claim.jobs)
            if jobs or not claim.jobs or claimed_at >= search_until:  # behind unknown tasks there may be known ones
                return ClaimResult(jobs, claimed_at, has_quarantined=claim.has_quarantined, next_due=claim.next_due)

    async def _claim_isolated(self, request: RemoteClaimRequest) -> ClaimResult:
        claimed_at = self._app.clock.monotonic()
        claim = await self._claim(request, isolated=True)
        jobs = await self._without_unknown(request, claim.jobs)
        return ClaimResult(
            jobs, claimed_at, isolated=bool(jobs), has_quarantined=claim.has_quarantined, next_due=claim.next_due
        )

    async def _claim(self, request: RemoteClaimRequest, *, isolated: bool = False) -> Claim:
        """Claims from the queues of the request.

        A store counts slots by queue: of queues that share theirs, no more jobs are claimed at once than have room.
        """
        capacity, left = dict(request.capacity), 1 if isolated else request.limit
        claim, jobs = Claim([]), list[Job]()
        while left and any(capacity.values()):
            limit = min([left, *(capacity[queue] for queue in request.wildcard_queues if capacity[queue])])
            try:
                claim = await self._claim_once(request, capacity, limit, isolated=isolated)
            except HoldfastError:
                if not jobs:  # else their claim would be lost
                    raise
                break
            jobs += claim.jobs
            if len(claim.jobs) < limit:
                break
            left -= limit
            for job in claim.jobs:
                same = request.wildcard_queues if job.queue in request.wildcard_queues else {job.queue}
                capacity |= {queue: capacity[queue] - 1 for queue in capacity.keys() & same}
        return msgspec.structs.replace(claim, jobs=jobs)

    async def _claim_once(
        self, request: RemoteClaimRequest, capacity: Mapping[str, int], limit: int, *, isolated: bool
    ) -> Claim:
        store = await self._app.open_store()
        claim = await store.queueing.claim(
            ClaimRequest(
                request.worker,
                capacity,
                limit=limit,
                lease_for=request.lease_for,
                isolated=isolated,
                shared_worker_id=True,
            )
        )
        emit_claim(self._app.events, claim, request.worker, request.lease_for)
        return claim

    async def _without_unknown(self, request: RemoteClaimRequest, jobs: list[Job]) -> list[Job]:
        if request.tasks is None:
            return jobs
        unknown = [job for job in jobs if job.task not in request.tasks]
        if unknown:
            await self.remote_workers.settle_unknown(request.worker, unknown, request.tasks)
        return [job for job in jobs if job.task in request.tasks]

    # ── pending claims ────────────────────────────────────────────────────────────────────────────────────────────────
    def enqueue_claim(self, request: RemoteClaimRequest) -> PendingClaim:
        """Queues a claim; its result is set in ``result``."""
        pending = PendingClaim(request)
        if self._closed:
            pending.result.set_result(ClaimResult([]))
            return pending
        self._pending[pending] = None
        self._changed.set()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve_pending(), name="holdfast-claims", context=Context())
        return pending

    def update_request(self, pending: PendingClaim, request: RemoteClaimRequest) -> None:
        """Changes the request of a pending claim."""
        if request != pending.request:
            pending.request = request
            self._changed.set()

    def _stopping(self, event: Event) -> None:
        """Ends all pending claims: the API is stopping."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._closed = True
        ended, self._pending = self._pending, {}
        for pending in ended:
            pending.result.set_result(ClaimResult([]))

    async def cancel_claim(self, pending: PendingClaim) -> ClaimResult:
        """Ends a pending claim. Returns jobs that are being claimed for it at this moment."""
        pending.is_cancelled = True
        if pending in self._pending:
            del self._pending[pending]
            pending.result.set_result(ClaimResult([]))
        return await asyncio.shield(pending.result)

    async def _serve_pending(self) -> None:
        """While claims wait: claims for each, then waits for notifications, or for a store that is away."""
        while self._pending:
            self._changed.clear()
            try:
                due = await self._claim_for_each()
                if self._pending:
                    await self._wait_for_event(due)
            except HoldfastError as error:
                if isinstance(error, Unavailable) and not isinstance(error, StoreReplaced):
                    self._app.events.emit(StoreTrouble(service="api", error=str(error), retry_in=OUTAGE_PAUSE))
                    await self._app.clock.sleep(OUTAGE_PAUSE)
                    continue
                for pending in list(self._pending):
                    del self._pending[pending]
                    pending.result.set_exception(error)

    async def _claim_for_each(self) -> float:
        """Claims for each pending claim; returns the seconds until the next job is due."""
        due = math.inf
        without_jobs: set[tuple[frozenset[str], bool]] = set()
        for pending in list(self._pending):
            wanted = pending.request.queues_with_slots, pending.request.is_idle
            if pending not in self._pending or wanted in without_jobs:
                continue
            del self._pending[pending]  # ``cancel_claim`` waits for the result from here on
            try:
                result = await self.claim_now(pending.request)
            except HoldfastError as error:
                if pending.is_cancelled or self._closed:
                    pending.result.set_exception(error)
                else:
                    self._pending[pending] = None  # it waits on, or ends with the others
                raise
            except BaseException as error:
                pending.result.set_exception(HoldfastError(str(error)))
                raise
            if result.jobs or pending.is_cancelled or self._closed:
                pending.result.set_result(result)
                continue
            self._pending[pending] = None
            without_jobs.add(wanted)
            if result.next_due is not None:
                due = min(due, result.next_due.total_seconds())
        return due

    async def _wait_for_event(self, due: float) -> None:
        """Waits until a job may be ready or is due, or the pending claims have changed."""
        clock, poll = self._app.clock, self._app.settings.poll.total_seconds()
        store = await self._app.open_store()
        topics = sorted({f"queue:{queue}" for pending in self._pending for queue in pending.request.queues_with_slots})
        longest = max(_MIN_PAUSE, min(poll, due))
        waits: list[asyncio.Future[object]] = [asyncio.ensure_future(self._changed.wait())]
        if topics:
            waits.append(asyncio.ensure_future(store.queueing.wait(topics, timeout=longest + 1)))
        try:
            await clock.run_bounded(wait_first(*waits), longest)
        finally:
            for each in waits:
                each.cancel()
