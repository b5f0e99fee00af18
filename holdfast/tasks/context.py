"""The running job as its handler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from holdfast.core.errors import Conflict, HoldfastError
from holdfast.core.models import Job, Lease
from holdfast.core.portal import drive_coroutine, forbid_running_loop
from holdfast.tasks.job_logger import NOTHING, JobLog


class Completer(Protocol):
    """Protocol of an object that ends a job inside its handler's transaction."""

    async def complete(self, context: Context, connection: Any, result: Any) -> None: ...


class LogOpener(Protocol):
    """Protocol of an object that stores handlers' log lines."""

    def open_log(self, lease: Lease) -> JobLog: ...


class Limiter(Protocol):
    """Protocol of an object that takes tokens of limits for handlers."""

    async def take(self, name: str, tokens: int, *, wait: bool) -> None: ...

    def take_blocking(self, name: str, tokens: int, *, wait: bool) -> None: ...


class Context:
    """The running job. A handler whose first parameter is annotated ``Context`` gets it; ``current_job()`` too."""

    __slots__ = ("job", "cancelled", "completing", "_completer", "_limiter", "_log", "_opener")

    def __init__(
        self,
        job: Job,
        completer: Completer | None = None,
        opener: LogOpener | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        self.job = job
        self._limiter = limiter
        self._completer = completer
        self._opener = opener
        self._log: JobLog | None = None  # made when something is logged: most jobs log nothing
        self.completing = False
        """True once ``complete`` was called: then only the store knows whether the job has ended."""
        self.cancelled = False
        """True once the job is asked to stop. A handler in a thread looks here; a coroutine is cancelled anyway."""

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def attempts(self) -> int:
        """Attempts so far, this one included: 1 in the first."""
        return self.job.attempts

    @property
    def max_attempts(self) -> int | None:
        """How many attempts there may be; None: no limit."""
        return self.job.max_attempts

    @property
    def claims(self) -> int:
        """The fencing token: grows with every claim of this job.

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
    def log(self) -> JobLog:
        """``context.log("fetched", rows=3)`` stores a line with the job, ``context.log.warning(…)`` one of that level.

        It never waits and never raises; `holdfast show` and the API show it. Where no worker runs the handler, as in a
        test that calls it, nothing is stored.
        """
        if self._log is None:
            self._log = (
                JobLog(NOTHING, lambda _, __: None) if self._opener is None else self._opener.open_log(self.job.lease)
            )
        return self._log

    @property
    def opened_log(self) -> JobLog | None:
        """The log, if anything was logged: for the runner of the handler."""
        return self._log

    async def complete(self, connection: Any, result: Any = None) -> Any:
        """End the job as succeeded, with this result, inside the transaction of ``connection``: both are committed, or
        neither is. Returns the result; the handler's own return value after the commit is ignored.

        LeaseLost: the job is not this attempt's any more; let the error roll your transaction back. Rolled back, the
        attempt has failed.
        """
        if self._completer is None:
            raise HoldfastError(
                "context.complete(): this code runs in a process of its own, without a store; "
                'let the task run with executor="async" or "thread"'
            )
        self.completing = True  # first: a concurrent stop sees it, or is seen here
        if self.cancelled:
            raise Conflict(f"job {self.id} was asked to stop, and cannot be completed any more; roll back")
        await self._completer.complete(self, connection, result)
        return result

    async def limit(self, name: str, tokens: int = 1, *, wait: bool = False) -> None:
        """Take tokens of a limit with a rate, before a call that it covers: ``await context.limit("api")``.

        Over the limit it raises `RateLimited`: the attempt fails, and is retried after the policy's delay; with
        ``wait`` it waits for the tokens, and keeps its runner.
        """
        await _limiter_of(self).take(name, tokens, wait=wait)

    @property
    def sync(self) -> SyncContext:
        """For handlers in threads: ``context.sync.complete(connection, result)``."""
        return SyncContext(self)

    def cancel(self) -> None:
        """Called by the worker: ask the handler to stop."""
        self.cancelled = True


class SyncContext:
    """The blocking face of a context."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def complete(self, connection: Any, result: Any = None) -> Any:
        """``Context.complete``, in this thread, to which the connection belongs."""
        forbid_running_loop("await context.complete(…) itself instead of context.sync.complete(…)")
        return drive_coroutine(self._context.complete(connection, result))

    def limit(self, name: str, tokens: int = 1, *, wait: bool = False) -> None:
        """``Context.limit``, in this thread."""
        forbid_running_loop("await context.limit(…) itself instead of context.sync.limit(…)")
        _limiter_of(self._context).take_blocking(name, tokens, wait=wait)


def _limiter_of(context: Context) -> Limiter:
    """The limits of the store, as the worker takes from them. HoldfastError where there is no store."""
    limiter = context._limiter
    if limiter is None:
        raise HoldfastError(
            "context.limit(): this code runs without a worker or in a process of its own, without a store; "
            'let the task run with executor="async" or "thread"'
        )
    return limiter


CURRENT: ContextVar[Context] = ContextVar("holdfast_current_job")
"""Set by the runner of a handler, inside that handler's own context."""


def current_job() -> Context:
    """The job this code runs for."""
    try:
        return CURRENT.get()
    except LookupError:
        raise HoldfastError(
            "current_job(): no job is running here; call it inside a handler, or hand the value over as an argument "
            "(a thread started by hand does not inherit it: start it with contextvars.copy_context().run)"
        ) from None
