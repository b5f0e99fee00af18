"""Figures at a bounded cost: how many jobs there are, of each kind, and what happened lately."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState
from holdfast.core.stats import JobStats
from holdfast.stores.base import Store
from tests.conformance.limited import job_of, limit
from tests.conformance.support import WORKER, ended, ending, failing, lose, new_job, put, running, settle, take

MINUTES = timedelta(minutes=5)


async def figures(store: Store, max_count: int = 1000) -> JobStats:
    return await store.query.stats(recent=MINUTES, max_count=max_count)


async def test_they_agree_with_the_jobs_there_are(store: Store, clock: ManualClock) -> None:
    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.FAILED, JobState.SUCCEEDED):
        await ended(store, state, queue="mail")
    await put(store, new_job(), new_job(priority=5), new_job(delay=timedelta(hours=1)), new_job(priority=-3))
    await running(store)
    suspect = await running(store, queue="crash")
    await lose(store, clock, suspect)
    quarantined = await running(store, queue="poison")
    for _ in range(2):
        await lose(store, clock, quarantined)
        taken = await take(store, capacity={"poison": 1}, max_must_start=1)
        quarantined = taken[0] if taken else quarantined

    found = await figures(store)

    jobs = (await store.query.find(JobFilter(), limit=100)).jobs
    assert found.count_by(lambda group: (group.queue, group.state)) == Counter((job.queue, job.state) for job in jobs)
    assert found.count_by(lambda group: (group.worker, group.state)) == Counter((job.worker, job.state) for job in jobs)
    assert found.count_by(lambda group: group.attempts) == Counter(job.attempts for job in jobs)
    assert found.count_by(lambda group: group.failures) == Counter(job.failures for job in jobs)
    later = [job for job in jobs if job.state in (JobState.SCHEDULED, JobState.FAILED) and job.run_at_us > clock()]
    assert found.count_jobs(lambda group: group.later) == len(later)
    assert (found.count_jobs(), found.at_least) == (len(jobs), frozenset())


async def test_stats_of_some_queues_are_as_exact_as_of_all(store: Store) -> None:
    """Jobs of other queues may have been counted in their place."""
    await put(store, *[new_job(queue=queue, delay=timedelta(hours=1)) for queue in ("a", "a", "a", "z")])
    for most, at_least in ((3, {JobState.SCHEDULED, JobState.FAILED}), (5, set())):
        found = (await figures(store, most)).for_queues(lambda queue: queue == "z")
        assert found.at_least == at_least
        assert most == 3 or found.count_jobs() == 1


async def test_recent_activity_is_separated_from_the_total(store: Store, clock: ManualClock) -> None:
    old = [await ended(store, state) for state in (JobState.SUCCEEDED, JobState.DEAD)]
    long_since = await running(store, queue="other")
    await store.queueing.settle([failing(long_since, delay=timedelta(hours=9))])
    (waiting,) = await put(store, new_job(queue="third"))
    clock.advance(600)
    new = await ended(store, JobState.SUCCEEDED)
    (late,) = await take(store, capacity={"third": 1})
    clock.advance(20)
    await store.queueing.settle([failing(late, delay=timedelta(hours=9))])
    clock.advance(290)

    found = await figures(store)

    recent = found.count_by(lambda group: group.state, lambda group: group.recent)
    assert recent == {JobState.FAILED: 1}  # taken 310 s ago, failed 290 s ago
    assert len({*old, new, waiting, late.id, long_since.id}) == found.count_jobs() == 5


async def test_they_say_how_long_attempts_took(store: Store, clock: ManualClock) -> None:
    for seconds in (2, 4):
        job = await running(store)
        clock.advance(seconds)
        await settle(store, job)

    (group,) = (await figures(store)).groups
    shown = (group.state, group.worker, group.number, group.seconds, group.longest)
    assert shown == (JobState.SUCCEEDED, WORKER, 2, 6, 4)


async def test_they_look_at_so_many_and_say_so(store: Store, clock: ManualClock) -> None:
    await put(store, *[new_job() for _ in range(30)])
    for _ in range(6):
        await store.queueing.settle([ending(job, JobState.SUCCEEDED) for job in await take(store, limit=2)])
        clock.advance(1)
    await ended(store, JobState.DEAD, queue="other")

    found = await figures(store, max_count=10)

    numbers = found.count_by(lambda group: group.state)
    assert numbers == {JobState.QUEUED: 10, JobState.SUCCEEDED: 10, JobState.DEAD: 1}
    assert found.at_least == {JobState.QUEUED, JobState.SUCCEEDED}
    assert found.for_queues(lambda queue: queue == "other").count_jobs() == 1


async def test_they_count_jobs_under_limits_up_to_a_number(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    await put(store, *[job_of(tenant) for tenant in (1, 2, 3) for _ in range(3)])
    await take(store, 9)

    for most, queued, may_be_more in ((9, 6, False), (2, 2, True)):
        found = await figures(store, most)
        assert found.count_jobs(lambda group: group.state is JobState.QUEUED) == queued
        assert (JobState.QUEUED in found.at_least) is may_be_more


async def test_the_rate_of_many_endings_is_that_of_the_latest(store: Store, clock: ManualClock) -> None:
    """Also of one queue, whose own first may be younger: those that were looked at took as long for all."""
    for queue in ("a", "a", "b"):
        await put(store, *[new_job(queue=queue) for _ in range(10)])
        await store.queueing.settle([ending(job) for job in await take(store, capacity={queue: 10})])
        clock.advance(1)

    found = await figures(store, max_count=20)

    assert found.ended_per_second(MINUTES) == 10
    assert found.for_queues(lambda queue: queue == "b").ended_per_second(MINUTES) == 5
    assert (await figures(store)).ended_per_second(MINUTES) == 30 / 300


async def test_an_empty_store_has_none(store: Store) -> None:
    assert await figures(store) == JobStats([], 1000)
