"""Jobs on their last attempt: a crash before they start ends them, so a claim takes no more than can start at once."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import NewJob
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.support import SECOND, claim, failing, lose, new_job, put, running, take, take_ids


def last(**fields: Any) -> NewJob:
    """A job whose first attempt is its last."""
    return new_job(max_attempts=1, **fields)


async def test_claim_ends_before_last_attempts_that_cannot_start(store: Store) -> None:
    ids = await put(store, last(), new_job(), last(), new_job(), last(), new_job())

    first = await claim(store, max_must_start=2)
    assert ([job.id for job in first.jobs], first.stopped_at_last_attempt, first.refused) == (ids[:4], True, 0)

    none = await claim(store, max_must_start=0)
    assert ([job.id for job in none.jobs], none.stopped_at_last_attempt, none.refused) == ([], True, 0)

    rest = await claim(store, max_must_start=1)
    assert ([job.id for job in rest.jobs], rest.stopped_at_last_attempt, rest.refused) == (ids[4:], False, 0)


async def test_claim_takes_every_last_attempt_without_a_bound(store: Store) -> None:
    ids = await put(store, *[last() for _ in range(5)])

    brought = await claim(store)

    assert ([job.id for job in brought.jobs], brought.stopped_at_last_attempt) == (ids, False)


async def test_claim_stops_at_a_retry_on_its_last_attempt(store: Store) -> None:
    job = await running(store, max_attempts=2)
    await store.queueing.settle([failing(job)])
    await store.maintenance.promote_due(limit=1)
    (other,) = await put(store)

    held = await claim(store, max_must_start=0)
    assert ([each.id for each in held.jobs], held.stopped_at_last_attempt) == ([], True)
    assert await take_ids(store, max_must_start=1) == [job.id, other]


async def test_unlimited_attempts_are_never_the_last(store: Store) -> None:
    ids = await put(store, new_job(max_attempts=None), new_job(max_attempts=None))

    brought = await claim(store, max_must_start=0)

    assert ([job.id for job in brought.jobs], brought.stopped_at_last_attempt) == (ids, False)


async def test_exact_bound_of_last_attempts_stops_no_claim(store: Store) -> None:
    ids = await put(store, *[last() for _ in range(4)])

    brought = await claim(store, 2, max_must_start=2)

    assert ([job.id for job in brought.jobs], brought.stopped_at_last_attempt) == (ids[:2], False)


@pytest.mark.parametrize("capacity", [{"a": 9, "b": 9, "c": 9}, {EVERY_QUEUE: 9}], ids=["named", "wildcard"])
async def test_max_must_start_bounds_the_whole_claim(store: Store, capacity: dict[str, int]) -> None:
    ids = {queue: await put(store, *[last(queue=queue) for _ in range(2)], new_job(queue=queue)) for queue in "abc"}

    brought = await claim(store, 9, capacity, max_must_start=3)

    assert brought.stopped_at_last_attempt
    assert sum(job.max_attempts == 1 for job in brought.jobs) == 3
    for queue in "abc":
        taken = [job.id for job in brought.jobs if job.queue == queue]
        assert taken == ids[queue][: len(taken)]


@pytest.mark.parametrize("capacity", [{"a": 2, "b": 2}, {EVERY_QUEUE: 2}], ids=["named", "wildcard"])
async def test_queue_stopped_at_a_last_attempt_starves_no_other(store: Store, capacity: dict[str, int]) -> None:
    await put(store, *[last(queue="a") for _ in range(4)])
    innocent = await put(store, *[new_job(queue="b") for _ in range(4)])

    brought = []
    for _ in range(4):
        brought += await take_ids(store, 2, capacity, max_must_start=0)

    assert brought == innocent


async def test_suspect_counts_as_startable(store: Store, clock: ManualClock) -> None:
    suspect = await running(store)
    await lose(store, clock, suspect)
    (single,) = await put(store, last())

    brought = await claim(store, max_must_start=1)

    assert ([job.id for job in brought.jobs], brought.stopped_at_last_attempt) == ([suspect.id], True)
    assert await take_ids(store, max_must_start=1) == [single]


async def test_named_jobs_on_their_last_attempt_are_bounded(store: Store) -> None:
    ids = await put(store, last(), new_job(), last(), new_job())

    brought = await claim(store, ids=ids, max_must_start=1)

    assert ([job.id for job in brought.jobs], brought.stopped_at_last_attempt) == (ids[:2], True)
    assert await take_ids(store, ids=ids, max_must_start=1) == ids[2:]


async def test_long_claim_counts_last_attempts_throughout(store: Store) -> None:
    jobs = [last() if number in (250, 260, 270) else new_job() for number in range(400)]
    ids = await put(store, *jobs)

    first = await claim(store, 400, max_must_start=2)
    assert ([job.id for job in first.jobs], first.stopped_at_last_attempt) == (ids[:270], True)

    rest = await take(store, 400, max_must_start=1)
    assert [job.id for job in rest] == ids[270:]


async def test_lower_priority_does_not_pass_a_last_attempt(store: Store) -> None:
    low = await put(store, new_job(), new_job(priority=-1))
    high = await put(store, last(priority=1), last(priority=1))

    brought = await claim(store, max_must_start=1)
    assert [job.id for job in brought.jobs] == high[:1]
    assert await take_ids(store, max_must_start=1) == [high[1], *low]


async def test_claim_stopped_at_a_last_attempt_reports_due_jobs(store: Store, clock: ManualClock) -> None:
    later = await put(store, new_job(delay=SECOND), new_job(delay=3 * SECOND))
    clock.advance(1)
    (single,) = await put(store, last())

    held = await claim(store, 1, max_must_start=0)
    if not held.stopped_at_last_attempt:  # what fell due was ready first
        assert [job.id for job in held.jobs] == later[:1]
        held = await claim(store, 1, max_must_start=0)

    assert (held.jobs, held.stopped_at_last_attempt, held.next_due) == ([], True, 2 * SECOND)
    assert single in await take_ids(store)


async def test_suspect_behind_a_last_attempt_stops_no_claim(store: Store, clock: ManualClock) -> None:
    suspect = await running(store)
    await lose(store, clock, suspect)
    (single,) = await put(store, last(priority=1))

    first = await take_ids(store, max_must_start=1)
    second = await take_ids(store, max_must_start=1)

    assert (len(first), {*first, *second}) == (1, {suspect.id, single})
