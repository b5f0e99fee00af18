"""Limits: concurrency, rates and turns of partitions, decided by the claim; on every store, in virtual time."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.models import JobState, Reason
from holdfast.stores.base import EVERY_QUEUE, Store
from tests.conformance.limited import end, get, job_of, limit, tenants
from tests.conformance.support import LEASE, MINUTE, claim, ending, failing, lose_all, new_job, put, state_of, take

DAY = timedelta(days=1)


# ── limits are stored ───────────────────────────────────────────────────────────────────────────────────────────────
async def test_limit_is_replaced_by_its_revision(store: Store) -> None:
    first = Limit(name="mail", queue="mail", by="args.tenant", values=LimitValues(concurrency=2, shares={"a": 3}))
    revision = await store.limits.write_limit(LimitChange(first, 0))
    assert revision is not None
    assert revision > 0
    assert await store.limits.write_limit(LimitChange(first, 0)) is None
    assert await store.limits.write_limit(LimitChange(first, revision - 1)) is None
    (known,) = await store.limits.read_limits()
    assert known == Limit(name="mail", queue="mail", by="args.tenant", values=first.values, revision=revision)
    second = await store.limits.write_limit(LimitChange(first, revision))
    assert second is not None
    assert second > revision
    assert await store.limits.write_limit(LimitChange(first, revision, remove=True)) is None
    assert await store.limits.write_limit(LimitChange(first, second, remove=True)) is not None
    assert await store.limits.read_limits() == []


async def test_limits_are_read_by_name(store: Store) -> None:
    for name in ("b", "a", "c"):
        await limit(store, name, task=name, concurrency=1)
    assert [each.name for each in await store.limits.read_limits()] == ["a", "b", "c"]


# ── concurrency ─────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_queue_runs_as_many_jobs_as_its_limit(store: Store) -> None:
    await limit(store, concurrency=3)
    await put(store, *[new_job() for _ in range(10)])
    first = await take(store, 2)
    second = await take(store, 5, worker="worker-2")
    assert (len(first), len(second)) == (2, 1)
    brought = await claim(store, 5)
    assert (brought.jobs, brought.next_due) == ([], None)  # nothing comes by itself: a worker need not look again
    await end(store, first[0], second[0])
    assert len(await take(store, 5)) == 2
    assert await take(store, 5) == []


async def test_jobs_of_a_limited_queue_come_in_order(store: Store) -> None:
    await limit(store, concurrency=3)
    low, first, second = await put(store, new_job(priority=-1), new_job(), new_job())
    high = (await put(store, new_job(priority=2)))[0]
    assert [job.id for job in await take(store, 10)] == [high, first, second]
    assert await state_of(store, low) is JobState.QUEUED


async def test_other_queues_and_tasks_have_no_limit(store: Store) -> None:
    await limit(store, "one", queue="mail", concurrency=1)
    await limit(store, "two", task="slow", concurrency=1)
    await put(
        store, *[new_job(queue=queue, task=task) for queue in ("mail", "default") for task in ("slow", "quick") * 3]
    )
    jobs = await take(store, 50, {"*": 50})
    assert Counter((job.queue, job.task) for job in jobs)["default", "quick"] == 3
    assert sum(job.queue == "mail" for job in jobs) == 1
    assert sum(job.task == "slow" for job in jobs) <= 1
    assert len(jobs) == 5 - (sum(job.task == "slow" and job.queue == "mail" for job in jobs))


async def test_task_counts_in_all_its_queues(store: Store) -> None:
    await limit(store, task="slow", concurrency=2)
    await put(store, *[new_job(queue=f"q{number % 3}", task="slow") for number in range(6)])
    jobs = await take(store, 10, {"*": 10})
    assert len(jobs) == 2
    assert await take(store, 10, {"q0": 10, "q1": 10, "q2": 10}, worker="worker-2") == []
    await end(store, *jobs)
    assert len(await take(store, 10, {"*": 10})) == 2


async def test_blocked_task_holds_up_no_other(store: Store) -> None:
    await limit(store, task="slow", concurrency=1)
    await put(store, *[new_job(task="slow", priority=5) for _ in range(20)])
    plain = await put(store, *[new_job(task="quick") for _ in range(3)])
    jobs = await take(store, 10)
    assert {job.id for job in jobs if job.task == "quick"} == set(plain)
    assert sum(job.task == "slow" for job in jobs) == 1


async def test_each_key_has_room_of_its_own(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=2)
    await put(store, *[job_of(tenant) for tenant in [1] * 10 + [2] * 3 + ['"x"']])
    jobs = await take(store, 20)
    assert Counter(tenants(jobs)) == {1: 2, 2: 2, "x": 1}
    (of_two, _) = [job for job in jobs if tenants([job]) == [2]]
    await end(store, of_two)
    assert tenants(await take(store, 20)) == [2]


async def test_missing_key_counts_as_null(store: Store) -> None:
    await limit(store, by="args.tenant.id", concurrency=1)
    await put(store, new_job(), job_of("null"), job_of(7), job_of('{"id":7}'), job_of('{"id":"null"}'))
    assert len(await take(store, 20)) == 3


async def test_values_of_one_text_are_one_key(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    await put(store, *[job_of(value) for value in (1, '"1"', "true", '"true"', '{"x":1}', r'"{\"x\":1}"')])
    assert len(await take(store, 20)) == 3


async def test_job_takes_the_room_of_its_weight(store: Store) -> None:
    await limit(store, concurrency=5, weight="args.tenant")
    ids = await put(store, *[job_of(weight) for weight in (2, 2, 2, 1)])
    jobs = await take(store, 10)
    assert [job.id for job in jobs] == ids[:2]  # the third has no room, and is not passed by
    await end(store, jobs[0])
    assert [job.id for job in await take(store, 10)] == [ids[2], ids[3]]


async def test_weight_above_the_limit_runs_alone(store: Store) -> None:
    await limit(store, concurrency=3, weight="args.tenant")
    small, large = await put(store, job_of(1), job_of(100))
    jobs = await take(store, 10)
    assert [job.id for job in jobs] == [small]
    await end(store, *jobs)
    await put(store, job_of(1))
    jobs = await take(store, 10)
    assert [job.id for job in jobs] == [large]
    await end(store, *jobs)
    assert len(await take(store, 10)) == 1


async def test_several_limits_hold_at_once(store: Store) -> None:
    await limit(store, "queue", concurrency=4)
    await limit(store, "tenant", by="args.tenant", concurrency=2)
    await limit(store, "slow", task="slow", concurrency=1)
    await put(store, *[job_of(tenant, task=task) for tenant in (1, 2, 3) for task in ("slow", "quick", "quick")])
    jobs = await take(store, 20)
    assert len(jobs) == 4
    assert sum(job.task == "slow" for job in jobs) <= 1
    assert max(Counter(tenants(jobs)).values()) <= 2


# ── a slot is free again ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("outcome", ["success", "retry", "dead", "release", "snooze"])
async def test_every_outcome_frees_the_room(store: Store, outcome: str) -> None:
    await limit(store, concurrency=1)
    await put(store, new_job(), new_job())
    (job,) = await take(store, 5)
    settlements = {
        "success": ending(job),
        "retry": failing(job, delay=DAY),
        "dead": ending(job, JobState.DEAD, reason=Reason.ERROR, error="x"),
        "release": ending(job, JobState.QUEUED, reason=Reason.RELEASED, refund=True),
        "snooze": ending(job, JobState.SCHEDULED, reason=Reason.SNOOZED, refund=True, delay=DAY),
    }
    (answer,) = await store.queueing.settle([settlements[outcome]])
    assert answer.accepted
    (again,) = await take(store, 5)
    assert (again.id == job.id) is (outcome == "release")
    assert await take(store, 5) == []


async def test_lost_lease_frees_the_room_once_it_is_settled(store: Store, clock: ManualClock) -> None:
    await limit(store, concurrency=1)
    first, second = await put(store, new_job(), new_job())
    (job,) = await take(store, 5)
    clock.advance(LEASE.total_seconds() + 1)
    assert await take(store, 5) == []  # it may still run
    (expired,) = await store.maintenance.find_expired_leases(limit=10)
    lost = ending(expired, JobState.FAILED, reason=Reason.CRASHED, lease_expired=True, delay=DAY)
    assert (await store.queueing.settle([lost]))[0].accepted
    (late,) = await store.queueing.settle([ending(job)])
    assert not late.accepted
    (other,) = await take(store, 5)
    assert (job.id, other.id) == (first, second)
    assert await take(store, 5) == []


async def test_retry_keeps_its_partition(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    await put(store, job_of(1))
    (job,) = await take(store, 5)
    await store.queueing.settle([failing(job, delay=MINUTE)])
    clock.advance(61)
    await put(store, job_of(1))
    (again,) = await take(store, 5)
    assert (again.id, again.attempts) == (job.id, 2)
    assert await take(store, 5) == []


async def test_jobs_that_killed_processes_obey_limits(store: Store, clock: ManualClock) -> None:
    await limit(store, concurrency=1)
    (first,) = await put(store, new_job(max_attempts=9))
    for _ in range(2):
        (job,) = await take(store, 5)
        assert job.id == first
        clock.advance(LEASE.total_seconds() + 1)
        lost = ending(job, JobState.FAILED, reason=Reason.CRASHED, lease_expired=True)
        assert (await store.queueing.settle([lost]))[0].accepted
        clock.advance(1)
    (other,) = await put(store, new_job())
    assert [job.id for job in await take(store, 5)] == [other]  # the quarantined one runs alone
    assert await take(store, 1, isolated=True) == []
    await end(store, await get(store, other))
    assert [job.id for job in await take(store, 1, isolated=True)] == [first]


async def quarantine(store: Store, clock: ManualClock, *queues: str) -> list[str]:
    """A job under a limit of its task in each queue that lost two leases in a row; their ids."""
    await limit(store, task="work", concurrency=5)
    ids = await put(store, *[new_job(queue=queue, max_attempts=9) for queue in queues])
    for _ in range(2):
        assert sorted([job.id for job in await take(store, 9, dict.fromkeys(queues, 5))]) == sorted(ids)
        await lose_all(store, clock)
        clock.advance(1)
    return ids


async def test_every_claim_reports_a_quarantined_job_under_limits(store: Store, clock: ManualClock) -> None:
    await quarantine(store, clock, "default")
    for _ in range(4):
        found = await claim(store, 5)
        assert (found.jobs, found.has_quarantined) == ([], True)
        clock.advance(1)


async def test_quarantined_job_in_a_paused_queue_is_not_reported(store: Store, clock: ManualClock) -> None:
    await quarantine(store, clock, "default")
    await store.admin.pause("default")
    await put(store, new_job(queue="other"))
    for _ in range(3):
        assert not (await claim(store, 1, {"default": 5, "other": 5})).has_quarantined


async def test_isolated_claim_takes_one_job_under_limits(store: Store, clock: ManualClock) -> None:
    """Also while another job is due."""
    ids = await quarantine(store, clock, "default", "other")
    await put(store, new_job(task="plain", delay=timedelta(seconds=1)))
    clock.advance(2)
    taken = await take(store, 9, {"default": 5, "other": 5}, isolated=True)
    assert len(taken) == 1
    assert taken[0].id in ids


async def test_deleted_and_cancelled_jobs_leave_no_trace(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    ids = await put(store, *[job_of(1) for _ in range(4)])
    await store.admin.cancel([ids[0]])
    await store.admin.delete([ids[1]])
    (job,) = await take(store, 5)
    assert job.id == ids[2]
    await store.admin.cancel([ids[2]])
    await store.queueing.settle([ending(job, JobState.CANCELLED, reason=Reason.CANCELLED)])
    assert [job.id for job in await take(store, 5)] == [ids[3]]


async def test_replayed_job_obeys_limits(store: Store) -> None:
    await limit(store, by="args.tenant", concurrency=1)
    ids = await put(store, *[job_of(1) for _ in range(2)])
    await store.admin.cancel(ids)
    await store.admin.replay(ids)
    (job,) = await take(store, 5)
    assert await take(store, 5) == []
    await end(store, job)
    assert len(await take(store, 5)) == 1


async def test_paused_queue_is_not_claimed(store: Store) -> None:
    await limit(store, concurrency=5)
    await put(store, new_job())
    await store.admin.pause("default")
    assert await take(store, 5) == []
    await store.admin.resume("default")
    assert len(await take(store, 5)) == 1


async def test_idle_runners_bound_what_is_claimed_under_limits(store: Store) -> None:
    await limit(store, concurrency=5)
    await put(store, *[new_job() for _ in range(5)])
    assert await take(store, 5, free_runners=0) == []
    assert len(await take(store, 5, free_runners=2)) == 2


async def test_unlisted_queues_under_limits_share_the_slots_of_the_wildcard(store: Store) -> None:
    queues = ("a", "b", "mail", "plain")
    for queue in queues[:3]:
        await limit(store, queue, queue=queue, concurrency=5)
    await put(store, *[new_job(queue=queue) for queue in queues for _ in range(5)])
    for _ in range(2):  # with jobs under limits first, and last
        jobs = await take(store, 9, {"mail": 1, EVERY_QUEUE: 3})
        assert Counter(job.queue if job.queue == "mail" else "others" for job in jobs) == {"mail": 1, "others": 3}
    assert len(await take(store, 50, {EVERY_QUEUE: 50})) == 20 - 8


async def test_claim_by_ids_leaves_limited_jobs(store: Store) -> None:
    await limit(store, concurrency=5)
    ids = await put(store, new_job())
    assert await take(store, 5, ids=ids) == []
    assert len(await take(store, 5)) == 1


async def test_claim_by_ids_leaves_jobs_that_were_there_before_their_limit(store: Store) -> None:
    ids = await put(store, *[new_job() for _ in range(3)])
    await store.limits.write_limit(
        LimitChange(Limit(name="late", queue="default", values=LimitValues(concurrency=1)), 0)
    )
    assert await take(store, 5, ids=ids) == []
    assert len(await take(store, 5)) == 1


async def test_claims_without_slots_take_no_turn(store: Store) -> None:
    await limit(store, task="limited", concurrency=50)
    await put(store, *[new_job(task=task, queue="mail") for task in ("limited", "plain") for _ in range(10)])
    served = Counter[str]()
    for _ in range(10):
        served.update(job.task for job in await take(store, 1, {"mail": 1}))
        assert await take(store, 1, {"mail": 0}) == []
    assert served == {"limited": 5, "plain": 5}


@pytest.mark.parametrize("names", [("limited", "plain", "other"), (EVERY_QUEUE,)], ids=("listed", "wildcard"))
async def test_queues_beside_a_limited_one_are_served_in_turn(store: Store, names: tuple[str, ...]) -> None:
    await limit(store, queue="limited", concurrency=50)
    await put(store, *[new_job(queue=queue) for queue in ("limited", "plain", "other") for _ in range(20)])
    served = Counter[str]()
    for _ in range(12):
        jobs = await take(store, 2, dict.fromkeys(names, 2))
        served.update(job.queue for job in jobs)
        await end(store, *jobs)
    assert min(served[queue] for queue in ("limited", "plain", "other")) >= 6, served


# ── rates ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_rate_spaces_the_starts(store: Store, clock: ManualClock) -> None:
    await limit(store, rate=10, period_us=1_000_000)
    await put(store, *[new_job() for _ in range(5)])
    brought = await claim(store, 5)
    assert len(brought.jobs) == 1
    assert brought.next_due is not None
    assert timedelta(0) < brought.next_due <= timedelta(seconds=0.1)
    await end(store, *brought.jobs)
    assert await take(store, 5) == []
    clock.advance(0.1)
    assert len(await take(store, 5)) == 1
    clock.advance(10)
    assert len(await take(store, 5)) == 1  # time without jobs saves no more than the burst


async def test_burst_comes_at_once(store: Store, clock: ManualClock) -> None:
    await limit(store, rate=1, period_us=1_000_000, burst=3)
    await put(store, *[new_job() for _ in range(9)])
    assert len(await take(store, 9)) == 3
    clock.advance(2)
    assert len(await take(store, 9)) == 2
    clock.advance(60)
    assert len(await take(store, 9)) == 3


async def test_rate_of_a_key_blocks_no_other_key(store: Store, clock: ManualClock) -> None:
    await limit(store, by="args.tenant", rate=1, period_us=60_000_000)
    await put(store, *[job_of(1) for _ in range(50)])
    assert tenants(await take(store, 50)) == [1]
    assert await take(store, 50) == []
    await put(store, job_of(2), job_of(2))
    assert tenants(await take(store, 50)) == [2]
    clock.advance(60)
    assert sorted(tenants(await take(store, 50))) == [1, 2]


async def test_weight_takes_so_many_tokens(store: Store, clock: ManualClock) -> None:
    await limit(store, rate=1, period_us=1_000_000, burst=4, weight=3)
    await put(store, *[new_job() for _ in range(3)])
    assert len(await take(store, 5)) == 1
    clock.advance(1.9)
    assert await take(store, 5) == []
    clock.advance(0.1)
    assert len(await take(store, 5)) == 1
