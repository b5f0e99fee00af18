"""Context: the running job, for its handler."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from holdfast.core.errors import Conflict, HoldfastError, Invalid
from holdfast.core.lifecycle import Outcome
from holdfast.core.models import Job, Lease, NewJob
from holdfast.core.portal import drive_coroutine, forbid_running_loop, requires_loop
from holdfast.core.retry import Retry, as_retry
from holdfast.core.steps import Progress
from holdfast.core.validation import check_name, check_span, check_timeout, explain_attribute, parse_count
from holdfast.tasks.children import Child
from holdfast.tasks.job_logger import NOTHING, JobLog
from holdfast.tasks.saved_values import (
    DEFAULT_OPTIONS,
    CallerTransaction,
    SavedState,
    StepOptions,
    StepStore,
    TxStepStore,
)
from holdfast.tasks.steps import JobSteps

P = ParamSpec("P")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


_ELSEWHERE = {
    "retry": "to try again later: raise RetryAfter(60), or let the error out",
    "max_retries": "how often it is tried: context.job.max_attempts; set by @app.task(max_attempts=…)",
    "request": "what the running job is: context.id, context.attempts, context.job",
    "update_state": "to say how far it is: await context.progress(30, 100)",
}
"""Methods of a bound task in Celery, with what to write here."""


class Completer(TxStepStore, Protocol):
    """Protocol of an object that ends a job inside its handler's transaction, and records steps there."""

    async def complete(self, context: Context, connection: Any, result: Any) -> None: ...


class LogOpener(Protocol):
    """Protocol of an object that stores handlers' log lines."""

    def open_log(self, lease: Lease) -> JobLog: ...


class Limiter(Protocol):
    """Protocol of an object that takes tokens of limits for handlers."""

    async def take(self, name: str, tokens: int, *, wait: bool) -> None: ...

    def take_blocking(self, name: str, tokens: int, *, wait: bool, is_cancelled: Callable[[], bool]) -> None: ...


class CallableTask(Protocol[P, R_co]):
    """Protocol of a task, with or without options, whose jobs a handler can start."""

    def new_job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob: ...

    def decode_result(self, text: str | None) -> R_co: ...


