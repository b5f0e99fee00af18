"""The PostgreSQL store in networks that go silent, cut off and lie: RELIABILITY F12–F16, F20, F22, F26, F28."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

import asyncpg
import pytest

from holdfast.core.errors import Conflict, HoldfastError, Unavailable
from holdfast.core.ids import new_id
from holdfast.core.models import Job, JobFilter, JobState, Lease, Settlement
from holdfast.stores import open_store
from holdfast.stores.postgres import notifications, pool
from tests.conformance.support import (
    LEASE,
    claim,
    ending,
    failing,
    heartbeat,
    new_job,
    put,
    running,
    settle,
    stored,
    take,
)
from tests.faults.support import opened, until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.load import slowness
from tests.support.postgres import DATABASE, USER, Postgres


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_half_open_connection_is_noticed(
    proxy: FaultProxy, proxied_url: str, hurried: None, direction: str
) -> None:
    async with opened(proxied_url) as store:
        (job_id,) = await put(store)
        proxy.hold(to_server=direction == "to_server", to_client=direction == "to_client")

        with pytest.raises(Unavailable, match="cannot be reached"):
            await claim(store)

        proxy.heal()
        assert await until_it_works(lambda: store.query.count(JobFilter())) == 1
        assert (await stored(store, job_id)).id == job_id


async def test_a_black_hole_is_noticed_by_every_verb(proxy: FaultProxy, proxied_url: str, hurried: None) -> None:
    async with opened(proxied_url) as store:
        job = await running(store)
        proxy.hold()

        for call in (
            store.queueing.submit([new_job()]),
            store.queueing.settle([failing(job)]),
            store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE),
            store.maintenance.find_expired_leases(limit=1),
            store.query.get(job.id),
            store.admin.cancel([job.id]),
        ):
            with pytest.raises(Unavailable):
                await call


async def test_refusing_server_is_reported_in_one_line_and_soon(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        proxy.refuse()
        proxy.cut()
        begun = time.monotonic()

        with pytest.raises(Unavailable) as raised:
            await store.queueing.submit([new_job()])

        assert time.monotonic() - begun < (pool.RETRY_FOR + 3) * slowness()
        assert "\n" not in str(raised.value)
        proxy.accept()
        (answer,) = await until_it_works(lambda: store.queueing.submit([new_job()]))
        assert answer.created
        assert await store.query.count(JobFilter()) == 1


async def test_a_short_absence_is_not_even_noticed(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        for _ in range(5):
            proxy.cut()
            (answer,) = await store.queueing.submit([new_job()])
            assert answer.created
        assert await store.query.count(JobFilter()) == 5


async def test_silent_listener_costs_one_poll_and_is_replaced(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "KEEPALIVE_INTERVAL", 0.5)
    monkeypatch.setattr(notifications, "KEEPALIVE_TIMEOUT", 0.5)
    async with opened(proxied_url) as worker, opened(proxied_url) as submitter:
        await worker.queueing.wait(["queue:default"], timeout=0.1)
        proxy.hold(of=b"LISTEN")

        await put(submitter)
        begun = time.monotonic()
        await worker.queueing.wait(["queue:default"], timeout=1.0)
        assert time.monotonic() - begun < 5.0 * slowness()
        assert len(await take(worker)) == 1

        proxy.heal()
        deadline = time.monotonic() + 120
        while True:  # until a listener is back: woken long before the timeout
            await worker.queueing.wait(["queue:default"], timeout=0.2)
            waiting = asyncio.create_task(worker.queueing.wait(["queue:default"], timeout=60))
            await asyncio.sleep(0.1)
            if waiting.done():
                continue
            begun = time.monotonic()
            await put(submitter)
            await waiting
            if time.monotonic() - begun < 30:
                return
            assert time.monotonic() < deadline


async def test_a_cancelled_call_leaves_no_answer_for_the_next_one(url: str) -> None:
    """Cancelled at every point it can be: what is asked next is answered, and with its own answer."""
    async with opened(url) as store:
        first, second = await put(store, new_job("first"), new_job("second"))
        for steps in range(40):
            asked = asyncio.create_task(store.query.get(first))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            answered = asyncio.gather(*[store.query.get(each) for each in (second, first, second)])
            assert [job.task for job in await answered if job is not None] == ["second", "first", "second"]
            await asyncio.gather(asked, return_exceptions=True)


async def test_a_deadlock_is_tried_again(postgres: Postgres, url: str) -> None:
    async with opened(url) as store:
        ids = sorted(await put(store, new_job(), new_job()))
        schema = url.rpartition("schema=")[2]
        lock = f"select from {schema}.job where id = $1 for update"
        other = await asyncpg.connect(postgres.url())
        try:
            transaction = other.transaction()
            await transaction.start()
            await other.execute(lock, ids[1])
            cancelling = asyncio.create_task(store.admin.cancel(ids))
            await asyncio.sleep(0.3)  # it holds the first row and waits for the second
            try:
                await other.execute(lock, ids[0])  # one of the two must give way
            except asyncpg.DeadlockDetectedError:
                await transaction.rollback()
            else:
                await transaction.commit()
            assert (await cancelling).changed == [(job_id, JobState.CANCELLED) for job_id in ids]
        finally:
            await other.close()


@pytest.mark.parametrize("outcome", [ending, failing])
async def test_locked_row_does_not_delay_other_rows(
    postgres: Postgres, url: str, outcome: Callable[[Job], Settlement]
) -> None:
    async with opened(url) as store:
        jobs = [await running(store) for _ in range(3)]
        schema = url.rpartition("schema=")[2]
        other = await asyncpg.connect(postgres.url())
        try:
            async with other.transaction():
                await other.execute(f"select from {schema}.job where id = $1 for update", jobs[1].id)

                answers = await store.queueing.settle([outcome(job) for job in jobs])
                assert [(answer.accepted, answer.locked) for answer in answers] == [
                    (True, False),
                    (False, True),
                    (True, False),
                ]
                assert [answer.locked for answer in await store.queueing.settle([outcome(jobs[1])])] == [True]
            assert [(answer.accepted, answer.locked) for answer in await store.queueing.settle([outcome(jobs[1])])] == [
                (True, False)
            ]
            assert [answer.locked for answer in await store.queueing.settle([outcome(jobs[1])])] == [False], (
                "lost, not locked"
            )
        finally:
            await other.close()


async def test_a_primary_that_takes_no_more_writes_is_left(url: str) -> None:
    with Postgres(durable=False) as server:
        url = server.url()
        async with opened(url) as store:
            await put(store)
            server.change(default_transaction_read_only="on")
            with pytest.raises(Unavailable, match="read-only") as caught:
                await store.queueing.submit([new_job()])
            assert (caught.value.outcome, "all the same" in str(caught.value)) == ("", False), "it cannot be stored"
            assert (await store.query.count(JobFilter())) == 1

            server.change(default_transaction_read_only="off")
            await until_it_works(lambda: store.queueing.submit([new_job()]))
            assert (await store.query.count(JobFilter())) == 2


async def test_hosts_among_the_parameters_are_asked_which_takes_writes() -> None:
    with Postgres(durable=False) as standby, Postgres(durable=False) as primary:
        standby.change(default_transaction_read_only="on")
        places = f"host=127.0.0.1,127.0.0.1&port={standby.port},{primary.port}"
        url = f"postgresql:///{DATABASE}?user={USER}&{places}"
        async with opened(url) as store:
            await put(store)
            assert (await store.query.count(JobFilter())) == 1


async def test_heartbeat_does_not_wait_for_a_handler_holding_its_job(postgres: Postgres, url: str) -> None:
    async with opened(url) as store:
        held, other = await running(store), await running(store)
        schema = url.rpartition("schema=")[2]
        link = await asyncpg.connect(postgres.url())
        try:
            async with link.transaction():
                await link.execute(f"select from {schema}.job where id = $1 for update", held.id)
                leases: list[Lease] = [held.lease, other.lease]
                reply = await asyncio.wait_for(
                    store.queueing.heartbeat(heartbeat(), leases, lease_for=LEASE * 2), timeout=60
                )
                assert [str(each) for each in reply.statuses] == ["locked", "held"]
            assert (await stored(store, other.id)).lease_until_us > (await stored(store, held.id)).lease_until_us  # type: ignore[operator]
        finally:
            await link.close()


async def test_a_beat_says_in_time_what_it_waited_for(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_FOR", 600.0)
    async with opened(proxied_url) as store:
        job = await running(store)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await asyncio.wait_for(
                store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=timedelta(seconds=1)), timeout=30
            )


async def test_claim_waits_for_a_job_being_made_ready_elsewhere(postgres: Postgres, url: str) -> None:
    async with opened(url) as store:
        (due,) = await put(store, new_job(delay=timedelta(milliseconds=1)))
        await asyncio.sleep(0.01)
        (later,) = await put(store)
        link = await asyncpg.connect(postgres.url())
        try:
            await link.execute(f"set search_path = {url.rpartition('schema=')[2]}")
            async with link.transaction():
                await link.execute("update job set state = 0 where id = $1", due)
                claiming = asyncio.create_task(take(store, 1))
                await asyncio.sleep(0.002)
            assert [job.id for job in await claiming] == [due]
            assert [job.id for job in await take(store, 1)] == [later]
        finally:
            await link.close()


async def test_what_a_database_has_by_default_does_not_matter(postgres: Postgres) -> None:
    theirs = {
        "default_transaction_isolation": "serializable",
        "statement_timeout": "1ms",
        "lock_timeout": "1ms",
        "idle_session_timeout": "1ms",
        "standard_conforming_strings": "off",
        "plan_cache_mode": "force_custom_plan",
        "client_encoding": "latin1",
    }
    database = postgres.create_database()
    for name, value in theirs.items():
        postgres.execute(f"alter database {database} set {name} = '{value}'")
    async with opened(postgres.url(database=database)) as store:
        job = await running(store, payload='{"text":"€"}')
        assert job.payload == '{"text":"€"}'
        assert (await settle(store, job)).accepted
    ours = pool.PostgresPool(pool.parse_url(postgres.url(database=database)), now=None)
    for name, value in theirs.items():
        assert await ours.call(lambda link, name=name: link.fetchval(f"show {name}")) != value, name
    await ours.close()


async def test_a_password_is_never_shown(url: str) -> None:
    for url in (
        "postgresql://app:hunter2secret@127.0.0.1:1/app",
        "postgresql://app:hunter2secret@127.0.0.1:1,127.0.0.1:2/app?schema=x",
    ):
        store = open_store(url)
        assert "hunter2secret" not in store.url
        with pytest.raises(Unavailable) as raised:
            await store.open()
        assert "hunter2secret" not in str(raised.value)


async def test_unknown_ids_are_refused_clearly(url: str) -> None:
    async with opened(url) as store:
        with pytest.raises(HoldfastError):
            await store.queueing.submit([new_job(id="no id")])
        operated = await store.admin.cancel(["no id", new_id()])
        assert [state for _, state in operated.refused] == [None, None]
    with pytest.raises((Conflict, HoldfastError)):
        await store.query.count(JobFilter())
