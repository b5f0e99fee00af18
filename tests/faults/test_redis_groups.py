"""Redis servers that take over from one another: replicas, sentinels, a cluster: RELIABILITY F21."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

import psutil
import pytest

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.models import JobFilter, JobState
from holdfast.stores import open_store
from holdfast.stores.base import Store
from holdfast.stores.connections import redis as connections
from holdfast.stores.redis import pool
from tests.conformance.support import ended, failing, new_job, put, queues, running, settle, stored, take, take_ids
from tests.faults.support import opened, until_it_works
from tests.support.fault_proxy import FaultProxy
from tests.support.keys import Keys
from tests.support.redis import FLOORS, MAIN, PASSWORD, Redis, shared
from tests.support.redis_groups import SERVICE, Cluster, Sentinel, follow, replicated, role_of
from tests.support.servers import until


def frozen(server: Redis) -> psutil.Process:
    """The server's process, stopped: it hears nothing until it is resumed."""
    process = psutil.Process(int(server.execute("INFO", "server")["process_id"]))
    process.send_signal(signal.SIGSTOP)
    return process


# ── replicas ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_replica_is_not_written_to(hurried: None) -> None:
    with replicated() as (primary, _), FaultProxy(primary.port) as proxy:
        url = primary.url(namespace="moved").replace(f":{primary.port}/", f":{proxy.port}/")
        async with opened(url) as store:
            await put(store)
            primary.execute("REPLICAOF", "127.0.0.1", 1)  # now no server takes writes
            with pytest.raises(Unavailable, match="read only replica"):
                await store.queueing.submit([new_job()])
            (found,) = [each for each in await store.health.doctor() if each.name == "failover"]
            assert (found.level, "takes no writes" in found.text, bool(found.remedy)) == ("error", True, True)
            primary.execute("REPLICAOF", "NO", "ONE")
            await until_it_works(lambda: store.queueing.submit([new_job()]))
            assert await store.query.count(JobFilter()) == 2


