"""Settlements that the store refuses, because another program changed the row: all others go through."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from holdfast import Context, Holdfast, JobState
from holdfast.core.events import StoreTrouble, SweepComplete
from holdfast.stores.base import ClaimRequest
from tests.support.spoiling import accept_writes, refuse_writes
from tests.worker.support import Recorder, harness


async def test_unsettleable_lost_job_does_not_block_others(app: Holdfast, home: str) -> None:
    events = Recorder(app)

    @app.task("work")
    async def work() -> str:
        return "done"

    async with harness(app, sweep="5s") as harnessed:
        store = await app.open_store()
        lost = [await work.enqueue() for _ in range(7)]
        await store.queueing.claim(ClaimRequest("doomed", {"*": 7}, limit=7, lease_for=timedelta(seconds=1)))
        frozen = lost.pop(3)
        refuse_writes(home, frozen.id)
        await harnessed.advance(60)
        assert [await job.result() for job in lost] == ["done"] * 6
        assert await frozen.state() is JobState.RUNNING
        assert not any(hand.running.done() for hand in harnessed._workers), "the worker has gone"
    assert sum(event.recovered for event in events.of(SweepComplete)) == 6
    (reported,) = events.of(StoreTrouble)
    assert (
        reported.service,
        reported.error.startswith(f"job {frozen.id}, whose lease ran out, cannot be settled: "),
    ) == ("sweeper", True)
    assert "the row is frozen" in reported.error


async def test_settlement_that_the_store_refuses_costs_no_other_job_its_result(app: Holdfast, home: str) -> None:
    events = Recorder(app)

    @app.task("work")
    async def work(ctx: Context) -> int:
        if ctx.job.id == frozen.id and ctx.attempts == 1:
            await asyncio.to_thread(refuse_writes, home, frozen.id)
        return ctx.attempts

    async with harness(app, concurrency=7, lease="30s", sweep="5s") as harnessed:
        others = [await work.enqueue() for _ in range(7)]
        frozen = others.pop(3)
        await harnessed.start()
        await harnessed.advance(1)
        assert [await job.result(timeout=0) for job in others] == [1] * 6
        assert await frozen.state() is JobState.RUNNING
        accept_writes(home)
        await harnessed.advance(60)
        assert await frozen.result(timeout=0) == 2
    (reported,) = events.of(StoreTrouble)
    assert (reported.service, "the row is frozen" in reported.error) == ("settler", True)
