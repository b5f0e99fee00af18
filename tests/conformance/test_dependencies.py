"""Dependencies: a job starts when the jobs it waits for have ended as it asks, however they ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import NEVER_US, Condition, Dependency, DependencyInfo, DependencyState
from holdfast.core.errors import Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import JobState, Options, Reason, UniqueKey
from holdfast.stores.base import Store
from tests.conformance.support import (
    after,
    claim,
    end,
    ended,
    ending,
    lose,
    new_job,
    put,
    running,
    settle,
    state_of,
    states_of,
    stored,
    take,
    take_ids,
)

HOUR = timedelta(hours=1)
OPEN, MET, FAILED = DependencyState
SUCCESS, FAILURE, END = Condition
WAITING, SCHEDULED, CANCELLED = JobState.WAITING, JobState.SCHEDULED, JobState.CANCELLED


async def put_after(store: Store, *job_ids: str, on: Condition = SUCCESS, **fields: object) -> str:
    (job_id,) = await put(store, after(*job_ids, on=on, **fields))
    return job_id


async def run(store: Store, *job_ids: str, state: JobState = JobState.SUCCEEDED) -> None:
    """Claim these jobs, which must be ready, and end them."""
    jobs = await take(store, len(job_ids))
    assert {job.id for job in jobs} == set(job_ids)
    for job in jobs:
        await end(store, job, state)


async def dependencies_of(store: Store, job_id: str) -> list[DependencyInfo]:
    return (await store.workflow.read_waits(job_id)).dependencies


async def dead_end(store: Store, job_id: str) -> None:
    await run(store, job_id, state=JobState.DEAD)


async def cancel_end(store: Store, job_id: str) -> None:
    await store.admin.cancel([job_id])


async def delete_end(store: Store, job_id: str) -> None:
    await store.admin.delete([job_id])


async def test_awaited_success_clears_the_failures_before_it_and_a_late_cancellation(store: Store) -> None:
    first = await running(store)
    await put_after(store, first.id)
    await settle(store, first, JobState.FAILED, reason=Reason.ERROR, error="boom", delay=timedelta(0))
    (again,) = await take(store)
    await store.admin.cancel([again.id])

    assert (await settle(store, again, result='"r"')).accepted
    found = await stored(store, first.id)
    assert (found.state, found.error, found.error_group, found.result) == (JobState.SUCCEEDED, None, None, '"r"')
    assert [attempt.state for attempt in await store.query.attempts(first.id)] == [JobState.FAILED]


Fail = Callable[[Store, str], Awaitable[None]]
FAILURES: list[Fail] = [dead_end, cancel_end, delete_end]


async def test_job_waits_for_another_and_is_then_due_at_once(store: Store, clock: ManualClock) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    found = await stored(store, second)
    assert (found.state, found.reason, found.attempts, found.run_at_us) == (WAITING, "dependency", 0, NEVER_US)
    assert await dependencies_of(store, second) == [DependencyInfo(first, SUCCESS, OPEN, False)]
    assert (await store.workflow.read_waits(first)).dependents == [DependencyInfo(second, SUCCESS, OPEN, False)]
    (job,) = await take(store)
    assert job.id == first
    claimed = await claim(store)
    assert (claimed.jobs, claimed.next_due) == ([], None)
    clock.advance(20)
    await end(store, job)
    found = await stored(store, second)
    assert (found.run_at_us, found.reason) == (clock(), None)
    assert await dependencies_of(store, second) == [DependencyInfo(first, SUCCESS, MET, False)]
    (job,) = await take(store)
    assert (job.id, job.run_at_us, job.attempts) == (second, clock(), 1)


async def test_job_waits_for_all_of_many(store: Store) -> None:
    firsts = await put(store, *[new_job() for _ in range(5)])
    last = await put_after(store, *firsts)
    jobs = await take(store)
    for job in jobs[:-1]:
        await end(store, job)
        assert await state_of(store, last) is WAITING
    await end(store, jobs[-1])
    assert await take_ids(store) == [last]


async def test_many_ends_in_one_settlement_start_the_job_once(store: Store) -> None:
    firsts = await put(store, *[new_job() for _ in range(50)])
    lasts = await put(store, after(*firsts), after(*firsts[:25]), after(firsts[0]))
    jobs = await take(store)
    await store.queueing.settle([ending(job) for job in jobs])
    assert await take_ids(store) == lasts
    assert await take_ids(store) == []


async def test_whole_graph_is_submitted_in_one_batch(store: Store) -> None:
    root = new_job()
    branches = [after(root.id) for _ in range(3)]
    last = after(*[job.id for job in branches], root.id)
    await put(store, root, *branches, last)
    assert await states_of(store, [job.id for job in branches]) == [WAITING] * 3
    await run(store, root.id)
    await run(store, *[job.id for job in branches])
    await run(store, last.id)


@pytest.mark.parametrize("fail", FAILURES)
async def test_failure_cancels_those_that_wait_for_success(store: Store, clock: ManualClock, fail: Fail) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    third = await put_after(store, second)
    always = await put_after(store, second, on=END)
    clock.advance(5)
    await fail(store, first)
    found = await stored(store, second)
    how = {dead_end: "dead", cancel_end: "cancelled", delete_end: "deleted"}[fail]
    assert (found.state, found.reason, found.ended_at_us) == (CANCELLED, "dependency", clock())
    assert found.error == f"job {first}, for which it waited, is {how}"
    assert (await stored(store, third)).error == f"job {second}, for which it waited, is cancelled"
    assert await take_ids(store) == [always]


@pytest.mark.parametrize("fail", FAILURES)
async def test_failure_starts_those_that_wait_for_it(store: Store, fail: Fail) -> None:
    (first,) = await put(store)
    second = await put_after(store, first, on=FAILURE)
    await fail(store, first)
    assert await take_ids(store) == [second]


async def test_success_cancels_those_that_wait_for_a_failure(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first, on=FAILURE)
    await run(store, first)
    found = await stored(store, second)
    assert (found.state, found.error) == (CANCELLED, f"job {first}, for which it waited, is succeeded")


async def test_retry_is_no_end(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    second = await put_after(store, job.id, on=END)
    await settle(store, job, JobState.FAILED, reason=Reason.ERROR, error="boom", delay=HOUR)
    clock.advance(HOUR.total_seconds())
    (again,) = await take(store)
    await lose(store, clock, again)
    (again,) = await take(store)
    await settle(store, again, JobState.QUEUED, reason=Reason.RELEASED, refund=True)
    assert await state_of(store, second) is WAITING
    await run(store, job.id)
    assert await take_ids(store) == [second]


async def test_lost_lease_of_a_cancelled_job_is_an_end(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    second = await put_after(store, job.id, on=END)
    await store.admin.cancel([job.id])
    await lose(store, clock, job)
    assert await take_ids(store) == [second]


async def test_expiry_is_an_end(store: Store, clock: ManualClock) -> None:
    (first,) = await put(store, new_job(expires_in=HOUR))
    second = await put_after(store, first, on=END)
    third = await put_after(store, first)
    clock.advance(HOUR.total_seconds())
    assert await take_ids(store) == [second]
    assert (await stored(store, third)).reason == "dependency"


async def test_waiting_job_expires(store: Store, clock: ManualClock) -> None:
    (first,) = await put(store)
    second = await put_after(store, first, expires_in=HOUR)
    clock.advance(HOUR.total_seconds())
    await store.maintenance.expire_unstarted(limit=10)
    assert (await stored(store, second)).reason == "expired"
    await run(store, first)
    assert await state_of(store, second) is CANCELLED


async def test_job_after_ended_ones_is_due_at_once(store: Store, clock: ManualClock) -> None:
    """In the state in which it would be if they ended only now."""
    done, dead = await ended(store, JobState.SUCCEEDED), await ended(store, JobState.DEAD)
    clock.advance(20)
    ready = await put_after(store, done, dead, on=END)
    found = await stored(store, ready)
    assert (found.state, found.reason, found.run_at_us) == (JobState.SCHEDULED, None, clock())
    assert await take_ids(store) == [ready]


async def test_ended_job_decides_at_submission(store: Store) -> None:
    done, dead = await ended(store, JobState.SUCCEEDED), await ended(store, JobState.DEAD)
    ready = [
        await put_after(store, done),
        await put_after(store, dead, on=FAILURE),
        await put_after(store, dead, done, on=END),
    ]
    lost = [await put_after(store, dead), await put_after(store, done, on=FAILURE), await put_after(store, done, dead)]
    assert await states_of(store, lost) == [CANCELLED] * 3
    assert (await stored(store, lost[2])).error == f"job {dead}, for which it waited, is dead"
    assert sorted(await take_ids(store)) == sorted(ready)
    chained = await put_after(store, lost[0], on=END)
    assert await take_ids(store) == [chained]


async def test_dependency_on_a_job_that_is_not_there_is_refused_whole(store: Store) -> None:
    (there,) = await put(store)
    missing, innocent = new_id(), new_job()
    with pytest.raises(Invalid, match=missing):
        await put(store, innocent, after(there, missing))
    assert await state_of(store, innocent.id) is None
    own = new_id()
    with pytest.raises(Invalid, match=own):
        await put(store, new_job(id=own, after=(Dependency(own),)))
    later = new_job()
    with pytest.raises(Invalid, match=later.id):
        await put(store, after(later.id), later)
    assert await take_ids(store) == [there]


async def test_dependency_on_a_key_is_one_on_the_job_that_has_it(store: Store) -> None:
    (holder,) = await put(store, new_job(key="one"))
    twin = new_job(key="one")
    second = after(twin.id)
    assert await put(store, twin, second) == [holder, second.id]
    assert await dependencies_of(store, second.id) == [DependencyInfo(holder, SUCCESS, OPEN, False)]
    await run(store, holder)
    assert await take_ids(store) == [second.id]


async def test_dependency_on_a_job_that_has_left_its_key_is_met(store: Store, clock: ManualClock) -> None:
    gone = await ended(store, JobState.DEAD, key="one", key_for=HOUR)
    clock.advance(1)
    assert await store.maintenance.prune({"dead": timedelta(0)}, limit=1) == 1
    twin = new_job(key="one")
    second = after(twin.id)
    assert await put(store, twin, second) == [gone, second.id]
    assert await dependencies_of(store, second.id) == [DependencyInfo(gone, SUCCESS, MET, False)]
    assert await take_ids(store) == [second.id]
    assert (await store.query.get(gone)) is None


async def test_first_of_two_dependencies_on_a_job_counts(store: Store) -> None:
    (holder,) = await put(store, new_job(key="one"))
    twin = new_job(key="one")
    second = new_job(after=(Dependency(twin.id, END), Dependency(holder, FAILURE)))
    await put(store, twin, second)
    assert await dependencies_of(store, second.id) == [DependencyInfo(holder, END, OPEN, False)]


async def test_submission_is_repeated_harmlessly(store: Store) -> None:
    (first,) = await put(store)
    second = after(first, key="second")
    for _ in range(2):
        await put(store, second)
    await run(store, first)
    await put(store, second)
    assert await take_ids(store) == [second.id]
    await put(store, second)
    assert await state_of(store, second.id) is JobState.RUNNING


async def test_submission_is_repeated_after_its_dependency_is_gone(store: Store) -> None:
    (first,) = await put(store)
    by_id, by_key = after(first), after(first, key="second")
    await put(store, by_id, by_key)
    await run(store, first)
    await store.admin.delete([first])
    assert await put(store, by_id) == [by_id.id]
    assert await put(store, after(first, key="second")) == [by_key.id]
    assert sorted(await take_ids(store)) == sorted([by_id.id, by_key.id])


async def test_cancelled_job_gives_its_unique_key_to_the_next_of_its_batch(store: Store) -> None:
    dead = await ended(store, JobState.DEAD)
    unique = Options(unique=UniqueKey(key="\x1fu", during="active"))
    first, second, third = after(dead, options=unique), new_job(options=unique), new_job(options=unique)
    assert await put(store, first, second, third) == [first.id, second.id, second.id]
    assert await states_of(store, [first.id, second.id]) == [CANCELLED, JobState.QUEUED]


async def test_dependency_given_twice_counts_once(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first, first)
    await run(store, first)
    assert await take_ids(store) == [second]


async def test_cancelled_waiting_job_does_not_start(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    await store.admin.cancel([second])
    assert (await stored(store, second)).reason == "cancelled"
    await run(store, first)
    assert await take_ids(store) == []


async def test_deleted_waiting_job_is_forgotten(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    await store.admin.delete([second])
    assert (await store.workflow.read_waits(first)).dependents == []
    await run(store, first)
    assert await take_ids(store) == []


# ── replays ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_replay_brings_back_what_a_failure_has_cancelled(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    third = await put_after(store, second)
    await dead_end(store, first)
    assert await states_of(store, [second, third]) == [CANCELLED] * 2
    await store.admin.replay([first])
    for job_id, other in ((second, first), (third, second)):
        found = await stored(store, job_id)
        assert (found.state, found.reason, found.error, found.ended_at_us) == (WAITING, "dependency", None, None)
        assert await dependencies_of(store, job_id) == [DependencyInfo(other, SUCCESS, OPEN, False)]
    for job_id in (first, second, third):
        await run(store, job_id)


async def test_job_that_waits_again_expires_no_more(store: Store, clock: ManualClock) -> None:
    (first,) = await put(store)
    second = await put_after(store, first, expires_in=HOUR)
    await dead_end(store, first)
    await store.admin.replay([first])
    assert (await stored(store, second)).expires_at_us is None
    clock.advance(HOUR.total_seconds())
    await store.maintenance.expire_unstarted(limit=10)
    await run(store, first)
    assert await take_ids(store) == [second]


async def test_replay_of_both_ends_of_a_chain_keeps_its_order(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    third = await put_after(store, second)
    await dead_end(store, first)
    await store.admin.replay([third, first])
    assert await states_of(store, [second, third]) == [WAITING] * 2
    for job_id in (first, second, third):
        await run(store, job_id)


async def test_replay_leaves_what_an_operator_cancelled(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    await store.admin.cancel([second])
    await dead_end(store, first)
    await store.admin.replay([first])
    assert await state_of(store, second) is CANCELLED


async def test_replayed_job_is_waited_for_again(store: Store) -> None:
    firsts = await put(store, *[new_job() for _ in range(2)])
    last = await put_after(store, *firsts, on=END)
    one, two = await take(store)
    await end(store, one, JobState.DEAD)
    await store.admin.replay([one.id])
    await end(store, two)
    assert await state_of(store, last) is WAITING
    await run(store, one.id)
    assert await take_ids(store) == [last]


async def test_replay_touches_nothing_that_has_started(store: Store) -> None:
    first = await ended(store, JobState.DEAD)
    second = await put_after(store, first, on=END)
    (job,) = await take(store)
    await store.admin.replay([first])
    assert await state_of(store, second) is JobState.RUNNING
    await settle(store, job)
    await run(store, first)
    assert await state_of(store, second) is JobState.SUCCEEDED


async def test_two_failures_must_both_be_replayed(store: Store) -> None:
    firsts = await put(store, *[new_job() for _ in range(2)])
    last = await put_after(store, *firsts)
    await run(store, *firsts, state=JobState.DEAD)
    await store.admin.replay([firsts[0]])
    assert await state_of(store, last) is CANCELLED
    await run(store, firsts[0])
    assert await state_of(store, last) is CANCELLED
    await store.admin.replay([firsts[1]])
    assert await state_of(store, last) is WAITING
    await run(store, firsts[1])
    assert await take_ids(store) == [last]


@pytest.mark.parametrize("how", ["delete", "prune"])
async def test_failure_of_a_job_that_is_gone_stays(store: Store, clock: ManualClock, how: str) -> None:
    gone, second = await put(store, *[new_job() for _ in range(2)])
    last = await put_after(store, gone, second)
    await run(store, gone, second, state=JobState.DEAD)
    if how == "delete":
        await store.admin.delete([gone])
    else:
        clock.advance(1)
        await store.maintenance.prune({"dead": timedelta(0)}, limit=1)
        gone, second = (second, gone) if await state_of(store, second) is None else (gone, second)
    assert await dependencies_of(store, last) == sorted(
        [DependencyInfo(gone, SUCCESS, FAILED, False), DependencyInfo(second, SUCCESS, FAILED, False)],
        key=lambda each: each.job_id,
    )
    await store.admin.replay([second])
    assert await state_of(store, last) is CANCELLED
    await store.admin.replay([last])
    await run(store, second)
    assert await take_ids(store) == [last]


async def test_operator_runs_a_cancelled_job_without_the_failed_one(store: Store) -> None:
    dead = await ended(store, JobState.DEAD)
    (going_on,) = await put(store)
    second = await put_after(store, dead, going_on)
    await store.admin.replay([second])
    assert await state_of(store, second) is WAITING
    await run(store, going_on)
    assert await take_ids(store) == [second]


async def test_replay_of_both_at_once_keeps_their_order(store: Store) -> None:
    (first,) = await put(store)
    second = await put_after(store, first)
    third = await put_after(store, second)
    await dead_end(store, first)
    answer = await store.admin.replay([third, second, first])
    assert {job_id for job_id, _ in answer.changed} == {first, second, third}
    for job_id in (first, second, third):
        await run(store, job_id)


async def test_unique_job_is_not_brought_back(store: Store) -> None:
    (first,) = await put(store)
    unique = Options(unique=UniqueKey(key="\x1fu", during="active"))
    second = await put_after(store, first, options=unique)
    await dead_end(store, first)
    await store.admin.replay([first])
    assert await state_of(store, second) is CANCELLED
    await store.admin.replay([second])
    assert await state_of(store, second) is WAITING


# ── keeping ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_jobs_are_kept_as_long_as_one_waits_for_them(store: Store, clock: ManualClock) -> None:
    first = await ended(store, JobState.SUCCEEDED)
    alone = await ended(store, JobState.SUCCEEDED)
    (open_one,) = await put(store)
    second = await put_after(store, first, open_one)
    clock.advance(100)
    week = {"succeeded": timedelta(seconds=10)}
    assert await store.maintenance.prune(week, limit=1) == 1  # the kept one is no obstacle
    assert await states_of(store, [first, alone]) == [JobState.SUCCEEDED, None]
    await run(store, open_one)
    await run(store, second)
    clock.advance(100)
    while await store.maintenance.prune(week, limit=100):
        pass
    assert await states_of(store, [first, open_one, second]) == [None] * 3
