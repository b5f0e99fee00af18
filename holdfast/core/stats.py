"""Statistics of queues at a bounded cost: the counts of a store, and values derived from them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.core.models import NOT_STARTED, TERMINAL, JobState, QueueInfo

K = TypeVar("K")
Kinds = frozenset[JobState]

STATE_GROUPS: tuple[Kinds, ...] = (
    frozenset({JobState.QUEUED}),
    frozenset({JobState.SCHEDULED, JobState.FAILED}),
    frozenset({JobState.WAITING}),
    frozenset({JobState.RUNNING}),
    frozenset({JobState.SUCCEEDED}),
    frozenset({JobState.DEAD}),
    frozenset({JobState.CANCELLED}),
)
"""States that are counted together, because one index or data structure holds them."""


class StateCounts(msgspec.Struct, frozen=True):
    """Exact numbers of the jobs that match a filter. ``first_created_us``: when the earliest of them was created; None
    without jobs, and on Redis where the filter has only states and a queue."""

    states: dict[JobState, int]
    """Every state, with the number of jobs in it."""
    first_created_us: int | None = None

    @property
    def total(self) -> int:
        """Returns the number of jobs in all states."""
        return sum(self.states.values())

    @property
    def ended(self) -> int:
        """Returns the number of jobs that have ended."""
        return sum(self.states[state] for state in TERMINAL)


class CountGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Row of a grouped count. ``later``: its jobs are not due yet. ``recent``: its jobs changed recently."""

    queue: str
    state: JobState
    worker: str | None
    attempts: int
    later: bool
    recent: bool
    number: int
    seconds: float = 0.0  # total length of the latest attempts of ended jobs
    longest: float = 0.0
    age: float = 0.0  # seconds since the first job of the group ended

    @property
    def failures(self) -> int:
        """Failed executions of each job."""
        return max(0, self.attempts - (self.state in (JobState.RUNNING, JobState.SUCCEEDED)))


class JobStats(msgspec.Struct, frozen=True):
    """Bounded counts: at most ``most`` jobs of each of the ``STATE_GROUPS``, of ended jobs the latest."""

    groups: list[CountGroup]
    most: int
    truncated_states: Kinds = frozenset()
    """Further states that may have more jobs: jobs of other queues took their places in the count."""
    ages: Mapping[JobState, float] = {}
    """By terminal state, seconds since the first counted job of all queues ended; empty: see ``groups``."""

    def count_jobs(self, which: Callable[[CountGroup], bool] = lambda group: True) -> int:
        """Sums the counts of some groups."""
        return sum(group.number for group in self.groups if which(group))

    def count_by(
        self, key: Callable[[CountGroup], K], which: Callable[[CountGroup], bool] = lambda group: True
    ) -> Mapping[K, int]:
        """Sums the counts of some groups, by the ``key`` of each."""
        found: Counter[K] = Counter()
        for group in self.groups:
            if which(group):
                found[key(group)] += group.number
        return found

    @property
    def at_least(self) -> Kinds:
        """States that may have more jobs than were counted."""
        return full_states(self.count_by(lambda group: group.state), self.most) | self.truncated_states

    def ended_per_second(self, recent: timedelta) -> float:
        """Returns the recent rate of ended jobs a second. ``recent``: the requested window."""
        ages, rate = self.ages or self._ages(), 0.0
        lately = self.count_by(lambda group: group.state, lambda group: group.recent)
        for state in TERMINAL:
            rate += lately.get(state, 0) / covered_seconds(
                recent, ages.get(state, 0.0), is_complete=state not in self.at_least
            )
        return rate

    def _ages(self) -> Mapping[JobState, float]:
        ages: dict[JobState, float] = {}
        for group in self.groups:
            if group.state in TERMINAL:
                ages[group.state] = max(group.age, ages.get(group.state, 0.0))
        return ages

    def for_queues(self, allows: Callable[[str], bool]) -> JobStats:
        """Returns the counts of some queues."""
        own = [group for group in self.groups if allows(group.queue)]
        return JobStats(own, self.most, self.at_least, self.ages or self._ages())


def full_states(numbers: Mapping[JobState, int], max_count: int, buckets: Sequence[Kinds] = STATE_GROUPS) -> Kinds:
    """Returns the states whose bucket reached ``max_count``: there may be more jobs than these numbers."""
    full = [bucket for bucket in buckets if sum(numbers.get(state, 0) for state in bucket) >= max_count]
    return frozenset(state for bucket in full for state in bucket)


def covered_seconds(recent: timedelta, age: float, *, is_complete: bool) -> float:
    """Returns the length of the window that was counted in full: ``recent``, or at most ``age`` of the first job if the
    count is not ``is_complete``. At least one second, since many jobs may end in an instant."""
    seconds = recent.total_seconds()
    return max(1.0, seconds if is_complete else min(seconds, age))


def merge_groups(groups: Iterable[CountGroup]) -> list[CountGroup]:
    """Merges groups that differ in their numbers only."""
    found: dict[tuple[object, ...], CountGroup] = {}
    for each in groups:
        key = (each.queue, each.state, each.worker, each.attempts, each.later, each.recent)
        known = found.get(key)
        found[key] = each if known is None else _together(known, each)
    return list(found.values())


def _together(one: CountGroup, other: CountGroup) -> CountGroup:
    return msgspec.structs.replace(
        one,
        number=one.number + other.number,
        seconds=one.seconds + other.seconds,
        longest=max(one.longest, other.longest),
        age=max(one.age, other.age),
    )


class CountRow(NamedTuple):
    """Number of jobs of a queue and state. Of ended ones, ``lately`` ended recently, the first ``age_us`` ago."""

    queue: str
    state: JobState
    number: int
    lately: int = 0
    age_us: int = 0


def queues_of(
    counted: Sequence[CountRow], paused: Mapping[str, bool], *, recent: timedelta, max_count: int
) -> dict[str, QueueInfo]:
    """Returns the counted and the paused queues by name, without the age of their oldest ready job."""
    names = sorted({row.queue for row in counted} | {name for name in paused if paused[name]})
    states: dict[str, Counter[JobState]] = {name: Counter() for name in names}
    for row in counted:
        if row.number:
            states[row.queue][row.state] += row.number
    together = [bucket for bucket in STATE_GROUPS if not bucket & NOT_STARTED]
    shared = full_states(sum(states.values(), Counter()), max_count, together)
    own = [bucket for bucket in STATE_GROUPS if bucket & NOT_STARTED]
    rates = _rates(counted, recent, max_count)
    return {
        name: QueueInfo(
            name=name,
            paused=paused.get(name, False),
            states={state.value: number for state, number in states[name].items()},
            oldest_ready=None,
            at_least=shared | full_states(states[name], max_count, own),
            ended_per_second=rates.get(name, 0.0),
        )
        for name in names
    }


def _rates(counted: Sequence[CountRow], recent: timedelta, max_count: int) -> Mapping[str, float]:
    rates: defaultdict[str, float] = defaultdict(float)
    for state in TERMINAL:
        seen = [row for row in counted if row.state is state]
        is_complete = sum(row.number for row in seen) < max_count
        seconds = covered_seconds(recent, max((row.age_us for row in seen), default=0) / 1e6, is_complete=is_complete)
        for row in seen:
            rates[row.queue] += row.lately / seconds
    return rates
