"""A task that knows its application."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.app.batches import Batch
from holdfast.app.handle import JobHandle
from holdfast.app.submitter import JobOptions, draft_job
from holdfast.app.sync import Blocker
from holdfast.app.workflows import After
from holdfast.core.encryption import Codec
from holdfast.core.ids import new_id
from holdfast.core.models import NewJob
from holdfast.core.portal import forbid_running_loop, requires_loop
from holdfast.core.retry import Retry
from holdfast.core.unique import Unique, as_unique
from holdfast.core.validation import check_tags, explain_attribute, with_suggestions
from holdfast.settings.settings import Settings
from holdfast.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


_SUBMIT = "to submit a job: await task.enqueue(…), or task.sync.enqueue(…) where there is no event loop"
_WITH_OPTIONS = "to submit a job with options: await task.options(delay=60, queue=…, priority=…).enqueue(…)"
_ELSEWHERE = {
    **dict.fromkeys(("delay", "send", "kiq", "defer", "defer_async", "enqueue_async", "perform_async"), _SUBMIT),
    **dict.fromkeys(
        ("apply_async", "send_with_options", "schedule", "configure", "kicker", "enqueue_in"), _WITH_OPTIONS
    ),
    **dict.fromkeys(("perform_in", "perform_at", "enqueue_at"), _WITH_OPTIONS),
    **dict.fromkeys(("s", "si", "signature", "subtask", "message"), "to draft a job: task.new_job(…)"),
    **dict.fromkeys(("apply", "run", "call_local", "fn"), "to call the function itself: task(…)"),
    **dict.fromkeys(
        ("map", "starmap", "chunks"), "to submit a job for each: await app.enqueue_many([task.new_job(item), …])"
    ),
    "request": "the running job is a first parameter annotated Context: context.id, context.attempts",
    "options": "give all options in one call: task.options(delay=60, queue=…)",
    "AsyncResult": "to get the handle of a job: app.handle(id)",
}
"""Methods of tasks in other queues, and of a task without options, with what to write here."""


class TaskOwner(Blocker, Protocol):
    """The application that a task belongs to."""

    @property
    def settings(self) -> Settings: ...

    @property
    def codec(self) -> Codec | None: ...

    async def submit(self, job: NewJob, *, connection: Any = None) -> JobHandle[Any]: ...


class _Explaining:
    """Explains the name here of a submitting method that other queues have."""

    __slots__ = ()

    if not TYPE_CHECKING:  # to a type checker, other attributes are errors as ever

        def __getattr__(self, name: str) -> Any:
            raise explain_attribute(self, name, _ELSEWHERE)


class BoundTask(_Explaining, Task[P, R], Generic[P, R, F]):
    """A function registered by ``@app.task``. Calling it just calls the function."""

    __slots__ = ("_app", "_with_defaults")

    def __init__(self, app: TaskOwner, name: str, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(name, function, **options)
        self._app = app
        self._with_defaults: ConfiguredTask[P, R] = ConfiguredTask(app, self, JobOptions(), None)

    @property
    def __call__(self) -> F:  # a call has the function's own type, its Context included
        """Just call the function: with its context, if it takes one, and without any queue."""
        function: F = self.function  # type: ignore[assignment]
        return function

    def new_job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """A job with these arguments, not submitted yet: for ``app.enqueue_many``."""
        return self._with_defaults.new_job(*args, **kwargs)

    @requires_loop
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Submit a job with these arguments. When this returns, it is stored."""
        return await self._with_defaults.submit(*args, **kwargs)

    @with_suggestions
    def options(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        delay: float | timedelta | str | None = None,
        run_at: datetime | str | None = None,
        key: str | None = None,
        key_for: float | timedelta | str | None = None,
        unique: Unique | str | float | timedelta | None = None,
        expires: float | timedelta | datetime | str | None = None,
        max_attempts: int | UnsetType | None = UNSET,
        timeout: float | timedelta | str | None = None,
        retry: Retry | str | None = None,
        tags: tuple[str, ...] | list[str] = (),
        metadata: dict[str, object] | None = None,
        after: After | Iterable[After] | None = None,
        batch: Batch | None = None,
        id: str | None = None,
        connection: Any = None,
    ) -> ConfiguredTask[P, R]:
        """Say more about the jobs to be enqueued through the answer; None leaves a value to task and settings;
        max_attempts=None is no limit.

        delay, key_for, timeout: seconds, a timedelta, or text like "5m".
        run_at: an aware datetime, or RFC 3339 text with offset.
        key: an idempotency key: at most one job is created for it; key_for: it lives at least that long.
        unique: a policy for jobs that do the same work: a ``Unique``, or its ``during`` alone, like "active".
        expires: a span or an instant by which a worker must have taken the job, else it is cancelled; or "never".
        after: jobs that must have succeeded first: ids, handles, drafted jobs, or a `Dependency` for another end.
        batch: the batch of which they are members, by its id or handle; it must not have ended.
        connection: submit inside the transaction of this connection of yours, to the same database.

        Raises `Invalid` at once for a value that is not valid.
        """
        options = JobOptions(
            id=id,
            queue=queue,
            priority=priority,
            delay=delay,
            run_at=run_at,
            key=key,
            key_for=key_for,
            unique=None if unique is None else as_unique(unique),
            expires=expires,
            max_attempts=max_attempts,
            timeout=timeout,
            retry=retry,
            tags=check_tags(tags) if tags else (),
            metadata=metadata,
            after=after,
            batch=batch,
        )
        prepared = ConfiguredTask(self._app, self, options, connection)
        prepared.check()
        return prepared

    @property
    def sync(self) -> BlockingTask[P, R]:
        """For blocking callers: ``task.sync.enqueue(…)``."""
        return self._with_defaults.sync


