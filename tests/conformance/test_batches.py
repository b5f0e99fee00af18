"""Batches: jobs without a handler that end when all their members have ended."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.batches import BATCH_TASK, BatchEnded
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import Conflict, Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, NewJob, Options, Reason, UniqueKey
from holdfast.stores.base import Store
from tests.conformance.support import (
    claim,
    end,
    ended,
    ending,
    lose,
    new_job,
    put,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)

SUCCESS, FAILURE, END = Condition
SUCCEEDED, DEAD, CANCELLED = JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED
WAITING, SCHEDULED = JobState.WAITING, JobState.SCHEDULED
HOUR = timedelta(hours=1)


def new_batch(**fields: object) -> NewJob:
    return new_job(BATCH_TASK, is_batch=True, **fields)


def member(batch: NewJob | str, **fields: object) -> NewJob:
    batch_id = batch if isinstance(batch, str) else batch.id
    return new_job(options=Options(batch=batch_id), **fields)


def after(job: NewJob, on: Condition) -> NewJob:
    """A job that waits for the end of another, or of a batch."""
    return new_job("callback", after=(Dependency(job.id, on),))


async def put_batch(store: Store, members: int, *conditions: Condition) -> tuple[str, list[str], list[str]]:
    """Submits a batch and its callbacks; their ids: the batch, its members, the callbacks."""
    batch = new_batch()
    jobs = [member(batch) for _ in range(members)]
    callbacks = [after(batch, on) for on in conditions]
    await put(store, batch, *jobs, *callbacks)
    return batch.id, [job.id for job in jobs], [job.id for job in callbacks]


async def progress_of(store: Store, batch_id: str) -> tuple[int, int, int]:
    progress = await store.workflow.read_batch(batch_id)
    assert progress is not None
    return progress.members, progress.ended, progress.failed


async def test_batch_ends_with_its_last_member(store: Store, clock: ManualClock) -> None:
    batch, members, _ = await put_batch(store, 3)
    found = await stored(store, batch)
    assert (found.state, found.reason, found.task) == (WAITING, "dependency", BATCH_TASK)
    jobs = await take(store)
    assert sorted(job.id for job in jobs) == sorted(members)
    assert (await claim(store)).jobs == []
    clock.advance(5)
    for number, job in enumerate(jobs[:-1], 1):
        await end(store, job)
        assert await progress_of(store, batch) == (3, number, 0)
        found = await stored(store, batch)
        assert (found.state, found.result) == (WAITING, None)
    await end(store, jobs[-1])
    found = await stored(store, batch)
    assert (found.state, found.reason, found.error, found.result) == (SUCCEEDED, None, None, '{"members":3}')
    assert (found.ended_at_us, found.attempts) == (clock(), 0)
    assert await progress_of(store, batch) == (3, 3, 0)


async def test_only_a_batch_has_progress(store: Store) -> None:
    (plain,) = await put(store)
    assert await store.workflow.read_batch(plain) is None
    assert await store.workflow.read_batch(new_id()) is None


async def test_success_starts_the_callbacks_for_it(store: Store) -> None:
    _, members, (success, failure, always) = await put_batch(store, 2, SUCCESS, FAILURE, END)
    for job in await take(store, 2):
        assert await states_of(store, [success, failure, always]) == [WAITING] * 3
        await end(store, job)
    assert await states_of(store, [success, failure, always]) == [SCHEDULED, CANCELLED, SCHEDULED]
    assert sorted(await take_ids(store)) == sorted([success, always])
    assert len(members) == 2


async def test_first_failure_starts_its_callback_while_others_run(store: Store) -> None:
    batch, _, (success, failure, always) = await put_batch(store, 3, SUCCESS, FAILURE, END)
    jobs = await take(store)
    await end(store, jobs[0], DEAD)
    assert await progress_of(store, batch) == (3, 1, 1)
    assert await states_of(store, [batch, success, failure, always]) == [WAITING, WAITING, SCHEDULED, WAITING]
    assert await take_ids(store) == [failure]
    await end(store, jobs[1], CANCELLED)
    await end(store, jobs[2])
    found = await stored(store, batch)
    assert (found.state, found.reason, found.error) == (DEAD, "dependency", "2 of 3 jobs of the batch have failed")
    assert await progress_of(store, batch) == (3, 3, 2)
    assert await states_of(store, [success, always]) == [CANCELLED, SCHEDULED]
    assert (await stored(store, success)).error == f"job {batch}, for which it waited, is dead"


async def test_callback_that_comes_after_the_first_failure_starts_at_once(store: Store) -> None:
    batch, _, _ = await put_batch(store, 2)
    first, second = await take(store)
    await end(store, first, DEAD)
    late = [after(new_job(id=batch), on) for on in (SUCCESS, FAILURE, END)]
    await put(store, *late)
    assert await take_ids(store) == [late[1].id]
    await end(store, second)
    assert await take_ids(store) == [late[2].id]


async def test_many_ends_in_one_settlement_end_the_batch_once(store: Store) -> None:
    batch, members, callbacks = await put_batch(store, 50, SUCCESS, FAILURE, END)
    jobs = await take(store)
    assert len(jobs) == len(members)
    states = [DEAD if number % 10 == 0 else SUCCEEDED for number in range(50)]
    await store.queueing.settle(
        [
            ending(job, state, reason=None if state is SUCCEEDED else Reason.ERROR)
            for job, state in zip(jobs, states, strict=True)
        ]
    )
    assert await progress_of(store, batch) == (50, 50, 5)
    assert await state_of(store, batch) is DEAD
    assert sorted(await take_ids(store)) == sorted(callbacks[1:])
    assert await take_ids(store) == []


async def test_every_kind_of_end_counts(store: Store, clock: ManualClock) -> None:
    batch = new_batch()
    expiring, deleted, cancelled, lost = (
        member(batch, expires_in=HOUR),
        member(batch),
        member(batch),
        member(batch, max_attempts=1),
    )
    await put(store, batch, expiring, deleted, cancelled, lost)
    (job,) = await take(store, 1, ids=[lost.id])
    await lose(store, clock, job)
    await store.admin.delete([deleted.id])
    await store.admin.cancel([cancelled.id])
    clock.advance(HOUR.total_seconds())
    await store.maintenance.expire_unstarted(limit=10)
    assert await progress_of(store, batch.id) == (4, 4, 4)
    assert await state_of(store, batch.id) is DEAD


async def test_members_are_added_while_it_runs(store: Store) -> None:
    batch, _, (callback,) = await put_batch(store, 1, SUCCESS)
    (loader,) = await take(store)
    added = [member(batch) for _ in range(3)]
    await put(store, *added)
    await put(store, *added)  # an answer that was lost
    assert await progress_of(store, batch) == (4, 0, 0)
    await end(store, loader)
    assert await state_of(store, batch) is WAITING
    jobs = await take(store)
    for job in jobs:
        await end(store, job)
    assert len(jobs) == 3
    assert await take_ids(store) == [callback]


async def test_ended_batch_takes_no_members(store: Store) -> None:
    batch, _, _ = await put_batch(store, 1)
    (job,) = await take(store)
    await end(store, job)
    innocent, late = new_job(), member(batch)
    with pytest.raises(Conflict, match=batch):
        await put(store, innocent, late)
    assert await states_of(store, [innocent.id, late.id]) == [None, None]
    await put(store, member(batch, id=job.id))  # it is one already
    assert await progress_of(store, batch) == (1, 1, 0)


async def test_member_of_what_is_no_batch_is_refused_whole(store: Store) -> None:
    (plain,) = await put(store)
    for no_batch in (plain, new_id()):
        innocent, lost = new_job(), member(no_batch)
        with pytest.raises(Invalid, match=no_batch):
            await put(store, innocent, lost)
        assert await states_of(store, [innocent.id, lost.id]) == [None, None]


async def test_member_of_a_plain_job_far_before_it_is_refused_whole(store: Store) -> None:
    plain = new_job()
    with pytest.raises(Invalid, match=plain.id):
        await put(store, plain, *[new_job() for _ in range(1000)], member(plain))
    assert await store.query.count(JobFilter()) == 0


async def test_job_that_stands_for_a_member_is_one(store: Store) -> None:
    (holder,) = await put(store, new_job(key="one"))
    done = await ended(store, SUCCEEDED, key="two", queue="other")
    batch = new_batch()
    await put(store, batch, member(batch, key="one"), member(batch, key="one"), member(batch, key="two"))
    assert await progress_of(store, batch.id) == (2, 1, 0)
    (job,) = await take(store)
    assert job.id == holder
    await end(store, job)
    assert (await state_of(store, batch.id), await state_of(store, done)) == (SUCCEEDED, SUCCEEDED)


async def test_batch_of_jobs_that_have_ended_ends_at_once(store: Store) -> None:
    await ended(store, DEAD, key="one", queue="other")
    batch = new_batch()
    failure, always = after(batch, FAILURE), after(batch, END)
    await put(store, batch, member(batch, key="one"), failure, always)
    assert await progress_of(store, batch.id) == (1, 1, 1)
    assert await state_of(store, batch.id) is DEAD
    assert sorted(await take_ids(store)) == sorted([failure.id, always.id])


async def test_submission_is_repeated_harmlessly(store: Store) -> None:
    batch = new_batch()
    jobs = [member(batch), member(batch), after(batch, SUCCESS)]
    for _ in range(2):
        await put(store, batch, *jobs)
        assert await progress_of(store, batch.id) == (2, 0, 0)
    for job in await take(store):
        await end(store, job)
    await put(store, batch, *jobs)
    assert await progress_of(store, batch.id) == (2, 2, 0)
    assert await take_ids(store) == [jobs[-1].id]


async def test_batch_under_the_id_of_another_job_is_refused_whole(store: Store) -> None:
    (plain,) = await put(store)
    for members in (1, 450):  # Redis stores the larger one in parts
        jobs = [
            new_batch(id=plain, has_client_id=True),
            *[member(plain) for _ in range(members)],
            after(new_job(id=plain), SUCCESS),
        ]
        with pytest.raises(Conflict, match=f"{plain} is a job that is no batch"):
            await put(store, *jobs)
        assert await store.query.count(JobFilter()) == 1
    assert await take_ids(store) == [plain]


@pytest.mark.parametrize("members", [1, 450])
async def test_repeated_submission_adds_no_member_to_an_ended_batch(store: Store, members: int) -> None:
    batch = new_batch(has_client_id=True)
    jobs = [batch, *[member(batch) for _ in range(members)]]
    await put(store, *jobs)
    await store.admin.cancel([job.id for job in jobs[1:]])
    assert await state_of(store, batch.id) is DEAD
    with pytest.raises(BatchEnded, match=batch.id):
        await put(store, *jobs, member(batch), after(batch, END))
    assert await store.query.count(JobFilter()) == len(jobs)
    assert not any(answer.created for answer in await store.queueing.submit([*jobs]))


async def test_repeated_submission_adds_members_to_a_batch_that_has_not_ended(store: Store) -> None:
    batch = new_batch()
    jobs = [member(batch), member(batch)]
    await put(store, batch, jobs[0])
    answers = await store.queueing.submit([batch, *jobs])
    assert [answer.created for answer in answers] == [False, False, True]
    assert await progress_of(store, batch.id) == (2, 0, 0)


@pytest.mark.parametrize("keys", [2, 450])
async def test_submission_with_keys_is_repeated_after_the_end_of_its_batch(store: Store, keys: int) -> None:
    """A job that stands for a member has another id. Redis stores the larger one in parts."""
    await ended(store, SUCCEEDED, key=f"{keys - 2}", queue="other")
    batch = new_batch(has_client_id=True)
    members = [member(batch, key=f"{number}") for number in range(keys)]
    jobs = [batch, *members, member(batch, key=f"{keys - 1}"), after(batch, END)]
    await put(store, *jobs)
    await store.admin.cancel([job.id for job in members])
    assert await state_of(store, batch.id) is DEAD
    assert not any(answer.created for answer in await store.queueing.submit(jobs))
    assert await progress_of(store, batch.id) == (keys, keys, keys - 1)


async def test_submission_is_repeated_after_the_retention_of_its_members(store: Store, clock: ManualClock) -> None:
    batch = new_batch()
    jobs = [member(batch), member(batch)]
    await put(store, batch, *jobs)
    first, second = await take(store)
    await end(store, first)
    await end(store, second, DEAD)
    clock.advance(100)
    while await store.maintenance.prune({"succeeded": timedelta(seconds=10)}, limit=100):
        pass
    assert await states_of(store, [batch.id, first.id, second.id]) == [DEAD, None, DEAD]
    await put(store, batch, *jobs)
    assert await take_ids(store) == [first.id]
    assert await progress_of(store, batch.id) == (2, 2, 1)


async def test_repeated_submission_leaves_an_ended_batch_as_it_is(store: Store) -> None:
    batch = new_batch()
    options = Options(batch=batch.id, unique=UniqueKey("\x1fkey", "active", None, "keep"))
    jobs = [batch, new_job(options=options), new_job(options=options)]  # the first stands for the second
    await put(store, *jobs)
    (job,) = await take(store)
    await end(store, job)
    await put(store, *jobs)  # the key is free again
    assert await progress_of(store, batch.id) == (1, 1, 0)
    assert await state_of(store, batch.id) is SUCCEEDED


async def test_batch_within_a_batch(store: Store) -> None:
    outer = new_batch()
    inner = new_batch(options=Options(batch=outer.id))
    await put(store, outer, inner, member(inner), member(inner), member(outer))
    assert await progress_of(store, outer.id) == (2, 0, 0)
    jobs = await take(store)
    for job in jobs[:2]:
        await end(store, job, DEAD)
    assert (await state_of(store, inner.id), await progress_of(store, outer.id)) == (DEAD, (2, 1, 1))
    await end(store, jobs[2])
    assert await state_of(store, outer.id) is DEAD


async def test_replay_of_a_member_opens_its_batch_again(store: Store) -> None:
    batch, members, (success, failure, always) = await put_batch(store, 2, SUCCESS, FAILURE, END)
    for job in await take(store, 2):
        await end(store, job, DEAD)
    assert sorted(await take_ids(store)) == sorted([failure, always])
    await store.admin.replay(members)
    assert await progress_of(store, batch) == (2, 0, 0)
    found = await stored(store, batch)
    assert (found.state, found.reason, found.error, found.ended_at_us) == (WAITING, "dependency", None, None)
    assert await states_of(store, [success, failure, always]) == [WAITING, JobState.RUNNING, JobState.RUNNING]
    for job in await take(store):
        await end(store, job)
    assert await progress_of(store, batch) == (2, 2, 0)
    assert await state_of(store, batch) is SUCCEEDED
    assert await take_ids(store) == [success]


async def test_replay_of_one_of_two_dead_members_keeps_the_other_counted(store: Store) -> None:
    batch, members, (success,) = await put_batch(store, 3, SUCCESS)
    jobs = await take(store)
    await end(store, jobs[0])
    for job in jobs[1:]:
        await end(store, job, DEAD)
    await store.admin.replay([jobs[1].id])
    assert await progress_of(store, batch) == (3, 2, 1)
    (again,) = await take(store)
    await end(store, again)
    found = await stored(store, batch)
    assert (found.state, found.error) == (DEAD, "1 of 3 jobs of the batch have failed")
    assert found.error_group == "batch"
    await store.admin.replay([jobs[2].id])
    (again,) = await take(store)
    await end(store, again)
    assert await state_of(store, batch) is SUCCEEDED
    assert await take_ids(store) == [success]
    assert len(members) == 3


async def test_replay_while_it_runs_takes_the_failure_back(store: Store) -> None:
    batch, _, (success,) = await put_batch(store, 2, SUCCESS)
    first, second = await take(store)
    await end(store, first, DEAD)
    await store.admin.replay([first.id])
    assert await progress_of(store, batch) == (2, 0, 0)
    (again,) = await take(store)
    await end(store, again)
    await end(store, second)
    assert await take_ids(store) == [success]


async def test_replay_of_a_success_takes_no_failure_back(store: Store) -> None:
    batch, _, (success,) = await put_batch(store, 3, SUCCESS)
    first, second, third = await take(store)
    await end(store, first)
    await end(store, second, DEAD)
    await store.admin.replay([first.id], force=True)
    assert await progress_of(store, batch) == (3, 1, 1)
    for job in (*await take(store), third):
        await end(store, job)
    assert await progress_of(store, batch) == (3, 3, 1)
    assert await states_of(store, [batch, success]) == [DEAD, CANCELLED]


async def test_replayed_member_that_waits_again_is_counted_once(store: Store) -> None:
    batch, first = new_batch(), new_job()
    second = member(batch, after=(Dependency(first.id, SUCCESS),))
    await put(store, first, batch, second)
    await store.admin.cancel([second.id])
    assert await state_of(store, batch.id) is DEAD
    await store.admin.replay([second.id])
    assert await progress_of(store, batch.id) == (1, 0, 0)
    for job_id in (first.id, second.id):
        (job,) = await take(store)
        assert job.id == job_id
        await end(store, job)
    assert await progress_of(store, batch.id) == (1, 1, 0)
    assert await state_of(store, batch.id) is SUCCEEDED


async def test_job_that_waits_for_the_failure_of_a_new_member_waits(store: Store) -> None:
    batch = new_batch()
    job = member(batch)
    callback = after(job, FAILURE)
    await put(store, batch, job, callback)
    assert await state_of(store, callback.id) is WAITING
    (taken,) = await take(store)
    await end(store, taken)
    assert await states_of(store, [callback.id, batch.id]) == [CANCELLED, SUCCEEDED]


async def test_batch_itself_is_not_replayed(store: Store) -> None:
    batch, _, _ = await put_batch(store, 1)
    (job,) = await take(store)
    await end(store, job, DEAD)
    answer = await store.admin.replay([batch])
    assert answer.changed == []
    assert await state_of(store, batch) is DEAD


async def test_cancelled_batch_counts_on_and_stays_cancelled(store: Store) -> None:
    batch, members, (success, always) = await put_batch(store, 2, SUCCESS, END)
    await store.admin.cancel([batch])
    assert await states_of(store, [batch, success, always]) == [CANCELLED, CANCELLED, SCHEDULED]
    assert await take_ids(store, capacity={"default": 100}, ids=[always]) == [always]
    jobs = await take(store)
    assert sorted(job.id for job in jobs) == sorted(members)
    await end(store, jobs[0])
    await end(store, jobs[1], DEAD)
    assert await progress_of(store, batch) == (2, 2, 1)
    await store.admin.replay([jobs[1].id])
    assert await states_of(store, [batch, success]) == [CANCELLED, CANCELLED]
    with pytest.raises(Conflict, match=batch):
        await put(store, member(batch))


async def test_deleted_batch_leaves_its_members(store: Store) -> None:
    batch, _, _ = await put_batch(store, 2)
    await store.admin.delete([batch])
    assert await store.workflow.read_batch(batch) is None
    for job in await take(store):
        await end(store, job)


async def test_waiting_batch_is_never_due(store: Store, clock: ManualClock) -> None:
    batch, _, _ = await put_batch(store, 1)
    assert len(await take(store)) == 1
    clock.advance(1e9)
    assert (await claim(store)).jobs == []
    assert await state_of(store, batch) is WAITING


async def test_repair_after_the_retention_runs_the_last_step(store: Store, clock: ManualClock) -> None:
    batch, _, (success, failure) = await put_batch(store, 2, SUCCESS, FAILURE)
    good, bad = await take(store, 2)
    await end(store, good)
    await end(store, bad, DEAD)
    (on_failure,) = await take(store)
    await end(store, on_failure)
    clock.advance(100)
    week = {"succeeded": timedelta(seconds=10), "cancelled": timedelta(seconds=10)}
    while await store.maintenance.prune(week, limit=100):
        pass
    assert await states_of(store, [batch, success, failure, good.id]) == [DEAD, CANCELLED, None, None]
    await store.admin.replay([bad.id])
    (again,) = await take(store)
    await end(store, again)
    assert await state_of(store, batch) is SUCCEEDED
    assert await take_ids(store) == [success]


async def test_batch_with_a_deleted_failed_job_fails_again(store: Store) -> None:
    batch, _, (success,) = await put_batch(store, 2, SUCCESS)
    bad, deleted = await take(store, 2)
    for job in (bad, deleted):
        await end(store, job, DEAD)
    await store.admin.delete([deleted.id])
    await store.admin.replay([bad.id])
    (again,) = await take(store)
    await end(store, again)
    assert await states_of(store, [batch, success]) == [DEAD, CANCELLED]
