"""Checks of ids, keys and filters of jobs, and of limits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from holdfast.core.errors import Invalid, InvalidId, NotFound
from holdfast.core.models import BulkResult, JobFilter, JobState, parse_id
from holdfast.core.validation import parse_count
from holdfast.tasks import Task

_YEAR_OF_MINUTES = 525_600
_MOST_AT_ONCE = 1_000_000  # jobs one operation may take in its one transaction
_FILTER_REMEDY = 'give a JobFilter, such as JobFilter(queue="mail", states=("dead",))'


def canonical_id(job_id: object) -> str:
    """The id in the store's spelling. Raises `InvalidId`, which is also a `NotFound`, for text that is no id."""
    canonical = parse_id(str(job_id))
    if canonical is None:
        raise InvalidId("id", job_id, "give a job's id (a UUID or ULID), or key: and its idempotency key")
    return canonical


def checked_filter(where: object) -> JobFilter:
    """The filter, an empty one for None. Raises `Invalid` for anything else."""
    if where is None:
        return JobFilter()
    if not isinstance(where, JobFilter):
        raise Invalid("where", where, _FILTER_REMEDY)
    return where


def check_selection(selection: object) -> None:
    """Raises `Invalid` for a mapping, whose keys would pass for ids."""
    if isinstance(selection, Mapping):
        raise Invalid("selection", selection, f"give an id, a list of ids, or a filter: {_FILTER_REMEDY}")


def check_no_function(task: object) -> None:
    """Refuse a function or task: its own ``enqueue`` takes the arguments."""
    if isinstance(task, Task):
        call = f"{task.function.__name__}.enqueue(…)"
        raise Invalid("task", task, f"give its name, {task.name!r}, or call {call} with the arguments")
    if callable(task):
        remedy = "register the function with @app.task() and call its enqueue(…), or give a task's name"
        raise Invalid("task", task, remedy)


def looked_at(minutes: int, most: int) -> tuple[timedelta, int]:
    """The span and the number of jobs that a count looks at."""
    recent = timedelta(minutes=parse_count(minutes, "minutes", least=1, most=_YEAR_OF_MINUTES, text=False))
    return recent, parse_count(most, "most", least=1, most=1_000_000, text=False)


def check_limit(limit: int) -> None:
    """Raises `Invalid` for a number of jobs that one operation cannot take."""
    parse_count(limit, "limit", least=1, most=_MOST_AT_ONCE, text=False)


def refused_state(operated: BulkResult) -> JobState:
    """The state that refused an operation on one job; raises `NotFound` where there is no job."""
    job_id, state = operated.refused[0]
    if state is None:
        raise NotFound(f"there is no job {job_id}")
    return state


def batch_size(size: int) -> int:
    """Jobs a transaction. Raises `Invalid` for too many, or none."""
    if not 1 <= size <= 10_000:
        raise Invalid("batch", size, "give between 1 and 10,000 jobs a transaction")
    return size
