"""Invokes handlers: dependencies, middlewares and executors."""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from holdfast.app import Holdfast, Middleware
from holdfast.core.errors import ConfigError
from holdfast.core.lifecycle import Outcome, Released, Succeeded
from holdfast.core.resources import UNLIMITED
from holdfast.settings.settings import Settings
from holdfast.tasks import Context, LogLimits, Task, await_in_scopes, call_in_scopes
from holdfast.tasks.command_policy import largest_limits
from holdfast.worker.executors.outcome import UNSTARTABLE_DELAY
from holdfast.worker.executors.process import ProcessExecutor
from holdfast.worker.executors.resource_limits import ResourceWatcher
from holdfast.worker.executors.thread import NoThread, ThreadExecutor

Next = Callable[[Context], Awaitable[Any]]


class OutcomeRaised(Exception):
    """Carries the outcome of a handler that failed in a child process or as a command through the middlewares."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(getattr(outcome, "error", str(outcome)))
        self.outcome = outcome


class HandlerInvoker:
    """Resources that handlers of one worker need: opened before its first job, closed after its last."""

    def __init__(self, app: Holdfast, settings: Settings, threads: ThreadExecutor | None = None) -> None:
        """``threads``: those of ``def`` handlers; None: as many as the settings say."""
        self._app = app
        self._settings = settings
        self._exit_stack = AsyncExitStack()
        self._injected: dict[str, dict[str, Any]] = {}
        self._threads = ThreadExecutor(settings.concurrency) if threads is None else threads
        self._processes: ProcessExecutor | None = None
        self._middlewares = app.middlewares
        self.watcher = ResourceWatcher()
        """Watches the resource use of jobs in their own processes."""

    async def open(self) -> None:
        """Checks tasks, enters lifespans, makes dependencies, and starts child processes if tasks need them."""
        app = self._app
        for task in app.registry:
            task.check_runnable()
            if task.resources is not None:
                maxima = largest_limits(self._settings)
                task.resources.to_limits().check_within(maxima, f"resources of task {task.name!r}")
        for lifespan in app.lifespans:
            await self._exit_stack.enter_async_context(lifespan(app))
        await self._make_dependencies()
        if any(task.executor == "process" for task in app.registry):
            self._processes = ProcessExecutor(
                # A slot for every job that may run: a job that waits for a child spends its timeout waiting, as it
                # does after a reload has raised the concurrency (docs/workers.md).
                self._settings.concurrency,
                warm=min(self._settings.concurrency, os.cpu_count() or 1),
                app=self._settings.app,
                recycle_jobs=self._settings.recycle_jobs,
                recycle_memory=self._settings.recycle_memory,
                result_limit=self._settings.result_limit,
                log=LogLimits(self._settings.job_lines, self._settings.job_line_size),
                events=app.events,
                watcher=self.watcher,
            )
            await self._processes.start()

    def wrap_handlers(self, outermost: Middleware) -> None:
        """Runs handlers inside one more middleware, around those of the application."""
        self._middlewares = [outermost, *self._middlewares]

    def resize(self, concurrency: int) -> None:
        """Sets the number of threads for handlers."""
        self._threads.resize(concurrency)

    async def close(self) -> int:
        """Undoes ``open``; returns the number of threads stuck in handlers that do not end."""
        if self._processes is not None:
            await self._processes.close()
        stuck = self._threads.close()
        await self._exit_stack.aclose()
        return stuck

    # ── dependencies ──────────────────────────────────────────────────────────────────────────────────────────
    async def _make_dependencies(self) -> None:
        made: dict[type, Any] = {}
        for task in self._app.registry:
            for kind in task.dependencies.values():
                if kind not in made:
                    made[kind] = await self._make(task, kind)
            self._injected[task.name] = {name: made[kind] for name, kind in task.dependencies.items()}

    async def _make(self, task: Task[..., Any], kind: type) -> Any:
        factory = self._app.providers.get(kind)
        if factory is None:
            raise ConfigError(
                f"task {task.name!r} asks for a {kind.__name__}, which nothing provides; "
                f"register a factory with @app.provide that returns one"
            )
        if inspect.isasyncgenfunction(factory):
            return await self._exit_stack.enter_async_context(asynccontextmanager(factory)())
        value = factory()
        if inspect.isawaitable(value):
            value = await value
        if hasattr(value, "__aenter__") and not isinstance(value, kind):
            value = await self._exit_stack.enter_async_context(value)
        return value

    # ── calling ───────────────────────────────────────────────────────────────────────────────────────────────
    def call(self, task: Task[..., Any], context: Context) -> Coroutine[Any, Any, Any]:
        """Returns a coroutine that runs the handler inside the middlewares and returns its result.

        Raises Invalid if the job's payload does not fit the handler.
        """
        signature = task.prepare()
        arguments = signature.bind(context.job.payload)
        if signature.dependencies:
            arguments |= self._injected.get(task.name, {})
        if task.executor == "async" and not self._middlewares and not task.scopes:
            if signature.needs_context:
                return signature.entry(context, **arguments)  # type: ignore[no-any-return]  # an async def gives one
            return signature.entry(**arguments)  # type: ignore[no-any-return]  # as above
        return self.apply_middleware(context, functools.partial(self._run_handler, task, context, arguments))

    async def apply_middleware(self, context: Context, handler: Callable[[], Awaitable[Any]]) -> Any:
        """Runs ``handler`` inside every middleware; the first registered is the outermost."""
        call_next: Next = _innermost(handler)
        for middleware in reversed(self._middlewares):
            call_next = _wrap(middleware, call_next)
        return await call_next(context)

    async def _run_handler(self, task: Task[..., Any], context: Context, arguments: dict[str, Any]) -> Any:
        if task.executor == "process":
            return await self._run_in_child(task, context)
        leading = (context,) if task.needs_context else ()
        handler = functools.partial(task.entry, *leading, **arguments)
        if task.executor == "async":
            return await await_in_scopes(task.scopes, context, handler)
        called = functools.partial(call_in_scopes, task.scopes, context, handler)
        # A context can be entered once at a time: the thread gets a copy of the one this coroutine runs in.
        try:
            return await self._threads.run(called, contextvars.copy_context(), context.cancel)
        except NoThread as error:
            raise OutcomeRaised(Released(f"this worker cannot start a thread: {error}", UNSTARTABLE_DELAY)) from error

    async def _run_in_child(self, task: Task[..., Any], context: Context) -> Any:
        if self._processes is None:
            raise ConfigError(f"task {task.name!r} was registered after the worker had started; restart the worker")
        carrier = None if self._app.spans is None else self._app.spans.trace_context()
        asked = UNLIMITED if task.resources is None else task.resources.to_limits()
        limits = asked.restricted_to(largest_limits(self._settings))
        ran = await self._processes.run(task, context.job, lambda: context.log, carrier, limits)
        return unwrap_outcome(ran)


def unwrap_outcome(outcome: Outcome) -> Any:
    """Returns the result of a handler that ran in another process; raises OutcomeRaised if it failed."""
    if not isinstance(outcome, Succeeded):
        raise OutcomeRaised(outcome)
    return None if outcome.result is None else msgspec.json.decode(outcome.result)


def _innermost(handler: Callable[[], Awaitable[Any]]) -> Next:
    async def call_next(_: Context) -> Any:
        return await handler()

    return call_next


def _wrap(middleware: Callable[[Any, Next], Any], call_next: Next) -> Next:
    async def call(context: Context) -> Any:
        return await middleware(context, call_next)

    return call
