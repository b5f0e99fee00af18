"""Searches of jobs by a filter: which statements find them without reading most others, and how far they get in time.

Successes are many, and soon met. The others are few among millions, and found by the indexes of their states.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.stats import StateCounts
from holdfast.stores.base import Store
from holdfast.stores.common.named_sql import CODES, STATES

UNSUCCESSFUL = frozenset({JobState.DEAD, JobState.CANCELLED})
"""States of few jobs among millions, which are found without reading the others."""

_MAX_UNENDED, _MAX_FILTERED = 20_000, 50_000
_GROWTH = 4

FIRST_PART = 10_000
"""Number of jobs in the first part of a search in parts, and the least."""


class Search(NamedTuple):
    """A statement by its name in ``queries.sql``, and the states of the jobs it finds; none: those of the filter."""

    statement: str
    states: Sequence[JobState] = ()

    @property
    def state_codes(self) -> list[int]:
        """The states as they stand in rows."""
        return [CODES[state] for state in self.states]


_ALL_JOBS = Search("find")


def is_unsuccessful(where: JobFilter) -> bool:
    """Returns True if it asks for dead or cancelled jobs only."""
    return bool(where.states) and UNSUCCESSFUL.issuperset(where.states)


def costs_its_page(where: JobFilter) -> bool:
    """Returns True if a search reads nothing but its page of matches: it takes no slot of the searches."""
    return where == JobFilter(states=where.states) and (not where.states or is_unsuccessful(where))


def unended_states(where: JobFilter) -> list[JobState]:
    """Returns the states that matching jobs have which have not ended; none if the search uses no index of them."""
    if JobState.SUCCEEDED in _possible_states(where) or _is_by_tag(where):
        return []
    return [state for state in JobState if state in _possible_states(where) - UNSUCCESSFUL]


def max_unended(where: JobFilter) -> int:
    """Returns the number of jobs that have not ended among which a search looks before it goes through all jobs.

    Of many jobs in some states a page is soon met; with another condition perhaps none.
    """
    return _MAX_UNENDED if where == JobFilter(states=where.states) else _MAX_FILTERED


def choose_searches(where: JobFilter, unended: int) -> list[Search]:
    """Returns the searches that together find such jobs. ``unended``: how many are in ``unended_states``."""
    if _is_by_tag(where):
        return [Search("find_tagged")]
    states = _possible_states(where)
    if JobState.SUCCEEDED in states or unended > max_unended(where):
        return [_ALL_JOBS]
    found = [Search("find_ended", [state]) for state in states & UNSUCCESSFUL]
    if unended_states(where):
        found.append(Search("find_unended", unended_states(where)))
    return found


class CountSearch(NamedTuple):
    """A statement that counts jobs, by its name in ``queries.sql``, its filter, and its own parameters."""

    statement: str
    where: JobFilter
    parameters: dict[str, object]


def choose_counts(where: JobFilter) -> list[CountSearch]:
    """Returns the statements that together count such jobs."""
    if is_unsuccessful(where):
        return [CountSearch("count_ended", where, {"state": CODES[state]}) for state in set(where.states)]
    if where.tag is not None:
        return [CountSearch("count_tagged", replace(where, tag=None), {"of_tag": where.tag})]
    return [CountSearch("count", where, {})]


def sum_counts(rows: Iterable[Sequence[Any]]) -> StateCounts:
    """Returns the counts of the rows of such statements: a number for each state, and the earliest creation."""
    totals, created = [0] * len(STATES), []
    for *numbers, first_created in rows:
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        created += [] if first_created is None else [first_created]
    return StateCounts({state: totals[CODES[state]] for state in JobState}, min(created, default=None))


def may_read_all(where: JobFilter, searches: Sequence[Search]) -> bool:
    """Returns True if the search goes through jobs that do not match, the newest first, until a page is full."""
    return [*searches] == [_ALL_JOBS] and not costs_its_page(where)


def _possible_states(where: JobFilter) -> frozenset[JobState]:
    """Returns the states in which a job can match. Succeeded ones have no error."""
    has_error = where.error is not None or where.error_group is not None
    return frozenset(where.states or JobState) - ({JobState.SUCCEEDED} if has_error else set())


def _is_by_tag(where: JobFilter) -> bool:
    return where.tag is not None and not is_unsuccessful(where)


async def iterate_jobs(store: Store, where: JobFilter, *, page_size: int = 500) -> AsyncGenerator[Job, None]:
    """Yields all jobs that match, the newest first. Raises as ``find`` does, also between jobs."""
    cursor, has_more = None, True
    while has_more:
        page = await store.query.find(where, limit=page_size, cursor=cursor)
        cursor, has_more = page.cursor, page.cursor is not None
        for job in page.jobs:
            yield job


class SearchParts:
    """The parts in which a search goes through all jobs, so that it ends after some seconds with what it has found."""

    def __init__(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self.size = FIRST_PART
        """Number of jobs of the next part."""

    def has_time(self) -> bool:
        """Returns True if there is time for another part; to be asked once after each."""
        now = time.monotonic()
        took, self._begun = max(now - self._begun, 1e-6), now
        in_time = self.size * (self._until - now) / took
        self.size = min(_GROWTH * self.size, max(int(in_time), FIRST_PART))
        return in_time >= FIRST_PART / 2
