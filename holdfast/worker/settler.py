"""The settler: writes settlements in batches: when a batch is full, when a few milliseconds have passed, or when
nothing else runs. Last attempts, and all without ``prefetch``, wait for no batch. Its write overlaps the fetcher's next
claim."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.events import JobSucceeded, StoreTrouble
from holdfast.core.fault_injection import fault_point
from holdfast.core.metric_events import BatchSettled
from holdfast.core.models import JobState, Lease, Reason, Settled
from holdfast.stores.base import Store
from holdfast.worker.context import FULL, RetryDelay, TaskRun, WorkerContext
from holdfast.worker.reporting import measure_settled, tell_lost, tell_rest

_LINGER = 0.004  # seconds a batch may still grow while other handlers run
_LOCKED = 0.5  # seconds between looks at jobs locked by another transaction


class Settler:
    """Empties the outcomes of one shift."""

    def __init__(self, shift: WorkerContext, store: Store, write_lines: Callable[[], Awaitable[object]]) -> None:
        """``write_lines``: writes the jobs' log lines, which are refused once they are settled."""
        self._shift = shift
        self._store = store
        self._write_lines = write_lines
        self._patience = RetryDelay(shift, "settler")
        self._finishing = False
        self._locked: dict[Lease, TaskRun] = {}  # settlements of jobs locked by another transaction
        self._look_at = 0.0  # the clock's reading when these are tried again

    def finish(self) -> None:
        """No more outcomes will come: ``run`` returns once all of them are written."""
        self._finishing = True
        self._shift.settling.set()
        self._shift.full.set()

    async def run(self) -> None:
        """Settle until ``finish``. Not to be cancelled before: the batch on its way would not be written."""
        shift = self._shift
        while not self._finishing or shift.outcomes or self._locked:
            await self._until_some()
            if shift.busy and not shift.urgent and len(shift.outcomes) < FULL:
                shift.full.clear()
                await shift.clock.run_bounded(shift.full.wait(), _LINGER)
            await self.flush()

    async def _until_some(self) -> None:
        """Until there is something to settle, or to try again."""
        shift = self._shift
        if self._locked:
            await shift.clock.run_bounded(shift.settling.wait(), max(0.0, self._look_at - shift.clock.monotonic()))
        else:
            await shift.settling.wait()

    async def flush(self) -> None:
        """Write everything that waits."""
        shift = self._shift
        if self._locked and shift.clock.monotonic() >= self._look_at:
            shift.outcomes += self._locked.values()
        while shift.outcomes:
            batch = shift.outcomes[: 2 * FULL]
            del shift.outcomes[: len(batch)]
            shift.urgent = False
            await self._write(batch)
        shift.settling.clear()

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
                    self._shift.let_go(batch[0])
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
        shift = self._shift
        tell_success = shift.events.has_subscriber(JobSucceeded)
        succeeded: list[TaskRun] = []
        held, last_attempts = shift.held, 0
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
                if tell_success:
                    shift.tell_success(run)
            else:
                self._tell_rest(run, answer)
        shift.make_room(last_attempts)
        shift.succeeded += len(succeeded)
        if shift.events.has_subscriber(BatchSettled):
            measure_settled(shift.events, len(batch), [(run.job.task, run.seconds) for run in succeeded])

    def _wait_for(self, run: TaskRun) -> None:
        """Retries a settlement of a locked job; its neighbours do not wait. Its neighbours do not wait."""
        shift = self._shift
        self._look_at = shift.clock.monotonic() + _LOCKED
        if run.lease not in self._locked:
            self._locked[run.lease] = run
            error = f"job {run.job.id} waits to be settled: another program's transaction holds its row"
            shift.emit(StoreTrouble(service="settler", error=error, retry_in=_LOCKED))

    def _tell_rest(self, run: TaskRun, answer: Settled) -> None:
        shift, job, settlement = self._shift, run.job, run.settlement
        if not answer.accepted:
            tell_lost(shift.events, job, shift.worker_id)
            return
        if answer.state in (JobState.FAILED, JobState.DEAD):
            shift.failed += 1
        elif answer.state is not JobState.CANCELLED:
            shift.released += settlement.reason is Reason.RELEASED
        tell_rest(shift.events, job, settlement, answer, seconds=run.seconds, dlq_key=shift.dead_letters(job))
