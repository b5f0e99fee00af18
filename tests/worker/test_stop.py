"""How a worker stops: grace, release, drain, orders."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta

import pytest

from holdfast import Context, Holdfast
from holdfast.core.events import JobReleased, JobSucceeded, WorkerStarted, WorkerStopped, WorkerStopping
from holdfast.stores.base import ClaimRequest
from holdfast.worker import Worker
from holdfast.worker.policy import Deferrals
from holdfast.worker.sweeper import Sweeper
from tests.worker.support import Recorder, forever, harness


async def test_stop_releases_buffered_jobs_and_lets_running_ones_finish(app: Holdfast) -> None:
    started: list[str] = []

    @app.task("long")
    async def long(name: str) -> None:
        started.append(name)
        await harnessed.clock.sleep(20)

    async with harness(app, concurrency=1, grace="30s") as harnessed:
        first = await long.enqueue("first")
        hand = await harnessed.start()
        await harnessed.advance(1)
        second = await long.enqueue("second")
        shared = hand.worker.shared
        store = await app.open_store()
        claim = await store.queueing.claim(
            ClaimRequest(hand.worker.id, {"*": 1}, limit=1, lease_for=timedelta(seconds=30))
        )
        shared.deliver_jobs(claim.jobs, shared.clock.monotonic() + 20)  # claimed ahead, behind the long one
        assert await second.state() == "running"
        hand.worker.stop()
        await harnessed.advance(0.01)
        waiting = await second.job()
        assert (waiting.state, waiting.attempts) == ("queued", 0)
        assert await first.state() == "running"
        await harnessed.advance(25)
        assert hand.running.done()
        assert await first.state() == "succeeded"
    assert started == ["first"]


async def test_after_the_grace_what_runs_is_cancelled_and_given_back(app: Holdfast) -> None:
    events = Recorder(app)
    ended: list[str] = []

    @app.task("long", max_attempts=1)
    async def long() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with harness(app, grace="30s") as harnessed:
        job = await long.enqueue()
        hand = await harnessed.start()
        hand.worker.stop()
        await harnessed.advance(29)
        (stopping,) = events.of(WorkerStopping)
        assert (stopping.running, stopping.grace) == (1, 30)
        assert not ended
        await harnessed.advance(2)
        assert hand.running.done()
        released = await job.job()
        assert await app.attempts(job.id) == []
    assert ended == ["cancelled"]
    assert (released.state, released.attempts, released.claims) == ("queued", 0, 1)
    assert [event.reason for event in events.of(JobReleased)] == ["released"]


async def test_a_second_stop_ends_the_grace(app: Holdfast) -> None:
    @app.task("long")
    async def long() -> None:
        await forever()

    async with harness(app, grace="30s") as harnessed:
        job = await long.enqueue()
        hand = await harnessed.start()
        began = harnessed.now
        hand.worker.stop()
        await harnessed.advance(1.5)
        assert not hand.running.done()
        hand.worker.stop()
        await harnessed.advance(0)
        assert harnessed.now - began == timedelta(seconds=1.5)
        assert hand.running.done()
        assert ((await job.job()).state, (await job.job()).attempts) == ("queued", 0)


async def test_stop_requests_within_a_second_keep_the_grace(app: Holdfast) -> None:
    @app.task("long")
    async def long() -> None:
        await harnessed.clock.sleep(20)

    async with harness(app, grace="30s") as harnessed:
        job = await long.enqueue()
        hand = await harnessed.start()
        hand.worker.stop("SIGTERM")
        hand.worker.stop("SIGINT")
        await harnessed.advance(0.9)
        hand.worker.stop("SIGTERM")
        await harnessed.advance(18)
        assert not hand.running.done()
        await harnessed.advance(2)
        assert hand.running.done()
        assert await job.state() == "succeeded"


async def test_first_stop_while_recycling_keeps_the_grace(app: Holdfast) -> None:
    @app.task("long")
    async def long() -> None:
        await harnessed.clock.sleep(20)

    async with harness(app, grace="30s") as harnessed:
        job = await long.enqueue()
        hand = await harnessed.start()
        hand.worker._recycle()
        await harnessed.advance(5)
        hand.worker.stop("supervisor")
        await harnessed.advance(16)
        assert hand.running.done()
        assert await job.state() == "succeeded"


async def test_what_ends_while_the_worker_stops_is_not_lost(app: Holdfast) -> None:
    @app.task("quick")
    async def quick(number: int) -> int:
        return number

    async with harness(app, concurrency=10) as harnessed:
        hand = await harnessed.start()
        jobs = [await quick.enqueue(number) for number in range(50)]
        hand.worker.stop()  # some are claimed, some run, some are being settled
        await harnessed.advance(6)
        assert hand.running.done()
        states = {str(await job.state()) for job in jobs}
        assert states <= {"succeeded", "queued"}
        await harnessed.start()
        await harnessed.run_until_idle()
        done = [await job.job() for job in jobs]
    assert {(job.state, job.attempts) for job in done} == {("succeeded", 1)}


@pytest.mark.parametrize("moment", range(6))
async def test_stop_during_a_claim_leaves_nothing_leased(app: Holdfast, moment: int) -> None:
    @app.task("quick")
    async def quick() -> None: ...

    async with harness(app) as harnessed:
        hand = await harnessed.start()
        job = await quick.enqueue()
        for _ in range(moment):
            await asyncio.sleep(0.0002)
        hand.worker.stop()
        await harnessed.advance(0)
        assert hand.running.done()
        assert await job.state() in ("succeeded", "queued")
        assert await app.workers() == []


async def test_handler_that_ignores_cancellation_does_not_delay_the_worker(app: Holdfast) -> None:
    may_end = asyncio.Event()

    @app.task("stubborn")
    async def stubborn() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with harness(app, grace="1s") as harnessed:
        job = await stubborn.enqueue()
        hand = await harnessed.start()
        hand.worker.stop()
        await harnessed.advance(10)
        for _ in range(20):  # a runner that does not end is waited for in real time, for a second
            await asyncio.wait([hand.running], timeout=0.1)
            await harnessed.advance(0.01)
        ended = hand.running.done()
        may_end.set()
        assert ended
        assert hand.worker.stuck == 1
        assert ((await job.job()).state, (await job.job()).attempts) == ("queued", 0)


async def test_drain_runs_what_there_is_and_stops(app: Holdfast) -> None:
    @app.task("work")
    async def work(again: int) -> None:
        await harnessed.clock.sleep(1)
        if again:
            await work.enqueue(again - 1)

    async with harness(app, poll="5s") as harnessed:
        began = harnessed.now
        await work.enqueue(3)
        hand = await harnessed.start(drain=True)
        await harnessed.run_until_idle()
        assert hand.running.done()
        assert (harnessed.now - began).total_seconds() < 4.5  # four jobs of one second, no poll in between
        (queue,) = await app.queues()
        assert queue.states == {"succeeded": 4} | {k: 0 for k in queue.states if k != "succeeded"}


@pytest.mark.parametrize("drain", [False, True])
async def test_an_order_through_the_store_is_followed(app: Holdfast, drain: bool) -> None:
    events = Recorder(app)

    @app.task("work")
    async def work() -> None: ...

    async with harness(app) as harnessed:
        hand = await harnessed.start()
        await harnessed.advance(30)
        await work.enqueue()
        assert await app.stop_workers(drain=drain) == [hand.worker.id]
        await harnessed.advance(10)
        assert hand.running.done()
        assert await app.workers() == []
    (stopping,) = events.of(WorkerStopping)
    assert stopping.reason == ("drained" if drain else "command")


async def test_worker_that_is_stopped_before_its_first_claim_signs_off(app: Holdfast) -> None:
    events = Recorder(app)
    async with app:
        worker = Worker(app)
        app.events.subscribe(lambda _: worker.stop(), WorkerStarted)
        await worker.run()
        assert await app.workers() == []
    assert len(events.of(WorkerStopped)) == 1


async def test_worker_that_ends_by_a_bug_says_so(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Sweeper) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Sweeper, "run", fail)
    events = Recorder(app)
    async with app:
        with pytest.raises(ZeroDivisionError):
            await Worker(app).run()
    assert [stopping.reason for stopping in events.of(WorkerStopping)] == ["internal_error"]


async def test_heartbeats_are_frequent_at_work_and_rare_when_idle(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.heartbeat.resident_bytes", itertools.count(1 << 20).__next__)

    @app.task("work")
    async def work() -> None: ...

    async def seen_at() -> int:
        (info,) = await app.workers()
        return info.seen_at_us

    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(20)
        await work.enqueue()
        await harnessed.advance(4)
        (info,) = await app.workers()
        assert info.heartbeat.succeeded == 1
        idle = set()
        for _ in range(60):
            await harnessed.advance(1)
            idle.add(await seen_at())
    assert 5 <= len(idle) <= 12


async def test_a_worker_signs_on_and_off(app: Holdfast) -> None:
    events = Recorder(app)

    @app.task("work")
    async def work(ctx: Context) -> None: ...

    async with harness(app, queues="mail:2,default", concurrency=3) as harnessed:
        await work.enqueue()
        hand = await harnessed.start()
        await harnessed.advance(11)
        (info,) = await app.workers()
        assert info.alive
        assert (info.heartbeat.worker, info.heartbeat.concurrency, info.heartbeat.queues) == (
            hand.worker.id,
            3,
            "mail:2,default",
        )
        assert info.heartbeat.succeeded == 1
        (started,) = events.of(WorkerStarted)
        assert started.store == (await app.open_store()).url
        hand.worker.stop("SIGTERM")
        await harnessed.advance(0)
        assert await app.workers() == []
    assert [event.name for event in events.of(WorkerStarted, JobSucceeded, WorkerStopping, WorkerStopped)] == [
        "worker_started",
        "job_succeeded",
        "worker_stopping",
        "worker_stopped",
    ]
    (stopped,) = events.of(WorkerStopped)
    assert (stopped.worker_id, stopped.succeeded, stopped.failed, stopped.released) == (hand.worker.id, 1, 0, 0)
    assert events.of(WorkerStopping)[0].reason == "SIGTERM"


async def test_deferrable_job_is_given_back_if_the_worker_stops_while_its_row_is_read(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_ever(*_: object) -> None:
        await forever()

    monkeypatch.setattr(Deferrals, "defer_or_fail", wait_for_ever)
    async with harness(app, grace="0s") as harnessed:
        job = await app.enqueue("unknown", {}, max_attempts=1)
        hand = await harnessed.start()
        await harnessed.advance(0.01)
        hand.worker.stop()
        await harnessed.advance(1)
        stored = await job.job()
    assert (stored.state, stored.attempts) == ("queued", 0)


async def test_handler_with_steps_has_no_outcome_if_the_worker_stops_while_they_are_read(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_ever(*_: object) -> None:
        await forever()

    monkeypatch.setattr(Context, "final_outcome", wait_for_ever)

    async def pay() -> int:
        return 1

    @app.task("work")
    async def work(ctx: Context) -> int:
        return await ctx.step("pay", pay)

    async with harness(app, grace="0s") as harnessed:
        job = await work.enqueue()
        hand = await harnessed.start()
        await harnessed.advance(0.01)
        hand.worker.stop()
        await harnessed.advance(1)
        stored = await job.job()
    assert (stored.state, stored.attempts) == ("queued", 0)


@pytest.mark.parametrize("reason", ["command", "orphaned", "exited"])
async def test_only_a_repeated_request_ends_the_grace(app: Holdfast, reason: str) -> None:
    @app.task("long")
    async def long() -> str:
        await harnessed.clock.sleep(10)
        return "done"

    async with harness(app, grace="30s") as harnessed:
        job = await long.enqueue()
        hand = await harnessed.start()
        await harnessed.advance(1)
        hand.worker.start_stopping(reason)
        await harnessed.advance(2)
        hand.worker.stop()
        await harnessed.advance(10)
        assert await job.state() == "succeeded"
