"""Arguments for the calls of the model test."""

from __future__ import annotations

import random
from datetime import timedelta

import msgspec
from hypothesis import strategies as st
from msgspec import UNSET

from holdfast.core.dependencies import Condition
from holdfast.core.ids import new_id
from holdfast.core.job_changes import JobChanges
from holdfast.core.lifecycle import Cancelled, Failed, Lost, Outcome, Released, Snoozed, Succeeded, Suspended
from holdfast.core.limits import Limit, LimitValues
from holdfast.core.models import NewJob, Reason
from holdfast.core.unique import Unique

LIMITED = "limited"
"""A queue with a limit, and with one for each value of ``n``."""
AT_ONCE, OF_A_KEY = 3, 2
LIMITS = (
    Limit(name="all", queue=LIMITED, values=LimitValues(concurrency=AT_ONCE)),
    Limit(name="key", queue=LIMITED, by="args.n", values=LimitValues(concurrency=OF_A_KEY)),
)


class FiveSeconds:
    """A policy that needs no luck. ``priority``: of retries."""

    def __init__(self, priority: int | None = None) -> None:
        self.priority = priority

    def delay_after(self, failures: int, rng: random.Random) -> timedelta:
        return timedelta(seconds=5)


spans = st.sampled_from([0.0, 0.000001, 1.0, 10.0, 29.999999, 30.0, 45.0]).map(lambda s: timedelta(seconds=s))
expiries = st.sampled_from([0.000001, 1.0, 10.0, 60.0]).map(lambda s: timedelta(seconds=s))
picks = st.lists(st.integers(0, 10_000), min_size=1, max_size=4)
policies = st.builds(
    Unique,
    during=st.sampled_from(["unstarted", "active", 10]),
    by=st.just(["task", "queue"]),
    on_conflict=st.sampled_from(["keep", "replace", "reschedule"]),
)


def with_policy(job: NewJob, policy: Unique | None) -> NewJob:
    """The job, with a key of its own for each kind of policy."""
    if policy is None:
        return job
    bound = policy.bind(msgspec.structs.replace(job, task=f"{job.task}-{policy.during}"))
    return msgspec.structs.replace(bound, task=job.task)


plain_jobs = st.builds(
    NewJob,
    id=st.builds(new_id),
    task=st.just("work"),
    payload=st.sampled_from(["{}", '{"n":1}', '{"n":2}']),
    queue=st.sampled_from(["a", "a", "b", LIMITED]),
    priority=st.sampled_from([0, 0, 1, -1]),
    delay=st.none() | spans,
    max_attempts=st.sampled_from([1, 2, 3, None]),
    key=st.none() | st.sampled_from(["k1", "k2"]),
    key_for=st.none() | spans,
    expires_in=st.none() | st.none() | expiries,
)
edits = st.builds(
    JobChanges,
    queue=st.none() | st.sampled_from(["a", "b", LIMITED]),
    priority=st.none() | st.sampled_from([0, 1, -1]),
    payload=st.none() | st.sampled_from(["{}", '{"n":1}']),
    delay=st.none() | spans,
    expires_in=st.none() | expiries,
    expires_at_us=st.sampled_from([UNSET, None]),
)
new_jobs = st.builds(with_policy, plain_jobs, st.none() | policies)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.just(Succeeded('"done"')),
    st.builds(Failed, error=st.sampled_from(["boom", "x\0y"]), retryable=st.booleans(), delay=st.none() | spans),
    st.builds(Snoozed, delay=spans),
    st.just(Released()),
    st.just(Cancelled()),
    st.just(Lost()),
    st.builds(Suspended, reason=st.sampled_from([Reason.SIGNAL, Reason.CHILDREN]), delay=st.none() | spans),
)
conditions = st.sampled_from(list(Condition))
step_names = st.sampled_from(["x", "x#2", "y"])
"""Steps that wait for a signal; each begins with its topic."""
timeouts = st.sampled_from([0.0, 0.000001, 5.0, 29.999999, 45.0, 3600.0]).map(lambda s: timedelta(seconds=s))
