"""Checks of ids, keys and filters that callers name jobs by."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.errors import Invalid, InvalidId
from holdfast.core.models import JobFilter, parse_id

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
