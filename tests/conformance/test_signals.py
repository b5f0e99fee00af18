"""Signals: each is received once, by the job that has waited longest, or kept until one waits."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import Conflict
from holdfast.core.ids import new_id
from holdfast.core.models import Job, JobState, Lease, Reason
from holdfast.core.steps import NewStep
from holdfast.core.waits import SIGNAL_RETENTION, SentSignal, Signal, SignalReceipt, SignalWait
from holdfast.stores.base import Store
from tests.conformance.support import LEASE, WORKER, Opener, claim, lose, put, running, settle, state_of, stored, take

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def wait_of(job: Job | Lease, topic: str = "approved", step: str = "approved", timeout: timedelta = HOUR) -> SignalWait:
    lease = job.lease if isinstance(job, Job) else job
    return SignalWait(NewStep(lease, step, 1, True, None, WORKER), topic, timeout)


async def receive(
    store: Store, job: Job | Lease, topic: str = "approved", step: str = "approved", timeout: timedelta = HOUR
) -> SignalReceipt:
    return await store.workflow.receive_signal(wait_of(job, topic, step, timeout))


async def send(store: Store, value: str = "1", topic: str = "approved", signal_id: str | None = None) -> SentSignal:
    return await store.workflow.send_signal(Signal(signal_id or new_id(), topic, value))


async def suspend(store: Store, job: Job, delay: timedelta | None = HOUR) -> JobState | None:
    """Settle a job as waiting; the state in which it is then."""
    answer = await settle(store, job, JobState.WAITING, refund=True, reason=Reason.SIGNAL, delay=delay)
    assert answer.accepted
    return answer.state


async def suspended(store: Store, topic: str = "approved", timeout: timedelta = HOUR) -> Job:
    """A job that waits for a signal."""
    job = await running(store)
    assert await receive(store, job, topic, timeout=timeout) == SignalReceipt(time_left=timeout)
    assert await suspend(store, job, timeout) is JobState.WAITING
    return job


async def results_of(store: Store, job: Job) -> list[tuple[str, str | None]]:
    return [(step.name, step.result) for step in await store.workflow.read_steps(job.id)]


async def test_signal_makes_a_suspended_job_due_with_the_value_in_its_record(store: Store, clock: ManualClock) -> None:
    job = await suspended(store)
    assert await take(store) == []
    clock.advance(20)
    assert await send(store, '{"by":"ü"}') == SentSignal(True, job.id)
    (again,) = await take(store)
    assert (again.id, again.attempts, again.run_at_us) == (job.id, 1, clock())
    assert await receive(store, again) == SignalReceipt(result='{"signal":{"by":"ü"}}')
    (step,) = await store.workflow.read_steps(job.id)
    assert (step.name, step.number, step.is_ordered, step.ended_at_us) == ("approved", 1, True, clock())
    assert step.result == '{"signal":{"by":"ü"}}'


async def test_suspended_job_has_its_deadline_and_a_reason(store: Store, clock: ManualClock) -> None:
    job = await suspended(store)
    found = await store.query.get(job.id)
    assert found is not None
    assert (found.state, found.reason, found.attempts) == (JobState.WAITING, "signal", 0)
    assert found.run_at_us == clock() + HOUR // timedelta(microseconds=1)
    waits = await store.workflow.read_waits(job.id)
    assert waits.receiver is not None
    assert (waits.receiver.topic, waits.receiver.step) == ("approved", "approved")
    assert (waits.receiver.since_us, waits.receiver.until_us) == (clock(), found.run_at_us)
    claimed = await claim(store)
    assert (claimed.jobs, claimed.next_due) == ([], HOUR)


@pytest.mark.parametrize("ended_by", ["signal", "early signal", "deadline", "deadline of any queue", "delivery"])
async def test_job_that_waits_no_more_has_no_reason(store: Store, clock: ManualClock, ended_by: str) -> None:
    job = await running(store)
    await receive(store, job)
    if ended_by == "early signal":
        await send(store)
    await suspend(store, job)
    if ended_by == "signal":
        await send(store)
    else:
        clock.advance(HOUR.total_seconds())
    if ended_by == "deadline of any queue":
        await store.maintenance.promote_due(limit=10)
    ids = [job.id] if ended_by == "delivery" else None
    assert [each.id for each in await take(store, ids=ids)] == [job.id]
    assert (await stored(store, job.id)).reason is None


async def test_signal_that_comes_first_is_kept_and_received_once(store: Store, clock: ManualClock) -> None:
    sent = [await send(store, str(n)) for n in range(3)]
    assert sent == [SentSignal(True, None)] * 3
    assert [each.value for each in await store.workflow.read_signals()] == ["0", "1", "2"]
    for n in range(3):
        job = await running(store)
        assert await receive(store, job) == SignalReceipt(result=f'{{"signal":{n}}}')
        assert await results_of(store, job) == [("approved", f'{{"signal":{n}}}')]
    assert await store.workflow.read_signals() == []
    job = await running(store)
    assert await receive(store, job) == SignalReceipt(time_left=HOUR)


async def test_claim_is_not_due_for_the_wait_of_another_queue(store: Store) -> None:
    job = await running(store, queue="other")
    await receive(store, job)
    assert await suspend(store, job) is JobState.WAITING
    assert (await claim(store)).next_due is None
    assert (await claim(store, 1, {"other": 1})).next_due == HOUR


async def test_signals_are_listed_by_topic(store: Store, clock: ManualClock) -> None:
    for n, topic in enumerate(("a", "b", "a", "A", "ü:\n*")):
        await send(store, str(n), topic)
        clock.advance(1)
    assert [(each.topic, each.value) for each in await store.workflow.read_signals("a")] == [("a", "0"), ("a", "2")]
    assert [each.topic for each in await store.workflow.read_signals(limit=4)] == ["a", "b", "a", "A"]
    assert [each.topic for each in await store.workflow.read_signals("ü:\n*")] == ["ü:\n*"]
    first, second = await store.workflow.read_signals("a")
    assert second.sent_at_us - first.sent_at_us == 2_000_000


async def test_second_signal_of_an_id_changes_nothing(store: Store) -> None:
    assert await send(store, "1", signal_id="once") == SentSignal(True, None)
    assert await send(store, "2", signal_id="once") == SentSignal(False, None)
    job = await running(store)
    assert await receive(store, job) == SignalReceipt(result='{"signal":1}')
    assert await send(store, "3", signal_id="once") == SentSignal(False, job.id)
    other = await suspended(store)
    assert await send(store, "4", "approved", "once") == SentSignal(False, job.id)
    assert await state_of(store, other.id) is JobState.WAITING
    assert await send(store, "5", "approved", "more") == SentSignal(True, other.id)
    assert await send(store, "6", "approved", "more") == SentSignal(False, other.id)
    assert await results_of(store, other) == [("approved", '{"signal":5}')]


async def test_job_that_has_waited_longest_receives_the_signal(store: Store, clock: ManualClock) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(await suspended(store))
        clock.advance(1)
    assert [(await send(store)).job_id for _ in range(4)] == [*[job.id for job in jobs], None]


async def test_signals_of_other_topics_leave_a_job_waiting(store: Store) -> None:
    job = await suspended(store, "approved:42")
    for topic in ("approved:4", "approved:421", "APPROVED:42", "", "approved:42 "):
        assert (await send(store, topic=topic)).job_id is None
    assert await state_of(store, job.id) is JobState.WAITING


async def test_deadline_makes_the_job_ready_and_is_recorded_once(store: Store, clock: ManualClock) -> None:
    job = await suspended(store)
    clock.advance(HOUR.total_seconds() - 1)
    assert await take(store) == []
    clock.advance(1)
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(result='{"timed_out":true}')
    assert await send(store) == SentSignal(True, None)
    assert await receive(store, again) == SignalReceipt(result='{"timed_out":true}')
    assert await results_of(store, job) == [("approved", '{"timed_out":true}')]
    assert len(await store.workflow.read_signals()) == 1


async def test_signal_after_the_deadline_counts_until_the_job_has_noticed(store: Store, clock: ManualClock) -> None:
    await suspended(store)
    clock.advance(HOUR.total_seconds() + 5)
    await send(store, '"late"')
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(result='{"signal":"late"}')


async def test_deadline_stays_when_the_attempt_is_repeated(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    assert await receive(store, job) == SignalReceipt(time_left=HOUR)
    await lose(store, clock, job)
    (again,) = await take(store)
    left = HOUR - timedelta(microseconds=clock() - job.run_at_us)
    assert await receive(store, again, timeout=DAY) == SignalReceipt(time_left=left)
    assert await receive(store, again, timeout=DAY) == SignalReceipt(time_left=left)
    assert await receive(store, again, "approved", step="approved#2", timeout=DAY) == SignalReceipt(time_left=DAY)


async def test_signal_before_the_settlement_makes_the_job_due_at_once(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await receive(store, job)
    assert await send(store) == SentSignal(True, job.id)
    assert await state_of(store, job.id) is JobState.RUNNING
    assert await suspend(store, job) is JobState.SCHEDULED
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(result='{"signal":1}')


async def test_waiting_for_nothing_is_no_waiting(store: Store) -> None:
    job = await running(store)
    assert await suspend(store, job, None) is JobState.SCHEDULED
    assert [each.id for each in await take(store)] == [job.id]


async def test_job_that_received_its_signal_waits_for_nothing(store: Store) -> None:
    job = await running(store)
    await receive(store, job, timeout=timedelta(microseconds=1))
    await send(store, topic="other")
    assert (await receive(store, job, "other", step="other")).result is not None
    assert await send(store) == SentSignal(True, job.id)
    assert (await receive(store, job)).result is not None
    assert await suspend(store, job, None) is JobState.SCHEDULED


async def test_job_whose_deadline_came_waits_for_nothing(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await receive(store, job, timeout=timedelta(seconds=1))
    clock.advance(1)
    assert await receive(store, job) == SignalReceipt(result='{"timed_out":true}')
    assert await suspend(store, job, None) is JobState.SCHEDULED


async def test_wait_of_no_time_ends_in_its_first_attempt(store: Store) -> None:
    job = await running(store)
    assert await receive(store, job, timeout=timedelta(0)) == SignalReceipt(result='{"timed_out":true}')
    await send(store)
    assert await receive(store, job, timeout=timedelta(0)) == SignalReceipt(result='{"timed_out":true}')
    assert await receive(store, job, step="approved#2", timeout=timedelta(0)) == SignalReceipt(result='{"signal":1}')
    assert (await store.workflow.read_waits(job.id)).receiver is None
    assert await suspend(store, job, None) is JobState.SCHEDULED


async def test_wait_of_no_time_leaves_the_receiver_of_another_step(store: Store) -> None:
    job = await running(store)
    await receive(store, job)
    assert (await receive(store, job, "late", "late", timedelta(0))).result == '{"timed_out":true}'
    assert await send(store) == SentSignal(True, job.id)


async def test_repeated_attempt_keeps_its_place_among_receivers(store: Store, clock: ManualClock) -> None:
    first = await running(store)
    await receive(store, first)
    clock.advance(1)
    await suspended(store)
    await settle(store, first, JobState.QUEUED, refund=True, reason=Reason.RELEASED)
    clock.advance(1)
    (again,) = await take(store)
    await receive(store, again)
    assert (await send(store)).job_id == first.id


async def test_receiver_of_an_earlier_lease_waits_for_nothing(store: Store) -> None:
    job, other = await running(store), await running(store)
    await receive(store, job)
    for each in (job, other):
        await settle(store, each, JobState.QUEUED, refund=True, reason=Reason.RELEASED)
    again = {each.id: each for each in await take(store)}
    await receive(store, again[other.id])
    assert await suspend(store, again[job.id], None) is JobState.SCHEDULED


async def test_receipt_under_a_lost_lease_is_refused(store: Store, clock: ManualClock) -> None:
    await send(store)
    job = await running(store)
    clock.advance(LEASE.total_seconds())
    assert await receive(store, job) == SignalReceipt(has_lease=False)
    await lose(store, clock, job)
    assert await receive(store, job) == SignalReceipt(has_lease=False)
    (again,) = await take(store)
    assert await receive(store, job) == SignalReceipt(has_lease=False)
    assert await receive(store, Lease(new_id(), 1)) == SignalReceipt(has_lease=False)
    assert await results_of(store, job) == []
    other = SignalWait(NewStep(again.lease, "approved", 1, True, None, "another"), "approved", HOUR)
    assert await store.workflow.receive_signal(other) == SignalReceipt(has_lease=False)
    assert await receive(store, again) == SignalReceipt(result='{"signal":1}')


async def test_receiver_under_an_earlier_lease_gets_no_signal(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await receive(store, job)
    await lose(store, clock, job)
    assert await send(store) == SentSignal(True, None)
    (again,) = await take(store)
    assert await results_of(store, again) == []
    assert await receive(store, again) == SignalReceipt(result='{"signal":1}')


async def test_next_attempt_gets_no_signal_before_it_waits(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await receive(store, job)
    await lose(store, clock, job)
    (again,) = await take(store)
    assert await send(store) == SentSignal(True, None)
    assert await results_of(store, again) == []
    assert await receive(store, again) == SignalReceipt(result='{"signal":1}')


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_job_that_has_ended_receives_nothing(store: Store, how: str) -> None:
    job = await suspended(store)
    assert (await getattr(store.admin, how)([job.id])).changed
    assert await send(store) == SentSignal(True, None)
    assert await results_of(store, job) == []
    other = await running(store)
    assert (await receive(store, other)).result == '{"signal":1}'


@pytest.mark.parametrize("how", ["cancelled", "dead", "released", "lost"])
async def test_job_that_can_receive_nothing_shows_no_wait(store: Store, clock: ManualClock, how: str) -> None:
    async def is_shown() -> bool:
        return (await store.workflow.read_waits(job.id)).receiver is not None

    job = await running(store)
    await receive(store, job)
    assert await is_shown()
    if how == "cancelled":
        await suspend(store, job)
        assert await is_shown()
        await store.admin.cancel([job.id])
    elif how == "dead":
        await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom")
    elif how == "released":
        await settle(store, job, JobState.QUEUED, refund=True, reason=Reason.RELEASED)
    else:
        await lose(store, clock, job)
    assert not await is_shown()
    if how in ("released", "lost"):
        (again,) = await take(store)
        assert not await is_shown()
        await receive(store, again)
        assert await is_shown()


async def test_cancelled_waiting_job_that_is_replayed_waits_anew(store: Store, clock: ManualClock) -> None:
    job = await suspended(store)
    clock.advance(20)
    await store.admin.cancel([job.id])
    await store.admin.replay([job.id])
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(time_left=HOUR - timedelta(seconds=20))
    assert await suspend(store, again) is JobState.WAITING
    assert await send(store) == SentSignal(True, job.id)


async def test_received_signal_stays_through_a_replay(store: Store) -> None:
    await send(store)
    job = await running(store)
    await receive(store, job)
    await settle(store, job, JobState.DEAD, reason=Reason.ERROR, error="boom")
    await store.admin.replay([job.id])
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(result='{"signal":1}')


async def test_cancellation_of_a_running_receiver_ends_it(store: Store) -> None:
    job = await running(store)
    await receive(store, job)
    await store.admin.cancel([job.id])
    assert await suspend(store, job) is JobState.CANCELLED
    assert await send(store) == SentSignal(True, None)


async def test_receiver_of_another_topic_does_not_wait_for_the_first(store: Store) -> None:
    job = await running(store)
    await receive(store, job, "first", step="first")
    await receive(store, job, "second", step="second")
    await suspend(store, job)
    assert await send(store, topic="first") == SentSignal(True, None)
    assert await send(store, topic="second") == SentSignal(True, job.id)
    assert await results_of(store, job) == [("second", '{"signal":1}')]


async def test_suspended_job_counts_as_waiting_and_can_be_found(store: Store) -> None:
    job = await suspended(store)
    await put(store)
    (info,) = await store.query.queues(recent=HOUR, max_count=100)
    assert (info.states["waiting"], info.states["queued"]) == (1, 1)
    depths = {each.name: each.states for each in await store.query.queue_depths(max_count=100)}
    assert depths["default"].get("scheduled", 0) == 0
    assert await store.workflow.read_signals("approved") == []
    assert await state_of(store, job.id) is JobState.WAITING


async def test_lost_leases_are_settled_as_ever_while_jobs_are_suspended(store: Store, clock: ManualClock) -> None:
    await suspended(store, timeout=DAY)
    job = await running(store)
    assert (await lose(store, clock, job)).state is JobState.QUEUED


async def test_old_signals_are_pruned(store: Store, clock: ManualClock) -> None:
    await send(store, signal_id="old")
    job = await running(store)
    await send(store, topic="other", signal_id="received")
    await receive(store, job, "other", step="other")
    clock.advance(SIGNAL_RETENTION.total_seconds() / 2)
    await send(store, "2", signal_id="young")
    clock.advance(SIGNAL_RETENTION.total_seconds() / 2 + 1)
    await store.maintenance.prune({}, limit=100)
    assert [each.id for each in await store.workflow.read_signals()] == ["young"]
    for signal_id in ("old", "received"):
        assert (await send(store, "3", "third", signal_id)).is_new
    assert not (await send(store, "3", signal_id="young")).is_new


async def test_signals_and_receivers_race(store: Store, opener: Opener) -> None:
    other = await opener()
    jobs = [await running(store) for _ in range(40)]
    sends = [send(other, str(n), signal_id=f"s{n // 2}") for n in range(80)]
    receipts, answers = await asyncio.gather(
        asyncio.gather(*[receive(store, job) for job in jobs]), asyncio.gather(*sends)
    )
    values = []
    for job, receipt in zip(jobs, receipts, strict=True):
        steps = await results_of(store, job)
        values += [result for _, result in steps]
        assert receipt.has_lease
        assert receipt.result is None or steps == [("approved", receipt.result)]
    kept = await store.workflow.read_signals()
    assert len(values) + len(kept) == 40
    assert len({*values, *[f'{{"signal":{each.value}}}' for each in kept]}) == 40
    assert sum(answer.is_new for answer in answers) == 40
    assert len(values) == 40 or not kept


async def test_too_many_kept_signals_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.waits.MAX_SIGNALS", 3)
    for _ in range(3):
        await send(store)
    with pytest.raises(Conflict, match=r"^topic 'approved' has 3 signals that no job has received;"):
        await send(store)
    await send(store, topic="other")
    job = await running(store)
    await receive(store, job)
    assert (await send(store)).is_new


async def test_replayed_success_keeps_its_signal(store: Store) -> None:
    await send(store)
    job = await running(store)
    await receive(store, job)
    await settle(store, job)
    await store.admin.replay([job.id], force=True)
    (again,) = await take(store)
    assert (await receive(store, again)).result == '{"signal":1}'


async def test_replay_from_a_wait_waits_anew(store: Store, clock: ManualClock) -> None:
    job = await suspended(store)
    clock.advance(60)
    await store.admin.cancel([job.id])
    await store.admin.replay([job.id], from_step=1)
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(time_left=HOUR)
    await send(store)
    await settle(store, again, JobState.DEAD, reason=Reason.ERROR, error="boom")
    await store.admin.replay([job.id], from_step=1)
    (again,) = await take(store)
    assert await receive(store, again) == SignalReceipt(time_left=HOUR)
