"""The sweeper: on its own clock, under load too, in any number of workers at once: settles expired leases, makes due
jobs ready in queues nobody reads, and prunes what retention lets go."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from holdfast.errors import HoldfastError
from holdfast.events import JobCancelled, JobDead, JobFailed, SweepComplete
from holdfast.faults import point
from holdfast.job import Job, JobState, Settled
from holdfast.lifecycle import Lost, decide
from holdfast.store import Store
from holdfast.worker.patience import Patience
from holdfast.worker.shift import Shift

_BATCH = 500
_PRUNE_EVERY = 60.0  # seconds


class Sweeper:
    """Maintains the store for everyone."""

    def __init__(self, shift: Shift, store: Store) -> None:
        self._shift = shift
        self._store = store
        self._patience = Patience(shift, "sweeper")
        self._pruned_at = shift.clock.monotonic()

    async def run(self) -> None:
        """Sweep every interval, give or take a fifth, so that many workers do not sweep at once."""
        shift = self._shift
        while True:
            await shift.clock.sleep(shift.settings.sweep.total_seconds() * shift.rng.uniform(0.8, 1.2))
            if shift.settings.role == "follower":
                continue
            try:
                await self.sweep()
            except HoldfastError as error:
                await self._patience.after(error)
            else:
                self._patience.reset()

    async def sweep(self) -> None:
        """One round."""
        recovered = await self._recover()
        requeued = await self._promote()
        pruned = await self._prune()
        if recovered or requeued or pruned:
            self._shift.emit(SweepComplete(requeued=requeued, recovered=recovered, pruned=pruned))

    async def _promote(self) -> int:
        """Make due jobs ready: for queues nobody reads, and for followers while this worker is too busy to claim. An
        idle worker that serves every queue does it by its own claims, at the very instant."""
        if self._shift.attentive:
            return 0
        requeued = 0
        while (promoted := await self._store.promote(limit=_BATCH)) == _BATCH:
            requeued += promoted
        return requeued + promoted

    async def _recover(self) -> int:
        """Settle every lease that ran out; a worker that renews in between keeps its job."""
        shift, recovered = self._shift, 0
        while jobs := await self._store.expired(limit=_BATCH):
            point("sweep.before_settle")
            answers = await self._store.settle([decide(job, Lost(), shift.settings.retry, shift.rng) for job in jobs])
            point("sweep.after_settle")
            recovered += self._tell(jobs, answers)
            if len(jobs) < _BATCH:
                break
        return recovered

    def _tell(self, jobs: Sequence[Job], answers: Sequence[Settled]) -> int:
        shift, recovered = self._shift, 0
        for job, answer in zip(jobs, answers, strict=True):
            if not answer.accepted:
                continue
            recovered += 1
            error = f"lease expired: worker {job.worker} died, froze or was cut off"
            if answer.state is JobState.CANCELLED:
                shift.emit(JobCancelled(job_id=job.id, job_type=job.task, attempt=job.attempts))
            elif answer.state is JobState.DEAD:
                shift.emit(
                    JobDead(
                        job_id=job.id,
                        job_type=job.task,
                        attempt=job.attempts,
                        reason="crashed",
                        error=error,
                        seconds=0.0,
                    )
                )
            elif answer.state is JobState.QUEUED:
                shift.emit(
                    JobFailed(
                        job_id=job.id,
                        job_type=job.task,
                        attempt=job.attempts,
                        reason="crashed",
                        error=error,
                        retry_at=None,  # it is ready now
                        seconds=0.0,
                    )
                )
        return recovered

    async def _prune(self) -> int:
        shift = self._shift
        now = shift.clock.monotonic()
        if now - self._pruned_at < _PRUNE_EVERY:
            return 0
        self._pruned_at = now
        pruned = 0
        while (batch := await self._store.prune(self.retention(), limit=_BATCH)) > 0:
            pruned += batch
            if batch < _BATCH:
                break
            await shift.clock.sleep(0.01)  # others have work to write
        return pruned

    def retention(self) -> dict[str, timedelta]:
        """How long ended jobs are kept, by state; what is kept for ever is left out."""
        settings = self._shift.settings
        spans = {
            JobState.SUCCEEDED: settings.keep_succeeded,
            JobState.CANCELLED: settings.keep_cancelled,
            JobState.DEAD: settings.keep_dead,
        }
        return {state: span for state, span in spans.items() if span is not None}
