"""The backend for ``django.tasks`` of Django 6, or of its backport ``django-tasks``.

TASKS = {"default": {"BACKEND": "holdfast.integrations.django.backend.HoldfastBackend"}}

A task of Django is a task of Holdfast, named by its module path. Its payload has ``args`` and ``kwargs``.
"""

from __future__ import annotations

import builtins
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any

from django.apps import apps
from django.core import checks
from django.utils import timezone

try:
    from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ModuleNotFoundError:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

import holdfast
from holdfast.app.handle import canonical_id
from holdfast.core.errors import InvalidId
from holdfast.core.lifecycle import Dead, Snooze, Suspension
from holdfast.core.models import Attempt, Job, JobState, to_datetime
from holdfast.core.portal import call_off_loop, forbid_running_loop
from holdfast.integrations.django import app
from holdfast.tasks import Context

_STATUSES = {
    JobState.RUNNING: TaskResultStatus.RUNNING,
    JobState.SUCCEEDED: TaskResultStatus.SUCCESSFUL,
    JobState.DEAD: TaskResultStatus.FAILED,
    JobState.CANCELLED: TaskResultStatus.FAILED,
}
"""The status of each state; of any other it is READY."""
_RAISED = re.compile(r"^([^\W\d][\w.]*)(?::|$)", re.MULTILINE)
"""Lines of a traceback that begin with the path of a class."""
_UNNAMED_ERROR = "holdfast.JobFailed"
"""Class of errors without one: a timeout, a process that died."""
_registered: dict[str, Task] = {}
"""The tasks of Django that the application knows, by module path."""


class UnsupportedResult(TypeError):
    """A task returned a value that is not JSON. Not retryable: its work is done."""


class HoldfastBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Backend of ``django.tasks`` that submits jobs to the application of the project."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Task) -> None:
        """Raises InvalidTask if the task cannot be run here; registers it otherwise."""
        super().validate_task(task)
        name = task.module_path
        known = _registered.get(name)
        if known is None or known.func is not task.func:
            handler = _async_handler(task) if iscoroutinefunction(task.func) else _blocking_handler(task)
            app.task(name, dead_on=UnsupportedResult)(handler)
            _registered[name] = task

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> TaskResult:
        """Submits a job; inside ``transaction.atomic()`` it is part of the transaction."""
        forbid_running_loop("await task.aenqueue(…) instead of task.enqueue(…)")
        result, options = self._draft(task, args, kwargs)
        handle = app.sync.enqueue(task.module_path, {"args": result.args, "kwargs": result.kwargs}, **options)
        _set(result, id=handle.id, enqueued_at=_stored_at(handle.stored_at_us))
        task_enqueued.send(type(self), task_result=result)
        return result

    async def aenqueue(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> TaskResult:
        """Submits a job from async code."""
        result, options = self._draft(task, args, kwargs)
        handle = await app.enqueue(task.module_path, {"args": result.args, "kwargs": result.kwargs}, **options)
        _set(result, id=handle.id, enqueued_at=_stored_at(handle.stored_at_us))
        await task_enqueued.asend(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Returns the result of a job; TaskResultDoesNotExist if there is none."""
        return call_off_loop(lambda: app.run_blocking(self.aget_result(result_id)))

    async def aget_result(self, result_id: str) -> TaskResult:
        """Returns the result of a job; TaskResultDoesNotExist if there is none."""
        try:
            job_id = canonical_id(result_id)
        except InvalidId:
            raise TaskResultDoesNotExist(result_id) from None
        query = (await app.open_store()).query
        job = await query.get(job_id)
        if job is None or job.task not in _registered:
            raise TaskResultDoesNotExist(result_id)
        return self._read_result(job, await query.attempts(job_id))

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        """Returns an error if the project lacks the application, which imports tasks in the worker."""
        if not apps.is_installed("holdfast.integrations.django"):
            problem = f"TASKS[{self.alias!r}] needs 'holdfast.integrations.django' in INSTALLED_APPS."
            yield checks.Error(problem, id="holdfast.E001")

    def _draft(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[TaskResult, dict[str, Any]]:
        """Returns a result without an id, and the options of its job."""
        self.validate_task(task)
        options: dict[str, Any] = {"queue": task.queue_name, "priority": task.priority}
        if task.run_after is not None:
            naive = timezone.is_naive(task.run_after)
            options["run_at"] = timezone.make_aware(task.run_after) if naive else task.run_after
        return self._new_result(task, "", args, kwargs), options

    def _new_result(self, task: Task, job_id: str, args: Sequence[Any], kwargs: dict[str, Any]) -> TaskResult:
        return TaskResult(
            task=task,
            id=job_id,
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )

    def _read_result(self, job: Job, attempts: Sequence[Attempt]) -> TaskResult:
        is_later = not job.attempts and job.run_at_us > job.created_at_us
        changes = {"queue_name": job.queue, "run_after": job.run_at if is_later else None, "backend": self.alias}
        task = _registered[job.task].using(priority=job.priority, **changes)
        result = self._new_result(task, job.id, **job.decode_arguments())
        status = _STATUSES.get(job.state, TaskResultStatus.READY)
        started = [each.started_at for each in attempts if each.started_at is not None]
        present = [job.worker or ""] if job.state in (JobState.RUNNING, JobState.SUCCEEDED) else []
        _set(
            result,
            status=status,
            enqueued_at=job.created_at,
            started_at=started[0] if started else job.started_at,
            last_attempted_at=job.started_at,
            finished_at=job.ended_at,
            errors=[_read_error(each) for each in attempts if each.error is not None],
            worker_ids=[*(each.worker or "" for each in attempts), *present],
            _return_value=job.return_value(),
        )
        return result

    # ── in the worker ─────────────────────────────────────────────────────────────────────────────────────────────
    def result_of_context(self, task: Task, context: Context, args: list[Any], kwargs: dict[str, Any]) -> TaskResult:
        """Returns the result of a task that begins to run."""
        job, now = context.job, timezone.now()
        result = self._new_result(task, job.id, args, kwargs)
        _set(
            result,
            status=TaskResultStatus.RUNNING,
            enqueued_at=job.created_at,
            started_at=now,
            last_attempted_at=now,
            worker_ids=[job.worker or ""] * job.attempts,  # those of earlier attempts are not read
        )
        return result


def _blocking_handler(task: Task) -> Callable[..., Any]:
    def run_task(context: Context, args: list[Any], kwargs: dict[str, Any]) -> Any:
        backend = task.get_backend()
        result = backend.result_of_context(task, context, args, kwargs)
        task_started.send(type(backend), task_result=result)
        try:
            value = _succeed(result, task.func(*_leading(task, result), *args, **kwargs))
        except BaseException as error:
            if _fail(result, context, error):
                task_finished.send(type(backend), task_result=result)
            raise
        task_finished.send(type(backend), task_result=result)
        return value

    return run_task


def _async_handler(task: Task) -> Callable[..., Any]:
    async def run_task(context: Context, args: list[Any], kwargs: dict[str, Any]) -> Any:
        backend = task.get_backend()
        result = backend.result_of_context(task, context, args, kwargs)
        await task_started.asend(type(backend), task_result=result)
        try:
            value = _succeed(result, await task.func(*_leading(task, result), *args, **kwargs))
        except BaseException as error:
            if _fail(result, context, error):
                await task_finished.asend(type(backend), task_result=result)
            raise
        await task_finished.asend(type(backend), task_result=result)
        return value

    return run_task


def _leading(task: Task, result: TaskResult) -> tuple[TaskContext, ...]:
    return (TaskContext(task_result=result),) if task.takes_context else ()


def _succeed(result: TaskResult, returned: Any) -> Any:
    """Notes and returns the value as JSON gives it back; UnsupportedResult if JSON cannot hold it."""
    try:
        value = normalize_json(returned)
    except (TypeError, ValueError) as error:
        raise UnsupportedResult(str(error)) from error
    _set(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
    return value


def _fail(result: TaskResult, context: Context, error: BaseException) -> bool:
    """Notes the error; returns True if the job has no further attempt, so that it has ended."""
    result.errors.append(_describe_error(error))
    is_last = context.attempts == context.max_attempts and not isinstance(error, Snooze | Suspension)  # these go on
    is_final = is_last or isinstance(error, UnsupportedResult | Dead)
    if is_final:
        _set(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
    return is_final


def _describe_error(error: BaseException) -> TaskError:
    kind = type(error)
    text = "".join(traceback.format_exception(error))
    return TaskError(exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback=text)


def _read_error(attempt: Attempt) -> TaskError:
    """Returns the error of an attempt: the class is the one whose name begins the last lines of the traceback."""
    text = attempt.error or ""
    name = text.partition(":")[0]
    paths = [path for path in _RAISED.findall(attempt.traceback or "") if path.rpartition(".")[2] == name]
    path = paths[-1] if paths else name
    if "." not in path:
        homes = [each for each in (builtins, holdfast, sys.modules[__name__]) if hasattr(each, path)]
        path = f"{homes[0].__name__}.{path}" if homes else _UNNAMED_ERROR
    return TaskError(exception_class_path=path, traceback=attempt.traceback or text)


def _stored_at(us: int | None) -> datetime:
    return timezone.now() if us is None else to_datetime(us)


def _set(result: TaskResult, **values: Any) -> None:
    """Sets fields of a result, which is frozen."""
    for name, value in values.items():
        object.__setattr__(result, name, value)
