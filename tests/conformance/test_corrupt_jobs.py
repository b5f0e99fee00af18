"""Jobs that another program wrote to: a job that cannot be handled ends dead, and delays no other."""

from __future__ import annotations

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition
from holdfast.core.models import JobState, Reason
from holdfast.stores.base import Store
from tests.conformance.support import after, claim, ending, lose_all, new_job, put, running, stored, take
from tests.support.spoiling import spoil

DEPTHS = (64, 990, 1500)
"""Levels of lists in an object: too deep for us by one, and what SQLite still takes for JSON, but not every Python."""


@pytest.mark.parametrize("depth", DEPTHS)
async def test_options_nested_too_deep_do_not_affect_other_jobs(store: Store, home: str, depth: int) -> None:
    deep, innocent = await put(store, new_job(), new_job())
    spoil(home, deep, options='{"metadata": {"a": ' + "[" * depth + "]" * depth + "}}")

    assert (await stored(store, deep)).options is None
    assert [job.id for job in await take(store)] == [innocent]
    found = await stored(store, deep)
    assert (found.reason, found.error_group) == (Reason.PAYLOAD, "unreadable")


async def test_end_of_an_unreadable_job_starts_what_waits_for_it(store: Store, home: str) -> None:
    deep = new_job()
    waiting = after(deep.id, on=Condition.FAILURE)
    await put(store, deep, waiting)
    spoil(home, deep.id, options='{"metadata": {"a": ' + "[" * 990 + "]" * 990 + "}}")

    assert await take(store) == []
    assert (await stored(store, deep.id)).state is JobState.DEAD
    assert [job.id for job in await take(store)] == [waiting.id]


async def test_lost_job_with_deep_options_does_not_hide_others(store: Store, home: str, clock: ManualClock) -> None:
    deep, innocent = await running(store), await running(store)
    spoil(home, deep.id, options='{"metadata": {"a": ' + "[" * 990 + "]" * 990 + "}}")

    assert set(await lose_all(store, clock)) == {deep.id, innocent.id}
    assert [job.id for job in (await claim(store, max_must_start=2)).jobs] == [innocent.id]
    assert (await stored(store, deep.id)).state is JobState.DEAD


async def test_an_attempt_that_is_not_there_is_not_given_back(store: Store, home: str) -> None:
    robbed, neighbour = await running(store), await running(store)
    spoil(home, robbed.id, attempts=0)

    answers = await store.queueing.settle([ending(job, JobState.QUEUED, refund=True) for job in (robbed, neighbour)])

    assert [answer.accepted for answer in answers] == [True, True]
    assert [(await stored(store, job.id)).attempts for job in (robbed, neighbour)] == [0, 0]
