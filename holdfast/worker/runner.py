"""The runners: long-lived coroutines that pull jobs from the buffer and run their handlers, one job each at a time.

No task object per job: the handler's coroutine is driven inside its runner's own task, in a context of its own. A job
is stopped (timeout, cancellation, lost lease, release) by cancelling the runner's task and taking that back afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import itertools
from typing import Any

from holdfast.core.errors import Invalid
from holdfast.core.events import HandlerStart
from holdfast.core.fault_injection import fault_point
from holdfast.core.lifecycle import Cancelled, Failed, Outcome, Released, Succeeded
from holdfast.core.models import Job, Reason, TxOutcome
from holdfast.tasks import CURRENT, Context, LogOpener, Task
from holdfast.tasks.command_policy import COMMAND
from holdfast.telemetry.trace_context import trace_id_of
from holdfast.worker.context import StopReason, TaskRun, WorkerContext
from holdfast.worker.executors.command import CommandRunner
from holdfast.worker.executors.coroutine import Escaped, drive_in_context
from holdfast.worker.executors.outcome import describe_error, outcome_of, payload_refused, success_outcome
from holdfast.worker.handler_limits import HandlerLimits
from holdfast.worker.invocation import HandlerInvoker, RemoteOutcome, unwrap_outcome
from holdfast.worker.policy import Unfit
from holdfast.worker.tx_completion import UNDONE, TxCompletion

_SPARE = 100  # deadlines of ended runs that may be kept
_STUCK_AFTER = 1.0  # seconds a cancelled runner may take to end


class Runner:
    """The runners of one worker: as many as its concurrency, and one watchdog over their deadlines."""

    def __init__(self, shared: WorkerContext, calls: HandlerInvoker, logs: LogOpener, limits: HandlerLimits) -> None:
        self._shared = shared
        self._calls = calls
        self._logs = logs
        self._commands = CommandRunner(watcher=calls.watcher)
        self._completing = TxCompletion(shared)
        self._limits = limits
        self._registry = shared.app.registry
        self._runners: set[asyncio.Task[None]] = set()
        self._doubts: set[asyncio.Task[None]] = set()
        self._closing = False
        self._deadlines: list[tuple[float, int, TaskRun]] = []
        self._order = itertools.count()
        self._earlier = asyncio.Event()
        self._unfit = Unfit(shared.app)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never done, unless with the error of a runner that died of a bug."""

    def resize(self, concurrency: int) -> None:
        """Have this many runners; superfluous ones end when they are idle."""
        while len(self._runners) < concurrency:
            runner = asyncio.create_task(self._pull(), name="holdfast-runner")
            self._runners.add(runner)
            runner.add_done_callback(self._ended)
        if len(self._runners) > concurrency:
            idle = self._shared.idle_runners
            for _ in range(min(len(self._runners) - concurrency, len(idle))):
                idle.popleft().cancel()

    def _ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        self._shared.wake_runners()  # it may have been the one that was awake
        if runner.cancelled() and not self._closing and len(self._runners) < self._shared.settings.concurrency:
            self.resize(len(self._runners) + 1)  # a handler left something behind that cancelled its runner later
        elif not runner.cancelled() and (error := runner.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def close(self) -> int:
        """End every runner; how many do not end: their handlers swallow every cancellation."""
        self._closing = True
        runners = [*self._runners, *self._doubts]
        for runner in runners:
            runner.cancel()
        if not runners:
            return 0
        _, stuck = await asyncio.wait(runners, timeout=_STUCK_AFTER)
        return len(stuck)

    # ── one runner ────────────────────────────────────────────────────────────────────────────────────────────
    async def _pull(self) -> None:
        shared = self._shared
        buffer, idle = shared.buffer, shared.idle_runners
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        assert me is not None  # noqa: S101 - a coroutine that runs has a task
        since_yield = 0
        while True:
            while not buffer:
                woken: asyncio.Future[None] = loop.create_future()
                idle.append(woken)
                since_yield = 0
                await woken
            run = buffer.popleft()
            try:
                await self._run(run, me)
            except BaseException as error:  # this runner ends, by a stop or by a bug
                self._leave(run, error)
                if isinstance(error, GeneratorExit):
                    self._replace(me)
                raise
            since_yield += 1
            if since_yield >= 50:  # handlers that never wait must not keep the fetcher and the settler from the loop
                since_yield = 0
                await asyncio.sleep(0)

    def _replace(self, runner: asyncio.Task[None]) -> None:
        """Starts another runner for one whose coroutine a handler has closed: its task knows nothing of that."""
        if self._closing or not runner.get_loop().is_running():
            return
        self._runners.discard(runner)
        runner.remove_done_callback(self._ended)
        runner.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        runner.cancel()
        self.resize(self._shared.settings.concurrency)
        self._shared.wake_runners()

    def _leave(self, run: TaskRun, error: BaseException) -> None:
        """A job whose runner is stopped is for another. One that meets a bug of ours pays an attempt: else it would
        meet it in every worker, for ever."""
        if run not in self._shared.running:
            return
        self._shared.running.discard(run)
        if run.completing:
            self._shared.drop_run(run)  # the worker that finds its lease expired will know whether it has ended
            return
        stopped = isinstance(error, asyncio.CancelledError)
        self._shared.settle(run, Released() if stopped else Failed(error=describe_error(error), reason=Reason.CRASHED))

    async def _run(self, run: TaskRun, runner: asyncio.Task[None]) -> None:
        shared, job = self._shared, run.job
        monotonic = shared.clock.monotonic
        run.runner = runner
        run.context = Context(job, self._completing, self._logs, self._limits)
        run.started = monotonic()
        if shared.is_stale(run, run.started):
            shared.discard_run(run)
            return
        if shared.app.spans is not None:
            run.span = shared.app.spans.start_execution(job, shared.worker_id)
        shared.running.add(run)
        if shared.events.has_subscriber(HandlerStart):
            trace_id = trace_id_of(job)
            shared.emit(HandlerStart(job_id=job.id, task=job.task, attempt=job.attempts, trace_id=trace_id))
        fault_point("handler.before")
        outcome: Outcome | None = None
        try:
            outcome = await self._execute(run, run.context)
            if type(outcome) is Failed and Unfit.is_unfit(outcome, job):
                [outcome] = await self._unfit.settle_unfit([job], [outcome], shared.settings)
            if type(outcome) is Failed and outcome.pause is not None:
                outcome = await self._limits.pause_scope(job, outcome)
        except asyncio.CancelledError:
            if run.why is None:  # not the job is being stopped, but this runner
                raise
        fault_point("handler.after")
        run.seconds = monotonic() - run.started
        if run.context.opened_log is not None:
            run.context.opened_log.finish_log()
        if run.completing and not await self._is_left(run):
            return
        shared.running.discard(run)
        if run.why is not None:
            outcome = self._after_interruption(run, outcome)
        elif run.completing and type(outcome) is Succeeded:
            outcome = Failed(error=UNDONE)
        if outcome is None:
            shared.discard_run(run)
        else:
            shared.settle(run, outcome)

    async def _is_left(self, run: TaskRun) -> bool:
        """Returns True if there is still something to settle after a handler that completed its job itself."""
        self._shared.wake_runners()
        fate = None
        while fate is None:
            try:
                fate = await self._completing.read_outcome(run)
            except asyncio.CancelledError:
                if run.why is None:  # not the job is being stopped, but this runner
                    raise
                while run.runner is not None and run.runner.cancelling():
                    run.runner.uncancel()
        if fate is TxOutcome.ROLLED_BACK:
            return True
        self._shared.running.discard(run)
        if fate is TxOutcome.COMMITTED:
            self._shared.tx_completed(run)
        else:
            self._shared.drop_run(run)
        return False

    def _after_interruption(self, run: TaskRun, outcome: Outcome | None) -> Outcome | None:
        """The outcome of an interrupted execution. None: nothing to settle, another worker has the lease."""
        while run.runner is not None and run.runner.cancelling():
            run.runner.uncancel()
        match run.why:
            case StopReason.LOST:
                return None
            case StopReason.TIMEOUT:
                # Also for a handler that swallowed the cancellation and returned: it ran longer than it may.
                return Failed(error=f"timeout: still running after {self._timeout(run.job):g} s", reason=Reason.TIMEOUT)
            case StopReason.CANCEL:
                return outcome or Cancelled()
            case _:
                return outcome or Released()

    def check_lease(self, run: TaskRun) -> None:
        """Its lease was not renewed: because the job has ended with its handler's own transaction, or is about to?"""
        asking = asyncio.create_task(self._doubt(run), name="holdfast-doubt")
        self._doubts.add(asking)
        asking.add_done_callback(self._doubts.discard)

    async def _doubt(self, run: TaskRun) -> None:
        if await self._completing.is_lost(run):
            run.interrupt_run(StopReason.LOST)

    # ── one execution ─────────────────────────────────────────────────────────────────────────────────────────
    async def _execute(self, run: TaskRun, context: Context) -> Outcome:
        job = run.job
        task = self._registry.get(job.task)
        timeout = self._timeout(job, task)
        if timeout is not None:
            self._watch(run, timeout)
        if task is None and job.task != COMMAND:
            return self._unfit.unknown_task_failure(job, self._registry.task_names(), self._shared.settings)
        try:
            if task is None:
                calling = self._calls.apply_middleware(context, functools.partial(self._command, job))
            else:
                calling = self._calls.call(task, context, task.bind(job.payload))
        except Invalid as error:
            return payload_refused(error)
        except BaseException as error:  # annotations run the application's code
            return outcome_of(error, task)
        variables = contextvars.copy_context()
        variables.run(CURRENT.set, context)
        if run.span is not None:
            run.span.enter_context(variables)
        try:
            value = await drive_in_context(calling, variables, self._shared.wake_runners)
        except asyncio.CancelledError as error:
            if run.why is not None:
                raise
            while run.runner is not None and run.runner.cancelling():
                run.runner.uncancel()
            return outcome_of(error, task)  # the handler cancelled itself
        except RemoteOutcome as ran:
            return ran.outcome
        except Escaped as escaped:
            return outcome_of(escaped.error, task)
        except Exception as error:
            return outcome_of(error, task)
        except GeneratorExit:
            raise  # this runner is being thrown away
        except BaseException as error:  # SystemExit, KeyboardInterrupt or an unknown exception: none ends the worker
            return outcome_of(error, task)
        return success_outcome(task, value, self._shared.settings.result_limit)

    async def _command(self, job: Job) -> Any:
        """Run a command job as if it were a handler: middlewares see its result, or its error."""
        policy = self._shared.app.command_policy(self._shared.settings)
        return unwrap_outcome(await self._commands.run(job.payload, policy))

    # ── deadlines ─────────────────────────────────────────────────────────────────────────────────────────────
    def _timeout(self, job: Job, task: Task[..., Any] | None = None) -> float | None:
        """Seconds an execution may take: the job's own word, its task's, or the settings'."""
        own = job.options_or_default.timeout
        if own is not None:
            return own
        task = task or self._registry.get(job.task)
        if task is not None and task.timeout is not None:
            return task.timeout
        settings = self._shared.settings
        span = settings.command_timeout if task is None and job.task == COMMAND else settings.timeout
        return None if span is None else span.total_seconds()

    def _watch(self, run: TaskRun, timeout: float) -> None:
        run.deadline = self._shared.clock.monotonic() + timeout
        heapq.heappush(self._deadlines, (run.deadline, next(self._order), run))
        if len(self._deadlines) > 2 * len(self._shared.running) + _SPARE:  # the rest have ended before their deadlines
            self._deadlines[:] = [each for each in self._deadlines if each[2] in self._shared.running]
            heapq.heapify(self._deadlines)
        if self._deadlines[0][2] is run:
            self._earlier.set()

    async def watch_deadlines(self) -> None:
        """The watchdog: interrupts every run past its deadline. One for all runs."""
        shared, deadlines = self._shared, self._deadlines
        while True:
            self._earlier.clear()
            now = shared.clock.monotonic()
            while deadlines and (deadlines[0][0] <= now or deadlines[0][2] not in shared.running):
                _, _, run = heapq.heappop(deadlines)
                if run in shared.running:
                    run.interrupt_run(StopReason.TIMEOUT)
            pause = deadlines[0][0] - now if deadlines else 3600.0
            await shared.clock.run_bounded(self._earlier.wait(), pause)