class ConfiguredTask(_Explaining, Generic[P, R]):
    """A task with options for its next jobs."""

    __slots__ = ("_app", "_connection", "_options", "_settings", "_task", "_template", "_unique")

    def __init__(self, app: TaskOwner, task: BoundTask[P, R, Any], options: JobOptions, connection: Any) -> None:
        self._app = app
        self._task = task
        self._options = options
        self._connection = connection
        self._template: NewJob | None = None
        self._unique: Unique | None = None
        self._settings: Settings | None = None  # those that the template was checked with

    def check(self) -> NewJob:
        """A job without arguments that carries the options. Raises `Invalid` where one is not valid."""
        settings = self._app.settings
        options = with_defaults(self._options, self._task)
        template = draft_job(self._task.name, "{}", options, settings, self._app.codec)
        self._unique = None if options.unique is None else as_unique(options.unique)
        self._template, self._settings = template, settings
        return template

    def new_job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """A job with these arguments and options, not submitted yet."""
        settings = self._app.settings
        payload = self._task.encode(args, kwargs, settings.payload_limit)
        template = self._template
        if template is None or self._settings is not settings:  # checked once, not once a job
            template = self.check()
        fresh = new_id() if self._options.id is None else template.id
        job = msgspec.structs.replace(template, id=fresh, payload=payload)
        return job if self._unique is None else self._unique.bind(job, self._app.codec)

    def decode_result(self, text: str | None) -> R:
        """Decodes a stored result by the function's return annotation."""
        return self._task.decode_result(text)

    @requires_loop
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Submit a job with these arguments: stored on return, or part of ``connection``'s transaction."""
        return await self.submit(*args, **kwargs)

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """``enqueue`` for callers that run the coroutine themselves."""
        return await self._app.submit(self.new_job(*args, **kwargs), connection=self._connection)

    @property
    def connection(self) -> Any:
        """Returns the connection of the caller whose transaction its jobs join; None if none was given."""
        return self._connection

    @property
    def sync(self) -> BlockingTask[P, R]:
        """For blocking callers."""
        return BlockingTask(self._app, self)


class BlockingTask(_Explaining, Generic[P, R]):
    """``task.sync``: the blocking view of a task, with or without options."""

    __slots__ = ("_app", "_prepared")

    def __init__(self, app: TaskOwner, prepared: ConfiguredTask[P, R]) -> None:
        self._app = app
        self._prepared = prepared

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Submit a job with these arguments, blocking until it is stored."""
        forbid_running_loop("await task.enqueue(…) itself instead of task.sync.enqueue(…)")
        connection = self._prepared.connection
        if connection is None:
            connection = self._app._current_connection()
        job = self._prepared.new_job(*args, **kwargs)
        call = self._app.submit(job, connection=connection)
        return self._app.run_blocking(call, in_this_thread=connection is not None)


def with_defaults(options: JobOptions, task: Task[..., Any]) -> JobOptions:
    """Returns the options, with the task's values where they have none."""
    given: dict[str, Any] = {}
    if options.queue is None:
        given["queue"] = task.queue
    if options.priority is None:
        given["priority"] = task.priority
    if options.max_attempts is UNSET:
        given["max_attempts"] = task.max_attempts
    if options.unique is None:
        given["unique"] = task.unique
    else:
        task.check_unique(as_unique(options.unique))
    if options.expires is None:
        given["expires"] = task.expires
    if task.tags:
        given["tags"] = (*task.tags, *(tag for tag in options.tags if tag not in task.tags))
    return msgspec.structs.replace(options, **given)
