"""The settler: writes settlements in batches: when a batch is full, when a few milliseconds have passed, or when
nothing else runs. Last attempts, and all without ``prefetch``, wait for no batch. Its write overlaps the fetcher's next
claim."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.events import BatchSettled, JobSucceeded, StoreTrouble
from holdfast.core.fault_injection import fault_point
from holdfast.core.models import JobState, Lease, Reason, Settled
from holdfast.stores.base import Store
from holdfast.worker.context import FULL, RetryDelay, TaskRun, WorkerContext
from holdfast.worker.reporting import emit_lease_lost, emit_unsuccessful, measure_settled

_LINGER = 0.004  # seconds a batch may still grow while other handlers run
_LOCKED = 0.5  # seconds between looks at jobs locked by another transaction


class Settler:
    """Empties the outcomes of one worker."""

    def __init__(self, shared: WorkerContext, store: Store, write_lines: Callable[[], Awaitable[object]]) -> None:
        """``write_lines``: writes the jobs' log lines, which are refused once they are settled."""
        self._shared = shared
        self._store = store
        self._write_lines = write_lines
        self._patience = RetryDelay(shared, "settler")
        self._finishing = False
        self._locked: dict[Lease, TaskRun] = {}  # settlements of jobs locked by another transaction
        self._look_at = 0.0  # the clock's reading when these are tried again

    def finish(self) -> None:
        """No more outcomes will come: ``run`` returns once all of them are written."""
        self._finishing = True
        self._shared.settling.set()
        self._shared.full.set()

    async def run(self) -> None:
        """Settle until ``finish``. Not to be cancelled before: the batch on its way would not be written."""
        shared = self._shared
        while not self._finishing or shared.outcomes or self._locked:
            await self._until_some()
            if shared.busy and not shared.urgent and len(shared.outcomes) < FULL:
                shared.full.clear()
                await shared.clock.run_bounded(shared.full.wait(), _LINGER)
            await self.flush()

    async def _until_some(self) -> None:
        """Until there is something to settle, or to try again."""
        shared = self._shared
        if self._locked:
            await shared.clock.run_bounded(shared.settling.wait(), max(0.0, self._look_at - shared.clock.monotonic()))
        else:
            await shared.settling.wait()

    async def flush(self) -> None:
        """Write everything that waits."""
        shared = self._shared
        if self._locked and shared.clock.monotonic() >= self._look_at:
            shared.outcomes += self._locked.values()
        while shared.outcomes:
            batch = shared.outcomes[: 2 * FULL]
            del shared.outcomes[: len(batch)]
            shared.urgent = False
            await self._write(batch)
        shared.settling.clear()

    async def _write(self, batch: list[TaskRun]) -> None:
        """Try until the store answers; a lease that ends meanwhile is refused by it, as after a crash."""
        while True:
            try:
                await self._write_lines()
                fault_point("settle.before")
                answers = await self._store.queueing.settle([run.settlement for run in batch])
                fault_point("settle.after")
            except (Unavailable, ConfigError) as error:
                await self._patience.wait_after(error)
            except HoldfastError as error:
                if len(batch) == 1:
                    # The store cannot take this one: renewed no more, its lease will end and the sweeper settle it.
                    self._shared.untrack_run(batch[0])
                    self._locked.pop(batch[0].lease, None)
                    await self._patience.wait_after(error)
                    return
                for run in batch:  # one that cannot be stored must not take its neighbours along
                    await self._write([run])
                return
            else:
                self._patience.reset()
                self._answered(batch, answers)
                return

    # ── after the commit ──────────────────────────────────────────────────────────────────────────────────────
    def _answered(self, batch: Sequence[TaskRun], answers: Sequence[Settled]) -> None:
        shared = self._shared
        emit_success = shared.events.has_subscriber(JobSucceeded)
        succeeded: list[TaskRun] = []
        held, last_attempts = shared.held, 0
        for run, answer in zip(batch, answers, strict=True):
            if answer.locked:
                self._wait_for(run)
                continue
            if held.pop(run.lease, None) is not None:
                last_attempts += run.is_last
            if self._locked:
                self._locked.pop(run.lease, None)
            if answer.accepted and answer.state is JobState.SUCCEEDED:
                succeeded.append(run)
                if emit_success:
                    shared.emit_success(run)
            else:
                self._tell_rest(run, answer)
        shared.make_room(last_attempts)
        shared.succeeded += len(succeeded)
        if shared.events.has_subscriber(BatchSettled):
            measure_settled(shared.events, len(batch), [(run.job.task, run.seconds) for run in succeeded])

    def _wait_for(self, run: TaskRun) -> None:
        """Retries a settlement of a locked job; the rest of its batch does not wait."""
        shared = self._shared
        self._look_at = shared.clock.monotonic() + _LOCKED
        if run.lease not in self._locked:
            self._locked[run.lease] = run
            error = f"job {run.job.id} waits to be settled: another program's transaction holds its row"
            shared.emit(StoreTrouble(service="settler", error=error, retry_in=_LOCKED))

    def _tell_rest(self, run: TaskRun, answer: Settled) -> None:
        shared, job, settlement = self._shared, run.job, run.settlement
        if not answer.accepted:
            emit_lease_lost(shared.events, job, shared.worker_id)
            return
        if answer.state in (JobState.FAILED, JobState.DEAD):
            shared.failed += 1
        elif answer.state is not JobState.CANCELLED:
            shared.released += settlement.reason is Reason.RELEASED
        emit_unsuccessful(
            shared.events, job, settlement, answer, seconds=run.seconds, dlq_key=shared.dead_letter_key(job)
        )
