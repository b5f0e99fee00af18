"""The settler: writes settlements in batches, while the fetcher claims the next jobs. It writes when a batch is full,
when a few milliseconds have passed, or when no handler runs. Last attempts are written at once; without ``prefetch``,
all settlements are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.events import JobSucceeded, StoreTrouble
from holdfast.core.fault_points import fault_point
from holdfast.core.metric_events import SettlementsWritten
from holdfast.core.models import JobState, Lease, Reason, Settled
from holdfast.stores.base import Store
from holdfast.worker.context import BATCH_SIZE, LeasedJob, StoreBackoff, WorkerState
from holdfast.worker.reporting import emit_lease_lost, emit_recovered, emit_unsuccessful, measure_settled

_MAX_DELAY = 0.004  # seconds a batch may grow while other handlers run
_LOCKED_RETRY_SECONDS = 0.5  # seconds between tries to settle a job locked by another transaction
_REPORTED_TRY = 5  # the first that is reported: a bulk cancel ends sooner


class Settler:
    """Settles the finished jobs of one worker."""

    def __init__(self, shared: WorkerState, store: Store, write_lines: Callable[[], Awaitable[object]]) -> None:
        """``write_lines``: writes buffered log lines; the store refuses lines of settled jobs."""
        self._shared = shared
        self._store = store
        self._write_lines = write_lines
        self._backoff = StoreBackoff(shared, "settler")
        self._finishing = False
        self._locked: dict[Lease, tuple[LeasedJob, int]] = {}  # jobs locked by another transaction, with their tries
        self._retry_at = 0.0  # clock reading of their next try

    def finish(self) -> None:
        """Makes ``run`` return once all settlements are written. Call it when no more can come."""
        self._finishing = True
        self._shared.has_unsettled.set()
        self._shared.flush_now.set()

    async def run(self) -> None:
        """Settles jobs until ``finish``. Do not cancel it before: the batch being written would be lost."""
        shared = self._shared
        while not self._finishing or shared.unsettled or self._locked:
            await self._wait_for_unsettled()
            if shared.busy and not shared.has_urgent_settlement and len(shared.unsettled) < BATCH_SIZE:
                shared.flush_now.clear()
                await shared.clock.run_bounded(shared.flush_now.wait(), _MAX_DELAY)
            await self.flush()

    async def _wait_for_unsettled(self) -> None:
        """Waits for settlements, or for the next try of locked jobs."""
        shared = self._shared
        if self._locked:
            await shared.clock.run_bounded(
                shared.has_unsettled.wait(), max(0.0, self._retry_at - shared.clock.monotonic())
            )
        else:
            await shared.has_unsettled.wait()

    async def flush(self) -> None:
        """Writes all settlements that the queue has."""
        shared = self._shared
        if self._locked and shared.clock.monotonic() >= self._retry_at:
            shared.unsettled += [leased for leased, _ in self._locked.values()]
        while shared.unsettled:
            batch = shared.unsettled[: 2 * BATCH_SIZE]
            del shared.unsettled[: len(batch)]
            shared.has_urgent_settlement = False
            await self._write(batch)
        shared.has_unsettled.clear()

    async def _write(self, batch: list[LeasedJob]) -> None:
        """Retries until the store answers. It refuses settlements whose leases have expired meanwhile."""
        while True:
            try:
                await self._write_lines()
                fault_point("settle.before")
                answers = await self._store.queueing.settle([leased.settlement for leased in batch])
                fault_point("settle.after")
            except (Unavailable, ConfigError) as error:
                await self._backoff.wait_after(error)
            except HoldfastError as error:
                if len(batch) == 1:
                    # The store cannot store this settlement: the lease expires, and a sweeper settles the job.
                    self._shared.remove_claimed(batch[0])
                    self._locked.pop(batch[0].lease, None)
                    await self._backoff.wait_after(error)
                    return
                for leased in batch:  # one bad settlement must not block the others
                    await self._write([leased])
                return
            else:
                self._backoff.reset()
                self._handle_answers(batch, answers)
                return

    # ── after the commit ──────────────────────────────────────────────────────────────────────────────────────
    def _handle_answers(self, batch: Sequence[LeasedJob], answers: Sequence[Settled]) -> None:
        shared = self._shared
        has_success_subscriber = shared.events.has_subscriber(JobSucceeded)
        succeeded: list[LeasedJob] = []
        claimed, last_attempts = shared.claimed, 0
        for leased, answer in zip(batch, answers, strict=True):
            if answer.locked:
                self._retry_later(leased)
                continue
            if claimed.pop(leased.lease, None) is not None:
                last_attempts += leased.is_last_attempt
            if self._locked:
                self._locked.pop(leased.lease, None)
            if answer.accepted and answer.state is JobState.SUCCEEDED:
                succeeded.append(leased)
                if has_success_subscriber:
                    shared.emit_success(leased)
            else:
                self._emit_answer(leased, answer)
        shared.wake_fetcher(last_attempts)
        shared.succeeded += len(succeeded)
        if shared.events.has_subscriber(SettlementsWritten):
            accepted = sum(answer.accepted for answer in answers)
            measure_settled(shared.events, accepted, [(leased.job.task, leased.seconds) for leased in succeeded])

    def _retry_later(self, leased: LeasedJob) -> None:
        """Schedules another try for a locked job; the rest of its batch is settled."""
        shared = self._shared
        self._retry_at = shared.clock.monotonic() + _LOCKED_RETRY_SECONDS
        _, tries = self._locked.get(leased.lease, (leased, 0))
        self._locked[leased.lease] = leased, tries + 1
        if tries + 1 == _REPORTED_TRY:
            held = _LOCKED_RETRY_SECONDS * (_REPORTED_TRY - 1)
            error = (
                f"job {leased.job.id} waits to be settled: another transaction has held its row for {held:g} s; "
                "holdfast doctor names old transactions"
            )
            shared.emit(StoreTrouble(service="settler", error=error, retry_in=_LOCKED_RETRY_SECONDS))

    def _emit_answer(self, leased: LeasedJob, answer: Settled) -> None:
        shared, job, settlement = self._shared, leased.job, leased.settlement
        if not answer.accepted:
            emit_lease_lost(shared.events, job, shared.worker_id)
            return
        if answer.state in (JobState.FAILED, JobState.DEAD) or settlement.lease_expired:
            shared.failed += 1
        elif answer.state is not JobState.CANCELLED:
            shared.released += settlement.reason is Reason.RELEASED
        emit = emit_recovered if settlement.lease_expired else partial(emit_unsuccessful, seconds=leased.seconds)
        emit(shared.events, job, settlement, answer, dlq_key=shared.dlq_key(job))
