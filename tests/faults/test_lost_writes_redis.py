"""Writes under a lease that a failover lost are refused and reported; those of an earlier life of an id are refused."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from holdfast.core.lifecycle import Cancelled, Failed, Lost, Outcome, Released, Snoozed, Succeeded, decide
from holdfast.core.models import Job, JobFilter, JobState, Settlement
from holdfast.core.retry import Retry
from holdfast.core.workers import LeaseStatus
from holdfast.stores.base import Store
from tests.conformance.support import LEASE, heartbeat, new_job, put, settle, take
from tests.faults.support import finding, opened, until_it_works
from tests.support.redis import Redis
from tests.support.redis_groups import replicated
from tests.transports.support import until_true

OUTCOMES: tuple[Outcome, ...] = (
    Succeeded(),
    Succeeded('"done"'),
    Failed(error="boom"),
    Failed(error="boom", retryable=False),
    Snoozed(timedelta(hours=1)),
    Released(),
    Cancelled(),
)


def decided(job: Job, outcome: Outcome) -> Settlement:
    return decide(job, outcome, Retry.fixed(1), random.Random(0))


async def expired(store: Store, number: int) -> list[Job]:
    """Running jobs whose lease ran out, once there are so many."""
    jobs: list[Job] = []

    async def has_expired() -> bool:
        jobs[:] = await store.maintenance.find_expired_leases(limit=10)
        return len(jobs) >= number

    await until_true(has_expired, "the leases to run out")
    return jobs


async def stale_lives(store: Store, *, is_given: bool) -> list[Job]:
    """Jobs as they were claimed twice, before each was cancelled and deleted."""
    ids = await put(store, *[new_job(has_client_id=is_given) for _ in range(4)])
    for _ in range(2):
        await take(store, worker="stale", max_must_start=4, lease_for=timedelta(milliseconds=1))
        jobs = await expired(store, 4)
        await store.queueing.settle([decided(job, Lost()) for job in jobs])
    await store.admin.cancel(ids)
    assert len((await store.admin.delete(ids)).changed) == 4
    return jobs


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "unclaimed"])
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "minted"])
async def test_stale_write_after_an_id_returned_is_no_loss(url: str, *, is_given: bool, is_claimed: bool) -> None:
    async with opened(url) as store:
        stale = await stale_lives(store, is_given=is_given)
        await put(store, *[new_job(id=job.id, has_client_id=True) for job in stale])
        owned = await take(store, worker="owner") if is_claimed else []

        outcomes = Succeeded(), Succeeded('"done"'), Failed(error="boom")
        answers = await store.queueing.settle(
            [decided(job, outcome) for job, outcome in zip(stale, outcomes, strict=False)]
        )
        assert [answer.accepted for answer in answers] == [False] * 3
        reply = await store.queueing.heartbeat(heartbeat("stale"), [job.lease for job in stale], lease_for=LEASE)
        assert reply.statuses == [LeaseStatus.LOST] * 4

        assert (await finding(store, "lost_leases")).level == "ok"
        for job in owned:
            assert (await settle(store, job)).accepted


async def test_plain_claim_of_a_given_id_begins_at_the_clock(url: str) -> None:
    async with opened(url) as store:
        before = await store.health.server_time_us()
        await put(store, new_job(), new_job(has_client_id=True))
        minted, given = await take(store)
        assert minted.claims == 1
        assert before <= given.claims <= await store.health.server_time_us()
        assert [(await settle(store, job)).accepted for job in (minted, given)] == [True, True]


async def test_lost_claim_of_a_given_id_is_reported() -> None:
    with Redis(settings={"appendfsync": "always", "aof-use-rdb-preamble": "no"}) as server:
        async with opened(server.url(namespace="lost")) as store:
            await put(store, new_job(has_client_id=True), new_job(has_client_id=True))
            size = server.written_log.stat().st_size
            jobs = await take(store)
            server.crash_back(size)

            reply = await until_it_works(
                lambda: store.queueing.heartbeat(heartbeat(), [jobs[0].lease], lease_for=LEASE)
            )
            assert reply.statuses == [LeaseStatus.LOST]
            assert not (await settle(store, jobs[1])).accepted

            assert "at least 2 acknowledged" in (await finding(store, "lost_leases")).text


async def test_lost_claim_settles_nothing_after_a_failover() -> None:
    with replicated() as (primary, replica):
        async with opened(primary.url(namespace="r")) as store:
            await put(store, *[new_job() for _ in OUTCOMES])
            primary.execute("WAIT", 1, 30_000)
            replica.execute("REPLICAOF", "NO", "ONE")  # what comes now is lost
            stale = {job.id: job for job in await take(store, worker="stale")}
        primary.kill()
        async with opened(replica.url(namespace="r")) as store:
            owned = await take(store, worker="owner")
            assert [job.lease for job in owned] == [stale[job.id].lease for job in owned]

            late = [decided(stale[job.id], outcome) for job, outcome in zip(owned, OUTCOMES, strict=True)]
            answers = await store.queueing.settle(late)
            assert {(answer.accepted, answer.state) for answer in answers} == {(False, JobState.RUNNING)}
            reply = await store.queueing.heartbeat(heartbeat("stale"), [job.lease for job in owned], lease_for=LEASE)
            assert reply.statuses == [LeaseStatus.LOST] * len(OUTCOMES)
            assert f"at least {2 * len(OUTCOMES)} acknowledged" in (await finding(store, "lost_leases")).text

            assert all([(await settle(store, job, worker="owner")).accepted for job in owned])
            assert await store.query.count(JobFilter(states=(JobState.SUCCEEDED,))) == len(OUTCOMES)


async def test_lost_lease_is_not_recovered_under_another_holder() -> None:
    with replicated() as (primary, replica):
        async with opened(primary.url(namespace="r")) as store:
            await put(store)
            primary.execute("WAIT", 1, 30_000)
            replica.execute("REPLICAOF", "NO", "ONE")
            await take(store, worker="stale", lease_for=timedelta(milliseconds=1))
            (stale,) = await expired(store, 1)
        primary.kill()
        async with opened(replica.url(namespace="r")) as store:
            await take(store, worker="owner", lease_for=timedelta(milliseconds=1))
            (owned,) = await expired(store, 1)
            assert owned.lease == stale.lease
            assert [each.accepted for each in await store.queueing.settle([decided(stale, Lost())])] == [False]
            assert [each.accepted for each in await store.queueing.settle([decided(owned, Lost())])] == [True]
