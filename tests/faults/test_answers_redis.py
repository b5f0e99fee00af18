"""Answers that are lost on their way from Redis: nothing is done twice, and who asks again hears what was done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import pytest
from msgspec.structs import replace
from redis import exceptions as driver

from holdfast import Holdfast
from holdfast.core.errors import Unavailable
from holdfast.core.ids import new_id
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.core.schedule import Schedule, ScheduleChange
from holdfast.core.steps import NewStep
from holdfast.core.waits import ChildStatus, SentSignal, Signal, SignalReceipt, SignalWait
from holdfast.core.workers import LeaseStatus
from holdfast.stores.connections import redis as pool
from holdfast.stores.connections.redis_protocol import Argument, RedisConnection
from holdfast.stores.redis.pool import NamespacePool, parse_url
from tests.conformance.support import (
    LEASE,
    WORKER,
    Submitted,
    ended,
    ending,
    failing,
    heartbeat,
    new_job,
    put,
    running,
    settle,
    state_of,
    stored,
    take,
    take_ids,
    until_claimed,
)
from tests.faults.support import EVER, opened, until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.redis import Redis


@pytest.mark.parametrize("keyed", [False, True])
async def test_stored_submission_without_answer_is_acknowledged_once(
    proxy: FaultProxy, proxied_url: str, keyed: bool
) -> None:
    async with opened(proxied_url) as store:
        first = new_job(key="first" if keyed else None)
        await store.admin.delete(await put(store, first))  # the server knows the script
        for n in range(10):
            job = new_job(payload=f'{{"needle":{n}}}', key=f"key-{n}" if keyed else None)
            proxy.cut_after(f'"needle":{n}'.encode(), answer=b":1")

            assert await store.queueing.submit([job]) == [Submitted(job.id, True)]
        assert proxy.cuts == 10
        assert await store.query.count(JobFilter()) == 10


async def test_a_settlement_that_was_written_and_never_answered_is_accepted(
    proxy: FaultProxy, proxied_url: str
) -> None:
    async with opened(proxied_url) as store:
        await settle(store, await running(store))  # the server knows the script
        for n in range(5):
            job = await running(store)
            proxy.cut_after(f'"needle {n}"'.encode(), answer=b"*1\r\n:1")
            answer = await settle(store, job, result=f'"needle {n}"')
            assert (answer.accepted, answer.state) == (True, JobState.SUCCEEDED)

            assert not (await settle(store, job)).accepted, "a second settlement is none"
        assert proxy.cuts == 5


async def test_stored_failure_without_answer_is_accepted_despite_later_claims(
    proxy: FaultProxy, proxied_url: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 30.0)
    async with opened(proxied_url) as store, opened(url) as other:
        await settle(store, await running(store))  # the server knows the script
        failed, released = await running(store), await running(store)
        proxy.cut_after(b"a needle", answer=b"failed")
        proxy.cut_before(b"a needle", times=EVER)
        batch = [failing(failed, "a needle"), ending(released, JobState.QUEUED, reason=Reason.RELEASED, refund=True)]
        settling = asyncio.create_task(store.queueing.settle(batch))
        again = [await until_claimed(other), await until_claimed(other)]
        await other.queueing.settle([failing(job, "of another") for job in again])
        proxy.heal()

        answers = [(answer.accepted, answer.state) for answer in await settling]

        assert answers == [(True, JobState.FAILED), (True, JobState.QUEUED)]
        assert not any(answer.accepted for answer in await store.queueing.settle(batch)), "a second settlement is none"


async def test_stored_replay_without_answer_is_not_repeated(
    proxy: FaultProxy, proxied_url: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 30.0)
    async with opened(proxied_url) as store, opened(url) as other:
        assert (await store.admin.replay([new_id()])).changed == []  # the server knows the script
        job_id = await ended(store, JobState.SUCCEEDED)
        proxy.cut_after(b"replay", answer=b"queued")
        proxy.cut_before(b"replay", times=EVER)
        replaying = asyncio.create_task(store.admin.replay([job_id], force=True))
        await settle(other, await until_claimed(other))
        proxy.heal()

        operated = await replaying

        assert (operated.changed, operated.refused) == ([(job_id, JobState.QUEUED)], [])
        assert await state_of(other, job_id) is JobState.SUCCEEDED, "it is not run once more"


async def test_stored_schedule_without_answer_is_written_once(proxy: FaultProxy, proxied_url: str) -> None:
    schedule = Schedule(id=new_id(), name="needle", job=new_job(id=""), every_us=1_000_000)
    async with opened(proxied_url) as store:
        write = store.schedules.write_schedule
        first = await write(ScheduleChange(replace(schedule, name="other"), 0))  # the server knows the script
        assert first is not None
        proxy.cut_after(b"needle", answer=b"*2", times=1)
        added = await write(ScheduleChange(schedule, 0))
        assert added is not None
        proxy.cut_after(b"needle", answer=b"*2", times=1)
        jobs = [new_job(), new_job()]
        assert await write(ScheduleChange(schedule, added, jobs)) == added + 1
        assert await write(ScheduleChange(schedule, added, jobs)) is None, "another write of the same is none"
        assert set(await take_ids(store)) == {job.id for job in jobs}
        proxy.cut_after(b"needle", answer=b"*2", times=1)
        assert await write(ScheduleChange(schedule, added + 1, remove=True)) is not None
        assert [each.name for each in await store.schedules.read_schedules()] == ["other"]
        assert proxy.cuts == 3


async def test_schedules_and_limits_of_an_operator_survive_lost_answers(proxy: FaultProxy, proxied_url: str) -> None:
    async with Holdfast(proxied_url) as app:
        for name in ("other", "needle"):  # once other is written, the server knows the scripts
            if name == "needle":
                proxy.cut_after(b"needle\r\n$1\r\n0", answer=b"*2", times=1)
                proxy.cut_after(b"needle-limit\r\n$1\r\n0", answer=b"$16", times=1)
            schedule = await app.schedules.add(name, app.draft_job("work", {}), every="1h")
            limit = await app.limits.add(f"{name}-limit", queue=name, concurrency=1)
            if name == "needle":
                proxy.cut_after(str(schedule.revision).encode(), answer=b"*2", times=1)
                proxy.cut_after(str(limit.revision).encode(), answer=b"$16", times=1)
            await app.schedules.remove(name)
            await app.limits.remove(f"{name}-limit")
        assert proxy.cuts == 4


async def test_operation_with_unknown_outcome_says_so(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 0.3)
    async with opened(proxied_url) as store:
        assert (await store.admin.cancel([new_id()])).changed == []
        (job_id,) = await put(store)
        proxy.cut_after(b"cancel", answer=b"cancelled")
        proxy.cut_before(b"cancel", times=EVER)

        with pytest.raises(Unavailable, match="it may have been done all the same: look before you ask again"):
            await store.admin.cancel([job_id])

        assert await until_it_works(lambda: state_of(store, job_id)) is JobState.CANCELLED
        proxy.heal()
        proxy.refuse()
        proxy.cut()
        with pytest.raises(Unavailable):
            await store.query.get(job_id)
        with pytest.raises(Unavailable) as never_sent:
            await store.admin.cancel([job_id])
        assert "may have been done" not in str(never_sent.value)


@pytest.mark.parametrize("delivered", [False, True])
async def test_stored_claim_without_answer_costs_no_attempt(
    proxy: FaultProxy, proxied_url: str, delivered: bool
) -> None:
    async with opened(proxied_url) as store:
        first, second, third = await put(store, new_job(), new_job(), new_job())
        assert await take_ids(store, 1, worker="unlucky") == [first]
        given_ids = {"ids": [second]} if delivered else {}
        await take_ids(store, 0, worker="unlucky", **given_ids)  # the server knows the script
        proxy.cut_after(b"unlucky", answer=b"work")

        assert await take_ids(store, 1, worker="unlucky", **given_ids) == ([] if delivered else [third])

        assert proxy.cuts == 1
        assert [(await stored(store, job_id)).attempts for job_id in (first, second)] == [1, 0]
        assert await state_of(store, first) is JobState.RUNNING, "what was answered stays"
        (job,) = await take(store, 1, worker="unlucky", **given_ids)
        assert (job.id, job.attempts) == (second, 1)


async def test_job_with_renewed_lease_survives_a_lost_claim(proxy: FaultProxy, proxied_url: str) -> None:
    """Its lease ends as late as one of the claim without an answer, and its handler runs."""
    async with opened(proxied_url) as store:
        await put(store, *[new_job() for _ in range(3)])
        (first,) = await take(store, 1, worker="unlucky")
        renewal = await store.queueing.heartbeat(heartbeat("unlucky"), [first.lease], lease_for=2 * LEASE)
        proxy.cut_after(b"unlucky", answer=b"work")
        (third,) = await take(store, 1, worker="unlucky")

        assert (proxy.cuts, renewal.statuses) == (1, [LeaseStatus.HELD])
        assert [(await settle(store, job)).accepted for job in (first, third)] == [True, True]


async def test_worker_that_claims_on_two_stores_keeps_its_jobs(proxy: FaultProxy, proxied_url: str, url: str) -> None:
    async with opened(proxied_url) as store, opened(url) as other:
        await put(store, *[new_job() for _ in range(4)])
        (first,) = await take(store, 1, worker="unlucky", shared_worker_id=True)
        (second,) = await take(other, 1, worker="unlucky", shared_worker_id=True)
        proxy.cut_after(b"unlucky", answer=b"work")

        (fourth,) = await take(store, 1, worker="unlucky", shared_worker_id=True)

        assert proxy.cuts == 1
        assert [(await settle(store, job)).accepted for job in (first, second, fourth)] == [True] * 3


async def test_abandoned_claim_is_returned_by_the_next_claim(
    proxy: FaultProxy, proxied_url: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 0.2)
    async with opened(proxied_url) as store, opened(url) as other:
        await put(store, *[new_job(priority=n % 3) for n in range(250)])
        (kept,) = await take(other, 1, worker="lucky")
        assert len(await take_ids(store, 1, worker="unlucky")) == 1
        proxy.cut_after(b"unlucky", answer=b"work")
        proxy.cut_before(b"unlucky", times=EVER)
        with pytest.raises(Unavailable):
            await take(store, 200, worker="unlucky")
        taken = await other.query.count(JobFilter(states=(JobState.RUNNING,)))
        proxy.heal()

        assert await until_it_works(lambda: take(store, 0, worker="unlucky")) == []
        ids = await until_it_works(lambda: take_ids(store, 10, worker="unlucky"))

        assert taken == 202
        assert len(ids) == 10
        assert await other.query.count(JobFilter(states=(JobState.RUNNING,))) == 12
        assert (await settle(other, kept)).accepted


@pytest.mark.parametrize("size", [1, 250])
async def test_submission_to_a_reloading_server_may_be_stored(
    url: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The server is killed before it answers, and has come back, but is not done with its log, when we give up."""
    tries: list[int] = []

    async def ask_each(link: RedisConnection, commands: Iterable[tuple[Argument, ...]]) -> list[Any]:
        given = list(commands)
        tries.append(len(given))
        if len(tries) == 1:
            await whole(link, given)
            raise driver.ConnectionError("Connection closed by server.")
        return [driver.ResponseError("LOADING Redis is loading the dataset in memory")] * len(given)

    whole = RedisConnection.ask_each
    monkeypatch.setattr(pool, "RETRY_FOR", 0.1)
    async with opened(url) as store:
        await store.admin.delete(await put(store))  # the server knows the script
        with monkeypatch.context() as patch:
            patch.setattr(RedisConnection, "ask_each", ask_each)
            with pytest.raises(Unavailable, match=r"LOADING.*may be stored all the same") as raised:
                await store.queueing.submit([new_job() for _ in range(size)])

        assert (len(tries) > 1, raised.value.stored) == (True, ())
        assert await store.query.count(JobFilter()) == size


