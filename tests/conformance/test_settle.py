"""Settling: the one way a running job stops running, under its lease and no other."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.ids import new_id
from holdfast.core.lifecycle import MAX_ERROR_LENGTH, clip_error
from holdfast.core.models import Job, JobState, Lease, Reason, Settled, Settlement
from holdfast.stores.base import Store
from tests.conformance.support import (
    LEASE,
    SECOND,
    Opener,
    ending,
    failing,
    lose,
    new_job,
    put,
    running,
    settle,
    state_of,
    stored,
    take,
    take_ids,
)

LOST = {"state": JobState.QUEUED, "reason": Reason.CRASHED, "error": "lease expired", "lease_expired": True}


async def unchanged(store: Store, job: Job) -> bool:
    kept = await stored(store, job.id)
    return (kept.state, kept.claims, kept.attempts, kept.ended_at_us, kept.result, kept.error) == (
        JobState.RUNNING,
        job.claims,
        job.attempts,
        None,
        None,
        None,
    )


# ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_success_ends_the_job_with_its_result(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(2)

    answer = await settle(store, job, result='{"sent":true}')

    assert (answer.job_id, answer.claims, answer.accepted, answer.state) == (job.id, 1, True, JobState.SUCCEEDED)
    kept = await stored(store, job.id)
    assert (kept.state, kept.result, kept.error, kept.reason) == (JobState.SUCCEEDED, '{"sent":true}', None, None)
    assert (kept.started_at_us, kept.ended_at_us) == (clock() - 2_000_000, clock())
    assert (kept.attempts, kept.lease_until_us) == (1, None)


async def test_a_success_without_a_result_has_none(store: Store) -> None:
    job = await running(store)
    await settle(store, job)

    assert (await stored(store, job.id)).result is None


async def test_a_failure_is_retried_after_its_delay(store: Store, clock: ManualClock) -> None:
    job = await running(store)

    (answer,) = await store.queueing.settle([failing(job, "boom", delay=timedelta(seconds=1.5))])

    assert answer == Settled(job.id, 1, True, JobState.FAILED, clock() + 1_500_000)
    kept = await stored(store, job.id)
    assert (kept.state, kept.error, kept.reason) == (JobState.FAILED, "boom", "error")
    assert kept.run_at_us == clock() + 1_500_000
    assert (kept.attempts, kept.lease_until_us, kept.ended_at_us) == (1, None, None)


async def test_failed_job_takes_the_priority_of_its_retry(store: Store, clock: ManualClock, carried: bool) -> None:
    front, plain, back, stopped, awaited = [await running(store) for _ in range(5)]
    fresh, waiter = await put(store, new_job(), new_job(after=(Dependency(awaited.id, Condition.END),)))
    await put(store, new_job(after=(Dependency(front.id, Condition.END),)))
    await store.admin.cancel([stopped.id, awaited.id])
    clock.advance(1)
    wanted = {front: 5, plain: None, back: -5, stopped: 5, awaited: 5}

    answers = await store.queueing.settle([failing(job, priority=priority) for job, priority in wanted.items()])

    assert [answer.state for answer in answers] == [*[JobState.FAILED] * 3, *[JobState.CANCELLED] * 2]
    assert [(await stored(store, job.id)).priority for job in wanted] == [5, 0, -5, 0, 0]
    clock.advance(1)
    taken = [job_id for _ in range(5) for job_id in await take_ids(store, 1)]
    assert set(taken) == {front.id, fresh, waiter, plain.id, back.id}
    assert carried or [taken[0], taken[1], taken[4]] == [front.id, fresh, back.id]


async def test_priority_of_a_retry_survives_a_lost_lease_and_a_replay(store: Store, clock: ManualClock) -> None:
    job = await running(store, priority=1)
    await store.queueing.settle([failing(job, priority=-5)])
    (again,) = await take(store)
    await lose(store, clock, again)
    assert (await stored(store, job.id)).priority == -5

    await store.admin.cancel([job.id])
    await store.admin.replay([job.id])

    (replayed,) = await take(store)
    assert (replayed.id, replayed.priority) == (job.id, -5)


async def test_a_dead_job_says_why(store: Store, clock: ManualClock) -> None:
    job = await running(store)

    answer = await settle(store, job, JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error="the last straw")

    assert (answer.accepted, answer.state) == (True, JobState.DEAD)
    kept = await stored(store, job.id)
    assert (kept.state, kept.reason, kept.error) == (JobState.DEAD, "max_attempts", "the last straw")
    assert kept.ended_at_us == clock()


async def test_a_cancelled_job_has_ended(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await settle(store, job, JobState.CANCELLED, reason=Reason.CANCELLED, error="cancelled")

    kept = await stored(store, job.id)
    assert (kept.state, kept.reason, kept.ended_at_us) == (JobState.CANCELLED, "cancelled", clock())


async def test_released_job_is_ready_at_once_with_its_attempt_refunded(store: Store) -> None:
    job = await running(store)

    answer = await settle(store, job, JobState.QUEUED, reason=Reason.RELEASED, refund=True)

    assert (answer.accepted, answer.state) == (True, JobState.QUEUED)
    kept = await stored(store, job.id)
    assert (kept.attempts, kept.claims) == (0, 1)
    (again,) = await take(store)
    assert (again.id, again.attempts, again.claims) == (job.id, 1, 2)


async def test_a_released_job_keeps_its_place(store: Store, clock: ManualClock) -> None:
    first = await running(store)
    clock.advance(1)
    (second,) = await put(store)
    await settle(store, first, JobState.QUEUED, reason=Reason.RELEASED, refund=True)

    assert [job.id for job in await take(store)] == [first.id, second]


async def test_a_snoozed_job_is_scheduled_with_its_attempt_given_back(store: Store, clock: ManualClock) -> None:
    job = await running(store)

    answer = await settle(store, job, JobState.SCHEDULED, reason=Reason.SNOOZED, delay=5 * SECOND, refund=True)

    assert answer == Settled(job.id, 1, True, JobState.SCHEDULED, clock() + 5_000_000)
    assert (await stored(store, job.id)).attempts == 0


async def test_deferred_job_keeps_reason_and_error_through_its_next_claim(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    deferred = {"reason": Reason.NO_HANDLER, "delay": 5 * SECOND, "refund": True}
    await settle(store, job, JobState.SCHEDULED, error="deferred since then: no task", **deferred)
    clock.advance(5)
    (again,) = await take(store)
    await settle(store, again, JobState.SCHEDULED, **deferred)  # without an error: the earlier one stays
    clock.advance(5)
    (third,) = await take(store)

    [row] = await store.query.summaries([job.id])

    assert row is not None
    assert (row.state, row.reason, row.error) == (JobState.RUNNING, "no_handler", "deferred since then: no task")
    assert (row.attempts, row.started_at_us, third.attempts) == (1, clock(), 1)
    assert await store.query.attempts(job.id) == []


async def test_lost_attempt_counts_and_next_success_clears_its_error(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await lose(store, clock, job)

    (again,) = await take(store, max_must_start=1)
    assert (again.attempts, again.claims, again.lost_leases) == (2, 2, 1)
    await settle(store, again)
    assert await state_of(store, job.id) is JobState.SUCCEEDED


async def test_an_unlimited_delay_of_175_years_is_kept(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    delay = timedelta(days=175 * 366)

    (answer,) = await store.queueing.settle([failing(job, delay=delay)])

    assert answer.run_at_us == clock() + delay // timedelta(microseconds=1)


# ── the fence ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_superseded_lease_cannot_settle(store: Store, clock: ManualClock) -> None:
    old = await running(store)
    await lose(store, clock, old)
    (new,) = await take(store, max_must_start=1)

    answer = await settle(store, old, result='"late"')

    assert answer == Settled(old.id, 1, False, JobState.RUNNING)
    assert (await stored(store, old.id)).claims == 2
    assert (await settle(store, new)).accepted


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.DEAD, JobState.CANCELLED])
async def test_an_expired_lease_cannot_settle(store: Store, clock: ManualClock, state: JobState) -> None:
    job = await running(store)
    clock.advance(LEASE.total_seconds() + 1)

    answer = await settle(store, job, state, delay=SECOND if state is JobState.FAILED else None)

    assert answer == Settled(job.id, 1, False, JobState.RUNNING)
    assert await unchanged(store, job)


async def test_a_live_lease_cannot_be_settled_as_lost(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(LEASE.total_seconds() - 0.000001)

    answer = await settle(store, job, **LOST)

    assert not answer.accepted
    assert await unchanged(store, job)


@pytest.mark.parametrize("offset_us", [-1, 0, 1])
async def test_at_every_instant_exactly_one_side_may_settle(store: Store, clock: ManualClock, offset_us: int) -> None:
    """The holder while the lease lives, a sweeper once it has run out; ``expired`` and ``settle`` agree which."""
    holder, sweeper = await running(store), await running(store)
    clock.advance(LEASE.total_seconds() + offset_us / 1e6)

    found = {job.id for job in await store.maintenance.find_expired_leases(limit=10)}
    by_holder = await settle(store, holder)
    by_sweeper = await settle(store, sweeper, **LOST)

    assert by_holder.accepted != by_sweeper.accepted
    assert found == ({holder.id, sweeper.id} if by_sweeper.accepted else set())
    assert offset_us == 0 or by_sweeper.accepted == (offset_us > 0)


async def test_a_lost_lease_is_settled_once(store: Store, opener: Opener, clock: ManualClock) -> None:
    job = await running(store)
    clock.advance(LEASE.total_seconds() + 1)
    other = await opener()

    answers = [await settle(each, job, **LOST) for each in (store, other, store)]

    assert [answer.accepted for answer in answers] == [True, False, False]
    assert (await stored(store, job.id)).lost_leases == 1


async def test_a_settled_job_cannot_be_settled_again(store: Store) -> None:
    job = await running(store)
    await settle(store, job, result="1")

    for state in (JobState.SUCCEEDED, JobState.DEAD, JobState.QUEUED):
        assert await settle(store, job, state, result="2") == Settled(job.id, 1, False, JobState.SUCCEEDED)
    assert (await stored(store, job.id)).result == "1"


async def test_a_job_that_was_never_claimed_cannot_be_settled(store: Store) -> None:
    (job_id,) = await put(store)

    for claims in (0, 1):
        assert not (await settle(store, Lease(job_id, claims))).accepted
    assert await state_of(store, job_id) is JobState.QUEUED


async def test_a_lease_from_the_future_cannot_settle(store: Store) -> None:
    job = await running(store)

    assert not (await settle(store, Lease(job.id, job.claims + 1))).accepted
    assert await unchanged(store, job)


async def test_an_unknown_job_cannot_be_settled(store: Store) -> None:
    unknown = Lease(new_id(), 1)

    assert await settle(store, unknown) == Settled(unknown.job_id, 1, False, None)


async def test_the_same_lease_twice_in_a_batch_is_answered_separately(store: Store) -> None:
    job = await running(store)

    first, second = await store.queueing.settle([ending(job, result="1"), ending(job, result="2")])

    assert (first.accepted, second.accepted) == (True, False)
    assert (await stored(store, job.id)).result == "1"


async def test_contradicting_settlements_of_a_lease_are_answered_separately(store: Store) -> None:
    job = await running(store)

    first, second = await store.queueing.settle([failing(job, delay=SECOND), ending(job, result="2")])

    assert (first.accepted, first.state, second.accepted) == (True, JobState.FAILED, False)
    assert await state_of(store, job.id) is JobState.FAILED


@pytest.mark.parametrize("stale_first", [True, False])
async def test_stale_and_current_in_a_batch_are_answered_separately(
    store: Store, clock: ManualClock, stale_first: bool
) -> None:
    stale = await running(store)
    await lose(store, clock, stale)
    (current,) = await take(store, max_must_start=1)
    batch = [ending(stale, result='"stale"'), ending(current, result='"current"')]

    answers = await store.queueing.settle(batch if stale_first else batch[::-1])

    assert [(each.claims, each.accepted) for each in answers] == [
        (settlement.claims, settlement.claims == 2) for settlement in (batch if stale_first else batch[::-1])
    ]
    assert (await stored(store, stale.id)).result == '"current"'


async def test_an_empty_batch_is_an_empty_answer(store: Store) -> None:
    assert await store.queueing.settle([]) == []


async def test_a_mixed_batch_of_500_is_answered_in_order(store: Store, clock: ManualClock) -> None:
    ids = await put(store, *[new_job() for _ in range(500)])
    kinds: list[tuple[JobState, bool]] = []
    batch: list[Settlement] = []
    for n, job in enumerate(await take(store, 500)):
        match n % 5:
            case 0:
                batch.append(ending(job, result=str(n)))
            case 1:
                batch.append(failing(job, f"error {n}", delay=n * SECOND))
            case 2:
                batch.append(ending(job, JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error=f"dead {n}", traceback="tb"))
            case 3:
                batch.append(ending(job, JobState.QUEUED, reason=Reason.RELEASED, refund=True))
            case _:
                batch.append(ending(Lease(job.id, 7)))
        kinds.append((batch[-1].state, n % 5 != 4))

    answers = await store.queueing.settle(batch)

    assert [each.job_id for each in answers] == ids
    assert [each.accepted for each in answers] == [accepted for _, accepted in kinds]
    for n, (job_id, (state, accepted)) in enumerate(zip(ids, kinds, strict=True)):
        job = await stored(store, job_id)
        assert job.state is (state if accepted else JobState.RUNNING)
        assert job.result == (str(n) if n % 5 == 0 else None)
        assert job.error == {1: f"error {n}", 2: f"dead {n}"}.get(n % 5)
        assert job.attempts == (0 if n % 5 == 3 else 1)
    assert (await stored(store, ids[1])).run_at_us == clock() + 1_000_000


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        "",
        "x\0y",
        clip_error("lone \ud800 surrogate"),
        "🦺" * MAX_ERROR_LENGTH,
        "x" * MAX_ERROR_LENGTH,
        "\r\n\t\x1b[31mb",
        "%_'\"\\;--",
    ],
    ids=["empty", "nul", "surrogate", "wide", "long", "control", "quotes"],
)
async def test_error_texts_are_kept_exactly(store: Store, error: str) -> None:
    job = await running(store)
    (answer,) = await store.queueing.settle([failing(job, error, traceback=error * 3)])

    assert answer.accepted
    assert (await stored(store, job.id)).error == error
    (attempt,) = await store.query.attempts(job.id)
    assert (attempt.error, attempt.traceback) == (error, error * 3)


@pytest.mark.parametrize("length", [0, 1, 64, 65, 600])
async def test_error_replaces_the_one_before(store: Store, length: int) -> None:
    job = await running(store)
    for error in ("first " * 50, "n" * length):
        assert (await store.queueing.settle([failing(job, error)]))[0].accepted
        assert (await stored(store, job.id)).error == error
        (job,) = await take(store, 1)


@pytest.mark.parametrize(
    "value", [2**200, -(2**63), 1e300, "a\0b", "🦺", [], {}, None, False, "x" * 1_000_000, ["\x00"] * 100]
)
async def test_results_are_kept_exactly(store: Store, value: object) -> None:
    job = await running(store)
    text = json.dumps(value, ensure_ascii=False)
    await settle(store, job, result=text)

    assert (await stored(store, job.id)).result == text


# ── history ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_success_leaves_no_attempt_record(store: Store) -> None:
    job = await running(store)
    await settle(store, job)

    assert await store.query.attempts(job.id) == []
    assert await store.query.attempts(new_id()) == []


async def test_every_failed_attempt_is_recorded_in_order(store: Store, clock: ManualClock) -> None:
    (job_id,) = await put(store, new_job())
    for n in range(3):
        (job,) = await take(store, worker=f"w{n}")
        clock.advance(2)
        await store.queueing.settle([failing(job, f"error {n}", traceback=f"trace {n}")])
    (job,) = await take(store, worker="w3")
    await settle(store, job, JobState.DEAD, reason=Reason.NON_RETRYABLE, error="over")

    records = await store.query.attempts(job_id)

    assert [(each.claims, each.attempt, each.worker, each.state, each.reason, each.error) for each in records] == [
        *[(n + 1, n + 1, f"w{n}", JobState.FAILED, "error", f"error {n}") for n in range(3)],
        (4, 4, "w3", JobState.DEAD, "non_retryable", "over"),
    ]
    assert [each.traceback for each in records] == ["trace 0", "trace 1", "trace 2", None]
    assert records[0].started_at_us == clock() - 6_000_000
    assert records[0].ended_at_us == clock() - 4_000_000


async def test_lost_attempt_is_recorded_with_its_worker(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await lose(store, clock, job)

    (record,) = await store.query.attempts(job.id)

    assert (record.claims, record.worker, record.reason, record.state) == (1, "worker-1", "crashed", JobState.QUEUED)
    assert "lease expired" in (record.error or "")


async def test_a_refused_settlement_records_nothing(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.queueing.settle([failing(Job(job.id, "work", "default", "{}", 9, 9, 5, 0, 0, 0, 0))])
    clock.advance(LEASE.total_seconds() + 1)
    await store.queueing.settle([failing(job)])

    assert await store.query.attempts(job.id) == []


async def test_the_last_error_stays_readable_while_the_job_runs_again(store: Store) -> None:
    job = await running(store)
    await store.queueing.settle([failing(job, "first")])
    await take(store)

    assert (await stored(store, job.id)).error == "first"


async def test_error_without_text_is_kept_as_given(store: Store) -> None:
    job = await running(store)
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="")
    assert (await stored(store, job.id)).error == ""
