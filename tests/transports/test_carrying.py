"""What a transport carries, and what becomes of what it delivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.errors import Unavailable
from holdfast.core.job_changes import JobChanges
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.models import JobState, Lease, Options, Reason, UniqueKey
from holdfast.core.workers import LeaseStatus, WorkerHeartbeat
from holdfast.stores.base import EVERY_QUEUE, Store
from holdfast.stores.postgres.encoding import NumberedStatement
from holdfast.stores.postgres.pool import PostgresPool, Rows
from holdfast.transports import redis
from tests.support.redis import Redis
from tests.support.spoiling import session
from tests.transports.support import RETRY_FOR, Pairing, claim, ending, new_job, put, take, until

SECOND = timedelta(seconds=1)


async def into_the_ledger(store: Store, pairing: Pairing) -> None:
    """Wait until what waits has been taken by who waits for it; a wait may end earlier."""
    async with asyncio.timeout(RETRY_FOR):
        while pairing.waiting():
            await store.queueing.wait(["queue:default"], timeout=1)


async def test_only_ready_ids_arrive_and_in_submission_order(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, *[new_job(priority=number % 3) for number in range(5)])
        other = await put(store, new_job(queue="mail"))
        await put(store, new_job(delay=timedelta(hours=1)))

        assert (pairing.waiting(), pairing.waiting("mail")) == (ids, other)
        assert [await take(store, 1) for _ in ids] == [[each] for each in ids]


async def test_a_delayed_job_is_announced_once_it_is_due(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        ids = await put(store, *[new_job(delay=number * SECOND) for number in (3, 1, 2)])
        clock.advance(2.5)
        assert await store.maintenance.promote_due(limit=10) == 2
        assert pairing.waiting() == [ids[1], ids[2]]
        clock.advance(1)

        assert await take(store) == [ids[1], ids[2], ids[0]]


async def test_a_due_job_that_is_locked_is_not_asked_for_again_at_once(pairing: Pairing) -> None:
    """Else an idle worker would ask for as long as the transaction of another program lasts."""
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        (job_id,) = await put(store, new_job(delay=SECOND))
        clock.advance(2)
        with session(pairing.url) as holder:
            holder.execute("select from job where id = %s for update", [job_id])
            claimed = await claim(store)
            assert claimed.jobs == []
            assert claimed.next_due is not None
            assert claimed.next_due > timedelta(0)
        assert await take(store) == [job_id]


async def test_an_instant_in_the_past_is_announced_at_once(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        (job_id,) = await put(store, new_job(run_at_us=clock() - 5))
        await put(store, new_job(run_at_us=clock() + 5))

        assert pairing.waiting() == [job_id]


async def test_a_known_key_announces_nothing_more(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        first = await put(store, new_job(key="k"))
        await put(store, new_job(key="k"))

        assert pairing.waiting() == first


async def test_workers_claim_only_what_was_delivered(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, new_job(), new_job())
        pairing.forget()
        pairing.push(ids[1])

        assert (await take(store), await take(store)) == ([ids[1]], [])


async def test_what_cannot_be_claimed_is_counted_once_each_and_gone(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ended, ready = await put(store, new_job(), new_job())
        await store.admin.cancel([ended])
        pairing.push(ready, "hello", "", "x" * 1000, "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", "a\nb")

        claimed = await claim(store)

        assert ([job.id for job in claimed.jobs], claimed.refused) == ([ready], 3)
        assert (await claim(store)).refused == 0
        await store.queueing.settle([ending(job) for job in claimed.jobs])
        assert (pairing.waiting(), pairing.unacknowledged()) == ([], 0)


async def test_claim_returns_the_lease_when_a_later_round_is_empty(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        (job_id,) = await put(store)
        pairing.push(job_id, job_id, job_id)

        claimed = await claim(store, 2)

        assert [job.id for job in claimed.jobs] == [job_id]
        assert claimed.lease_until_us == clock() + 30_000_000


@pytest.mark.parametrize(("failing", "call", "queue"), [("claim_limited", 2, ""), ("ready_queues", 1, EVERY_QUEUE)])
async def test_jobs_under_limits_are_returned_though_a_later_statement_fails(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch, failing: str, call: int, queue: str
) -> None:
    """Else they would run only once their leases have expired, and would be suspects."""
    capacity = {queue or f"queue-{number:02}": 9 for number in range(40)}  # more than one statement claims from
    calls = 0

    async def fail_once(pool: PostgresPool, statement: NumberedStatement, **values: Any) -> Rows:
        nonlocal calls
        calls += statement.name == failing
        if statement.name == failing and calls == call:
            raise Unavailable("the server is away")
        return await fetch(pool, statement, **values)

    fetch, limit = PostgresPool.fetch, Limit(name="work", task="work", values=LimitValues(concurrency=9))
    async with pairing.app() as app:
        store = await app.open_store()
        await store.limits.write_limit(LimitChange(limit, 0))
        ids = await put(store, new_job(queue="queue-00"), new_job(queue="queue-39"))
        monkeypatch.setattr(PostgresPool, "fetch", fail_once)
        taken = await take(store, 9, capacity=capacity)
        assert (calls, taken) == (call, ids[:1] if call == 2 else ids)
        assert await take(store, 9, capacity=capacity) == ids[len(taken) :]


async def test_an_id_in_another_spelling_is_the_same_job(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        (job_id,) = await put(store)
        pairing.forget()
        pairing.push(job_id.upper())

        assert await take(store) == [job_id]


async def test_two_workers_on_a_list_of_duplicates_share_the_jobs(pairing: Pairing) -> None:
    async with pairing.app() as one, pairing.app() as two:
        stores = [await one.open_store(), await two.open_store()]
        ids = await put(stores[0], *[new_job() for _ in range(50)])
        pairing.push(*ids, *reversed(ids))

        claims = [await claim(stores[turn % 2], 7) for turn in range(40)]

        assert sorted(job.id for each in claims for job in each.jobs) == sorted(ids)
        assert sum(each.refused for each in claims) == 100


async def test_a_hundred_thousand_stale_ids_are_worked_off(rough: Pairing) -> None:
    async with rough.app() as app:
        store = await app.open_store()
        stale = "01a1feb7-6997-7000-a22a-42bd08d01901"
        if rough.is_stream:
            script = "for n = 1, 100000 do redis.call('XADD', KEYS[1], '*', 'id', ARGV[1]) end"
        else:
            script = "for n = 1, 100000 do redis.call('LPUSH', KEYS[1], ARGV[1]) end"
        rough.execute("EVAL", script, 1, rough.key(), stale)
        (job_id,) = await put(store)

        refused, claimed = 0, []
        while not claimed:
            brought = await claim(store, 1)
            refused, claimed = refused + brought.refused, [job.id for job in brought.jobs]

        assert (refused, claimed) == (100_000, [job_id])


async def test_of_a_paused_queue_nothing_is_read(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, new_job(), new_job())
        await store.admin.pause("default")
        assert [await take(store) for _ in range(3)] == [[], [], []]
        assert (sorted(pairing.waiting()), await store.maintenance.reannounce()) == (sorted(ids), 0)

        await store.admin.resume("default")

        assert sorted(await take(store)) == sorted(ids)


async def test_the_star_serves_queues_in_turn(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        await put(store, *[new_job(queue=queue) for queue in ("a", "b", "c") for _ in range(5)])

        served = [job.queue for _ in range(6) for job in (await claim(store, 1, {EVERY_QUEUE: 1})).jobs]

        assert served == ["a", "b", "c", "a", "b", "c"]


async def test_queue_with_slots_of_its_own_takes_none_of_the_star(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, *[new_job(queue="a") for _ in range(4)])

        served = [job.id for _ in ids for job in (await claim(store, 9, {"a": 1, EVERY_QUEUE: 5})).jobs]

        assert served == ids


@asynccontextmanager
async def waiting_for_every_queue(pairing: Pairing) -> AsyncIterator[asyncio.Task[list[str]]]:
    """The job that an idle worker of every queue, which does not poll, gets next."""

    def clients() -> dict[str, str]:
        with pairing.server.client() as client:
            return {each["id"]: each["flags"] for each in client.client_list()}

    async def take_next(store: Store) -> list[str]:
        while not (taken := await take(store, worker="idle", capacity={EVERY_QUEUE: 1})):
            await store.queueing.wait(["queue:*"], timeout=3600)
        return taken

    others = clients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis, "_BLOCK", 3600.0)  # the queues to block on are read again after each
        async with pairing.app() as app:
            taking = asyncio.create_task(take_next(await app.open_store()))
            await until(
                lambda: any("b" in flags for each, flags in clients().items() if each not in others), "the wait"
            )
            async with asyncio.timeout(RETRY_FOR):
                yield taking


async def test_queue_is_heard_of_whose_only_id_is_given_back(pairing: Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    received, gate, fetch = asyncio.Event(), asyncio.Event(), PostgresPool.fetch

    async def wait_at_gate(pool: PostgresPool, statement: NumberedStatement, **values: Any) -> Rows:
        if statement.name == "claim_ids" and values["worker"] == "w":
            received.set()
            await gate.wait()
        return await fetch(pool, statement, **values)

    monkeypatch.setattr(PostgresPool, "fetch", wait_at_gate)
    async with pairing.app() as app:
        store = await app.open_store()
        (job_id,) = await put(store, new_job(queue="rare", max_attempts=1))
        claiming = asyncio.create_task(take(store, 1, capacity={EVERY_QUEUE: 1}, max_must_start=0))
        await received.wait()
        async with waiting_for_every_queue(pairing) as taking:
            gate.set()
            assert (await claiming, await taking) == ([], [job_id])


async def test_queue_is_heard_of_in_which_a_sweep_finds_ids(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        await put(store, new_job(queue="rare"))
        assert len(await take(store, capacity={EVERY_QUEUE: 9})) == 1
        async with pairing.app(transport="none") as program, waiting_for_every_queue(pairing) as taking:
            (job_id,) = await put(await program.open_store(), new_job(queue="rare"))
            pairing.push(job_id, queue="rare")
            await store.maintenance.reannounce()
            assert await taking == [job_id]


async def test_deliveries_without_free_capacity_go_to_other_workers(pairing: Pairing) -> None:
    async with pairing.app() as app, pairing.app() as other:
        store = await app.open_store()
        await claim(store, 1)
        (job_id,) = await put(store)
        await into_the_ledger(store, pairing)

        assert await take(store, 1, capacity={"elsewhere": 1}) == []
        assert await take(await other.open_store()) == [job_id]


async def test_many_deliveries_are_given_back_in_order(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, *[new_job(max_attempts=1) for _ in range(1200)])
        assert await take(store, 1200, max_must_start=0) == []
        assert pairing.waiting() == ids


async def test_closing_a_store_returns_its_deliveries(pairing: Pairing) -> None:
    async with pairing.app() as other:
        async with pairing.app() as app:
            store = await app.open_store()
            (job_id,) = await put(store)
            await into_the_ledger(store, pairing)

        assert await take(await other.open_store()) == [job_id]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD])
async def test_a_delivery_is_acknowledged_after_its_job_s_settlement(pairing: Pairing, state: JobState) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        await put(store)
        (job,) = (await claim(store)).jobs
        assert pairing.unacknowledged() == int(pairing.is_stream)

        await store.queueing.settle(
            [ending(job, state, reason=None if state == "succeeded" else Reason.ERROR, error="boom")]
        )

        assert (pairing.unacknowledged(), pairing.waiting()) == (0, [])
        assert not pairing.is_stream or pairing.execute("XLEN", pairing.key()) == 0


async def test_a_released_job_is_announced_again(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        (job_id,) = await put(store)
        (job,) = (await claim(store)).jobs
        await store.queueing.settle([ending(job, JobState.QUEUED, reason=Reason.RELEASED, refund=True)])

        assert pairing.waiting() == [job_id]
        assert await take(store) == [job_id]


async def test_a_lost_lease_needs_no_delivery(pairing: Pairing) -> None:
    """The sweep settles what ran out; its worker hears that at its next beat."""
    clock = ManualClock()
    async with pairing.app(now=clock) as app, pairing.app(now=clock) as other:
        store, sweeper = await app.open_store(), await other.open_store()
        await put(store)
        (job,) = (await claim(store)).jobs
        clock.advance(31)
        (lost,) = await sweeper.maintenance.find_expired_leases(limit=10)
        await sweeper.queueing.settle(
            [ending(lost, JobState.QUEUED, reason=Reason.CRASHED, error="lost", lease_expired=True)]
        )
        assert await take(sweeper) == [job.id]

        heartbeat = WorkerHeartbeat(worker="w", host="h", pid=1, queues="*", concurrency=1)
        reply = await store.queueing.heartbeat(heartbeat, [Lease(job.id, job.claims)], lease_for=timedelta(seconds=30))

        assert reply.statuses == [LeaseStatus.LOST]


async def test_edited_job_is_announced_in_its_new_queue(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        moved, put_off, soon = await put(store, new_job(), new_job(), new_job(delay=timedelta(hours=1)))
        await store.admin.edit(moved, JobChanges(queue="mail"))
        await store.admin.edit(put_off, JobChanges(delay=SECOND * 60))
        await store.admin.edit(soon, JobChanges(delay=SECOND * 0))

        assert pairing.waiting("mail") == [moved]
        assert pairing.waiting() == [moved, put_off, soon]
        assert await take(store) == [soon]
        assert pairing.waiting() == []  # what does not belong there was acknowledged
        assert await take(store, capacity={"mail": 9}) == [moved]
        assert pairing.waiting("mail") == []


async def test_expired_job_is_refused_and_acknowledged(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        await put(store, new_job(expires_in=SECOND))
        kept = await put(store, new_job())
        clock.advance(2)

        claimed = await claim(store)
        assert [job.id for job in claimed.jobs] == kept
        assert (len(claimed.expired), claimed.refused) == (1, 1)
        assert pairing.waiting() == []


@pytest.mark.parametrize("transport", ["redis_list", "redis_stream"])
async def test_a_redis_store_beside_the_transport_keeps_its_jobs(
    postgres_url: str, redis_of_its_own: Redis, transport: str
) -> None:
    """Both with their default names, in one database of Redis."""
    url = redis_of_its_own.url()
    async with Holdfast(url) as neighbor, Holdfast(postgres_url, transport=transport, transport_url=url) as app:
        on_redis, carried = await neighbor.open_store(), await app.open_store()
        theirs, ours = await put(on_redis), await put(carried)

        assert (await take(carried), await take(on_redis)) == (ours, theirs)


async def test_replaced_job_is_announced_in_the_queue_it_was_moved_to(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        unique = UniqueKey("order", "unstarted", on_conflict="replace")
        (job_id,) = await put(store, new_job(delay=SECOND * 60, options=Options(unique=unique)))
        await store.admin.edit(job_id, JobChanges(queue="mail"))
        assert await put(store, new_job(options=Options(unique=unique))) == [job_id]
        assert (pairing.waiting("mail"), pairing.waiting()) == ([job_id], [])
