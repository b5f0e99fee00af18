"""The Redis store when its server forgets, fills up, dies, is replaced or says no: RELIABILITY F06, F21, F27, F28, F44,
F51, F52, B84."""

from __future__ import annotations

import asyncio
import time

import pytest

from holdfast.errors import ConfigError, HoldfastError, StoreMismatch, Unavailable
from holdfast.job import Finding, JobFilter, JobState
from holdfast.store import Store
from holdfast.stores import open_store
from holdfast.stores.redis import links, news
from tests.conformance.support import (
    LEASE,
    claim,
    ending,
    failing,
    new_job,
    pulse,
    put,
    running,
    settle,
    stored,
    take,
)
from tests.faults.support import opened, until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.keys import Keys
from tests.support.redis import FLOORS, MAIN, PASSWORD, Redis, shared

KINDS = (MAIN, *FLOORS)


@pytest.fixture
def server() -> Redis:
    """A running server that the tests of this process share: spare it."""
    return shared()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines a test can wait for."""
    monkeypatch.setattr(links, "DEADLINE", 0.7)
    monkeypatch.setattr(links, "_CONNECT", 0.7)


async def finding(store: Store, name: str) -> Finding:
    (found,) = [each for each in await store.doctor() if each.name == name]
    return found


# ── scripts and connections ───────────────────────────────────────────────────────────────────────────────────────


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
                await store.beat(pulse(), [job.lease], lease_for=LEASE)
                server.execute("SCRIPT", "FLUSH")
                assert (await settle(store, job)).accepted
                assert job.id == job_id


async def test_killed_connections_are_not_even_noticed(server: Redis, url: str) -> None:
    async with opened(url) as store:
        for number in range(5):
            server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            (answer,) = await store.submit([new_job()])
            assert answer.created
            assert await store.count(JobFilter()) == number + 1


async def test_a_killed_listener_is_replaced(server: Redis, url: str) -> None:
    async with opened(url) as worker, opened(url) as submitter:
        await worker.wait(["job:x"], timeout=0.1)
        job = await running(submitter)
        for _ in range(3):
            server.execute("CLIENT", "KILL", "TYPE", "pubsub")
            await worker.wait(["worker:w"], timeout=0.05)
        waiting = asyncio.create_task(worker.wait([f"job:{job.id}"], timeout=50))
        await settle(submitter, job)
        await asyncio.wait_for(waiting, timeout=30)


async def test_a_cancelled_call_leaves_no_answer_for_the_next_one(url: str) -> None:
    """Cancelled at every point it can be: what is asked next is answered, and with its own answer."""
    async with opened(url) as store:
        first, second = await put(store, new_job("first"), new_job("second"))
        for steps in range(40):
            asked = asyncio.create_task(store.get(first))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            answered = asyncio.gather(*[store.get(each) for each in (second, first, second)])
            assert [job.task for job in await answered if job is not None] == ["second", "first", "second"]
            await asyncio.gather(asked, return_exceptions=True)


async def test_a_store_closes_whatever_its_listeners_are_just_doing(url: str) -> None:
    for steps in range(0, 120, 3):
        store = open_store(url)
        await store.open()
        waiting = asyncio.create_task(store.wait(["queue:default", "job:x"], timeout=50))
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.wait_for(store.close(), timeout=20)
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
            store.submit([new_job()]),
            store.settle([failing(job)]),
            store.beat(pulse(), [job.lease], lease_for=LEASE),
            store.expired(limit=1),
            store.get(job.id),
            store.cancel([job.id]),
        ):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await call

        proxy.heal()
        await until_it_works(lambda: store.count(JobFilter()))
        assert (await stored(store, job.id)).id == job.id


async def test_a_listener_that_went_silent_is_replaced(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "_PROOF", 0.5)
    monkeypatch.setattr(news, "_PROVEN_IN", 0.5)
    async with opened(proxied_url) as worker, opened(proxied_url) as submitter:
        await worker.wait(["job:x"], timeout=0.1)
        job = await running(submitter)
        proxy.hold(of=b"SUBSCRIBE")
        await asyncio.sleep(1.2)
        proxy.heal()
        waiting = asyncio.create_task(worker.wait([f"job:{job.id}"], timeout=50))
        await settle(submitter, job)
        await asyncio.wait_for(waiting, timeout=30)


async def test_a_server_that_refuses_is_told_in_one_line_and_soon(proxy: FaultProxy, proxied_url: str) -> None:
    async with opened(proxied_url) as store:
        proxy.refuse()
        proxy.cut()

        with pytest.raises(Unavailable) as told:
            await store.submit([new_job()])

        assert "\n" not in str(told.value)
        proxy.accept()
        (answer,) = await until_it_works(lambda: store.submit([new_job()]))
        assert answer.created
        assert await store.count(JobFilter()) == 1


async def test_a_password_is_never_shown() -> None:
    for scheme in ("redis", "rediss", "redis+sentinel", "redis+cluster"):
        store = open_store(f"{scheme}://app:hunter2secret@127.0.0.1:1,127.0.0.1:2/name/0?namespace=x")
        assert "hunter2secret" not in store.url
        with pytest.raises(Unavailable) as told:
            await store.open()
        assert "hunter2secret" not in str(told.value)


# ── death ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_what_was_acknowledged_survives_a_kill_of_the_server(kind: str, fsync: str) -> None:
    with Redis(kind, settings={"appendfsync": fsync}) as server:
        url = server.url(durability=fsync, namespace="kept")
        async with opened(url) as store:
            acknowledged: list[str] = []
            for _ in range(4):
                submitting = [asyncio.create_task(store.submit([new_job() for _ in range(3)])) for _ in range(40)]
                await asyncio.sleep(0.02)
                server.kill()
                server.start()
                for answer in await asyncio.gather(*submitting, return_exceptions=True):
                    if isinstance(answer, list):
                        acknowledged += [each.job_id for each in answer if each.created]
                    else:
                        assert isinstance(answer, Unavailable)
            await until_it_works(lambda: store.count(JobFilter()))
            kept = {job.id for job in (await store.find(JobFilter(), limit=10_000)).jobs}
            assert set(acknowledged) <= kept
            assert acknowledged
        keys = Keys(url)
        assert list(keys.strays()) == []
        keys.client.close()


async def test_a_log_that_lost_its_tail_is_never_half_there() -> None:
    """Whatever bytes are missing: each script is there or is not, and no structure contradicts another."""
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        url = server.url(namespace="cut")
        for lost in (1, 7, 40, 200, 500):
            async with opened(url) as store:
                await put(store, *[new_job(key=f"{lost}-{n}") for n in range(5)], new_job(priority=3))
                jobs = await take(store, 4)
                await store.settle([ending(job) for job in jobs[:2]] + [failing(job) for job in jobs[2:]])
                await store.cancel(JobFilter(states=(JobState.QUEUED,)), limit=1)
            server.kill()
            log = max(server.folder.glob("**/*.incr.aof"), key=lambda file: file.stat().st_size)
            with log.open("r+b") as file:
                file.truncate(log.stat().st_size - lost)
            server.start()
            async with opened(url) as store:
                keys = Keys(url)
                assert list(keys.strays()) == []
                keys.client.close()
                assert await store.count(JobFilter()) == len((await store.find(JobFilter(), limit=1000)).jobs)


async def test_a_replica_that_was_promoted_is_found_and_a_replica_is_not_written_to() -> None:
    with Redis() as first, Redis() as second, FaultProxy(first.port) as proxy:
        second.execute("REPLICAOF", "127.0.0.1", first.port)
        url = first.url(namespace="moved").replace(f":{first.port}/", f":{proxy.port}/")
        async with opened(url) as store:
            (job_id,) = await put(store)
            deadline = time.monotonic() + 30
            while not second.execute("EXISTS", f"{{moved}}:job:{job_id}"):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            first.execute("REPLICAOF", "127.0.0.1", second.port)  # now nobody takes writes
            with pytest.raises(Unavailable, match="read only replica"):
                await store.submit([new_job()])
            first.execute("REPLICAOF", "NO", "ONE")
            await until_it_works(lambda: store.submit([new_job()]))
            assert await store.count(JobFilter()) == 2


# ── durability as declared and as it is ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "effective"),
    [
        ({"appendonly": "no"}, "none"),
        ({"appendfsync": "no"}, "none"),
        ({"appendfsync": "everysec"}, "everysec"),
        ({"appendfsync": "always"}, "always"),
    ],
)
async def test_weaker_than_declared_is_refused_unless_accepted(settings: dict[str, str], effective: str) -> None:
    levels = ["none", "everysec", "always"]
    with Redis(settings=settings) as server:
        for declared in levels:
            url = server.url(durability=declared)
            if levels.index(declared) <= levels.index(effective):
                async with opened(url) as store:
                    durability = await finding(store, "durability")
                    assert f"declared {declared}" in durability.text
                    assert durability.level == ("error" if effective == "none" else "ok")
                continue
            with pytest.raises(ConfigError, match=f"durability={effective}, not {declared}.*accept"):
                await open_store(url).open()


async def test_waitaof_answers_when_the_disk_has_it() -> None:
    with Redis() as server:
        async with opened(server.url(durability="waitaof", namespace="w")) as store:
            (job_id,) = await put(store)
            server.kill()
            server.start()
            assert (await until_it_works(lambda: stored(store, job_id))).id == job_id
            assert server.execute("INFO", "commandstats") is not None
            assert "WAITAOF" in (await finding(store, "durability")).text


async def test_waitaof_needs_a_server_that_has_it() -> None:
    for kind in FLOORS:
        with pytest.raises(ConfigError, match="has no WAITAOF"):
            await open_store(shared(kind).url(durability="waitaof")).open()


async def test_a_server_that_evicts_is_refused_and_the_doctor_sees_it_later() -> None:
    with Redis(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        with pytest.raises(ConfigError, match="config set maxmemory-policy noeviction"):
            await open_store(server.url()).open()
        server.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")
        async with opened(server.url()) as store:
            assert (await finding(store, "eviction")).level == "ok"
            server.execute("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
            assert (await finding(store, "eviction")).level == "error"


# ── full ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_server_refuses_submissions_and_lets_jobs_finish(kind: str) -> None:
    with Redis(kind) as server:
        async with opened(server.url(namespace="full")) as store:
            jobs = [await running(store) for _ in range(5)]
            waiting = await put(store, *[new_job() for _ in range(5)])
            server.execute("CONFIG", "SET", "maxmemory", "1")

            for batch in ([new_job()], [new_job(key="k")], [new_job() for _ in range(300)]):
                with pytest.raises(Unavailable, match="is full"):
                    await store.submit(batch)
            assert await store.count(JobFilter()) == 10
            assert (await finding(store, "memory")).level == "error"

            beat = await store.beat(pulse(), [job.lease for job in jobs], lease_for=LEASE * 2)
            assert [str(each) for each in beat.held] == ["held"] * 5
            answers = await store.settle([ending(jobs[0], result="1"), failing(jobs[1]), *map(ending, jobs[2:])])
            assert [answer.accepted for answer in answers] == [True] * 5
            assert {job.id for job in await take(store)} == {*waiting, jobs[1].id}
            assert len((await store.delete([jobs[0].id])).changed) == 1
            assert (await store.cancel([waiting[0]])).changed == [(waiting[0], JobState.RUNNING)]

            server.execute("CONFIG", "SET", "maxmemory", "0")
            assert (await store.submit([new_job()]))[0].created


# ── rights ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_passwords_users_and_rights() -> None:
    with Redis(password=PASSWORD) as server:
        async with opened(server.url()) as store:
            await put(store)
        for wrong in (server.url().replace("hunter2", "hunter3"), f"redis://127.0.0.1:{server.port}/0"):
            with pytest.raises(ConfigError, match="refuses us"):
                await open_store(wrong).open()
        server.execute(
            *("ACL", "SETUSER", "queue", "on", ">secret", "~{mine}:*", "&{mine}:*", "+@all", "-@admin", "-@dangerous"),
            *("+info", "+config|get"),
        )
        mine = f"redis://queue:secret@127.0.0.1:{server.port}/0"
        async with opened(f"{mine}?namespace=mine") as store:
            await put(store)
            (job,) = await take(store)
            assert (await settle(store, job)).accepted
            await store.wait(["queue:default"], timeout=0.2)
        with pytest.raises(ConfigError, match="refuses us"):
            await open_store(f"{mine}?namespace=other").open()
        server.execute("ACL", "SETUSER", "queue", "-config", "-info")
        with pytest.raises(ConfigError, match="refuses us"):
            await open_store(f"{mine}?namespace=mine").open()


async def test_resp3_and_other_databases(server: Redis) -> None:
    with server.fresh_namespace() as namespace:
        url = server.url(namespace=namespace, protocol="3").replace("/0?", "/3?")
        async with opened(url) as store, opened(url) as other:
            (job_id,) = await put(store, new_job(priority=2, key="k"))
            (job,) = await take(other)
            waiting = asyncio.create_task(store.wait([f"job:{job_id}"], timeout=50))
            assert (await settle(other, job, result="1")).accepted
            await asyncio.wait_for(waiting, timeout=30)
            assert (await stored(store, job_id)).result == "1"
            assert [each.level for each in await store.doctor()].count("error") == 0
            await store.delete([job_id])


async def test_a_namespace_that_is_not_ours_or_newer_is_refused(server: Redis) -> None:
    with server.fresh_namespace() as namespace:
        url = server.url(namespace=namespace)
        server.execute("SET", f"{{{namespace}}}:meta", "theirs")
        with pytest.raises(StoreMismatch, match="belongs to another program"):
            await open_store(url).open()
        server.execute("DEL", f"{{{namespace}}}:meta")
        server.execute("HSET", f"{{{namespace}}}:meta", "schema", 99)
        with pytest.raises(StoreMismatch, match="upgrade"):
            await open_store(url).open()


async def test_backups_are_the_servers_own_affair(url: str) -> None:
    async with opened(url) as store:
        with pytest.raises(HoldfastError, match="redis-cli"):
            await store.backup("/tmp/nowhere")
