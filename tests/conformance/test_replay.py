"""Replaying and deleting: an operator's second chance, and an operator's end."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import Invalid
from holdfast.core.ids import new_id
from holdfast.core.models import BulkResult, JobFilter, JobState, Reason, ReplayRate, to_datetime
from holdfast.stores.base import Store
from tests.conformance.support import (
    Opener,
    changed_ids,
    ended,
    failing,
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
    until_done,
)


@pytest.mark.parametrize("state", [JobState.DEAD, JobState.FAILED, JobState.CANCELLED])
async def test_a_replayed_job_is_ready_with_a_new_budget(store: Store, clock: ManualClock, state: JobState) -> None:
    job_id = await ended(store, state, max_attempts=1)
    clock.advance(5)

    assert await store.admin.replay([job_id]) == BulkResult([(job_id, JobState.QUEUED)], [])

    job = await stored(store, job_id)
    assert (job.state, job.attempts, job.max_attempts, job.claims) == (JobState.QUEUED, 0, 1, 1)
    assert (job.error, job.reason, job.result, job.ended_at_us, job.lost_leases) == (None, None, None, None, 0)
    assert job.run_at_us == clock()
    (again,) = await take(store)
    assert (again.id, again.claims, again.attempts) == (job_id, 2, 1)


async def test_a_job_cancelled_before_it_ever_ran_can_be_replayed(store: Store) -> None:
    (job_id,) = await put(store, new_job(delay=timedelta(hours=1)))
    await store.admin.cancel([job_id])
    await store.admin.replay([job_id])

    assert await take_ids(store) == [job_id]


async def test_a_replay_keeps_the_history(store: Store) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, "first")])
    (job,) = await take(store)
    await settle(store, job, JobState.DEAD, error="second", reason=Reason.MAX_ATTEMPTS)
    await store.admin.replay([job.id])
    (job,) = await take(store)
    await store.queueing.settle([failing(job, "third")])

    records = await store.query.attempts(job.id)

    assert [(each.claims, each.attempt, each.error) for each in records] == [
        (1, 1, "first"),
        (2, 2, "second"),
        (3, 1, "third"),
    ]


@pytest.mark.parametrize("before", [10, 100_000])
@pytest.mark.parametrize("after", [10, 100_000])
async def test_a_replay_can_bring_a_new_payload(store: Store, before: int, after: int) -> None:
    job_id = await ended(store, JobState.DEAD, payload='{"to":"' + "b" * before + '"}')
    payload = '{"to":"' + "a" * after + '"}'

    await store.admin.replay([job_id], payload=payload)

    assert (await stored(store, job_id)).payload == payload
    assert [job.payload for job in await take(store)] == [payload]


async def test_a_replay_without_a_payload_keeps_the_old_one(store: Store) -> None:
    job_id = await ended(store, JobState.DEAD, payload='{"to":"right"}')
    await store.admin.replay([job_id])

    assert (await stored(store, job_id)).payload == '{"to":"right"}'


async def test_a_success_is_replayed_only_by_force(store: Store) -> None:
    job_id = await ended(store, JobState.SUCCEEDED)

    assert await store.admin.replay([job_id]) == BulkResult([], [(job_id, JobState.SUCCEEDED)])
    assert await state_of(store, job_id) is JobState.SUCCEEDED
    assert await store.admin.replay([job_id], force=True) == BulkResult([(job_id, JobState.QUEUED)], [])


@pytest.mark.parametrize("force", [False, True])
async def test_a_job_that_will_run_anyway_is_refused(store: Store, force: bool) -> None:
    (queued,) = await put(store)
    (scheduled,) = await put(store, new_job(delay=timedelta(hours=1)))
    job = await running(store)
    unknown = new_id()

    done = await store.admin.replay([job.id, scheduled, queued, unknown], force=force)

    assert done == BulkResult(
        [], [(job.id, JobState.RUNNING), (scheduled, JobState.SCHEDULED), (queued, JobState.QUEUED), (unknown, None)]
    )
    assert (await settle(store, job)).accepted


async def test_of_ten_replays_at_once_one_wins(store: Store, opener: Opener) -> None:
    stores = [store, await opener(), await opener()]
    job_id = await ended(store, JobState.DEAD)

    answers = await asyncio.gather(*[stores[n % 3].admin.replay([job_id]) for n in range(10)])

    assert sorted(len(answer.changed) for answer in answers) == [0] * 9 + [1]
    assert [answer.refused for answer in answers if answer.refused] == [[(job_id, JobState.QUEUED)]] * 9
    assert await take_ids(store) == [job_id]


async def test_a_paced_replay_makes_one_job_ready_after_the_other(store: Store, clock: ManualClock) -> None:
    dead = [await ended(store, JobState.DEAD) for _ in range(3)]
    (waits,) = await put(store, new_job(queue="other"))
    asked = [dead[1], waits, dead[2], dead[0]]
    start = clock()

    done = await store.admin.replay(asked, pace=ReplayRate(every=timedelta(seconds=2)))

    scheduled = [(dead[2], JobState.SCHEDULED), (dead[0], JobState.SCHEDULED)]
    assert done == BulkResult([(dead[1], JobState.QUEUED), *scheduled], [(waits, JobState.QUEUED)])
    falls_due = [((await stored(store, job_id)).run_at_us - start) / 1e6 for job_id in asked if job_id != waits]
    assert falls_due == [0, 4, 6]  # a refused turn goes to no other job
    assert await take_ids(store) == [dead[1]]
    assert await take_ids(store) == []
    clock.advance(4)
    assert await take_ids(store) == [dead[2]]
    clock.advance(2)
    (last,) = await take(store)
    assert (last.id, last.claims, last.attempts) == (dead[0], 2, 1)


async def test_a_paced_replay_goes_on_where_the_one_before_ended(store: Store, clock: ManualClock) -> None:
    dead = [await ended(store, JobState.DEAD) for _ in range(5)]
    every, passed = timedelta(seconds=1), 0
    start = clock()
    answers = []
    while not answers or answers[-1].more:
        pace = ReplayRate(every=every, after=passed * every)
        answers.append(await store.admin.replay(JobFilter(states=(JobState.DEAD,)), limit=2, pace=pace))
        passed += len(answers[-1].changed)

    assert changed_ids(answers) == dead  # in the order of their submission
    assert [(await stored(store, job_id)).run_at_us - start for job_id in dead] == [n * 1_000_000 for n in range(5)]


async def test_of_ten_paced_replays_at_once_one_wins(store: Store, opener: Opener) -> None:
    stores = [store, await opener(), await opener()]
    job_id = await ended(store, JobState.DEAD)
    pace = ReplayRate(after=timedelta(minutes=1))

    answers = await asyncio.gather(*[stores[n % 3].admin.replay([job_id], pace=pace) for n in range(10)])

    assert [answer.changed for answer in answers if answer.changed] == [[(job_id, JobState.SCHEDULED)]]
    assert [answer.refused for answer in answers if answer.refused] == [[(job_id, JobState.SCHEDULED)]] * 9


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.SUCCEEDED])
async def test_whatever_can_be_replayed_can_be_so_later(store: Store, clock: ManualClock, state: JobState) -> None:
    job_id = await ended(store, state)

    await store.admin.replay([job_id], force=True, pace=ReplayRate(after=timedelta(seconds=3)))

    job = await stored(store, job_id)
    assert (job.state, job.attempts, job.error, job.result) == (JobState.SCHEDULED, 0, None, None)
    assert (job.reason, job.ended_at_us, job.run_at_us) == (None, None, clock() + 3_000_000)
    assert await store.query.count(JobFilter(states=(JobState.SCHEDULED,))) == 1
    await store.admin.cancel([job_id])
    assert await state_of(store, job_id) is JobState.CANCELLED


async def test_a_lease_from_before_the_replay_cannot_settle(store: Store, clock: ManualClock) -> None:
    old = await running(store, max_attempts=1)
    assert (await lose(store, clock, old)).state is JobState.DEAD
    await store.admin.replay([old.id])
    (new,) = await take(store)

    assert not (await settle(store, old)).accepted
    assert (await settle(store, new)).accepted


async def test_a_replayed_crasher_is_no_longer_a_suspect(store: Store, clock: ManualClock) -> None:
    old = await running(store, max_attempts=1)
    await lose(store, clock, old)
    await store.admin.replay([old.id])

    assert await take_ids(store) == [old.id]


async def test_a_filter_replays_what_it_matches(store: Store) -> None:
    dead = [await ended(store, JobState.DEAD, task="t") for _ in range(3)]
    other = await ended(store, JobState.DEAD, task="other")
    success = await ended(store, JobState.SUCCEEDED, task="t")

    done = await store.admin.replay(JobFilter(tasks=("t",)))

    assert sorted(changed_ids([done])) == sorted(dead)
    assert await states_of(store, [other, success]) == [JobState.DEAD, JobState.SUCCEEDED]


async def test_a_filter_replays_in_bounded_steps_until_nothing_is_left(store: Store) -> None:
    dead = [await ended(store, JobState.DEAD) for _ in range(11)]

    answers = await until_done(lambda: store.admin.replay(JobFilter(states=(JobState.DEAD,)), limit=3))

    assert all(len(answer.changed) <= 3 for answer in answers)
    assert sorted(changed_ids(answers)) == sorted(dead)


async def test_replay_in_steps_reaches_every_job_though_some_die_again(store: Store, clock: ManualClock) -> None:
    dead = [await ended(store, JobState.DEAD) for _ in range(5)]
    where = JobFilter(states=(JobState.DEAD,), not_started_after=to_datetime(clock()))
    clock.advance(1)

    async def replay_and_fail() -> BulkResult:
        answer = await store.admin.replay(where, limit=2)
        for job in await take(store):
            await settle(store, job, JobState.DEAD, error="boom", reason=Reason.ERROR)
        return answer

    assert changed_ids(await until_done(replay_and_fail)) == dead


async def test_forced_replay_by_filter_takes_successes_too(store: Store) -> None:
    success = await ended(store, JobState.SUCCEEDED)

    assert changed_ids([await store.admin.replay(JobFilter(states=(JobState.SUCCEEDED,)), force=True)]) == [success]


# ── delete ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "state", [JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED, JobState.QUEUED]
)
async def test_a_deleted_job_is_gone_with_its_history(store: Store, state: JobState) -> None:
    job_id = (await put(store))[0] if state is JobState.QUEUED else await ended(store, state)

    done = await store.admin.delete([job_id])

    assert (changed_ids([done]), done.refused) == ([job_id], [])
    assert await store.query.get(job_id) is None
    assert await store.query.attempts(job_id) == []
    assert await take(store) == []


async def test_a_running_job_cannot_be_deleted(store: Store) -> None:
    job = await running(store)
    unknown = new_id()

    done = await store.admin.delete([job.id, unknown])

    assert (done.changed, done.refused) == ([], [(job.id, JobState.RUNNING), (unknown, None)])
    assert (await settle(store, job)).accepted


async def test_a_job_that_was_replayed_before_its_deletion_stays(store: Store) -> None:
    gone, replayed = await ended(store, JobState.DEAD), await ended(store, JobState.DEAD)
    await store.admin.replay([replayed])

    done = await store.admin.delete([replayed, gone], states=(JobState.DEAD, JobState.CANCELLED))

    assert done == BulkResult([(gone, JobState.DEAD)], [(replayed, JobState.QUEUED)])
    assert await state_of(store, replayed) is JobState.QUEUED
    assert (await store.admin.delete(JobFilter(), states=(JobState.DEAD,))).changed == []
    job = (await take(store))[0]
    assert (await store.admin.delete([job.id], states=tuple(JobState))).refused == [(job.id, JobState.RUNNING)]


@pytest.mark.parametrize("states", ["dead", ("gone",), (JobState.DEAD, 6)])
async def test_a_deletion_refuses_what_is_no_state(store: Store, states: Any) -> None:
    dead = await ended(store, JobState.DEAD)

    with pytest.raises(Invalid, match=r"^states: "):
        await store.admin.delete([dead], states=states)
    assert await state_of(store, dead) is JobState.DEAD


async def test_a_deleted_jobs_id_can_be_submitted_again(store: Store) -> None:
    new = new_job()
    await store.queueing.submit([new])
    await store.admin.delete([new.id])

    assert (await store.queueing.submit([new]))[0].created


async def test_a_filter_deletes_in_bounded_steps_and_spares_what_runs(store: Store) -> None:
    job = await running(store)
    ids = await put(store, *[new_job() for _ in range(10)])
    (spared,) = await put(store, new_job(queue="other"))

    answers = await until_done(lambda: store.admin.delete(JobFilter(queue="default"), limit=3))

    assert all(len(answer.changed) <= 3 for answer in answers)
    assert sorted(changed_ids(answers)) == sorted(ids)
    assert await states_of(store, [job.id, spared]) == [JobState.RUNNING, JobState.QUEUED]
    assert await store.query.count(JobFilter()) == 2
