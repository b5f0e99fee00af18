"""Registration of tasks, middlewares, lifespan and dependencies with an application."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, get_type_hints, overload

import msgspec

from holdfast.app.alerts import AlertManager
from holdfast.app.bound_task import BoundTask, TaskOwner
from holdfast.app.faults import FaultManager
from holdfast.app.handle import JobHandle
from holdfast.app.limits import LimitManager, merge_limits
from holdfast.app.schedules import ScheduleManager, draft_schedule, schedule_options
from holdfast.core.clock import Clock
from holdfast.core.encryption import Codec
from holdfast.core.errors import ConfigError
from holdfast.core.events import Events
from holdfast.core.job_changes import parse_expiry_span
from holdfast.core.limit_options import draft_limit, limit_options
from holdfast.core.limits import Limit
from holdfast.core.models import NewJob
from holdfast.core.resources import Resources, as_resources
from holdfast.core.retry import Retry, as_retry
from holdfast.core.schedule import Schedule
from holdfast.core.unique import Unique, as_unique
from holdfast.core.validation import check_name, check_tags, check_timeout, explain_attribute, with_suggestions
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.tasks import Context, ErrorMatch, Executor, HandlerScope, Registry

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


CallNext = Callable[[Context], Awaitable[Any]]
"""The rest of a job's way, as a middleware calls it."""

Middleware = Callable[[Context, CallNext], Awaitable[Any]]
"""``async def middleware(job, call_next): return await call_next(job)``; ``job`` is the handler's Context."""

M = TypeVar("M", bound=Middleware)
S = TypeVar("S", bound=HandlerScope)


PEER_NAMES = {
    **dict.fromkeys(("shared_task", "db_task", "actor", "job", "register_task"), "to register a task: @app.task()"),
    **dict.fromkeys(
        ("periodic_task", "db_periodic_task", "periodic", "cron", "on_after_configure", "add_periodic_task"),
        'to declare a schedule: app.schedule("nightly", task.new_job(…), cron="0 3 * * *")',
    ),
    **dict.fromkeys(
        ("send_task", "send", "defer", "enqueue_job", "configure_task"),
        "to submit a job by the name of its task: await app.enqueue(name, {…}), or app.sync.enqueue(…)",
    ),
    **dict.fromkeys(("AsyncResult", "fetch_job"), "to get the handle of a job: app.handle(id)"),
    **dict.fromkeys(
        ("conf", "config_from_object"),
        "settings are given in holdfast.toml, or as Holdfast(url, settings=Settings(…)); beat_schedule: "
        "app.schedule(…); task_routes: @app.task(queue=…); timezone: zone=… of a schedule",
    ),
    **dict.fromkeys(
        ("start", "worker_main", "Worker"), "to run a worker: the command holdfast -A … worker start, or app.worker()"
    ),
    **dict.fromkeys(
        ("control", "inspect"),
        "to revoke a job: await app.cancel(id); to see workers: app.workers(); to stop them: app.stop_workers()",
    ),
    **dict.fromkeys(
        ("group", "chord", "canvas", "GroupResult"), "for jobs that belong together: await app.enqueue_batch(…)"
    ),
    "Celery": 'to make an application: Holdfast("sqlite:///holdfast.db")',
    "autodiscover_tasks": "import the modules with tasks where the application is imported",
    "chain": "for jobs one after another: holdfast.chain_jobs(…)",
    "crontab": 'to declare a schedule: app.schedule("nightly", task.new_job(…), cron="0 3 * * *")',
    "signature": "to draft a job: task.new_job(…), or app.draft_job(name, {…})",
    "tasks": "to see the tasks: app.registry.task_names()",
}
"""Attributes of applications in other queues, with what to write here."""


class Registering(TaskOwner, Protocol):
    """An application with a registry of tasks."""

    handler_scopes: list[HandlerScope]

    @property
    def registry(self) -> Registry: ...


