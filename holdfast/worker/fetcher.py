"""The fetcher: claims jobs that can start within the next moment, never more, and sleeps until jobs may be ready.

It prefetches by the measured completion rate: runners of short jobs never wait for a claim. A job that has waited too
long in the buffer is released to the store, for a worker with a free slot.

A crash costs each claimed job an attempt. So the worker claims at most ``concurrency`` jobs on their last attempt,
including jobs whose outcome is not stored yet. Without ``prefetch`` that holds for all jobs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.fault_points import fault_point
from holdfast.core.lifecycle import Released, is_last_attempt
from holdfast.core.models import Claim
from holdfast.stores.base import EVERY_QUEUE, ClaimRequest, Store
from holdfast.worker.context import BATCH_SIZE, StoreBackoff, WorkerState, lease_valid_until_of
from holdfast.worker.reporting import emit_claim

PREFETCH_SECONDS = 0.04  # seconds of work, at the measured rate, that may be claimed ahead
_SMALL_CLAIM_PAUSE = 0.003  # seconds to wait after a small claim, so the next one is larger
_ISOLATION_WAIT, _MAX_ISOLATION_WAIT = 1.0, 300.0  # seconds without claims, to empty the worker for a quarantined job
_MAX_BUFFER_WAIT = 1.0  # seconds a job may wait in the buffer behind long ones
_SMOOTHING = 0.5


class Fetcher:
    """Fills the buffer of one worker."""

    def __init__(
        self, shared: WorkerState, store: Store, *, recover_leases: Callable[[], Awaitable[int]], drain: bool = False
    ) -> None:
        self._shared = shared
        self._recover_leases = recover_leases
        self._store = store
        self._rate = 0.0  # jobs finished per second, smoothed
        self._last_sample = (shared.clock.monotonic(), 0)
        self._backoff = StoreBackoff(shared, "fetcher")
        self._draining = drain
        self._found_none = False  # draining: the last search for jobs found none
        self._isolation_wait = _ISOLATION_WAIT
        self._isolate_again_at = 0.0
        self._skip_next_wait = False  # claim again without waiting for a notification
        self._notified: asyncio.Future[None] | None = None
        self._claiming: asyncio.Future[Claim] | None = None
        self._last_attempts_next = False  # the next jobs in line are on their last attempt
        self._was_bounded = False  # a cap of a queue, or jobs on their last attempt, bounded the latest claim
        self.idle_until: float | None = None
        """While it waits because no job is ready: clock reading at which the next job is due (inf: none is)."""

    def drain(self) -> None:
        """Stops the worker once the queues are empty."""
        self._draining = True
        self._skip_next_wait = True
        if self._notified is not None:
            self._notified.cancel()

    async def run(self) -> None:
        """Claims jobs until the worker is stopping."""
        shared = self._shared
        while not shared.stopping.is_set():
            max_jobs = self._max_jobs()
            if max_jobs <= 0:
                shared.is_at_capacity = True
                await self._wait_for_room()
                continue
            if shared.is_at_capacity:
                shared.is_at_capacity, shared.fetched_at = False, shared.clock.monotonic()
            if self._last_attempts_next and self._last_attempt_slots <= 0:
                await shared.clock.run_bounded(self._wait_for_last_attempt_slot(), _MAX_BUFFER_WAIT)
                self._last_attempts_next = self._last_attempt_slots > 0  # if not, claim other jobs
                continue
            if self._last_attempts_next:
                max_jobs = min(max_jobs, self._last_attempt_slots)
            was_empty = not shared.claimed
            free_runners = max(0, shared.settings.concurrency - len(shared.running) - len(shared.buffer))
            try:
                claim = await self._claim(max_jobs)
                if claim.has_quarantined and await self._run_isolated():
                    self._found_none = False
                    continue
                # A job that this worker had at the claim may be ready again by now: then claim once more.
                if self._draining and was_empty and not claim.jobs and not shared.claimed:
                    # The claim after the search sees also what others have made ready meanwhile.
                    if self._found_none:
                        shared.stopping.set()
                    else:
                        self._found_none = not await self._find_more()
                    continue
            except HoldfastError as error:
                await self._backoff.wait_after(error)
                continue
            self._backoff.reset()
            self._found_none = False
            self._last_attempts_next = claim.stopped_at_last_attempt or (
                bool(claim.jobs) and all(map(is_last_attempt, claim.jobs))
            )
            if claim.stopped_at_last_attempt:
                continue
            if not claim.jobs or (claim.none_left and not self._draining):
                await self._sleep_until_due(claim.next_due)
            elif 10 <= len(claim.jobs) < (min(free_runners, max_jobs) or max_jobs) // 4:  # limited: one a free runner
                await shared.clock.sleep(_SMALL_CLAIM_PAUSE)

    async def _find_more(self) -> bool:
        """Searches for jobs that a claim does not see: of dead workers, and those that a transport lacks."""
        recovered = 0 if self._shared.settings.role == "follower" else await self._recover_leases()
        return await self._store.maintenance.reannounce() > 0 or recovered > 0

    # ── claiming ──────────────────────────────────────────────────────────────────────────────────────────────
    def _max_jobs(self) -> int:
        """Returns the number of jobs to claim: those that could start within the next moment."""
        shared = self._shared
        self._measure_rate()
        if not shared.settings.prefetch:
            shared.low_watermark = 0
            return min(BATCH_SIZE, shared.settings.concurrency - len(shared.claimed))
        free = shared.settings.concurrency - len(shared.running)
        ahead = min(2 * BATCH_SIZE, int(self._rate * PREFETCH_SECONDS))
        shared.low_watermark = ahead // 2
        max_jobs = free + ahead - len(shared.buffer)
        if shared.buffer and len(shared.buffer) > shared.low_watermark:
            return 0
        return min(BATCH_SIZE, max_jobs)

    def _measure_rate(self) -> None:
        shared = self._shared
        now = shared.clock.monotonic()
        then, finished = self._last_sample
        if now - then >= 0.001:
            rate = (shared.finished - finished) / (now - then)
            self._rate += _SMOOTHING * (rate - self._rate)
            self._last_sample = (now, shared.finished)

    @property
    def _last_attempt_slots(self) -> int:
        """Returns the number of jobs on their last attempt that may be claimed."""
        return self._shared.settings.concurrency - self._shared.last_attempts

    def free_slots(self, max_jobs: int) -> dict[str, int]:
        """Returns the free slots by queue: ``max_jobs``, or less where the cap of the queue leaves less."""
        shared = self._shared
        caps = shared.settings.queues or {EVERY_QUEUE: None}
        unlisted = sum(number for queue, number in shared.in_flight.items() if queue not in caps)
        return {
            queue: max_jobs
            if cap is None
            else max(0, min(max_jobs, cap - (unlisted if queue == EVERY_QUEUE else shared.in_flight[queue])))
            for queue, cap in caps.items()
        }

    async def _claim(self, max_jobs: int, *, isolated: bool = False) -> Claim:
        shared = self._shared
        lease_for = shared.settings.lease
        lease_valid_until = lease_valid_until_of(shared.clock.monotonic(), lease_for)
        free_runners = shared.settings.concurrency - len(shared.running) - len(shared.buffer)
        shared.may_fetch.clear()  # a job that ends from here on frees a slot that this claim does not count
        capacity = self.free_slots(max_jobs)
        self._was_bounded = min(capacity.values()) < max_jobs or self._last_attempt_slots <= 0
        fault_point("claim.before")
        # Shielded: a claim that was cancelled halfway would keep its jobs until their leases expire.
        claiming = self._store.queueing.claim(
            ClaimRequest(
                shared.worker_id,
                capacity,
                limit=min(max_jobs, max(1, sum(capacity.values()))),
                lease_for=lease_for,
                max_must_start=max(0, min(self._last_attempt_slots, max(1, min(free_runners, max_jobs)))),
                isolated=isolated,
                promote=shared.settings.role != "follower",
                free_runners=max(0, free_runners),
            )
        )
        self._claiming = asyncio.ensure_future(self._deliver_claim(claiming, lease_valid_until))
        return await asyncio.shield(self._claiming)

    async def close(self) -> None:
        """After ``run`` was cancelled: waits for the claim in flight, so its jobs are released."""
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
            if not self._claiming.cancelled():
                self._claiming.exception()  # retrieved, else asyncio logs it: a failed claim has no jobs to release

    async def _deliver_claim(self, claiming: Coroutine[Any, Any, Claim], lease_valid_until: float) -> Claim:
        """Delivers the claimed jobs, even if the caller of the claim was cancelled."""
        claim = await claiming
        fault_point("claim.after")
        shared = self._shared
        shared.fetched_at = shared.clock.monotonic()
        shared.deliver_jobs(claim.jobs, lease_valid_until)
        # After a late answer, another worker may have the jobs: the store then refuses their release.
        if shared.stopping.is_set() or shared.fetched_at > lease_valid_until:
            self.release_buffered()
        emit_claim(shared.events, claim, shared.worker_id, shared.settings.lease)
        return claim

    async def _run_isolated(self) -> bool:
        """Claims and runs one quarantined job with no other job in the process, which it may kill; True if it did.

        Claims nothing until the worker is empty, for a bounded time. If long jobs keep it busy, or a limit leaves no
        room, normal claims go on; the next try comes after as long again and waits twice as long.
        """
        clock = self._shared.clock
        if clock.monotonic() < self._isolate_again_at:
            return False
        await clock.run_bounded(self._wait_until_empty(), self._isolation_wait)
        if not self._shared.claimed and not self._shared.stopping.is_set():
            claim = await self._claim(1, isolated=True)
            await self._wait_until_empty()
            if claim.jobs:
                self._isolation_wait = _ISOLATION_WAIT
                return True
        self._isolate_again_at = clock.monotonic() + self._isolation_wait
        self._isolation_wait = min(2 * self._isolation_wait, _MAX_ISOLATION_WAIT)
        return False

    async def _wait_until_empty(self) -> None:
        """Waits until every claimed job is settled, or the worker is stopping."""
        shared = self._shared
        while shared.claimed and not shared.stopping.is_set():
            shared.is_at_capacity = True
            shared.low_watermark = 0
            shared.may_fetch.clear()
            await shared.may_fetch.wait()

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def _wait_for_room(self) -> None:
        """Waits for a free slot. Releases buffered jobs that have waited too long behind long ones."""
        shared = self._shared
        shared.may_fetch.clear()
        if not shared.buffer:
            await shared.may_fetch.wait()
            return
        first = shared.buffer[0]
        await shared.clock.run_bounded(shared.may_fetch.wait(), _MAX_BUFFER_WAIT)
        if shared.buffer and shared.buffer[0] is first and not shared.may_fetch.is_set():
            self.release_buffered()
            self._rate = 0.0

    async def _wait_for_last_attempt_slot(self) -> None:
        """Waits until a job on its last attempt may be claimed, or the worker is stopping."""
        shared = self._shared
        while self._last_attempt_slots <= 0 and not shared.stopping.is_set():
            shared.may_fetch.clear()
            await shared.may_fetch.wait()

    def release_buffered(self) -> None:
        """Releases every job that has not started, at once."""
        shared = self._shared
        while shared.buffer:
            shared.queue_settlement(shared.buffer.popleft(), Released())
        shared.flush_now.set()

    async def _sleep_until_due(self, next_due: timedelta | None) -> None:
        """Sleeps until a notification, the next due job or the poll interval; also until a job ends, if the latest
        claim was bounded by a queue's cap or by last attempts, or the worker is draining."""
        shared = self._shared
        poll = shared.settings.poll.total_seconds()
        due = math.inf
        if next_due is not None and shared.settings.role != "follower":
            due = next_due.total_seconds()
        self.idle_until = shared.clock.monotonic() + due
        shared.wakes_on_time = EVERY_QUEUE in shared.settings.queues and shared.settings.role != "follower"
        try:
            await shared.clock.run_bounded(self._wait_for_notification(min(poll, due) + 1), min(poll, due))
        except HoldfastError as error:
            await self._backoff.wait_after(error)
        finally:
            self.idle_until = None
            shared.wakes_on_time = False

    async def _wait_for_notification(self, timeout: float) -> None:
        shared = self._shared
        topics = [f"queue:{queue}" for queue in (shared.settings.queues or (EVERY_QUEUE,))]
        if not self._skip_next_wait:
            self._notified = asyncio.ensure_future(self._store.queueing.wait(topics, timeout=timeout))
            has_room = asyncio.ensure_future(shared.may_fetch.wait()) if self._was_bounded or self._draining else None
            try:
                if has_room is not None:
                    await asyncio.wait([self._notified, has_room], return_when=asyncio.FIRST_COMPLETED)
                if has_room is None or self._notified.done():
                    await self._notified
            except asyncio.CancelledError:
                if not self._skip_next_wait:
                    raise
            finally:
                self._notified.cancel()
                if has_room is not None:
                    has_room.cancel()
                self._notified = None
        self._skip_next_wait = False
