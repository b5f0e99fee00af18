"""Callers whose clock is an hour off: leases, delays, retention and every stored instant go by the server's clock."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.lifecycle import Lost, decide
from holdfast.core.models import JobState
from holdfast.core.retry import Retry
from holdfast.core.workers import LeaseStatus
from holdfast.stores.base import Store
from tests.conformance.support import LEASE, claim, heartbeat, new_job, put, running, settle, stored, take
from tests.external_tx.kinds import by_asyncpg
from tests.faults.support import opened
from tests.support.stores import MIGRATED

Skewed = Callable[[], AbstractAsyncContextManager[Store]]

HALF_AN_HOUR = timedelta(minutes=30)
NEAR = 60.0
"""Seconds by which an instant may differ on a busy machine; a wrong clock is off by 3600."""

_server_time = time.time  # the servers run on this host; their processes see no patch


@pytest.fixture(params=["postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    with MIGRATED[request.param](tmp_path) as url:
        yield url


@pytest.fixture(params=[3600, -3600], ids=["ahead", "behind"])
def skewed(request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch) -> Skewed:
    """Opens a store in a process whose clock is an hour off."""
    offset: int = request.param
    true_ns = time.time_ns

    @asynccontextmanager
    async def open_skewed() -> AsyncIterator[Store]:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: _server_time() + offset)
            patch.setattr(time, "time_ns", lambda: true_ns() + offset * 10**9)
            async with opened(url) as store:
                yield store

    return open_skewed


def seconds_from_now(instant_us: int | None) -> float:
    """Seconds from the server's now to the instant."""
    assert instant_us is not None
    return instant_us / 1e6 - _server_time()


async def test_skewed_caller_claims_for_the_length_of_a_lease(skewed: Skewed) -> None:
    async with skewed() as store:
        (job_id,) = await put(store)
        answer = await claim(store)
        job = await stored(store, job_id)
        assert [each.id for each in answer.jobs] == [job_id]
        for until_us in (answer.lease_until_us, job.lease_until_us):
            assert seconds_from_now(until_us) == pytest.approx(30, abs=NEAR)
        for instant_us in (job.created_at_us, job.run_at_us, job.started_at_us, await store.health.server_time_us()):
            assert seconds_from_now(instant_us) == pytest.approx(0, abs=NEAR)

        reply = await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=2 * LEASE)
        assert reply.statuses == [LeaseStatus.HELD]
        assert seconds_from_now((await stored(store, job_id)).lease_until_us) == pytest.approx(60, abs=NEAR)
        assert (await settle(store, job)).accepted
        assert seconds_from_now((await stored(store, job_id)).ended_at_us) == pytest.approx(0, abs=NEAR)


async def test_skewed_caller_takes_over_no_live_lease(url: str, skewed: Skewed) -> None:
    async with opened(url) as owner:
        await put(owner)
        (job,) = await take(owner, lease_for=HALF_AN_HOUR)
        async with skewed() as store:
            assert await store.maintenance.find_expired_leases(limit=10) == []
            assert await take(store) == []
            lost = decide(job, Lost(), Retry.fixed(1), random.Random(0))
            assert [each.accepted for each in await store.queueing.settle([lost])] == [False]
        assert (await settle(owner, job)).accepted


async def test_skewed_caller_recovers_an_expired_lease(url: str, skewed: Skewed) -> None:
    async with opened(url) as owner:
        await put(owner)
        (job,) = await take(owner, lease_for=timedelta(milliseconds=1))
        async with skewed() as store:
            assert [each.id for each in await store.maintenance.find_expired_leases(limit=10)] == [job.id]
            assert not (await settle(store, job)).accepted


async def test_delay_of_a_skewed_caller_counts_from_the_servers_now(skewed: Skewed) -> None:
    async with skewed() as store:
        (late,) = await put(store, new_job(delay=HALF_AN_HOUR))
        assert seconds_from_now((await stored(store, late)).run_at_us) == pytest.approx(1800, abs=NEAR)
        assert await store.maintenance.promote_due(limit=10) == 0
        answer = await claim(store)
        assert answer.jobs == []
        assert answer.next_due is not None
        assert answer.next_due.total_seconds() == pytest.approx(1800, abs=NEAR)

        job = await running(store)
        await settle(store, job, JobState.FAILED, error="boom", delay=HALF_AN_HOUR)
        assert seconds_from_now((await stored(store, job.id)).run_at_us) == pytest.approx(1800, abs=NEAR)


async def test_due_job_starts_for_a_skewed_caller(url: str, skewed: Skewed) -> None:
    async with opened(url) as submitter, skewed() as store:
        (job_id,) = await put(submitter, new_job(run_at_us=int((_server_time() - 1) * 1e6)))
        assert [job.id for job in await take(store)] == [job_id]


async def test_skewed_caller_prunes_by_the_servers_clock(url: str, skewed: Skewed) -> None:
    async with opened(url) as owner:
        await settle(owner, await running(owner))
        async with skewed() as store:
            assert await store.maintenance.prune({"succeeded": HALF_AN_HOUR}, limit=10) == 0
            assert await store.maintenance.prune({"succeeded": timedelta(0)}, limit=10) == 1


async def test_outlived_key_ends_by_the_servers_clock(url: str, skewed: Skewed) -> None:
    async with opened(url) as owner:
        job = await running(owner, key="invoice-7", key_for=HALF_AN_HOUR)
        await settle(owner, job)
        assert await owner.maintenance.prune({"succeeded": timedelta(0)}, limit=10) == 1
        async with skewed() as store:
            (answer,) = await store.queueing.submit([new_job(key="invoice-7")])
        assert (answer.job_id, answer.created) == (job.id, False)


async def test_skewed_worker_is_seen_as_living(skewed: Skewed) -> None:
    async with skewed() as store:
        await store.queueing.heartbeat(heartbeat(), [], lease_for=LEASE)
        (worker,) = await store.query.workers()
        assert seconds_from_now(worker.seen_at_us) == pytest.approx(0, abs=NEAR)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_skewed_caller_writes_in_its_transaction_by_the_servers_clock(url: str, skewed: Skewed) -> None:
    async with skewed() as store, Holdfast(url) as app:
        job = await running(store)
        async with by_asyncpg(url) as held:
            (submitted,) = await app.external_tx.submit(held.connection, [new_job(delay=LEASE)])
            assert (await app.external_tx.complete(held.connection, job.lease, None, job.worker)).accepted
        assert seconds_from_now((await stored(store, job.id)).ended_at_us) == pytest.approx(0, abs=NEAR)
        assert seconds_from_now((await stored(store, submitted.job_id)).run_at_us) == pytest.approx(30, abs=NEAR)
