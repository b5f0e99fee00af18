"""Groups of errors: a store keeps the group of each failed job, finds jobs by it, and lists what failed last."""

from __future__ import annotations

from datetime import timedelta

from holdfast.core.clock import ManualClock
from holdfast.core.error_groups import FailedJob, identify_group
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.stores.base import Store
from tests.conformance.support import ended, failing, new_job, put, running, settle, stored, take

LATER = timedelta(hours=1)
BOOM = identify_group("boom", None)


async def fail(store: Store, error: str, *, dead: bool, **fields: object) -> str:
    """Returns the id of a new job that failed with this error, and is dead or waits for its next attempt."""
    job = await running(store, **fields)
    state, delay = (JobState.DEAD, None) if dead else (JobState.FAILED, LATER)
    assert (await settle(store, job, state, reason=Reason.ERROR, error=error, delay=delay)).accepted
    return job.id


async def test_failed_job_keeps_the_group_of_its_latest_error(store: Store) -> None:
    job = await running(store)
    assert job.error_group is None
    await store.queueing.settle([failing(job, "boom")])
    assert (await stored(store, job.id)).error_group == BOOM
    (again,) = await take(store, 1)
    await settle(store, again, JobState.QUEUED, reason=Reason.RELEASED, refund=True)
    assert (await stored(store, job.id)).error_group == BOOM
    (third,) = await take(store, 1)
    await store.queueing.settle([failing(third, "other")])
    assert (await stored(store, job.id)).error_group == identify_group("other", None)
    (fourth,) = await take(store, 1)
    await settle(store, fourth)
    assert (await stored(store, job.id)).error_group is None


async def test_group_depends_on_the_traceback(store: Store) -> None:
    job = await running(store)
    traceback = 'Traceback (most recent call last):\n  File "/srv/shop/mail.py", line 1, in send\nboom'
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom", traceback=traceback)
    assert (await stored(store, job.id)).error_group == identify_group("boom", traceback) != BOOM


async def test_replay_clears_the_group(store: Store) -> None:
    job_id = await ended(store, JobState.DEAD)
    await store.admin.replay([job_id])
    assert (await stored(store, job_id)).error_group is None
    assert await store.query.failed_jobs(10) == []


async def test_filter_finds_the_jobs_of_a_group(store: Store) -> None:
    one = await fail(store, "card 1 declined", dead=True)
    two = await fail(store, "card 22 declined", dead=True, queue="other")
    waiting = await fail(store, "card 3 declined", dead=False)
    await fail(store, "card lost", dead=True)
    await put(store)
    group = identify_group("card 4 declined", None)

    async def find(**where: object) -> set[str]:
        chosen = JobFilter(error_group=group, **where)  # type: ignore[arg-type]  # the tests' own keywords
        found = {job.id for job in (await store.query.find(chosen)).jobs}
        assert await store.query.count(chosen) == len(found)
        return found

    assert await find() == {one, two, waiting}
    assert await find(states=(JobState.DEAD,)) == {one, two}
    assert await find(states=(JobState.DEAD,), queue="other") == {two}
    replayed = await store.admin.replay(JobFilter(error_group=group, states=(JobState.DEAD,)))
    assert {job_id for job_id, _ in replayed.changed} == {one, two}


async def test_failed_jobs_are_the_dead_and_those_that_wait(store: Store, clock: ManualClock) -> None:
    dead = await fail(store, "boom", dead=True, queue="a", task="x")
    died = clock()
    clock.advance(1)
    waiting = await fail(store, "boom", dead=False, queue="b", task="y")
    failed = clock()
    clock.advance(1)
    await ended(store, JobState.SUCCEEDED)
    await ended(store, JobState.CANCELLED)
    for state, delay in ((JobState.DEAD, None), (JobState.FAILED, LATER)):  # without an error they have no group
        await settle(store, await running(store), state, delay=delay)
    deleted = await fail(store, "boom", dead=True)
    await store.admin.delete([deleted])
    retried = await running(store)
    await store.queueing.settle([failing(retried, "boom")])
    await take(store, 1)  # it runs again
    assert await store.query.failed_jobs(10) == [
        FailedJob(dead, "a", "x", BOOM, True, died),
        FailedJob(waiting, "b", "y", BOOM, False, failed),
    ]


async def test_job_that_fails_again_is_listed_once(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, "boom")])
    (again,) = await take(store, 1)
    clock.advance(2)
    await settle(store, again, JobState.FAILED, reason=Reason.ERROR, error="other", delay=LATER)
    (found,) = await store.query.failed_jobs(10)
    assert (found.group, found.at_us) == (identify_group("other", None), clock())


async def test_only_the_latest_failures_are_listed(store: Store, clock: ManualClock) -> None:
    ids: dict[bool, list[str]] = {True: [], False: []}
    for number in range(5):
        clock.advance(1)
        for dead in (True, False):
            ids[dead].append(await fail(store, f"boom {number}", dead=dead))
    found = await store.query.failed_jobs(3)
    assert [{job.job_id for job in found if job.is_dead is dead} for dead in (True, False)] == [
        set(ids[True][2:]),
        set(ids[False][2:]),
    ]


async def test_hundreds_of_failed_jobs_are_listed(store: Store) -> None:
    await put(store, *[new_job() for _ in range(450)])
    jobs = await take(store, 450)
    await store.queueing.settle([failing(job, "boom", delay=LATER) for job in jobs])
    found = await store.query.failed_jobs(10_000)
    assert {job.job_id for job in found} == {job.id for job in jobs}
