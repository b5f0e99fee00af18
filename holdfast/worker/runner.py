"""The runners: long-lived coroutines that take jobs from the buffer and run their handlers, one job at a time each.

There is no task object per job: a runner drives the handler's coroutine inside its own task, in a separate context. To
stop a job (timeout, cancellation, lost lease, release), the runner's task is cancelled, and uncancelled afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import itertools
from typing import Any

from holdfast.core.encryption import is_encrypted
from holdfast.core.errors import Invalid
from holdfast.core.events import HandlerStart
from holdfast.core.fault_points import fault_point
from holdfast.core.lifecycle import Cancelled, Failed, Outcome, Released, Succeeded
from holdfast.core.models import Job, Reason, TxOutcome
from holdfast.tasks import CURRENT, Context, LogOpener, Task
from holdfast.tasks.command_policy import COMMAND
from holdfast.telemetry.trace_context import trace_id_of
from holdfast.worker.context import LeasedJob, StopReason, WorkerState
from holdfast.worker.executors.command import CommandRunner
from holdfast.worker.executors.coroutine import HandlerGeneratorExit, drive_in_context
from holdfast.worker.executors.outcome import describe_error, outcome_of, payload_refused, success_outcome
from holdfast.worker.handler_limits import HandlerLimits
from holdfast.worker.invocation import HandlerInvoker, OutcomeRaised, unwrap_outcome
from holdfast.worker.policy import Deferrals, timeout_of
from holdfast.worker.step_writer import StepWriter
from holdfast.worker.tx_completion import UNDONE, TxCompletion

_MAX_STALE = 100  # deadlines of ended jobs that may stay in the heap
_CANCEL_TIMEOUT = 1.0  # seconds a cancelled runner may take to end


class RunnerPool:
    """The runners of one worker, as many as its concurrency, and one watchdog for their deadlines."""

    def __init__(
        self,
        shared: WorkerState,
        invoker: HandlerInvoker,
        logs: LogOpener,
        limits: HandlerLimits,
        step_writer: StepWriter,
    ) -> None:
        self._shared = shared
        self._invoker = invoker
        self._logs = logs
        self._is_encrypted = shared.app.codec is not None
        self._commands = CommandRunner(watcher=invoker.watcher, has_codec=self._is_encrypted)
        self._tx_completion = TxCompletion(shared)
        self._limits = limits
        self._step_writer = step_writer
        self._registry = shared.app.registry
        self._runners: set[asyncio.Task[None]] = set()
        self._lease_checks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._deadlines: list[tuple[float, int, LeasedJob]] = []
        self._order = itertools.count()
        self._deadline_moved = asyncio.Event()
        self._deferrals = Deferrals(shared.app)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception if a runner dies of a bug; else it is never done."""

    def resize(self, concurrency: int) -> None:
        """Starts or ends runners to have this many; surplus runners end once they have run their job."""
        while len(self._runners) < concurrency:
            runner = asyncio.create_task(self._run_jobs(), name="holdfast-runner")
            self._runners.add(runner)
            runner.add_done_callback(self._on_runner_ended)
        if len(self._runners) > concurrency:
            wakeups = self._shared.runner_wakeups
            for _ in range(min(len(self._runners) - concurrency, len(wakeups))):
                wakeups.popleft().cancel()

    def _on_runner_ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        self._shared.wake_runners()  # the ended runner may have been the only one awake
        if not runner.cancelled() and (error := runner.exception()) is not None:
            if not self.failed.done():
                self.failed.set_exception(error)
        elif not self._closing and len(self._runners) < self._shared.settings.concurrency:
            self.resize(len(self._runners) + 1)  # code of a handler cancelled it, or more ended than were surplus

    async def close(self) -> int:
        """Cancels every runner. Returns how many do not end: their handlers swallow cancellation."""
        self._closing = True
        runners = [*self._runners, *self._lease_checks]
        for runner in runners:
            runner.cancel()
        if not runners:
            return 0
        _, stuck = await asyncio.wait(runners, timeout=_CANCEL_TIMEOUT)
        await self._step_writer.close()
        return len(stuck)

    # ── one runner ────────────────────────────────────────────────────────────────────────────────────────────
    async def _run_jobs(self) -> None:
        shared = self._shared
        buffer, wakeups = shared.buffer, shared.runner_wakeups
        loop = asyncio.get_running_loop()
        this_runner = asyncio.current_task()
        assert this_runner is not None  # noqa: S101 - a coroutine that runs has a task
        since_yield = 0
        while len(self._runners) <= shared.settings.concurrency:
            while not buffer:
                wakeup: asyncio.Future[None] = loop.create_future()
                wakeups.append(wakeup)
                since_yield = 0
                await wakeup
            leased = buffer.popleft()
            try:
                await self._run_job(leased, this_runner)
            except BaseException as error:  # the runner ends: it was stopped, or has a bug
                self._settle_unfinished(leased, error)
                if isinstance(error, GeneratorExit):
                    self._replace(this_runner)
                raise
            if this_runner.cancelling() and not self._closing:
                await self._drop_cancellation(this_runner)
            since_yield += 1
            if since_yield >= 50:  # handlers that never await must not starve the fetcher and the settler
                since_yield = 0
                await asyncio.sleep(0)

    @staticmethod
    async def _drop_cancellation(runner: asyncio.Task[None]) -> None:
        """Takes a cancellation that a handler has left in its task, before it reaches the next job."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while runner.cancelling():
            runner.uncancel()

    def _replace(self, runner: asyncio.Task[None]) -> None:
        """Starts a new runner after a handler has closed the coroutine of this one: its task does not notice."""
        if self._closing or not runner.get_loop().is_running():
            return
        self._runners.discard(runner)
        runner.remove_done_callback(self._on_runner_ended)
        runner.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        runner.cancel()
        self.resize(self._shared.settings.concurrency)
        self._shared.wake_runners()

    def _settle_unfinished(self, leased: LeasedJob, error: BaseException) -> None:
        """Settles the job of a runner that ends: releases it, or fails it if the runner has a bug: if it were
        released, every worker would hit that bug."""
        if leased not in self._shared.running:
            return
        self._shared.running.discard(leased)
        if leased.has_called_complete:
            self._shared.report_lost_job(leased)  # a sweeper settles it, if the transaction did not
            return
        stopped = isinstance(error, asyncio.CancelledError)
        self._shared.queue_settlement(
            leased, Released() if stopped else Failed(error=describe_error(error), reason=Reason.CRASHED)
        )

    async def _run_job(self, leased: LeasedJob, runner: asyncio.Task[None]) -> None:
        shared, job = self._shared, leased.job
        monotonic = shared.clock.monotonic
        context = Context(job, self._tx_completion, self._logs, self._limits, self._step_writer, runner)
        leased.runner, leased.context = runner, context
        leased.started = monotonic()
        if leased.started > leased.lease_valid_until:
            shared.queue_settlement(leased, Released())
            return
        if shared.app.spans is not None:
            leased.span = shared.app.spans.start_execution(job, shared.worker_id)
        shared.running.add(leased)
        if shared.events.has_subscriber(HandlerStart):
            trace_id = trace_id_of(job)
            shared.emit(HandlerStart(job_id=job.id, task=job.task, attempt=job.attempts, trace_id=trace_id))
        fault_point("handler.before")
        outcome: Outcome | None = None
        try:
            ended = await self._execute(leased, context)
            if context.has_steps:
                ended = await context.final_outcome(ended)
            if type(ended) is Failed and Deferrals.is_deferrable(ended, job):
                [ended] = await self._deferrals.defer_or_fail([job], [ended], shared.settings)
            outcome = ended  # only once the store has answered: an interruption settles this outcome
            if type(outcome) is Failed and outcome.pause is not None:
                outcome = await self._limits.pause_scope(job, outcome)
        except asyncio.CancelledError:
            if leased.stop_reason is None:  # this runner is being stopped, not the job
                raise
        fault_point("handler.after")
        leased.seconds = monotonic() - leased.started
        if context.opened_log is not None:
            context.opened_log.finish_log()
        if leased not in shared.running:  # the worker ends, and has given up on it
            return
        if context.has_called_complete and not await self._needs_settlement(leased):
            return
        shared.running.discard(leased)
        if leased.stop_reason is not None:
            outcome = self._outcome_of_interrupted(leased, outcome)
        elif context.has_called_complete and type(outcome) is Succeeded:
            outcome = Failed(error=UNDONE)
        if outcome is None:
            shared.report_lost_job(leased)
        else:
            shared.queue_settlement(leased, outcome)

    async def _needs_settlement(self, leased: LeasedJob) -> bool:
        """Returns True if the job is still to be settled after its handler completed it in a transaction."""
        self._shared.wake_runners()
        tx_outcome = None
        while tx_outcome is None:
            try:
                tx_outcome = await self._tx_completion.read_outcome(leased)
            except asyncio.CancelledError:
                if leased.stop_reason is None:  # this runner is being stopped, not the job
                    raise
                while leased.runner is not None and leased.runner.cancelling():
                    leased.runner.uncancel()
        if tx_outcome is TxOutcome.ROLLED_BACK:
            return True
        self._shared.running.discard(leased)
        if tx_outcome is TxOutcome.COMMITTED:
            self._shared.tx_completed(leased)
        else:
            self._shared.report_lost_job(leased)
        return False

    def _outcome_of_interrupted(self, leased: LeasedJob, outcome: Outcome | None) -> Outcome | None:
        """Returns the outcome of an interrupted job; None if there is nothing to settle, since the lease is lost."""
        while leased.runner is not None and leased.runner.cancelling():
            leased.runner.uncancel()
        match leased.stop_reason:
            case StopReason.LOST:
                return None
            case StopReason.TIMEOUT:
                # Also if the handler swallowed the cancellation and returned: it exceeded its timeout.
                return leased.timeout_outcome()
            case StopReason.CANCEL:
                return outcome or Cancelled()
            case _:
                return outcome or Released()

    def check_lease(self, leased: LeasedJob) -> None:
        """Interrupts a job whose lease was not renewed, unless its handler's transaction completed it, or may yet."""
        check = asyncio.create_task(self._interrupt_if_lost(leased), name="holdfast-lease-check")
        self._lease_checks.add(check)
        check.add_done_callback(self._lease_checks.discard)

    async def _interrupt_if_lost(self, leased: LeasedJob) -> None:
        if await self._tx_completion.is_lost(leased):
            leased.interrupt_handler(StopReason.LOST)

    # ── one execution ─────────────────────────────────────────────────────────────────────────────────────────
    async def _execute(self, leased: LeasedJob, context: Context) -> Outcome:
        job = leased.job
        task = self._registry.get(job.task)
        timeout = timeout_of(job, task, self._shared.settings)
        if timeout is not None:
            self._watch(leased, timeout)
        if task is None and job.task != COMMAND:
            return self._deferrals.unknown_task_failure(job, self._registry.task_names(), self._shared.settings)
        if is_encrypted(job.payload):
            return self._deferrals.decryption_failure(job)
        try:
            if task is None:
                calling = self._invoker.apply_middleware(context, functools.partial(self._command, job))
            else:
                calling = self._invoker.call(task, context)
        except Invalid as error:
            return payload_refused(error, is_encrypted=self._is_encrypted)
        except BaseException as error:  # annotations run the application's code
            return self._outcome_of(error, task)
        variables = contextvars.copy_context()
        variables.run(CURRENT.set, context)
        if leased.span is not None:
            leased.span.enter_context(variables)
        try:
            value = await drive_in_context(calling, variables, self._shared.wake_runners)
        except asyncio.CancelledError as error:
            if leased.stop_reason is not None:
                raise
            while leased.runner is not None and leased.runner.cancelling():
                leased.runner.uncancel()
            return self._outcome_of(error, task)  # the handler raised it itself
        except OutcomeRaised as ran:
            return ran.outcome
        except HandlerGeneratorExit as escaped:
            return self._outcome_of(escaped.error, task)
        except Exception as error:
            return self._outcome_of(error, task)
        except GeneratorExit:
            raise  # the coroutine of this runner is being closed
        except BaseException as error:  # SystemExit, KeyboardInterrupt, custom ones: none may end the worker
            return self._outcome_of(error, task)
        return success_outcome(value, self._shared.settings.result_limit)

    def _outcome_of(self, error: BaseException, task: Task[..., Any] | None) -> Outcome:
        return outcome_of(error, task, is_encrypted=self._is_encrypted)

    async def _command(self, job: Job) -> Any:
        """Runs a command job like a handler: middlewares see its result, or its error."""
        policy = self._shared.app.command_policy(self._shared.settings)
        return unwrap_outcome(await self._commands.run(job.payload, policy, job.id, job.claims))

    # ── deadlines ─────────────────────────────────────────────────────────────────────────────────────────────
    def _watch(self, leased: LeasedJob, timeout: float) -> None:
        leased.timeout = timeout  # the settings may change before it is over
        leased.deadline = self._shared.clock.monotonic() + timeout
        heapq.heappush(self._deadlines, (leased.deadline, next(self._order), leased))
        # The others have ended before their deadlines.
        if len(self._deadlines) > 2 * len(self._shared.running) + _MAX_STALE:
            self._deadlines[:] = [each for each in self._deadlines if each[2] in self._shared.running]
            heapq.heapify(self._deadlines)
        if self._deadlines[0][2] is leased:
            self._deadline_moved.set()

    async def watch_deadlines(self) -> None:
        """The watchdog: interrupts jobs past their deadlines."""
        shared, deadlines = self._shared, self._deadlines
        while True:
            self._deadline_moved.clear()
            now = shared.clock.monotonic()
            while deadlines and (deadlines[0][0] <= now or deadlines[0][2] not in shared.running):
                _, _, leased = heapq.heappop(deadlines)
                if leased in shared.running:
                    leased.interrupt_handler(StopReason.TIMEOUT)
            pause = deadlines[0][0] - now if deadlines else 3600.0
            await shared.clock.run_bounded(self._deadline_moved.wait(), pause)