async def test_pieces_that_were_done_before_one_was_refused_count(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server becomes a replica in the middle of a batch, and takes writes again a moment later."""
    refused: list[str] = []

    async def ask_each(link: RedisConnection, commands: Iterable[tuple[Argument, ...]]) -> list[Any]:
        first, *rest = commands
        if rest and rest[-1][0] == "EVALSHA" and rest[-1][1] not in refused:
            refused.append(str(rest[-1][1]))
            answers = await whole(link, [first, *rest[:-1]])
            return [*answers, driver.ResponseError("READONLY You can't write against a read only replica.")]
        return await whole(link, [first, *rest])

    whole = RedisConnection.ask_each
    monkeypatch.setattr(RedisConnection, "ask_each", ask_each)
    async with opened(url) as store:
        jobs = [new_job() for _ in range(250)]
        assert [answer.created for answer in await store.queueing.submit(jobs)] == [True] * 250

        taken = await take(store, 1, worker="w") + await take(store, 240, worker="w")
        assert await store.query.count(JobFilter(states=(JobState.RUNNING,))) == len(taken) == 50

        taken += await take(store, 200, worker="w")
        answers = await store.queueing.settle([ending(job) for job in taken])
        assert [answer.accepted for answer in answers] == [True] * 250
        assert len(refused) == 3


async def test_a_cancelled_claim_is_given_back(url: str) -> None:
    async with opened(url) as store:
        await put(store, *[new_job() for _ in range(60)])
        held = len(await take_ids(store, 1, worker="w"))
        for steps in range(20):
            claiming = asyncio.create_task(take_ids(store, 1, worker="w"))
            for _ in range(steps):
                await asyncio.sleep(0)
            claiming.cancel()
            (answer,) = await asyncio.gather(claiming, return_exceptions=True)
            assert isinstance(answer, list | asyncio.CancelledError)
            held += len(answer) if isinstance(answer, list) else 0
        held += len(await take_ids(store, 1, worker="w"))

        assert await store.query.count(JobFilter(states=(JobState.RUNNING,))) == held


async def test_lease_number_given_twice_belongs_to_the_recorded_worker(server: Redis, url: str) -> None:
    """A failover may forget a claim: then the next one has the same number."""
    async with opened(url) as store:
        (job_id,) = await put(store)
        key = f"{{{url.rpartition('=')[2]}}}:job:{job_id}"
        (first,) = await take(store, worker="first")
        server.execute("HSET", key, "worker", "second")

        assert (await store.queueing.heartbeat(heartbeat("first"), [first.lease], lease_for=LEASE)).statuses == [
            LeaseStatus.LOST
        ]
        assert (await store.queueing.heartbeat(heartbeat("second"), [first.lease], lease_for=LEASE)).statuses == [
            LeaseStatus.HELD
        ]


async def test_waits_without_answer_begin_once(proxy: FaultProxy, proxied_url: str) -> None:
    hour = timedelta(hours=1)
    async with opened(proxied_url) as store:
        for n in range(4):
            job, child, topic = await running(store), new_job(payload=f'{{"child":{n}}}', delay=hour), f"needle-{n}"
            wait = SignalWait(NewStep(job.lease, "s", 1, True), topic, hour)
            cuts = ((topic, b"*2\r\n:2"), (f'"signal-{n}"', b"*2\r\n:1"), (f'"child":{n}', b"*2\r\n"))
            for needle, answer in cuts if n else ():  # the server knows the scripts
                proxy.cut_after(needle.encode(), answer=answer)
            receipt = await store.workflow.receive_signal(wait)
            assert receipt.time_left is not None
            assert hour - timedelta(minutes=1) < receipt.time_left <= hour
            signal = Signal(f"id-{n}", topic, f'"signal-{n}"')
            assert await store.workflow.send_signal(signal) == SentSignal(True, job.id)
            assert await store.workflow.receive_signal(wait) == SignalReceipt(result=f'{{"signal":"signal-{n}"}}')
            started = await store.workflow.start_children(job.lease, [child], WORKER)
            assert started == [ChildStatus(child.id, JobState.SCHEDULED)]
            await settle(store, job, JobState.WAITING, refund=True)
            await store.admin.cancel([child.id])
            assert await state_of(store, job.id) is JobState.SCHEDULED
        assert proxy.cuts == 9
        assert await store.health.repair() == []


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (driver.ResponseError("NOREPLICAS Not enough good replicas to write."), pool.WriteNotConfirmed),
        (driver.ResponseError("MISCONF Errors writing to the AOF file"), pool.WriteNotConfirmed),
        (driver.MovedError("1 127.0.0.1:6379"), driver.ConnectionError),
        (driver.ReadOnlyError("You can't write against a read only replica."), driver.ConnectionError),
    ],
)
async def test_write_without_mark_is_not_confirmed(refusal: Exception, raised: type[Exception]) -> None:
    """Waiting has succeeded, for what the connection wrote earlier or for nothing."""

    class Refusing:
        async def ask_each(self, commands: list[object]) -> list[object]:
            return [refusal, 1]

    namespace = NamespacePool(parse_url("redis://127.0.0.1/0?replicas=1"), now=None)
    with pytest.raises(raised):
        await namespace._confirm(cast("RedisConnection", Refusing()))
