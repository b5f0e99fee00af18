"""A draining worker against the store: what becomes ready again while it looks is not left behind."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast import Holdfast, Job, JobState, Retry
from holdfast.core.lifecycle import Lost, decide
from holdfast.core.models import Claim
from holdfast.stores.base import ClaimRequest
from holdfast.worker import Worker


def test_drain_runs_a_retry_that_is_due_at_once(tmp_path: Path) -> None:
    """A claim that saw nothing while the only job ran is answered after that job was settled for a retry."""
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("fail", retry=Retry.immediate(), max_attempts=2)
    async def fail() -> None:
        raise ValueError("again")

    async def run() -> Job:
        async with app:
            handle = await fail.enqueue()
            worker = Worker(app, drain=True)
            store = await app.open_store()
            claim = store.queueing.claim

            async def answered_late(*args: Any, **kwargs: Any) -> Claim:
                claimed = await claim(*args, **kwargs)
                while not claimed.jobs and worker.shared.claimed:  # noqa: ASYNC110 - no event tells of this
                    await asyncio.sleep(0)
                return claimed

            store.queueing.claim = answered_late  # a store that takes its time
            async with asyncio.timeout(60):
                await worker.run()
            return await handle.job()

    job = asyncio.run(run())
    assert (job.state, job.attempts) == (JobState.DEAD, 2)


async def _leave_leases(app: Holdfast, tasks: int) -> None:
    """Jobs that a worker has taken which died, and whose leases have run out."""
    store = await app.open_store()
    request = ClaimRequest("dead", {"default": tasks}, limit=tasks, lease_for=timedelta(milliseconds=1))
    assert len((await store.queueing.claim(request)).jobs) == tasks
    while len(await store.maintenance.find_expired_leases(limit=tasks)) < tasks:  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(0.01)


def test_drain_recovers_the_jobs_of_a_dead_worker(tmp_path: Path) -> None:
    app, done = Holdfast(f"sqlite:///{tmp_path}/jobs.db"), []

    @app.task("work")
    async def work(number: int) -> None:
        done.append(number)

    async def run() -> None:
        async with app:
            await app.enqueue_many([work.new_job(number) for number in range(3)])
            await _leave_leases(app, 3)
            async with asyncio.timeout(60):
                await Worker(app, drain=True).run()

    asyncio.run(run())
    assert sorted(done) == [0, 1, 2]


def test_drain_of_a_follower_leaves_maintenance_to_others(tmp_path: Path) -> None:
    app, done = Holdfast(f"sqlite:///{tmp_path}/jobs.db", role="follower"), []

    @app.task("work")
    async def work() -> None:
        done.append(1)

    async def run() -> JobState:
        async with app:
            handle = await work.enqueue()
            await _leave_leases(app, 1)
            async with asyncio.timeout(60):
                await Worker(app, drain=True).run()
            return await handle.state()

    assert (asyncio.run(run()), done) == (JobState.RUNNING, [])


def test_drain_runs_all_quarantined_jobs(tmp_path: Path) -> None:
    app, done = Holdfast(f"sqlite:///{tmp_path}/jobs.db"), []

    @app.task("work")
    async def work(number: int) -> None:
        done.append(number)

    async def run() -> None:
        async with app, asyncio.timeout(60):
            store = await app.open_store()
            handles = [await work.enqueue(number) for number in range(5)]
            for _ in range(6):  # all five, then one at a time: they have lost a lease
                request = ClaimRequest(
                    "dead", {"default": 5}, limit=5, lease_for=timedelta(milliseconds=1), max_must_start=5
                )
                await store.queueing.claim(request)
                await asyncio.sleep(0.01)
                lost = await store.maintenance.find_expired_leases(limit=5)
                decided = [decide(job, Lost(), Retry(), random.Random(0)) for job in lost]
                assert all(answer.accepted for answer in await store.queueing.settle(decided))
            jobs = [await handle.job() for handle in handles]
            assert [job.lost_leases for job in jobs] == [2] * 5
            await Worker(app, drain=True).run()

    asyncio.run(run())
    assert sorted(done) == list(range(5))


def test_drain_asks_nothing_more_of_the_store_once_it_has_found_no_job(tmp_path: Path) -> None:
    """Else a store that is away by now would hold it up."""
    app, calls = Holdfast(f"sqlite:///{tmp_path}/jobs.db", sweep="1h"), list[str]()

    async def run() -> None:
        async with app, asyncio.timeout(60):
            store = await app.open_store()
            claim, reannounce = store.queueing.claim, store.maintenance.reannounce

            async def noted_claim(request: ClaimRequest) -> Claim:
                calls.append("claim")
                return await claim(request)

            async def noted_search() -> int:
                calls.append("search")
                return await reannounce()

            store.queueing.claim, store.maintenance.reannounce = noted_claim, noted_search
            await Worker(app, drain=True).run()

    asyncio.run(run())
    assert calls == ["claim", "search", "claim"]
