"""Results of a bounded look at the queues, and the counts they allow. Pure, for every store.

SQL stores keep no counters and have no index by queue of ended jobs: each job would pay for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from holdfast.core.models import TERMINAL, JobState, QueueInfo
from holdfast.core.stats import BUCKETS, covered_seconds, full_states

_BY_QUEUE = frozenset({JobState.QUEUED, JobState.SCHEDULED, JobState.FAILED, JobState.WAITING})
"""States of which each queue's own jobs are looked at; of the others, those of all queues together."""


class CountRow(NamedTuple):
    """Jobs of a queue and state that were seen. Of ended ones: how many of them ended ``lately``, and how long ago the
    first of them all did."""

    queue: str
    state: JobState
    number: int
    lately: int = 0
    age_us: int = 0


def queues_of(
    looks: Sequence[CountRow], paused: Mapping[str, bool], *, recent: timedelta, most: int
) -> dict[str, QueueInfo]:
    """The queues that were seen and the paused ones, by name; without their oldest ready jobs yet."""
    names = sorted({look.queue for look in looks} | {name for name in paused if paused[name]})
    states: dict[str, Counter[JobState]] = {name: Counter() for name in names}
    for look in looks:
        if look.number:
            states[look.queue][look.state] += look.number
    together = [bucket for bucket in BUCKETS if not bucket & _BY_QUEUE]
    shared = full_states(sum(states.values(), Counter()), most, together)
    own = [bucket for bucket in BUCKETS if bucket & _BY_QUEUE]
    rates = _rates(looks, recent, most)
    return {
        name: QueueInfo(
            name=name,
            paused=paused.get(name, False),
            states={state.value: number for state, number in states[name].items()},
            oldest_ready=None,
            at_least=shared | full_states(states[name], most, own),
            ended_per_second=rates.get(name, 0.0),
        )
        for name in names
    }


def _rates(looks: Sequence[CountRow], recent: timedelta, most: int) -> Mapping[str, float]:
    rates: defaultdict[str, float] = defaultdict(float)
    for state in TERMINAL:
        seen = [look for look in looks if look.state is state]
        whole = sum(look.number for look in seen) < most
        seconds = covered_seconds(recent, max((look.age_us for look in seen), default=0) / 1e6, whole=whole)
        for look in seen:
            rates[look.queue] += look.lately / seconds
    return rates
