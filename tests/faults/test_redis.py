"""The Redis store on connections that are cut, silent, killed and cancelled: RELIABILITY F27, F28."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from holdfast import Holdfast
from holdfast.core.errors import Unavailable
from holdfast.core.events import StoreTrouble
from holdfast.core.models import JobFilter
from holdfast.stores import open_store
from holdfast.stores.redis import notifications
from tests.conformance.support import LEASE, claim, failing, heartbeat, new_job, put, running, settle, stored, take
from tests.faults.support import opened, until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.redis import FLOORS, MAIN, Redis, shared
from tests.transports.support import Recorder, counting, until_succeeded, working

KINDS = (MAIN, *FLOORS)


@pytest.mark.parametrize("kind", KINDS)
async def test_scripts_that_were_flushed_are_loaded_again_at_every_call(kind: str) -> None:
    server = shared(kind)
    with server.fresh_namespace() as namespace:
        async with opened(server.url(namespace=namespace)) as store:
            for _ in range(3):
                server.execute("SCRIPT", "FLUSH")
                (job_id,) = await put(store)
                server.execute("SCRIPT", "FLUSH")
                (job,) = await take(store)
                server.execute("SCRIPT", "FLUSH")
                await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)
                server.execute("SCRIPT", "FLUSH")
                assert (await settle(store, job)).accepted
                assert job.id == job_id


@pytest.mark.parametrize("kind", KINDS)
async def test_flushing_scripts_all_the_time_fails_no_call(kind: str) -> None:
    with Redis(kind) as server:
        app = Holdfast(server.url())
        runs, events = counting(app), Recorder(app)
        with server.flushing_scripts():
            async with app, working(app):
                ids = [handle.id for handle in await asyncio.gather(*[app.enqueue("work") for _ in range(100)])]
                ids += [handle.id for handle in await app.enqueue_many([app.draft_job("work", {}) for _ in range(500)])]
                await until_succeeded(app, len(ids))
        assert runs == Counter(ids)
        assert events.of(StoreTrouble) == []


async def test_killed_connections_are_not_even_noticed(server: Redis, url: str) -> None:
    async with opened(url) as store:
        for number in range(5):
            server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            (answer,) = await store.queueing.submit([new_job()])
            assert answer.created
            assert await store.query.count(JobFilter()) == number + 1


async def test_a_killed_listener_is_replaced(server: Redis, url: str) -> None:
    async with opened(url) as worker, opened(url) as submitter:
        await worker.queueing.wait(["job:x"], timeout=0.1)
        job = await running(submitter)
        for _ in range(3):
            server.execute("CLIENT", "KILL", "TYPE", "pubsub")
            await worker.queueing.wait(["worker:w"], timeout=0.05)
        waiting = asyncio.create_task(worker.queueing.wait([f"job:{job.id}"], timeout=50))
        await settle(submitter, job)
        await asyncio.wait_for(waiting, timeout=30)


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


async def test_a_store_closes_whatever_its_listeners_are_just_doing(url: str) -> None:
    for steps in range(0, 120, 3):
        store = open_store(url)
        await store.open()
        waiting = asyncio.create_task(store.queueing.wait(["queue:default", "job:x"], timeout=50))
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.wait_for(store.close(), timeout=60)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_half_open_connection_is_noticed_by_every_verb(
    proxy: FaultProxy, proxied_url: str, hurried: None, direction: str
) -> None:
    async with opened(proxied_url) as store:
        job = await running(store)
        proxy.hold(to_server=direction == "to_server", to_client=direction == "to_client")

        for call in (
            claim(store),
            store.queueing.submit([new_job()]),
            store.queueing.settle([failing(job)]),
            store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE),
            store.maintenance.find_expired_leases(limit=1),
            store.query.get(job.id),
            store.admin.cancel([job.id]),
        ):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await call

        proxy.heal()
        await until_it_works(lambda: store.query.count(JobFilter()))
        assert (await stored(store, job.id)).id == job.id


async def test_a_listener_that_went_silent_is_replaced(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "KEEPALIVE_INTERVAL", 0.5)
    monkeypatch.setattr(notifications, "KEEPALIVE_TIMEOUT", 0.5)
    async with opened(proxied_url) as worker, opened(proxied_url) as submitter:
        await worker.queueing.wait(["job:x"], timeout=0.1)
        job = await running(submitter)
        proxy.hold(of=b"SUBSCRIBE")
        await asyncio.sleep(1.2)
        proxy.heal()
        waiting = asyncio.create_task(worker.queueing.wait([f"job:{job.id}"], timeout=50))
        await settle(submitter, job)
        await asyncio.wait_for(waiting, timeout=30)


async def test_refusing_server_is_reported_in_one_line(proxy: FaultProxy, proxied_url: str, hurried: None) -> None:
    async with opened(proxied_url) as store:
        proxy.refuse()
        proxy.cut()

        with pytest.raises(Unavailable) as raised:
            await store.queueing.submit([new_job()])

        assert "\n" not in str(raised.value)
        proxy.accept()
        (answer,) = await until_it_works(lambda: store.queueing.submit([new_job()]))
        assert answer.created
        assert await store.query.count(JobFilter()) == 1


async def test_a_password_is_never_shown(hurried: None) -> None:
    for scheme in ("redis", "rediss", "redis+sentinel", "redis+cluster"):
        path = "name/0" if "sentinel" in scheme else "0"
        store = open_store(f"{scheme}://app:hunter2secret@127.0.0.1:1,127.0.0.1:2/{path}?namespace=x")
        assert "hunter2secret" not in store.url
        with pytest.raises(Unavailable) as raised:
            await store.open()
        assert "hunter2secret" not in str(raised.value)
