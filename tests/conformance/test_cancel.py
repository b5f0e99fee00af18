"""Cancelling: what waits ends at once, what runs is asked to stop."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import BulkResult, JobFilter, JobState, Reason
from holdfast.core.workers import LeaseStatus
from holdfast.stores.base import Store
from tests.conformance.support import (
    LEASE,
    Opener,
    changed_ids,
    ended,
    failing,
    heartbeat,
    lose,
    new_job,
    put,
    running,
    settle,
    state_of,
    states_of,
    stored,
    take,
    until_done,
)

HOUR = timedelta(hours=1)


async def test_a_waiting_job_is_cancelled_at_once_and_never_runs(store: Store, clock: ManualClock) -> None:
    (queued,) = await put(store)
    (scheduled,) = await put(store, new_job(delay=HOUR))
    failed = await ended(store, JobState.FAILED)

    done = await store.admin.cancel([scheduled, queued, failed])

    assert done == BulkResult([(id_, JobState.CANCELLED) for id_ in (scheduled, queued, failed)], [])
    for job_id in (queued, scheduled, failed):
        job = await stored(store, job_id)
        assert (job.state, job.reason, job.ended_at_us) == (JobState.CANCELLED, Reason.CANCELLED, clock())
    clock.advance(7200)
    assert await take(store) == []


async def test_a_running_job_is_asked_and_stays_running(store: Store, opener: Opener) -> None:
    job = await running(store)

    done = await (await opener()).admin.cancel([job.id])

    assert done == BulkResult([(job.id, JobState.RUNNING)], [])
    kept = await stored(store, job.id)
    assert (kept.state, kept.cancelling) == (JobState.RUNNING, True)
    assert (await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)).statuses == [LeaseStatus.CANCEL]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED])
async def test_an_ended_job_is_refused(store: Store, state: JobState) -> None:
    job_id = await ended(store, state)
    before = await store.query.get(job_id)

    assert await store.admin.cancel([job_id]) == BulkResult([], [(job_id, state)])
    assert await store.query.get(job_id) == before


async def test_an_unknown_job_is_refused_as_unknown(store: Store) -> None:
    unknown = new_id()
    (known,) = await put(store)

    done = await store.admin.cancel([unknown, known])

    assert done == BulkResult([(known, JobState.CANCELLED)], [(unknown, None)])


async def test_cancelling_nothing_changes_nothing(store: Store) -> None:
    await put(store)

    assert await store.admin.cancel([]) == BulkResult([], [])
    assert await store.query.count(JobFilter(states=(JobState.QUEUED,))) == 1


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (JobState.FAILED, {"delay": HOUR, "error": "boom", "reason": Reason.ERROR}),
        (JobState.QUEUED, {"refund": True, "reason": Reason.RELEASED}),
        (JobState.SCHEDULED, {"delay": HOUR, "refund": True, "reason": Reason.SNOOZED}),
        (JobState.WAITING, {"refund": True}),
    ],
)
async def test_a_cancelling_job_that_does_not_end_lands_cancelled(
    store: Store, clock: ManualClock, state: JobState, fields: dict[str, object]
) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])

    answer = await settle(store, job, state, **fields)

    assert (answer.accepted, answer.state) == (True, JobState.CANCELLED)
    kept = await stored(store, job.id)
    assert (kept.state, kept.cancelling, kept.ended_at_us) == (JobState.CANCELLED, False, clock())
    clock.advance(7200)
    assert await take(store) == []


async def test_a_cancelling_job_whose_lease_is_lost_lands_cancelled(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])

    assert (await lose(store, clock, job)).state is JobState.CANCELLED


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.DEAD])
async def test_an_ending_that_came_first_still_wins(store: Store, state: JobState) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])

    answer = await settle(store, job, state)

    assert (answer.accepted, answer.state) == (True, state)
    assert await state_of(store, job.id) is state


async def test_a_mixed_batch_lands_only_its_cancelling_jobs_cancelled(store: Store) -> None:
    await put(store, *[new_job() for _ in range(20)])
    jobs = await take(store)
    await store.admin.cancel([job.id for job in jobs[::2]])

    answers = await store.queueing.settle([failing(job, delay=HOUR) for job in jobs])

    assert [answer.state for answer in answers] == [JobState.CANCELLED, JobState.FAILED] * 10


async def test_asking_twice_to_stop_is_harmless(store: Store) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])

    again = await store.admin.cancel([job.id])

    assert [id_ for id_, _ in [*again.changed, *again.refused]] == [job.id]
    assert (await settle(store, job)).accepted


async def test_a_replayed_job_is_not_cancelled_by_an_old_request(store: Store) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])
    await settle(store, job, JobState.CANCELLED)
    await store.admin.replay([job.id])

    (again,) = await take(store)

    assert not again.cancelling
    assert (await store.queueing.heartbeat(heartbeat(), [again.lease], lease_for=LEASE)).statuses == [LeaseStatus.HELD]


async def test_a_filter_cancels_what_it_matches_and_nothing_else(store: Store) -> None:
    mine = await put(store, *[new_job("report", queue="a") for _ in range(3)])
    others = await put(store, new_job("report", queue="b"), new_job("mail", queue="a"))

    done = await store.admin.cancel(JobFilter(tasks=("report",), queue="a"))

    assert sorted(done.changed) == sorted((id_, JobState.CANCELLED) for id_ in mine)
    assert not done.more
    assert await states_of(store, others) == [JobState.QUEUED] * 2


async def test_a_filter_leaves_ended_jobs_as_they_are(store: Store) -> None:
    succeeded = await ended(store, JobState.SUCCEEDED)
    (queued,) = await put(store)

    done = await store.admin.cancel(JobFilter())

    assert changed_ids([done]) == [queued]
    assert await state_of(store, succeeded) is JobState.SUCCEEDED


async def test_a_filter_works_in_bounded_steps_until_nothing_is_left(store: Store) -> None:
    ids = await put(store, *[new_job() for _ in range(25)])
    asked = [job.id for job in await take(store, 10)]

    answers = await until_done(lambda: store.admin.cancel(JobFilter(), limit=4))

    assert all(len(answer.changed) <= 4 for answer in answers)
    assert sorted(changed_ids(answers)) == sorted(ids)
    assert await states_of(store, ids) == [JobState.RUNNING] * 10 + [JobState.CANCELLED] * 15
    assert all([(await stored(store, job_id)).cancelling for job_id in asked])


async def test_success_clears_a_cancellation_that_came_too_late(store: Store) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])

    assert (await settle(store, job)).accepted

    found = await stored(store, job.id)
    assert (found.state, found.cancelling) == (JobState.SUCCEEDED, False)
