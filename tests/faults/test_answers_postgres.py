"""Answers that are lost on their way from PostgreSQL: nothing is done twice, and who asks again hears what was done."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import timedelta

import asyncpg
import pytest

from holdfast.core.dependencies import Dependency
from holdfast.core.errors import Unavailable
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.core.steps import NewStep
from holdfast.core.waits import ChildStatus, SentSignal, Signal, SignalReceipt, SignalWait
from holdfast.stores.postgres import pool
from holdfast.stores.postgres.commit_status import Commit, begun_commit, is_committed
from tests.conformance.support import (
    WORKER,
    ended,
    ending,
    failing,
    new_job,
    put,
    running,
    settle,
    state_of,
    stored,
    take,
    until_claimed,
)
from tests.conformance.test_notifications_postgres import acquire_lock, listening, received_topics
from tests.faults.support import EVER, opened, until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.postgres import Postgres


@pytest.mark.parametrize("keyed", [False, True])
async def test_stored_submission_without_answer_is_acknowledged_once(
    proxy: FaultProxy, proxied_url: str, keyed: bool
) -> None:
    async with opened(proxied_url) as store:
        for n in range(10):
            job = new_job(payload=f'{{"needle":{n}}}', key=f"key-{n}" if keyed else None)
            proxy.cut_after(f'"needle":{n}'.encode(), answer=b"SELECT 1" if keyed else b"INSERT 0 1")

            (answer,) = await store.queueing.submit([job])

            assert (answer.job_id, answer.created) == (job.id, True)
        assert proxy.cuts == 10
        assert await store.query.count(JobFilter()) == 10


async def test_a_submission_that_never_arrived_is_sent_again(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        proxy.cut_before(b'"needle"')

        (answer,) = await store.queueing.submit([new_job(payload='{"needle":1}')])

        assert answer.created
        assert proxy.cuts == 1
        assert await store.query.count(JobFilter()) == 1


async def test_a_settlement_that_was_written_and_never_answered_is_accepted(
    proxy: FaultProxy, proxied_url: str
) -> None:
    async with opened(proxied_url) as store:
        for n in range(5):
            job = await running(store)
            proxy.cut_after(f'"needle {n}"'.encode(), answer=b"UPDATE 1")
            answer = await settle(store, job, result=f'"needle {n}"')
            assert (answer.accepted, answer.state) == (True, JobState.SUCCEEDED)

            assert not (await settle(store, job)).accepted, "a second settlement is none"
        assert proxy.cuts == 5


async def test_a_failure_that_was_written_and_never_answered_counts_once(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        job = await running(store)
        proxy.cut_after(b"a needle", answer=b"SELECT 1")

        (answer,) = await store.queueing.settle([failing(job, "a needle", delay=timedelta(hours=1))])

        assert (answer.accepted, answer.state) == (True, JobState.FAILED)
        assert len(await store.query.attempts(job.id)) == 1
        assert (await stored(store, job.id)).attempts == 1


async def test_stored_failure_without_answer_is_accepted_despite_later_claims(
    proxy: FaultProxy, proxied_url: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 30.0)
    async with opened(proxied_url) as store, opened(url) as other:
        failed, released, neighbour = [await running(store) for _ in range(3)]
        proxy.cut_after(b"a needle", answer=b"SELECT 3")
        proxy.cut_before(b"a needle", times=EVER)
        batch = [
            failing(failed, "a needle"),
            ending(released, JobState.QUEUED, reason=Reason.RELEASED, refund=True),
            ending(neighbour, JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error="late"),
        ]
        settling = asyncio.create_task(store.queueing.settle(batch))
        again = [await until_claimed(other), await until_claimed(other)]
        await other.queueing.settle([failing(job, "of another") for job in again])
        proxy.heal()

        answers = [(answer.accepted, answer.state) for answer in await settling]

        assert answers == [(True, JobState.FAILED), (True, JobState.QUEUED), (True, JobState.DEAD)]
        assert not any(answer.accepted for answer in await store.queueing.settle(batch)), "a second settlement is none"


async def test_successes_stored_before_an_outage_are_accepted(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of successes and failures takes two statements."""
    monkeypatch.setattr(pool, "RETRY_FOR", 0.3)
    async with opened(proxied_url) as store:
        succeeded, failed = await running(store), await running(store)
        batch = [ending(succeeded), failing(failed, "a needle")]
        proxy.cut_before(b"a needle", times=EVER)
        with pytest.raises(Unavailable):
            await store.queueing.settle(batch)
        proxy.heal()

        answers = await until_it_works(lambda: store.queueing.settle(batch))

        assert [(answer.accepted, answer.state) for answer in answers] == [
            (True, JobState.SUCCEEDED),
            (True, JobState.FAILED),
        ]


