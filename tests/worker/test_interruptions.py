"""Handlers that are stopped: timeouts and cancellations, wherever the job is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import datetime

import pytest

from holdfast import Conflict, Context, Holdfast, JobCancelled, Retry
from holdfast.core.events import JobCancelledEvent
from holdfast.stores.base import ClaimRequest
from tests.worker.support import Recorder, forever, harness


async def test_a_timeout_is_a_failed_attempt(app: Holdfast) -> None:
    ended: list[tuple[str, datetime]] = []

    @app.task("slow", timeout=30, max_attempts=2, retry=Retry.fixed(10))
    async def slow() -> None:
        try:
            await forever()
        finally:
            ended.append(("ended", harnessed.now))

    async with harness(app) as harnessed:
        began = harnessed.now
        job = await slow.enqueue()
        await harnessed.run_until_idle()
        dead = await job.job()
        recorded = await app.attempts(job.id)
    assert [(when - began).total_seconds() for _, when in ended] == [30, 70]
    assert (dead.state, dead.reason, dead.attempts) == ("dead", "max_attempts", 2)
    assert [each.reason for each in recorded] == ["timeout", "max_attempts"]
    assert dead.error == "timeout: still running after 30 s"


async def test_whose_timeout_counts(app: Holdfast) -> None:
    ended: dict[str, float] = {}

    @app.task("slow", timeout=30, max_attempts=1)
    async def slow(name: str) -> None:
        try:
            await forever()
        finally:
            ended[name] = (harnessed.now - began).total_seconds()

    @app.task("plain", max_attempts=1)
    async def plain(name: str) -> None:
        await slow(name)

    async with harness(app, timeout="60s") as harnessed:
        began = harnessed.now
        await slow.enqueue("the task's")
        await slow.options(timeout=5).enqueue("the job's")
        await plain.enqueue("the settings'")
        await harnessed.run_until_idle()
    assert ended == {"the job's": 5, "the task's": 30, "the settings'": 60}


@pytest.mark.parametrize("later", ["none", "90s"])
async def test_attempt_keeps_the_timeout_with_which_it_began(app: Holdfast, later: str) -> None:
    @app.task("slow", max_attempts=1)
    async def slow() -> None:
        await forever()

    async with harness(app, timeout="60s") as harnessed:
        hand = await harnessed.start()
        job = await slow.enqueue()
        await harnessed.advance(1)
        hand.worker.shared.apply_settings(hand.worker.shared.settings.replace_values(timeout=later))
        await harnessed.run_until_idle()
        dead = await job.job()
    assert (dead.state, dead.error) == ("dead", "timeout: still running after 60 s")


async def test_handler_that_swallows_its_timeout_has_failed(app: Holdfast) -> None:
    @app.task("slow", timeout=30, max_attempts=1)
    async def slow() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        return "too late"

    async with harness(app) as harnessed:
        job = await slow.enqueue()
        await harnessed.run_until_idle()
        assert ((await job.job()).state, (await job.job()).result) == ("dead", None)


async def test_the_runner_goes_on_after_an_interruption(app: Holdfast) -> None:
    @app.task("slow", timeout=1, max_attempts=1)
    async def slow() -> None:
        await forever()

    @app.task("quick")
    async def quick() -> str:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)
        return "fine"

    async with harness(app, concurrency=1) as harnessed:
        for _ in range(5):
            await slow.enqueue()
        job = await quick.enqueue()
        await harnessed.run_until_idle()
        assert await job.result(timeout=0) == "fine"


async def test_cancelling_what_waits(app: Holdfast) -> None:
    ran: list[str] = []

    @app.task("work")
    async def work(name: str) -> None:
        ran.append(name)

    async with harness(app) as harnessed:
        scheduled = await work.options(delay=60).enqueue("scheduled")
        queued = await work.enqueue("queued")
        assert await scheduled.cancel() == "cancelled"
        assert await queued.cancel() == "cancelled"
        await harnessed.run_until_idle()
        with pytest.raises(JobCancelled):
            await queued.result(timeout=0)
        with pytest.raises(Conflict):
            await queued.cancel()
    assert ran == []


async def test_cancelling_what_runs(app: Holdfast) -> None:
    events = Recorder(app)
    seen: list[str] = []

    @app.task("long", max_attempts=5)
    async def long(ctx: Context) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            seen.append(f"cancelled {ctx.cancelled}")
            raise

    async with harness(app, heartbeat="10s") as harnessed:
        job = await long.enqueue()
        await harnessed.advance(3)
        assert await job.cancel() == "running"
        await harnessed.advance(2)
        cancelled = await job.job()
        assert cancelled.state == "cancelled"
        await harnessed.run_until_idle()
    assert seen == ["cancelled True"]
    assert [event.job_id for event in events.of(JobCancelledEvent)] == [job.id]


async def test_cancelling_what_was_claimed_and_has_not_started(app: Holdfast) -> None:
    ran: list[str] = []

    @app.task("long")
    async def long(name: str) -> None:
        ran.append(name)
        await harnessed.clock.sleep(100)

    async with harness(app, concurrency=1) as harnessed:
        await long.enqueue("first")
        hand = await harnessed.start()
        second = await long.enqueue("second")
        shared, store = hand.worker.shared, await app.open_store()
        claim = await store.queueing.claim(
            ClaimRequest(hand.worker.id, {"*": 1}, limit=1, lease_for=app.settings.lease)
        )
        shared.deliver_jobs(claim.jobs, shared.clock.monotonic() + 20)
        assert await second.cancel() == "running"
        await harnessed.advance(3)
        assert await second.state() == "cancelled"
        await harnessed.run_until_idle()
    assert ran == ["first"]


async def test_job_that_fails_while_being_cancelled_is_not_retried(app: Holdfast) -> None:
    @app.task("rude", max_attempts=5, retry=Retry.immediate())
    async def rude() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            raise ValueError("not like this") from None

    async with harness(app) as harnessed:
        job = await rude.enqueue()
        await harnessed.advance(3)
        await job.cancel()
        await harnessed.run_until_idle()
        cancelled = await job.job()
    assert (cancelled.state, cancelled.attempts) == ("cancelled", 1)


async def test_sync_handler_sees_its_timeout_and_does_not_delay_settlement(app: Holdfast) -> None:
    interrupted = threading.Event()

    @app.task("blocking", timeout=30, max_attempts=1)
    def blocking(ctx: Context) -> None:
        for _ in range(5000):
            if ctx.cancelled:
                interrupted.set()
                return
            time.sleep(0.001)

    async with harness(app) as harnessed:
        job = await blocking.enqueue()
        await harnessed.run_until_idle()
        assert (await job.job()).error == "timeout: still running after 30 s"
        assert await asyncio.to_thread(interrupted.wait, 5)


async def test_cancellation_that_a_handler_leaves_in_its_task_reaches_no_other_job(app: Holdfast) -> None:
    @app.task("careless")
    async def careless() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @app.task("next", max_attempts=1)
    async def following() -> None:
        await asyncio.sleep(0)

    async with harness(app, concurrency=1, queues="default") as harnessed:
        hand = await harnessed.start()
        jobs = [await each.options(queue="aside").enqueue() for _ in range(3) for each in (careless, following)]
        shared, store = hand.worker.shared, await app.open_store()
        request = ClaimRequest(hand.worker.id, {"aside": 6}, limit=6, lease_for=app.settings.lease, max_must_start=6)
        shared.deliver_jobs((await store.queueing.claim(request)).jobs, shared.clock.monotonic() + 20)
        await harnessed.run_until_idle()
        ends = [await job.job() for job in jobs]
    assert [(job.state, job.attempts) for job in ends] == [("succeeded", 1)] * 6


async def test_shorter_lease_holds_from_the_next_heartbeat_on(app: Holdfast) -> None:
    interrupted: list[str] = []

    @app.task("long")
    async def long() -> None:
        try:
            await harnessed.clock.sleep(20)
        except asyncio.CancelledError:
            interrupted.append("long")
            raise

    async with harness(app, lease="30s", heartbeat="10s") as harnessed:
        job = await long.enqueue()
        hand = await harnessed.start()
        await harnessed.advance(9)
        shared = hand.worker.shared
        shared.apply_settings(shared.settings.replace_values(lease="5s", heartbeat="1s"))
        await asyncio.sleep(1.5)  # the heartbeat looks at its leases once a second, in real time
        assert interrupted == []
        await harnessed.run_until_idle()
        assert await job.state() == "succeeded"
