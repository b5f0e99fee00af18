"""The Redis store when its server dies, loses what it had, fills up or is weaker than declared: RELIABILITY F06, F44,
F51, F52."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

import pytest

from holdfast import Holdfast
from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.lifecycle import Failed, Outcome, Released, Succeeded, decide
from holdfast.core.limits import Limit, LimitChange, LimitValues
from holdfast.core.models import Job, JobFilter, JobState, Settlement
from holdfast.core.retry import Retry
from holdfast.core.steps import NewStep
from holdfast.core.waits import Signal, SignalReceipt, SignalWait
from holdfast.core.workers import LeaseStatus
from holdfast.stores import open_store
from holdfast.stores.connections.redis import load_scripts
from holdfast.stores.redis import server_info
from holdfast.stores.redis.pool import NamespacePool, parse_url
from tests.conformance.support import (
    LEASE,
    ending,
    failing,
    heartbeat,
    new_job,
    put,
    running,
    settle,
    stored,
    take,
    take_ids,
)
from tests.faults.support import finding, opened, until_it_works
from tests.support.keys import Keys
from tests.support.redis import FLOORS, MAIN, Redis, shared
from tests.transports.support import until, working

KINDS = (MAIN, *FLOORS)


# ── death ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_acknowledged_survives_a_kill_of_the_server(kind: str) -> None:
    # With everysec it need not: while a sync takes long, the server puts off even the writing, for up to two seconds.
    with Redis(kind, settings={"appendfsync": "always"}) as server:
        url = server.url(durability="always", namespace="kept")
        async with opened(url) as store:
            acknowledged: list[str] = []
            for _ in range(4):
                submitting = [
                    asyncio.create_task(store.queueing.submit([new_job() for _ in range(3)])) for _ in range(40)
                ]
                await asyncio.sleep(0.02)
                server.kill()
                server.start()
                for answer in await asyncio.gather(*submitting, return_exceptions=True):
                    if isinstance(answer, list):
                        acknowledged += [each.job_id for each in answer if each.created]
                    else:
                        assert isinstance(answer, Unavailable)
            await until_it_works(lambda: store.query.count(JobFilter()))
            kept = {job.id for job in (await store.query.find(JobFilter(), limit=10_000)).jobs}
            assert set(acknowledged) <= kept
            assert acknowledged
        keys = Keys(url)
        assert list(keys.strays()) == []
        keys.client.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_log_that_lost_its_tail_is_never_half_there(kind: str) -> None:
    """Whatever bytes are missing: each script is there or is not, and no structure contradicts another."""
    with Redis(kind, settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        url = server.url(namespace="cut")
        for lost in (1, 7, 40, 200, 500):
            async with opened(url) as store:
                await put(store, *[new_job(key=f"{lost}-{n}") for n in range(5)], new_job(priority=3))
                jobs = await take(store, 4)
                await store.queueing.settle([ending(job) for job in jobs[:2]] + [failing(job) for job in jobs[2:]])
                await store.admin.cancel(JobFilter(states=(JobState.QUEUED,)), limit=1)
            server.crash_back(server.written_log.stat().st_size - lost)
            async with opened(url) as store:
                keys = Keys(url)
                assert list(keys.strays()) == []
                keys.client.close()
                assert await store.query.count(JobFilter()) == len(
                    (await store.query.find(JobFilter(), limit=1000)).jobs
                )
                assert (await finding(store, "structures")).level == "ok"
                if kind in FLOORS:  # as its doctor says
                    assert "bgrewriteaof" in (await finding(store, "log")).remedy
                    server.rewrite_log()
                assert (await finding(store, "log")).level == "ok"


@pytest.mark.parametrize("kind", KINDS)
async def test_acknowledged_jobs_lost_in_a_crash_are_reported(kind: str) -> None:
    """The store that got the acknowledgement reports it once, whatever others have submitted since."""
    with Redis(kind, settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        url = server.url(namespace="lost")
        async with opened(url) as store, opened(url) as other, opened(url) as late:
            await put(store)
            await put(late)
            size = server.written_log.stat().st_size
            await put(other, *[new_job() for _ in range(5)])
            await put(store, *[new_job() for _ in range(3)])
            server.crash_back(size)

            await until_it_works(lambda: store.queueing.submit([new_job()]))
            found = await finding(store, "lost_leases")
            assert (found.level, "at least 8 acknowledged writes" in found.text) == ("error", True)
            await until_it_works(lambda: other.queueing.submit([new_job()]))
            await until_it_works(lambda: late.queueing.submit([new_job() for _ in range(10)]))
            assert "at least 8 acknowledged" in (await finding(store, "lost_leases")).text

            await store.health.repair()
            size = server.written_log.stat().st_size
            await put(other)
            server.crash_back(size)
            await until_it_works(lambda: late.queueing.submit([new_job() for _ in range(10)]))
            assert (await finding(store, "lost_leases")).level == "ok", "reported before anything asked"
            await until_it_works(lambda: other.queueing.submit([new_job()]))
            assert "at least 1 acknowledged" in (await finding(store, "lost_leases")).text


async def test_each_of_several_losses_is_reported_until_recorded() -> None:
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        async with opened(server.url(namespace="lost")) as store:
            await put(store, *[new_job() for _ in range(5)])
            size = server.written_log.stat().st_size
            await put(store, *[new_job() for _ in range(20)])
            for _ in range(2):  # the second time the telling is lost, too
                server.crash_back(size)
                await until_it_works(lambda: store.query.count(JobFilter()))
                assert "at least 20 acknowledged" in (await finding(store, "lost_leases")).text

            await store.health.repair()
            size = server.written_log.stat().st_size
            await put(store, new_job())  # fewer than were lost before
            server.crash_back(size)
            await until_it_works(lambda: store.query.count(JobFilter()))
            assert "at least 1 acknowledged" in (await finding(store, "lost_leases")).text


async def test_loss_is_reported_for_acknowledgements_in_any_order() -> None:
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        address = parse_url(server.url(namespace="lost"))
        async with opened(server.url(namespace="lost")) as store:
            (first,) = await put(store)
            size = server.written_log.stat().st_size
            (second,) = await put(store)
            scripts = load_scripts("holdfast.stores.redis", "basics", "common")
            pool = NamespacePool(address, now=None, lost=scripts["lost_writes"])
            pool.note_stored(b"2 0", second)
            pool.note_stored(b"1 0", first)
        server.crash_back(size)
        async with opened(server.url(namespace="lost")) as store:
            assert await pool.run_command("PING") == b"PONG"
            await pool.close()
            assert "at least 1 acknowledged" in (await finding(store, "lost_leases")).text


@pytest.mark.parametrize("setting", ["maxmemory", "min-replicas-to-write"])
async def test_loss_is_reported_once_the_server_accepts_writes(setting: str) -> None:
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        async with opened(server.url(namespace="lost")) as store:
            await put(store)
            size = server.written_log.stat().st_size
            await put(store)
            server.crash_back(size)
            server.execute("CONFIG", "SET", setting, 1)

            with pytest.raises(Unavailable):
                await store.queueing.submit([new_job()])
            server.execute("CONFIG", "SET", setting, 0)
            await put(store)

            assert "at least 1 acknowledged" in (await finding(store, "lost_leases")).text


async def test_claim_lost_in_a_crash_is_reported_by_its_worker() -> None:
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        async with opened(server.url(namespace="lost")) as store:
            await put(store, new_job(), new_job())
            size = server.written_log.stat().st_size
            jobs = await take(store)
            server.crash_back(size)

            reply = await until_it_works(
                lambda: store.queueing.heartbeat(heartbeat(), [jobs[0].lease], lease_for=LEASE)
            )
            assert reply.statuses == [LeaseStatus.LOST]
            assert not (await settle(store, jobs[1])).accepted

            assert "at least 2 acknowledged" in (await finding(store, "lost_leases")).text
            assert [job.claims for job in await take(store)] == [1, 1]


async def test_worker_with_a_lost_claim_settles_no_newer_claim() -> None:
    """The number of claims is given again: the lease is whose worker the store knows."""
    outcomes = (Succeeded(), Succeeded('"done"'), Failed(error="boom", delay=LEASE), Released())
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        async with opened(server.url(namespace="lost")) as store, opened(server.url(namespace="lost")) as other:
            await put(store, *[new_job() for _ in outcomes])
            size = server.written_log.stat().st_size
            stale = await take(store, worker="stale")
            server.crash_back(size)
            (*jobs, last) = await until_it_works(lambda: take(other, worker="since"))
            assert [job.lease for job in (*jobs, last)] == [job.lease for job in stale]

            answers = await store.queueing.settle(
                [_decided(job, outcome) for job, outcome in zip(stale, outcomes, strict=True)]
            )
            assert {(answer.accepted, answer.state) for answer in answers} == {(False, JobState.RUNNING)}
            reply = await store.queueing.heartbeat(heartbeat("stale"), [last.lease], lease_for=LEASE)
            assert reply.statuses == [LeaseStatus.LOST]
            assert "at least 5 acknowledged" in (await finding(store, "lost_leases")).text

            answers = await other.queueing.settle(
                [_decided(job, outcome) for job, outcome in zip(jobs, outcomes, strict=False)]
            )
            assert [answer.state for answer in answers] == [JobState.SUCCEEDED, JobState.SUCCEEDED, JobState.FAILED]
            assert all(answer.accepted for answer in answers)


def _decided(job: Job, outcome: Outcome) -> Settlement:
    return decide(job, outcome, Retry.fixed(1), random.Random(0))


@pytest.mark.parametrize("kind", KINDS)
async def test_log_with_a_corrupt_tail_is_repaired_by_redis_tools(kind: str) -> None:
    with Redis(kind, settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        url = server.url(namespace="spoiled")
        async with opened(url) as store:
            ids = await put(store, *[new_job() for _ in range(5)])
            jobs = await take(store, 2)
            await store.queueing.settle([ending(jobs[0]), failing(jobs[1])])
        server.kill()
        with server.written_log.open("ab") as file:
            file.write(b"\x00\xffgarbage" * 20)
        with pytest.raises(RuntimeError, match=r"Bad file format|make a backup"):
            server.start()
        server.mend_log()
        server.start()
        async with opened(url) as store:
            keys = Keys(url)
            assert list(keys.strays()) == []
            keys.client.close()
            assert sorted(await take_ids(store, 10)) == sorted({*ids} - {jobs[0].id})
            assert [each.level for each in await store.health.doctor()].count("error") == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_kill_while_the_log_is_rewritten_loses_nothing(kind: str) -> None:
    with Redis(kind, settings={"appendfsync": "always"}) as server:
        url = server.url(namespace="rewritten", durability="always")
        async with opened(url) as store:
            acknowledged: list[str] = []
            for _ in range(3):
                acknowledged += await put(store, *[new_job(payload='"' + "x" * 1000 + '"') for _ in range(400)])
                server.execute("BGREWRITEAOF")
                acknowledged += await put(store, *[new_job() for _ in range(10)])
                server.kill()
                server.start()
                kept = await until_it_works(lambda: store.query.find(JobFilter(), limit=10_000))
                assert {job.id for job in kept.jobs} == set(acknowledged)
        keys = Keys(url)
        assert list(keys.strays()) == []
        keys.client.close()


# ── durability as declared and as it is ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "effective"),
    [
        ({"appendonly": "no"}, "none"),
        ({"appendfsync": "no"}, "none"),
        ({"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}, "none"),
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
            with pytest.raises(ConfigError, match=f"durability={effective}, not {declared}.*accept") as refused:
                await open_store(url).open()
            for remedy in str(refused.value).partition("config set ")[2].partition(",")[0].split(" and "):
                server.execute("CONFIG", "SET", *remedy.split())
            async with opened(url):  # its remedy helped
                pass
            for name, value in settings.items():
                server.execute("CONFIG", "SET", name, value)


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


async def test_evicting_server_is_refused_and_found_by_the_doctor() -> None:
    with Redis(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        with pytest.raises(ConfigError, match="config set maxmemory-policy noeviction"):
            await open_store(server.url()).open()
        server.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")
        async with opened(server.url()) as store:
            assert (await finding(store, "eviction")).level == "ok"
            server.execute("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
            assert (await finding(store, "eviction")).level == "error"


@pytest.mark.parametrize("kind", KINDS)
async def test_eviction_switched_on_later_refuses_submissions(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_info, "LOOK_EVERY", 0.0)
    with Redis(kind) as server:
        async with opened(server.url()) as store:
            ids = await put(store, new_job(), new_job())
            server.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            for _ in range(3):
                with pytest.raises(Unavailable, match=r"allkeys-lru.*; config set maxmemory-policy noeviction"):
                    await store.queueing.submit([new_job()])
            assert await store.query.count(JobFilter()) == 2
            jobs = await take(store)
            assert [job.id for job in jobs] == ids
            assert all(answer.accepted for answer in await store.queueing.settle([ending(job) for job in jobs]))

            server.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await put(store)
    assert [(each.levelname, "maxmemory-policy=allkeys-lru" in each.message) for each in caplog.records] == [
        ("ERROR", True),
        ("WARNING", False),
    ]


async def test_eviction_switched_on_later_is_logged_by_a_sweeping_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_info, "LOOK_EVERY", 0.2)
    with Redis() as server:
        app = Holdfast(server.url(), sweep="200ms")
        async with app, working(app):
            server.execute("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
            await until(lambda: "maxmemory-policy=volatile-ttl" in caplog.text, "the line in the log")


async def test_eviction_policy_is_not_read_at_every_submission(url: str) -> None:
    async with opened(url) as store:
        before = shared().execute("INFO", "commandstats")["cmdstat_info"]["calls"]
        for _ in range(50):
            await put(store)
        after = shared().execute("INFO", "commandstats")["cmdstat_info"]["calls"]
    assert after - before <= 3  # one look, the test's own, and another look on a machine that took five seconds


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
                    await store.queueing.submit(batch)
            assert await store.query.count(JobFilter()) == 10
            assert (await finding(store, "memory")).level == "error"

            reply = await store.queueing.heartbeat(heartbeat(), [job.lease for job in jobs], lease_for=LEASE * 2)
            assert [str(each) for each in reply.statuses] == ["held"] * 5
            answers = await store.queueing.settle(
                [ending(jobs[0], result="1"), failing(jobs[1]), *map(ending, jobs[2:])]
            )
            assert [answer.accepted for answer in answers] == [True] * 5
            assert {job.id for job in await take(store)} == {*waiting, jobs[1].id}
            assert len((await store.admin.delete([jobs[0].id])).changed) == 1
            assert (await store.admin.cancel([waiting[0]])).changed == [(waiting[0], JobState.RUNNING)]

            server.execute("CONFIG", "SET", "maxmemory", "0")
            assert (await store.queueing.submit([new_job()]))[0].created


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_server_lets_workflows_go_on_and_takes_no_new_work(kind: str) -> None:
    hour = timedelta(hours=1)
    with Redis(kind) as server:
        async with opened(server.url(namespace="full")) as store:
            limit = Limit(name="api", values=LimitValues(rate=1, period_us=3_600_000_000))
            assert await store.limits.write_limit(LimitChange(limit, 0)) is not None
            assert (await store.workflow.send_signal(Signal("kept", "kept", "1"))).is_new
            job, other, last = [await running(store) for _ in range(3)]
            server.execute("CONFIG", "SET", "maxmemory", "1")

            assert await store.workflow.save_steps([NewStep(job.lease, "charge", 1, True, "1")]) == [True]
            receipts = [
                await store.workflow.receive_signal(SignalWait(NewStep(each.lease, topic, 2, True), topic, timeout))
                for each, topic, timeout in ((job, "kept", hour), (other, "paid", hour), (last, "late", timedelta(0)))
            ]
            assert receipts == [
                SignalReceipt(result='{"signal":1}'),
                SignalReceipt(time_left=hour),
                SignalReceipt(result='{"timed_out":true}'),
            ]
            assert await store.limits.take_tokens("api", 1) == timedelta(0)
            assert await store.limits.take_tokens("api", 1) > timedelta(0)
            await store.limits.pause_buckets(["api"], 10 * hour)
            assert await store.limits.take_tokens("api", 1) > 9 * hour

            with pytest.raises(Unavailable, match="is full"):
                await store.workflow.send_signal(Signal("new", "unawaited", "1"))
            with pytest.raises(Unavailable, match="is full"):
                await store.workflow.start_children(job.lease, [new_job()], job.worker or "")
            assert (await store.workflow.send_signal(Signal("paid", "paid", "2"))).job_id == other.id
            steps = [
                (step.name, step.result) for each in (job, other) for step in await store.workflow.read_steps(each.id)
            ]
            assert steps == [("charge", "1"), ("kept", '{"signal":1}'), ("paid", '{"signal":2}')]