class Context:
    """The running job. A handler whose first parameter is annotated ``Context`` gets it; ``current_job()`` too."""

    __slots__ = (
        "job",
        "cancelled",
        "has_called_complete",
        "_completer",
        "_step_store",
        "_limiter",
        "_log",
        "_opener",
        "_runner",
        "_steps",
    )

    def __init__(
        self,
        job: Job,
        completer: Completer | None = None,
        opener: LogOpener | None = None,
        limiter: Limiter | None = None,
        step_store: StepStore | None = None,
        runner: asyncio.Task[Any] | None = None,
    ) -> None:
        """``runner``: the task in which the handler runs."""
        self.job = job
        self._step_store = step_store
        self._runner = runner
        self._steps: JobSteps | None = None  # made for the first step: most jobs have none
        self._limiter = limiter
        self._completer = completer
        self._opener = opener
        self._log: JobLog | None = None  # made when something is logged: most jobs log nothing
        self.has_called_complete = False
        """True once ``complete`` was called: from then on only the store knows the job's state."""
        self.cancelled = False
        """True once the job is asked to stop. A handler in a thread should check it; a coroutine is cancelled."""

    if not TYPE_CHECKING:  # to a type checker, other attributes are errors as ever

        def __getattr__(self, name: str) -> Any:
            """Explains the name here of what ``self`` has in a task of Celery."""
            raise explain_attribute(self, name, _ELSEWHERE)

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def attempts(self) -> int:
        """Returns the number of attempts, this one included: 1 in the first."""
        return self.job.attempts

    @property
    def max_attempts(self) -> int | None:
        """Returns the maximum number of attempts; None: no limit."""
        return self.job.max_attempts

    @property
    def claims(self) -> int:
        """Returns the fencing token, which grows with every claim of this job.

        A system that remembers the highest one can refuse a stale worker.
        """
        return self.job.claims

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Returns the submitter's metadata."""
        return self.job.options_or_default.metadata or {}

    @property
    def tags(self) -> tuple[str, ...]:
        return self.job.options_or_default.tags

    @property
    def batch_id(self) -> str | None:
        """Returns the id of the batch of which this job is a member: its ``batch`` for further jobs."""
        return self.job.options_or_default.batch

    @property
    def log(self) -> JobLog:
        """``context.log("fetched", rows=3)`` stores a line with the job, ``context.log.warning(…)`` one of that level.

        It never waits and never raises; `holdfast show` and the API show it. Outside a worker, such as in a test that
        calls the handler, nothing is stored.
        """
        if self._log is None:
            self._log = (
                JobLog(NOTHING, lambda _, __: None) if self._opener is None else self._opener.open_log(self.job.lease)
            )
        return self._log

    @property
    def opened_log(self) -> JobLog | None:
        """Returns the log if a line was logged, else None. For the runner."""
        return self._log

    @overload
    def complete(self, connection: Any) -> Coroutine[Any, Any, None]: ...

    @overload
    def complete(self, connection: Any, result: T) -> Coroutine[Any, Any, T]: ...

    @requires_loop
    async def complete(self, connection: Any, result: Any = None) -> Any:
        """Ends the job as succeeded, with this result, inside the transaction of ``connection``: both commit or neither
        does. Returns the result; the handler's own return value after the commit is ignored.

        LeaseLost: this attempt has lost its lease; let the error roll back your transaction. After a rollback the
        attempt has failed.
        """
        completer = _completer_of(self, "complete")
        self.has_called_complete = True  # first: a concurrent stop either sees it, or is seen below
        if self.cancelled:
            raise Conflict(f"job {self.id} was asked to stop, and cannot be completed any more; roll back")
        await completer.complete(self, connection, result)
        return result

    @requires_loop
    async def limit(self, name: str, tokens: int = 1, *, wait: bool = False) -> None:
        """Takes tokens of a limit with a rate, before a call that it covers: ``await context.limit("api")``.

        Over the limit it raises `RateLimited`: the attempt fails and is retried after the policy's delay. With ``wait``
        it waits for the tokens and occupies its runner.
        """
        await _limiter_of(self).take(name, tokens, wait=wait)

    @overload
    def step(
        self, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def step(
        self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @requires_loop
    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Runs a function once in the life of the job: ``await context.step("charge", charge, order)``.

        Its result is stored under the lease before the next line runs; a retry, a release, a crash or a replay returns
        it as JSON values, converted by the function's return annotation. An exception is not stored. A name that is
        called again gets a number: "charge", "charge#2".
        """
        return self._job_steps.call(name, DEFAULT_OPTIONS, function, args, kwargs)

    @overload
    def step_in(
        self, connection: Any, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def step_in(
        self, connection: Any, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @requires_loop
    def step_in(
        self, connection: Any, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Runs a step that writes to the jobs' own database, in the transaction of ``connection``, which you commit.

        ``await context.step_in(connection, "charge", charge, connection, order)``: what the function writes there and
        its result are committed together or rolled back together. LeaseLost: let it roll back your transaction. Unless
        the transaction is committed before the next step and the handler's end, the attempt has failed.
        """
        transaction = CallerTransaction(_completer_of(self, "step_in"), connection)
        return self._job_steps.call(name, DEFAULT_OPTIONS, function, args, kwargs, transaction)

    def with_options(
        self, *, tries: int = 1, retry: Retry | str | None = None, timeout: float | timedelta | str | None = None
    ) -> StepContext:
        """Options of a step: ``context.with_options(tries=3, timeout=10).step("charge", charge, order)``.

        It is tried several times within this attempt of the job, with the delays of ``retry`` in between, each time for
        at most ``timeout``.
        """
        policy = Retry() if retry is None else as_retry(retry)
        if policy.priority is not None:
            raise Invalid(
                "retry.priority", policy.priority, "leave it out: a step waits in no queue; give it to the task"
            )
        return StepContext(
            self,
            StepOptions(
                tries=parse_count(tries, "tries", least=1, most=1000, text=False),
                retry=policy,
                timeout=None if timeout is None else check_timeout(timeout).total_seconds(),
            ),
        )

    @requires_loop
    async def sleep(self, span: float | timedelta | str) -> None:
        """Sleeps for seconds, a timedelta or text like ``3d``, without a worker.

        The attempt ends here, without counting; the next one, in which steps return their results, goes on behind it.

        It ends by an exception that ``except Exception`` does not catch; ``finally`` blocks run. Call it in the handler
        itself, not in a task that it has started.
        """
        await self._job_steps.sleep(check_span(span, "span"))

    @requires_loop
    async def wait_for(self, topic: str, *, timeout: float | timedelta | str) -> Any:
        """Waits for a signal, without a worker: ``await context.wait_for("approved:42", timeout="7d")``.

        Returns the value that was given to ``app.signal("approved:42", value)``, before or after this call. The signal
        is recorded like a step: later attempts get it again, and no other job receives it. The attempt ends here, as
        with ``sleep``. TimeoutError: no signal came in time; that is recorded too.
        """
        span = check_span(timeout, "timeout")
        return await self._job_steps.wait_for(topic, span)

    @requires_loop
    def call(self, task: CallableTask[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Child[T]:
        """Runs a job of another task, and waits for it without a worker: ``await context.call(charge, order)``.

        Returns its result. The job has an id of its own, made of this job's id and the name of its task: it is
        submitted once in the life of this job. `JobFailed` or `JobCancelled`: it ended without a result. Options:
        ``context.call(charge.options(priority=5), order)``.
        """
        if not hasattr(task, "new_job"):
            raise Invalid("task", task, "give a task of this application: context.call(charge, order)")
        job = task.new_job(*args, **kwargs)
        if job.after or job.delay is not None or job.run_at_us is not None:
            raise Invalid("options", task, "leave out after, delay and run_at: this job waits for the result")
        return self._job_steps.make_child(job, task.decode_result)

    @requires_loop
    async def gather(self, *children: Child[Any], return_exceptions: bool = False) -> list[Any]:
        """Runs several jobs side by side: ``await context.gather(context.call(a, 1), context.call(b, 2))``.

        Returns their results in this order, when all have ended. If one has failed, its error is raised; with
        ``return_exceptions`` it stands among the results, and is recorded like them.
        """
        for child in children:
            if not isinstance(child, Child):
                raise Invalid("children", child, "give calls of tasks: context.gather(context.call(task, …), …)")
        if not children:
            return []
        return await self._job_steps.gather(children, is_ordered=False, return_exceptions=return_exceptions)

    @property
    def state(self) -> SavedState:
        """Returns what the handler keeps: ``await context.state.save(value)``, and in a later attempt ``.read()``."""
        return SavedState(self._job_steps.values)

    @requires_loop
    async def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Says how far the job is: ``await context.progress(30, 100, "pages")``. `holdfast show` shows it.

        It is stored once a second at most, and always when ``done`` is ``total``.
        """
        await self._job_steps.values.save_progress(Progress(done, total, message))

    def iterate(
        self,
        source: Callable[[Any], AsyncIterable[T] | Iterable[T]],
        *,
        cursor: Callable[[T], Any],
        name: str = "rows",
        every: int = 100,
    ) -> AsyncGenerator[T, None]:
        """Goes through long input, and goes on behind the saved cursor in a later attempt.

        ``async for row in context.iterate(fetch_rows, cursor=lambda row: row["id"])``: ``source(after)`` gives the rows
        behind a cursor, None for the first; ``cursor(row)`` is stored after each ``every`` rows. So up to that many
        rows are met again after a crash. The loop takes no steps: the cursor is its record.
        """
        parse_count(every, "every", least=1, most=1_000_000, text=False)
        return self._job_steps.values.iterate(source, cursor, f"#cursor {check_name('name', name)}", every)

    @property
    def _job_steps(self) -> JobSteps:
        """Returns the steps of this attempt."""
        if self.has_called_complete:
            raise Conflict(f"job {self.id} is being completed, and takes no further step")
        if self._steps is None:
            if self._step_store is None:
                raise HoldfastError(
                    "steps: this code runs without a worker or in a process of its own, without a store; "
                    'let the task run with executor="async" or "thread"'
                )
            self._steps = JobSteps(self.job, self._step_store, self._runner)
        return self._steps

    @property
    def has_steps(self) -> bool:
        """Returns True if the handler has called a step. For the runner."""
        return self._steps is not None

    async def final_outcome(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the attempt, from that of the handler: its steps may end it otherwise."""
        return outcome if self._steps is None else await self._steps.final_outcome(outcome)

    @property
    def sync(self) -> SyncContext:
        """Returns the blocking interface, for handlers in threads: ``context.sync.complete(connection, result)``."""
        return SyncContext(self)

    def cancel(self) -> None:
        """Asks the handler to stop. Called by the worker."""
        self.cancelled = True


class StepContext:
    """Runs steps with options."""

    __slots__ = ("_context", "_options")

    def __init__(self, context: Context, options: StepOptions) -> None:
        self._context = context
        self._options = options

    @overload
    def step(
        self, name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def step(
        self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    @requires_loop
    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """``Context.step``, with these options."""
        return self._context._job_steps.call(name, self._options, function, args, kwargs)


class SyncContext:
    """Blocking interface of a context."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    @overload
    def complete(self, connection: Any) -> None: ...

    @overload
    def complete(self, connection: Any, result: T) -> T: ...

    def complete(self, connection: Any, result: Any = None) -> Any:
        """``Context.complete``, in this thread, to which the connection belongs."""
        forbid_running_loop("await context.complete(…) itself instead of context.sync.complete(…)")
        return drive_coroutine(inspect.unwrap(Context.complete)(self._context, connection, result))

    def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """``Context.step``, in this thread, for a function that is not async."""
        forbid_running_loop("await context.step(…) itself instead of context.sync.step(…)")
        return self._run(name, function, args, kwargs, None)

    def step_in(self, connection: Any, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """``Context.step_in``, in this thread, to which the connection belongs, for a function that is not async."""
        forbid_running_loop("await context.step_in(…) itself instead of context.sync.step_in(…)")
        transaction = CallerTransaction(_completer_of(self._context, "step_in"), connection)
        return self._run(name, function, args, kwargs, transaction)

    def _run(
        self,
        name: str,
        function: Callable[..., T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        transaction: CallerTransaction | None,
    ) -> T:
        is_ordered = CURRENT.get(None) is self._context  # a thread that the handler started does not inherit it
        result: T = self._context._job_steps.run_blocking(
            name, DEFAULT_OPTIONS, function, args, kwargs, transaction, is_ordered=is_ordered
        )
        return result

    def limit(self, name: str, tokens: int = 1, *, wait: bool = False) -> None:
        """``Context.limit``, in this thread."""
        forbid_running_loop("await context.limit(…) itself instead of context.sync.limit(…)")
        _limiter_of(self._context).take_blocking(name, tokens, wait=wait, is_cancelled=lambda: self._context.cancelled)


def _completer_of(context: Context, method: str) -> Completer:
    """Returns the completer of the worker; HoldfastError if the code has no access to the store."""
    completer = context._completer
    if completer is None:
        raise HoldfastError(
            f"context.{method}(): this code runs in a process of its own, without a store; "
            'let the task run with executor="async" or "thread"'
        )
    return completer


def _limiter_of(context: Context) -> Limiter:
    """Returns the limiter of the worker; HoldfastError if the code has no access to the store."""
    limiter = context._limiter
    if limiter is None:
        raise HoldfastError(
            "context.limit(): this code runs without a worker or in a process of its own, without a store; "
            'let the task run with executor="async" or "thread"'
        )
    return limiter


CURRENT: ContextVar[Context] = ContextVar("holdfast_current_job")
"""Set by the runner, inside the handler's own context."""


def current_job() -> Context:
    """Returns the context of the running job."""
    try:
        return CURRENT.get()
    except LookupError:
        raise HoldfastError(
            "current_job(): no job is running here; call it inside a handler, or hand the value over as an argument "
            "(a thread started by hand does not inherit it: start it with contextvars.copy_context().run)"
        ) from None