async def _acknowledges_what_a_replica_has(url: str, replica: Redis) -> None:
    """``url``: of namespace "r", with ``replicas=1``."""
    async with opened(url) as store, opened(url) as other:
        known = new_job()
        await until_it_works(lambda: store.queueing.submit([known]))
        assert f"{{r}}:job:{known.id}".encode() in replica.execute("KEYS", "*")
        asleep = frozen(replica)
        doubtful = new_job(key="k")
        for each in (store, other, store, other):  # from the second on it is there, and the other store did not see it
            with pytest.raises(Unavailable, match="0 of 1 replicas"):
                await each.queueing.submit([doubtful])
        (job,) = await take(store, 1)
        for _ in range(2):  # the second finds the job settled, on a new connection
            with pytest.raises(Unavailable, match="0 of 1 replicas"):
                await settle(store, job)

        asleep.resume()
        (answer,) = await until_it_works(lambda: other.queueing.submit([doubtful]))
        assert answer.job_id == doubtful.id
        settled = await until_it_works(lambda: settle(store, job))
        assert (settled.accepted, settled.state) == (True, JobState.SUCCEEDED)


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
async def test_nothing_is_acknowledged_that_too_few_replicas_have(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CONFIRMED", 0.3)
    with replicated(kind) as (primary, replica):
        await _acknowledges_what_a_replica_has(primary.url(namespace="r", replicas="1"), replica)
        assert replica.execute("KEYS", "{r}:nothing") == []


@pytest.mark.parametrize(("durability", "patience"), [("everysec", 0.3), ("waitaof", 2.0)])
async def test_nothing_is_acknowledged_that_too_few_replicas_of_a_cluster_have(
    durability: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeat that finds everything done has nothing to write, and its connection is a new one."""
    monkeypatch.setattr(pool, "_CONFIRMED", patience)  # a replica says once a second what its disk has
    with Cluster() as cluster:
        owner = cluster.owner("{r}:meta")
        replica = cluster.replica_of(owner)
        for server in (owner, replica):
            server.execute("CONFIG", "SET", "appendfsync", "always")
        url = cluster.url(namespace="r", replicas="1", durability=durability)
        await _acknowledges_what_a_replica_has(url, replica)


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
async def test_full_server_confirms_settlements(kind: str) -> None:
    with replicated(kind) as (primary, _):
        async with opened(primary.url(namespace="r", replicas="1")) as store:
            job = await running(store)
            primary.execute("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(Unavailable, match="is full"):
                await store.queueing.submit([new_job()])
            for _ in range(2):
                assert (await settle(store, job)).state is JobState.SUCCEEDED


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
async def test_submission_that_the_server_refuses_for_lack_of_replicas_is_not_reported_as_done(kind: str) -> None:
    with replicated(kind) as (primary, _):
        async with opened(primary.url(namespace="r", replicas="1")) as store:
            await store.queueing.submit([new_job()])
            primary.execute("CONFIG", "SET", "min-replicas-to-write", 2)
            job = new_job()
            with pytest.raises(Unavailable, match="takes no writes") as error:
                await store.queueing.submit([job])
            assert "stored" not in str(error.value)
            assert await store.query.get(job.id) is None


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
async def test_jobs_before_a_refused_part_are_not_stored_until_a_replica_has_them(kind: str) -> None:
    with replicated(kind) as (primary, replica):
        async with opened(primary.url(namespace="r", replicas="1")) as store:
            await store.queueing.submit([new_job()])
            used = primary.execute("INFO", "memory")["used_memory"]
            primary.execute("CONFIG", "SET", "maxmemory", int(used) + 2_000_000)
            replica.execute("REPLICAOF", "NO", "ONE")
            jobs = [new_job(payload='{"n":"%s"}' % ("x" * 6000)) for _ in range(600)]
            with pytest.raises(Unavailable, match="0 of 1 replicas had it") as error:
                await store.queueing.submit(jobs)
            assert not any(error.value.stored)
            primary.execute("CONFIG", "SET", "maxmemory", 0)
            assert 0 < await store.query.count(JobFilter()) < len(jobs)  # the server was full halfway


@pytest.mark.parametrize("kind", [MAIN, *FLOORS])
async def test_a_server_that_became_a_replica_is_away(kind: str) -> None:
    """One that has nothing to write learns of it where it waits for replicas."""
    with replicated(kind) as (primary, replica):
        async with opened(primary.url(namespace="r", replicas="1")) as store:
            known = new_job()
            await store.queueing.submit([known])
            job = await running(store)
            primary.execute("REPLICAOF", "127.0.0.1", 1)

            with pytest.raises(Unavailable, match="replica"):
                await store.queueing.submit([known])

            primary.execute("REPLICAOF", "NO", "ONE")
            follow(replica, primary)
            await until_it_works(lambda: store.queueing.submit([known]))
            assert (await until_it_works(lambda: settle(store, job))).accepted


async def test_settlement_during_a_failover_is_accepted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RETRY_FOR", 30.0)
    with replicated() as (primary, replica):
        async with opened(primary.url(namespace="r", replicas="1")) as store:
            job = await running(store)
            asleep = frozen(replica)
            settling = asyncio.create_task(settle(store, job))
            await asyncio.to_thread(until, lambda: b"cmd=wait" in primary.execute("CLIENT", "LIST"), "it to wait")
            primary.execute("REPLICAOF", "127.0.0.1", 1)
            primary.execute("REPLICAOF", "NO", "ONE")
            asleep.resume()
            follow(replica, primary)

            assert (await settling).accepted


async def test_the_disk_of_a_replica_counts_where_both_are_declared() -> None:
    with replicated() as (primary, replica):
        async with opened(primary.url(namespace="r", replicas="1", durability="waitaof")) as store:
            (job_id,) = await put(store)
            replica.kill()
            replica.start()
            assert replica.execute("EXISTS", f"{{r}}:job:{job_id}") == 1


# ── sentinels ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "password"), [(MAIN, PASSWORD), *((kind, "") for kind in FLOORS)])
async def test_a_store_follows_the_sentinels_to_the_replica_they_promote(kind: str, password: str) -> None:
    with replicated(kind, password=password) as (primary, replica), Sentinel(primary) as sentinel:
        url = sentinel.url(namespace="s")
        async with opened(url) as store, opened(url) as worker:
            (job_id,) = await put(store)
            job = await running(store)
            primary.execute("WAIT", 1, 5000)
            waiting = asyncio.create_task(until_it_works(lambda: worker.queueing.wait([f"job:{job.id}"], timeout=50)))
            primary.kill()

            await until_it_works(lambda: store.queueing.submit([new_job(id=job_id), new_job()]))

            assert role_of(replica)[0] == b"master"
            assert (await until_it_works(lambda: settle(store, job))).accepted
            await asyncio.wait_for(waiting, timeout=30)
            assert await store.query.count(JobFilter()) == 3


async def test_a_silent_sentinel_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicated() as (primary, _), Sentinel(primary) as sentinel, FaultProxy(sentinel.port) as proxy:
        monkeypatch.setattr(connections, "_CONNECT", 1.0)
        proxy.hold()
        url = sentinel.url(namespace="s").replace("127.0.0.1", f"127.0.0.1:{proxy.port},127.0.0.1", 1)
        async with opened(url) as store:
            await put(store)


async def test_unknown_primary_and_non_sentinel_are_reported(hurried: None) -> None:
    with replicated() as (primary, _), Sentinel(primary) as sentinel:
        with pytest.raises(Unavailable, match="none of them knows a primary called 'other'"):
            await open_store(sentinel.url().replace(f"/{SERVICE}/", "/other/")).open()
        with pytest.raises(ConfigError, match="is no sentinel"):
            await open_store(sentinel.url().replace(str(sentinel.port), str(primary.port))).open()


# ── a cluster ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _every_verb(store: Store) -> None:
    """A job's whole life and the others' ends."""
    later, *ids = await put(
        store, new_job(delay=timedelta(hours=1)), new_job(key="k"), *[new_job(queue="mail", priority=n) for n in (1, 2)]
    )
    jobs = await take(store, 10, {"default": 5, "mail": 5})
    assert sorted(job.id for job in jobs) == sorted(ids)
    answers = await store.queueing.settle([failing(job) for job in jobs])
    assert [answer.state for answer in answers] == [JobState.FAILED] * 3
    assert len(await take_ids(store, 10, {"*": 5})) == 3
    assert (await store.query.by_key("k")) is not None
    assert (await store.admin.cancel([later])).changed == [(later, JobState.CANCELLED)]
    assert (await store.admin.replay([later])).changed == [(later, JobState.QUEUED)]
    done = await ended(store, JobState.SUCCEEDED)
    await store.queueing.wait([f"job:{done}"], timeout=5)
    await store.admin.pause("mail")
    await store.queueing.wait(["queue:mail"], timeout=0.1)
    assert {info.name for info in await queues(store)} == {"default", "mail"}
    assert len((await store.query.find(JobFilter())).jobs) == await store.query.count(JobFilter()) == 5
    assert [each.level for each in await store.health.doctor()].count("error") == 0
    assert await store.maintenance.prune({"succeeded": timedelta(0)}, limit=10) == 1


async def test_namespace_occupies_one_cluster_slot_and_moves_with_it() -> None:
    with Cluster() as cluster:
        for namespace in ("one", "two", "three", "four"):  # another server's slot each, or nearly
            async with opened(cluster.url(namespace=namespace)) as store:
                await _every_verb(store)
                owner = cluster.owner(f"{{{namespace}}}:meta")
                names = owner.execute("KEYS", f"{{{namespace}}}:*")
                assert len({owner.execute("CLUSTER", "KEYSLOT", name) for name in names}) == 1
                assert len(names) > 15
        async with opened(cluster.url(namespace="one")) as store:
            (job_id,) = await put(store)
            owner = cluster.owner("{one}:meta")
            slot = owner.execute("CLUSTER", "KEYSLOT", "{one}:meta")
            target = next(node for node in cluster.nodes if node is not owner)
            owner.execute(
                "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.execute("CLUSTER", "MYID")
            )
            while cluster.owner("{one}:meta") is not target:
                await until_it_works(lambda: store.queueing.submit([new_job()]))
            await until_it_works(lambda: store.queueing.submit([new_job()]))
            assert (await stored(store, job_id)).state is JobState.QUEUED
            keys = Keys(target.url(namespace="one"))
            assert list(keys.strays()) == []
            keys.client.close()


async def test_a_cluster_s_replica_that_took_over_is_found() -> None:
    with Cluster(patience=2000) as cluster:
        async with opened(cluster.url(namespace="one")) as store:
            job = await running(store)
            owner = cluster.owner("{one}:meta")
            replica = cluster.replica_of(owner)
            owner.kill()

            assert (await until_it_works(lambda: settle(store, job))).accepted

            assert role_of(replica)[0] == b"master"
            assert await store.query.count(JobFilter()) == 1


async def test_non_cluster_server_serves_a_cluster_url() -> None:
    with shared().fresh_namespace() as namespace:
        url = shared().url(namespace=namespace).replace("redis://", "redis+cluster://").replace("/0?", "?")
        async with opened(url) as store:
            assert len(await put(store)) == 1
