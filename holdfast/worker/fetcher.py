"""The fetcher: claims jobs that can start within the next moment, never more, and sleeps until there may be something.

It looks ahead by the measured rate of service, so that runners of short jobs never wait for a claim while long jobs are
not hoarded: a job that has waited too long in the buffer goes back to the store, for a worker that is free.

A crash costs each job in hand an attempt. So of jobs on their last one it has no more in hand than run at once, those
included whose outcome is not stored yet; without ``prefetch`` that holds for all jobs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.fault_injection import fault_point
from holdfast.core.lifecycle import Released, budget_spent
from holdfast.core.models import Claim
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest, Store
from holdfast.worker.context import FENCE, FULL, RetryDelay, WorkerContext
from holdfast.worker.reporting import emit_claim

AHEAD = 0.02  # seconds of work at the measured rate that may be claimed beforehand
_SMALL = 0.003  # seconds a small claim is left to grow: others write meanwhile
_STEP_ASIDE, _STEP_ASIDE_MOST = 1.0, 300.0  # seconds without fetching for the sake of a quarantined job
_HOARDED = 1.0  # seconds a job may wait in the buffer behind long ones
_SMOOTHING = 0.5


class Fetcher:
    """Fills the buffer of one worker."""

    def __init__(self, shared: WorkerContext, store: Store, *, drain: bool = False) -> None:
        self._shared = shared
        self._store = store
        self._rate = 0.0  # jobs finished per second, smoothed
        self._seen = (shared.clock.monotonic(), 0)
        self._patience = RetryDelay(shared, "fetcher")
        self._draining = drain
        self._step_aside = _STEP_ASIDE
        self._alone_from = 0.0
        self._roused = False  # look again, whatever the store tells
        self._listening: asyncio.Future[None] | None = None
        self._claiming: asyncio.Future[Claim] | None = None
        self._narrow = False  # what comes next is on its last attempt, as far as the latest claim has seen
        self._capped = False  # the latest claim left a queue out, or took less of it, for that queue's own limit
        self.quiet_until: float | None = None
        """While it waits because nothing is ready: the clock's reading when the next job falls due (inf: none will)."""

    def drain(self) -> None:
        """Stop the worker once there is nothing to run."""
        self._draining = True
        self._roused = True
        if self._listening is not None:
            self._listening.cancel()

    async def run(self) -> None:
        """Fetch until the worker is stopping."""
        shared = self._shared
        while not shared.stopping.is_set():
            room = self._room()
            if room <= 0:
                shared.is_full = True
                await self._until_low()
                continue
            if shared.is_full:
                shared.is_full, shared.fetched_at = False, shared.clock.monotonic()
            if self._narrow and self._places <= 0:
                await shared.clock.run_bounded(self._until_settled(), _HOARDED)
                self._narrow = self._places > 0  # if not, there may be other jobs by now
                continue
            if self._narrow:
                room = min(room, self._places)
            empty_handed = not shared.held
            try:
                claim = await self._claim(room)
                if claim.quarantined:
                    await self._run_one_alone()
                # What was in hand when this claim looked may be ready again by now: then it takes another look.
                if self._draining and empty_handed and not claim.jobs and not shared.held:
                    if not await self._store.maintenance.reannounce():
                        shared.stopping.set()
                    continue
            except HoldfastError as error:
                await self._patience.wait_after(error)
                continue
            self._patience.reset()
            self._narrow = claim.stopped_at_last_attempt or (bool(claim.jobs) and all(map(budget_spent, claim.jobs)))
            if claim.stopped_at_last_attempt:
                continue
            if not claim.jobs:
                await self._idle(claim.next_due)
            elif len(claim.jobs) < room // 4 and len(claim.jobs) >= 10:
                await shared.clock.sleep(_SMALL)

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────────────────
    def _room(self) -> int:
        """Returns the number of jobs that could start within the next moment, beyond the jobs in hand."""
        shared = self._shared
        self._measure()
        if not shared.settings.prefetch:
            shared.low_mark = 0
            return min(FULL, shared.settings.concurrency - len(shared.held))
        free = shared.settings.concurrency - len(shared.running)
        ahead = min(2 * FULL, int(self._rate * AHEAD))
        shared.low_mark = ahead // 2
        room = free + ahead - len(shared.buffer)
        if shared.buffer and len(shared.buffer) > shared.low_mark:
            return 0
        return min(FULL, room)

    def _measure(self) -> None:
        shared = self._shared
        now = shared.clock.monotonic()
        then, finished = self._seen
        if now - then >= 0.001:
            rate = (shared.finished - finished) / (now - then)
            self._rate += _SMOOTHING * (rate - self._rate)
            self._seen = (now, shared.finished)

    @property
    def _places(self) -> int:
        """Returns the number of jobs on their last attempt that may be taken."""
        return self._shared.settings.concurrency - self._shared.last_attempts

    def free_slots(self, room: int) -> dict[str, int]:
        """Free slots by queue: all of the room, or the part that a queue's own limit leaves."""
        shared = self._shared
        limits = shared.settings.queues or {EVERY_QUEUE: None}
        unnamed = sum(number for queue, number in shared.in_flight.items() if queue not in limits)
        return {
            queue: room
            if limit is None
            else max(0, min(room, limit - (unnamed if queue == EVERY_QUEUE else shared.in_flight[queue])))
            for queue, limit in limits.items()
        }

    async def _claim(self, room: int, *, isolated: bool = False) -> Claim:
        shared = self._shared
        since = shared.clock.monotonic()
        idle = shared.settings.concurrency - len(shared.running) - len(shared.buffer)
        shared.may_fetch.clear()  # from here on, a job that leaves makes room this claim does not know of
        capacity = self.free_slots(room)
        self._capped = min(capacity.values()) < room
        fault_point("claim.before")
        # Shielded: a claim that was cancelled half-way would hold its jobs until their leases end.
        claiming = self._store.queueing.claim(
            ClaimRequest(
                shared.worker_id,
                capacity,
                limit=min(room, max(1, sum(capacity.values()))),
                lease_for=shared.settings.lease,
                max_must_start=max(0, min(self._places, max(1, min(idle, room)))),
                isolated=isolated,
                promote=shared.settings.role != "follower",
                idle=max(0, idle),
            )
        )
        self._claiming = asyncio.ensure_future(self._take(claiming, since))
        return await asyncio.shield(self._claiming)

    async def close(self) -> None:
        """After ``run`` was cancelled: wait for the claim under way, so that its jobs are given back in time."""
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
            if not self._claiming.cancelled():
                self._claiming.exception()  # retrieved, else asyncio logs it: a failed claim has nothing to give back

    async def _take(self, claiming: Coroutine[Any, Any, Claim], since: float) -> Claim:
        """Take in hand the claim's jobs, even if its waiter is gone."""
        claim = await claiming
        fault_point("claim.after")
        shared = self._shared
        shared.fetched_at = shared.clock.monotonic()
        if shared.clock.monotonic() - since > shared.settings.lease.total_seconds() * FENCE:
            return (
                claim  # the loop was blocked since: these leases are not renewed yet, and another worker may have them
            )
        shared.deliver_jobs(claim.jobs, since)
        if shared.stopping.is_set():
            self.release_buffered()
        emit_claim(shared.events, claim, shared.worker_id, shared.settings.lease)
        return claim

    async def _run_one_alone(self) -> None:
        """A job that lost two leases in a row may kill its process: it runs with no innocent neighbour in it.

        For its sake nothing is fetched for a while. Where long jobs run that is useless; then everything goes on, and
        the next time, after as long again, it is waited for twice as long.
        """
        clock = self._shared.clock
        if clock.monotonic() < self._alone_from:
            return
        await clock.run_bounded(self._emptied(), self._step_aside)
        if self._shared.held or self._shared.stopping.is_set():
            self._alone_from = clock.monotonic() + self._step_aside
            self._step_aside = min(2 * self._step_aside, _STEP_ASIDE_MOST)
            return
        self._step_aside = _STEP_ASIDE
        await self._claim(1, isolated=True)
        await self._emptied()

    async def _emptied(self) -> None:
        """Until nothing is in hand, settlements included, or the worker is stopping."""
        shared = self._shared
        while shared.held and not shared.stopping.is_set():
            shared.is_full = True
            shared.low_mark = 0
            shared.may_fetch.clear()
            await shared.may_fetch.wait()

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def _until_low(self) -> None:
        """Wait for room; meanwhile give back jobs that wait behind long ones."""
        shared = self._shared
        shared.may_fetch.clear()
        if not shared.buffer:
            await shared.may_fetch.wait()
            return
        first = shared.buffer[0]
        await shared.clock.run_bounded(shared.may_fetch.wait(), _HOARDED)
        if shared.buffer and shared.buffer[0] is first and not shared.may_fetch.is_set():
            self.release_buffered()
            self._rate = 0.0

    async def _until_settled(self) -> None:
        """Wait until a job on its last attempt may come in hand, or the worker is stopping."""
        shared = self._shared
        while self._places <= 0 and not shared.stopping.is_set():
            shared.may_fetch.clear()
            await shared.may_fetch.wait()

    def release_buffered(self) -> None:
        """Give every job that has not started back to the store, at once."""
        shared = self._shared
        while shared.buffer:
            shared.settle(shared.buffer.popleft(), Released())
        shared.full.set()

    async def _idle(self, next_due: timedelta | None) -> None:
        """Sleep until news of a queue, the next job's instant, or the poll; or until a job leaves whose queue was at
        its limit, or which a draining worker waits for."""
        shared = self._shared
        limit = shared.settings.poll.total_seconds()
        due = math.inf
        if next_due is not None and shared.settings.role != "follower":
            due = next_due.total_seconds()
        self.quiet_until = shared.clock.monotonic() + due
        shared.wakes_on_time = EVERY_QUEUE in shared.settings.queues and shared.settings.role != "follower"
        try:
            await shared.clock.run_bounded(self._notifications(min(limit, due) + 1), min(limit, due))
        except HoldfastError as error:
            await self._patience.wait_after(error)
        finally:
            self.quiet_until = None
            shared.wakes_on_time = False

    async def _notifications(self, timeout: float) -> None:
        shared = self._shared
        topics = [f"queue:{queue}" for queue in (shared.settings.queues or (EVERY_QUEUE,))]
        if not self._roused:
            self._listening = asyncio.ensure_future(self._store.queueing.wait(topics, timeout=timeout))
            low = asyncio.ensure_future(shared.may_fetch.wait()) if self._capped or self._draining else None
            try:
                if low is not None:
                    await asyncio.wait([self._listening, low], return_when=asyncio.FIRST_COMPLETED)
                if low is None or self._listening.done():
                    await self._listening
            except asyncio.CancelledError:
                if not self._roused:
                    raise
            finally:
                self._listening.cancel()
                if low is not None:
                    low.cancel()
                self._listening = None
        self._roused = False