class Decorator:
    """``@app.task(…)``: keeps the function's parameters, without a leading Context, and its result."""

    def __init__(self, app: Registering, name: str | None, options: dict[str, Any]) -> None:
        self._app = app
        self._name = name
        self._options = options

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a Context that a task takes first is not its parameter
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]
    ) -> BoundTask[P, R, Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], R]
    ) -> BoundTask[P, R, Callable[Concatenate[Context, P], R]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> BoundTask[P, R, Callable[P, Coroutine[Any, Any, R]]]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> BoundTask[P, R, Callable[P, R]]: ...
    def __call__(self, function: Callable[..., Any]) -> BoundTask[..., Any, Any]:
        if self._name is None and function.__module__ == "__main__":
            raise ConfigError(
                f"@app.task on {function.__qualname__}: this module runs as __main__, and a worker would know it by "
                f'another name; give it one: @app.task("{function.__name__}")'
            )
        name = self._name or f"{function.__module__}.{function.__qualname__}".replace(".<locals>", "")
        task: BoundTask[..., Any, Any] = BoundTask(
            self._app, name, function, scopes=self._app.handler_scopes, **self._options
        )
        self._app.registry.register(task)
        return task


class TaskRegistration(ABC):
    """The registering half of ``Holdfast``."""

    settings: Settings
    clock: Clock
    registry: Registry
    middlewares: list[Middleware]
    handler_scopes: list[HandlerScope]
    lifespans: list[Callable[[Any], AbstractAsyncContextManager[Any]]]
    providers: dict[type, Callable[[], Any]]
    declared: dict[str, Schedule]
    declared_limits: dict[str, Limit]

    events: Events
    codec: Codec | None
    readable: frozenset[str]

    if not TYPE_CHECKING:  # to a type checker, other attributes are errors as ever

        def __getattr__(self, name: str) -> Any:
            raise explain_attribute(self, name, PEER_NAMES)

    @abstractmethod
    async def open_store(self) -> Store:
        """The store, open."""

    @abstractmethod
    def forget_limits(self) -> None:
        """Reads the limits again at the next submission: one was changed."""

    @property
    def schedules(self) -> ScheduleManager:
        """Schedules in the store: those that ``schedule`` declares, and others."""
        return ScheduleManager(self)  # of a view with a store of its own, too

    @property
    def limits(self) -> LimitManager:
        """Limits in the store: those that ``limit`` declares, and others."""
        return LimitManager(self)

    @property
    def faults(self) -> FaultManager:
        """Faults that are injected into workers whose settings allow them."""
        return FaultManager(self)

    @property
    def alerts(self) -> AlertManager:
        """Alerts of the rules in the settings."""
        return AlertManager(self)

    @abstractmethod
    async def submit(self, job: NewJob, *, connection: Any = None) -> JobHandle[Any]:
        """Submit a drafted job; inside the transaction of ``connection`` if one is given."""

    @abstractmethod
    def run_blocking(self, call: Coroutine[Any, Any, T], *, in_this_thread: bool = False) -> T:
        """Run one of this application's coroutines for a blocking caller."""

    @abstractmethod
    def _current_connection(self) -> Any:
        """The caller's connection whose transaction blocking submissions join by themselves. None: there is none."""

    @with_suggestions
    def task(
        self,
        name: str | None = None,
        *,
        queue: str = "default",
        retry: Retry | str | None = None,
        max_attempts: int | msgspec.UnsetType | None = msgspec.UNSET,
        timeout: float | timedelta | str | None = None,
        executor: Executor | None = None,
        retry_on: ErrorMatch | None = None,
        dead_on: ErrorMatch = (),
        priority: int = 0,
        tags: Sequence[str] = (),
        unique: Unique | str | float | timedelta | None = None,
        expires: float | timedelta | str | None = None,
        resources: Resources | None = None,
    ) -> Decorator:
        """Register a function as a task: ``@app.task("email.send", max_attempts=5)``.

        name: in jobs (default: module and function name). timeout: what one attempt may take: seconds, a
        timedelta, or text like "5m". retry: a Retry, or text as the settings take it, like "fixed:10" or "1,5,25".
        max_attempts: executions a job may have, None for no limit. executor: "async", "thread" or "process".
        retry_on, dead_on: exception classes or predicates that are, or are not, worth another attempt.
        unique: a policy for jobs that do the same work: a Unique, or its ``during``: "active", "unstarted", "10m".
        expires: a span within which a worker must take a job after its submission, else it is cancelled.
        resources: limits of a process task, such as Resources(memory="512M", cpu=60).
        """
        if callable(name):
            raise ConfigError("@app.task needs parentheses: write @app.task() or @app.task('name')")
        of_task = "timeout" if name is None else f"timeout of task {name!r}"
        options = {
            "queue": check_name("queue", queue),
            "retry": None if retry is None else as_retry(retry),
            "max_attempts": max_attempts,
            "timeout": None if timeout is None else check_timeout(timeout, of_task).total_seconds(),
            "executor": executor,
            "retry_on": retry_on,
            "dead_on": dead_on,
            "priority": priority,
            "tags": check_tags(tags) if tags else (),
            "unique": None if unique is None else as_unique(unique),
            "expires": None if expires is None else parse_expiry_span(expires),
            "resources": None if resources is None else as_resources(resources),
        }
        return Decorator(self, name, options)

    def schedule(self, name: str, job: NewJob, **options: Any) -> None:
        """Declare a schedule of drafted jobs: ``app.schedule("nightly", report.new_job("all"), cron="0 3 * * *")``.

        The options are the fields of ``ScheduleOptions``: cron and zone, every, or at; catch_up, overlap, jitter,
        max_runs. A worker adds and changes declared schedules when it starts, and removes those that the code no longer
        declares.
        """
        if name in self.declared:
            raise ConfigError(f"schedule {name!r} is declared twice; give one of them another name")
        self.declared[name] = draft_schedule(name, job, schedule_options(options))

    def limit(self, name: str, **options: Any) -> None:
        """Declare a limit: ``app.limit("mail", queue="mail", concurrency=20)``, ``app.limit("crm", task="crm.sync",
        by="args.tenant", concurrency=1, rate="10/s")``.

        The options are the fields of ``LimitOptions``: queue or task; by, concurrency, rate, burst, weight, shares,
        depth. A worker adds and changes declared limits when it starts; values that an operator gave one stay.
        """
        if name in self.declared_limits:
            raise ConfigError(f"limit {name!r} is declared twice; give one of them another name")
        drafted = draft_limit(name, limit_options(options))
        self.limits.check_declared({name: drafted})
        self.declared_limits[name] = drafted
        merge_limits(self.declared_limits, self.settings)

    def middleware(self, function: M) -> M:
        """Wrap every job: ``async def middleware(job, call_next): return await call_next(job)``; first is outermost."""
        asynchronous = inspect.iscoroutinefunction(function)
        if not asynchronous:
            raise ConfigError(f"middleware {function.__qualname__} must be an async function (job, call_next)")
        self.middlewares.append(function)
        return function

    def handler_scope(self, scope: S) -> S:
        """Run each handler inside a context manager, in the handler's own thread or child process.

        A function that takes the job's Context and returns one, such as ``@app.handler_scope @contextmanager def
        renew_session(job): …``. For ``async def`` handlers it is entered on the event loop; a manager that has
        ``__aenter__`` too is awaited there. Scopes are inside the middlewares; the first is the outermost.
        """
        _refuse_bare_function("handler_scope", scope, "contextmanager")
        self.handler_scopes.append(scope)
        return scope

    def lifespan(self, manager: F) -> F:
        """Run around each worker process: an async context manager function that takes the application."""
        _refuse_bare_function("lifespan", manager, "asynccontextmanager")
        self.lifespans.append(manager)
        return manager

    def provide(self, factory: F) -> F:
        """Register a dependency by its return annotation; a handler asks with ``http: Client = provided()``.

        The factory is called once per worker process. It returns the value, awaits it, or is an async generator or
        context manager around it, closed when the worker stops.
        """
        kind = get_type_hints(inspect.unwrap(factory)).get("return")
        arguments = getattr(kind, "__args__", ())
        if arguments and not isinstance(kind, type):
            kind = arguments[0]  # AsyncIterator[Client] provides a Client
        if not isinstance(kind, type):
            raise ConfigError(f"provider {factory.__qualname__} needs a return annotation: the class it provides")
        self.providers[kind] = factory
        return factory


def _refuse_bare_function(role: str, function: object, decorator: str) -> None:
    """Refuse what returns no context manager: a generator function or coroutine function without its decorator."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_kind(function) for is_kind in kinds):
        raise ConfigError(f"{role} {function!r}: decorate it with contextlib.{decorator} first")
