"""The sweeper: on its own clock, under load too, in any number of workers at once: ends expired jobs, settles expired
leases, makes due jobs ready in unserved queues, republishes ids that the transport has lost, counts ended jobs into
the history, prunes by retention."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from holdfast.app.limits import LimitManager
from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.events import StoreTrouble, SweepComplete
from holdfast.core.fault_points import fault_point
from holdfast.core.lifecycle import Lost, decide
from holdfast.core.models import Job, JobState
from holdfast.stores.base import Store
from holdfast.worker.context import StoreBackoff, WorkerState
from holdfast.worker.reporting import emit_expired, emit_recovered

_BATCH = 500
_COUNT_BATCH = 5000  # ended jobs that one call adds to the history
_LONG_PART = 0.3  # share of the interval after which a part of a sweep leaves the rest of its work to the next
_PRUNE_EVERY = 60.0  # seconds
_END_EXPIRED_EVERY = 4.0  # seconds between two searches for jobs that have expired, however often it sweeps
_MAX_REFUSED = 1000  # limit of reported jobs that cannot be settled


class Sweeper:
    """Maintains the store for everyone."""

    def __init__(self, shared: WorkerState, store: Store) -> None:
        self._shared = shared
        self._store = store
        self._backoff = StoreBackoff(shared, "sweeper")
        self._began = self._ended_expired_at = float("-inf")  # due
        self._pruned_at = self._counted_at = shared.clock.monotonic()
        self._unassigned: dict[str, int] = {}  # revisions of limits whose jobs lack partitions, as they were last
        self._refused: set[str] = set()  # reported jobs that the store cannot settle

    async def run(self) -> None:
        """Sweep after a tenth to three tenths of an interval, then every interval, or up to a fifth earlier: many
        workers do not sweep at once. A long sweep shortens the pause after it: expired leases wait for no other work.
        """
        shared = self._shared
        while True:
            interval, share = shared.settings.sweep.total_seconds(), shared.rng.uniform(0.8, 1.0)
            spent = shared.clock.monotonic() - self._began
            await shared.clock.sleep(max(interval * share - spent, interval * (share - 0.7)))
            self._began = shared.clock.monotonic()
            if shared.settings.role == "follower":
                continue
            try:
                await self.sweep()
            except HoldfastError as error:
                await self._backoff.wait_after(error)
            else:
                self._backoff.reset()

    async def sweep(self) -> None:
        """Runs one sweep. If a part fails, the next ones still run; then the first error is raised."""
        failed: HoldfastError | None = None
        parts = {
            "expired": self._expire,
            "recovered": self.recover_leases,
            "promoted": self._promote,
            "reannounced": self._store.maintenance.reannounce,
            "counted": self._count_ended,
            "pruned": self._prune,
        }
        done = dict.fromkeys(parts, 0)
        for name, part in parts.items():
            try:
                done[name] = await part()
            except HoldfastError as error:
                failed = failed or error
        del done["counted"]  # not part of the event
        if any(done.values()):
            self._shared.emit(SweepComplete(**done, requeued=done["promoted"] + done["reannounced"]))
        if failed is not None:
            raise failed

    async def _expire(self) -> int:
        """Expires jobs of all queues; a claim expires only those of the queues it names."""
        now = self._shared.clock.monotonic()
        if now - self._ended_expired_at < _END_EXPIRED_EVERY:
            return 0
        self._ended_expired_at = now
        expired = 0
        while batch := await self._store.maintenance.expire_unstarted(limit=_BATCH):
            emit_expired(self._shared.events, batch)
            expired += len(batch)
        return expired

    async def _promote(self) -> int:
        """Promotes due jobs: of queues without workers, and for followers while this worker is too busy to claim. The
        claims of an idle worker that serves every queue promote them on time."""
        if self._shared.wakes_on_time:
            return 0
        total = 0
        while (promoted := await self._store.maintenance.promote_due(limit=_BATCH)) == _BATCH:
            total += promoted
        return total + promoted

    async def recover_leases(self) -> int:
        """Settles the jobs of expired leases. A worker that renews its lease meanwhile keeps its job."""
        recovered = 0
        limit = _BATCH + len(self._refused)  # the refused ones come first
        while jobs := await self._store.maintenance.find_expired_leases(limit=limit):
            number = await self._recover(jobs)
            recovered += number
            if len(jobs) < limit or not number:
                break
        return recovered

    async def _recover(self, jobs: Sequence[Job]) -> int:
        """Settles a batch. If the store refuses it, each half is settled by itself, down to the job at fault."""
        shared = self._shared
        fault_point("sweep.before_settle")
        settlements = [decide(job, Lost(), shared.settings.retry, shared.rng) for job in jobs]
        try:
            answers = await self._store.queueing.settle(settlements)
        except (Unavailable, ConfigError):
            raise
        except HoldfastError as error:
            if len(jobs) == 1:
                self._emit_refused(jobs[0], error)
                return 0
            half = len(jobs) // 2
            return await self._recover(jobs[:half]) + await self._recover(jobs[half:])
        fault_point("sweep.after_settle")
        recovered = 0
        for job, settlement, answer in zip(jobs, settlements, answers, strict=True):
            if answer.accepted:
                recovered += 1
                emit_recovered(shared.events, job, settlement, answer, shared.dlq_key(job))
        return recovered

    def _emit_refused(self, job: Job, error: HoldfastError) -> None:
        """Reports a job that cannot be settled, once: its corrupt row needs a manual repair."""
        if job.id not in self._refused and len(self._refused) < _MAX_REFUSED:
            self._refused.add(job.id)
            text = f"job {job.id}, whose lease ran out, cannot be settled: {error}"
            pause = self._shared.settings.sweep.total_seconds()
            self._shared.emit(StoreTrouble(service="sweeper", error=text, retry_in=pause))

    async def _prune(self) -> int:
        shared = self._shared
        now = shared.clock.monotonic()
        if now - self._pruned_at < _PRUNE_EVERY:
            return 0
        self._pruned_at = now
        self._unassigned = await LimitManager(shared.app).resume_assignments(self._unassigned)
        pruned = 0
        while (batch := await self._store.maintenance.prune(self.retention_by_state(), limit=_BATCH)) > 0:
            pruned += batch
            if batch < _BATCH:
                break
            if not await self._may_go_on(now):
                self._pruned_at = now - _PRUNE_EVERY  # the next sweep goes on
                break
        return pruned

    async def _count_ended(self) -> int:
        """Adds ended jobs to the history before they are pruned."""
        now = self._shared.clock.monotonic()
        if now - self._counted_at < _PRUNE_EVERY:
            return 0
        while await self._store.maintenance.count_ended(limit=_COUNT_BATCH):
            if not await self._may_go_on(now):
                return 0
        self._counted_at = now
        return 0

    async def _may_go_on(self, began: float) -> bool:
        """Lets other writers go first. Returns False if the rest of a part is for the next sweep."""
        clock, interval = self._shared.clock, self._shared.settings.sweep.total_seconds()
        await clock.sleep(0.01)
        return clock.monotonic() < began + interval * _LONG_PART

    def retention_by_state(self) -> dict[str, timedelta]:
        """Returns the retention of ended jobs by state, without states kept for ever."""
        settings = self._shared.settings
        spans = {
            JobState.SUCCEEDED: settings.keep_succeeded,
            JobState.CANCELLED: settings.keep_cancelled,
            JobState.DEAD: settings.keep_dead,
        }
        return {state: span for state, span in spans.items() if span is not None}