async def test_stored_claim_without_answer_costs_no_attempt(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        first, second, third = await put(store, new_job(), new_job(), new_job())
        assert [job.id for job in await take(store, 1, worker="unlucky")] == [first]
        proxy.cut_after(b"unlucky", answer=b"SELECT 2")

        assert [job.id for job in await take(store, 1, worker="unlucky")] == [third]

        assert proxy.cuts == 1
        assert [(await stored(store, job_id)).attempts for job_id in (first, second, third)] == [1, 0, 1]
        assert [(job.id, job.attempts) for job in await take(store, 1, worker="unlucky")] == [(second, 1)]


async def test_worker_that_claims_on_two_stores_keeps_its_jobs(proxy: FaultProxy, proxied_url: str, url: str) -> None:
    async with opened(proxied_url) as store, opened(url) as other:
        await put(store, *[new_job() for _ in range(4)])
        (first,) = await take(store, 1, worker="unlucky", shared_worker_id=True)
        (second,) = await take(other, 1, worker="unlucky", shared_worker_id=True)
        proxy.cut_after(b"unlucky", answer=b"SELECT 2")

        (fourth,) = await take(store, 1, worker="unlucky", shared_worker_id=True)

        assert proxy.cuts == 1
        assert [(await settle(store, job)).accepted for job in (first, second, fourth)] == [True] * 3


async def test_a_delivered_claim_that_was_never_answered_costs_no_attempt(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        first, second, third = await put(store, new_job(), new_job(), new_job())
        assert [job.id for job in await take(store, 1, worker="unlucky", ids=[first])] == [first]
        proxy.cut_after(b"unlucky", answer=b"SELECT 1")

        assert await take(store, 1, worker="unlucky", ids=[second]) == []

        assert proxy.cuts == 1
        assert [job.id for job in await take(store, 1, worker="unlucky", ids=[third])] == [third]
        assert [(await stored(store, job_id)).attempts for job_id in (first, second, third)] == [1, 0, 1]


OPERATIONS = {
    "cancel": (JobState.QUEUED, lambda store, job_id: store.admin.cancel([job_id]), JobState.CANCELLED),
    "replay": (JobState.DEAD, lambda store, job_id: store.admin.replay([job_id]), JobState.QUEUED),
    "delete": (JobState.DEAD, lambda store, job_id: store.admin.delete([job_id]), JobState.DEAD),
}


@pytest.mark.parametrize("verb", OPERATIONS)
@pytest.mark.parametrize("arrived", [True, False])
async def test_operation_cut_at_its_commit_reports_its_outcome(
    proxy: FaultProxy, proxied_url: str, verb: str, arrived: bool
) -> None:
    before, operate, after = OPERATIONS[verb]
    async with opened(proxied_url) as store:
        job_id = (await put(store))[0] if before is JobState.QUEUED else await ended(store, before)
        if arrived:
            proxy.cut_after(b"COMMIT", answer=b"COMMIT")
        else:
            proxy.cut_before(b"COMMIT")

        operated = await until_it_works(lambda: operate(store, job_id))

        assert proxy.cuts == 1
        assert (operated.changed, operated.refused) == ([(job_id, after)], [])
        now = await until_it_works(lambda: store.query.get(job_id))
        assert (now and now.state) is (None if verb == "delete" else after), "what is reported is done"


async def test_stored_replay_without_answer_is_not_repeated(
    proxy: FaultProxy, proxied_url: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 30.0)
    async with opened(proxied_url) as store, opened(url) as other:
        job_id = await ended(store, JobState.SUCCEEDED)
        proxy.cut_after(b"COMMIT", answer=b"COMMIT")
        proxy.cut_before(b"pg_xact_status", times=EVER)
        replaying = asyncio.create_task(store.admin.replay([job_id], force=True))
        job = await until_claimed(other)
        await settle(other, job)
        proxy.heal()

        operated = await replaying

        assert (operated.changed, operated.refused) == ([(job_id, JobState.QUEUED)], [])
        assert await state_of(other, job_id) is JobState.SUCCEEDED, "it is not run once more"


async def test_operation_with_unknown_outcome_says_so(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 0.3)
    async with opened(proxied_url) as store:
        (job_id,) = await put(store)
        proxy.cut_after(b"COMMIT", answer=b"COMMIT")
        proxy.cut_before(b"pg_xact_status", times=EVER)

        with pytest.raises(Unavailable, match="it may have been done all the same: look before you ask again"):
            await store.admin.cancel([job_id])

        assert await until_it_works(lambda: state_of(store, job_id)) is JobState.CANCELLED


async def test_promoted_server_confirms_no_commit_of_its_predecessor() -> None:
    """It may have given the same number to another transaction since."""
    with Postgres() as primary, closing(primary.standby()) as standby:
        link = await asyncpg.connect(primary.url())
        begun = []
        for ending in ("rollback", "commit"):
            await link.execute("begin; create table something (n int)")
            begun.append(await begun_commit(link))
            await link.execute(ending)
        assert [await is_committed(link, each) for each in begun] == [False, True]
        link.terminate()
        primary.kill()
        standby.promote()
        link = await asyncpg.connect(standby.url())
        with pytest.raises(Unavailable, match="another PostgreSQL server has taken over"):
            await is_committed(link, begun[1])
        assert not await is_committed(link, begun[0])
        assert not await is_committed(link, Commit(str(int(begun[1].number) + 1_000_000), begun[1].timeline))
        link.terminate()


async def test_a_commit_that_has_not_ended_is_waited_for(postgres: Postgres) -> None:
    link, other = await asyncpg.connect(postgres.url()), await asyncpg.connect(postgres.url())
    await link.execute("begin")
    begun = await begun_commit(link)
    with pytest.raises(Unavailable, match="neither committed nor rolled back"):
        await is_committed(other, begun)
    waiting = asyncio.create_task(is_committed(other, begun))
    await asyncio.sleep(0)
    await link.execute("commit")
    assert await waiting
    await link.close()
    await other.close()


# ── signals and dependencies ──────────────────────────────────────────────────────────────────────────────────────────
async def test_end_of_awaited_job_without_answer_is_accepted(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        for n in range(3):
            job = await running(store)
            (waiting,) = await put(store, new_job(after=(Dependency(job.id),)))
            success = ending(job, result="1", error=f"needle {n}")  # which the statement for plain jobs does not send
            proxy.cut_after(f"needle {n}".encode(), answer=b"SELECT 2")

            (answer,) = await store.queueing.settle([success])

            assert (answer.accepted, answer.state) == (True, JobState.SUCCEEDED)
            (again,) = await take(store)
            assert again.id == waiting
            await settle(store, again)
            assert not (await store.queueing.settle([success]))[0].accepted, "a second settlement is none"
        assert proxy.cuts == 3


async def test_dependent_submission_without_answer_is_stored_once(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        (first,) = await put(store)
        proxy.cut_after(b"COMMIT", answer=b"COMMIT")
        second = new_job(after=(Dependency(first),))

        (answer,) = await store.queueing.submit([second])

        assert (answer.job_id, answer.created) == (second.id, True)
        assert proxy.cuts == 1
        assert len((await store.workflow.read_waits(first)).dependents) == 1


async def test_signal_without_answer_notifies_of_the_job_that_received_it(
    proxy: FaultProxy, proxied_url: str, url: str
) -> None:
    hour = timedelta(hours=1)
    async with opened(url) as other:  # it sends what is pending as it closes
        job = await running(other)
        await other.workflow.receive_signal(SignalWait(NewStep(job.lease, "s", 1, True), "topic", hour))
        await settle(other, job, JobState.WAITING, refund=True, reason=Reason.SIGNAL, delay=hour)
    async with opened(proxied_url) as store:
        with listening(url, "ready") as listener:
            acquire_lock(listener, url, "ready")
            proxy.cut_after(b"a needle", answer=b"SELECT 1")

            assert await store.workflow.send_signal(Signal("once", "topic", '"a needle"')) == SentSignal(True, job.id)

            topics = await asyncio.to_thread(received_topics, listener)
            assert sorted(topics) == ["due:default", "queue:default"]
        assert proxy.cuts == 1


async def test_waits_without_answer_begin_once(proxy: FaultProxy, proxied_url: str) -> None:
    hour = timedelta(hours=1)
    async with opened(proxied_url) as store:
        for n in range(3):
            job, child, topic = await running(store), new_job(payload=f'{{"child":{n}}}', delay=hour), f"needle-{n}"
            wait = SignalWait(NewStep(job.lease, "s", 1, True), topic, hour)
            proxy.cut_after(topic.encode(), answer=b"SELECT 1")
            receipt = await store.workflow.receive_signal(wait)
            assert receipt.time_left is not None
            assert hour - timedelta(minutes=1) < receipt.time_left <= hour
            proxy.cut_after(f'"signal-{n}"'.encode(), answer=b"SELECT 1")
            signal = Signal(f"id-{n}", topic, f'"signal-{n}"')
            assert await store.workflow.send_signal(signal) == SentSignal(True, job.id)
            assert await store.workflow.receive_signal(wait) == SignalReceipt(result=f'{{"signal":"signal-{n}"}}')
            proxy.cut_after(b"COMMIT", answer=b"COMMIT")
            started = await store.workflow.start_children(job.lease, [child], WORKER)
            assert started == [ChildStatus(child.id, JobState.SCHEDULED)]
            await settle(store, job, JobState.WAITING, refund=True)
            await store.admin.cancel([child.id])
            assert await state_of(store, job.id) is JobState.SCHEDULED
        assert proxy.cuts == 9
