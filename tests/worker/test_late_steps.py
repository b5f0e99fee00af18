"""Steps of attempts that are over: none of their functions runs, whatever the handler still does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobFilter, JobState, LeaseLost, Retry
from holdfast.core.events import JobFailedEvent, JobReleased, JobUnstartable
from tests.worker.stepping import Ledger, steps_of
from tests.worker.support import Recorder, forever, harness

PATIENT = 60.0
"""Real seconds for what takes a moment."""


async def test_thread_takes_no_step_after_its_timeout(app: Holdfast) -> None:
    ledger, begun, go, ended = Ledger(), threading.Event(), threading.Event(), threading.Event()
    errors: list[Exception] = []

    @app.task("order", timeout=5, max_attempts=1)
    def order(context: Context) -> None:
        begun.set()
        go.wait(PATIENT)
        try:
            context.sync.step("charge", ledger.do_now, "charge")
        except Exception as error:
            errors.append(error)
        ended.set()

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(1)
        assert await asyncio.to_thread(begun.wait, PATIENT)
        await harnessed.advance(10)
        assert await handle.state() == JobState.DEAD
        go.set()
        assert await asyncio.to_thread(ended.wait, PATIENT)
    assert ledger.done == []
    assert [type(error) for error in errors] == [LeaseLost]
    assert "the attempt is over" in str(errors[0])


@pytest.mark.parametrize("seconds", [25, 35])
async def test_process_that_stood_still_past_its_lease_runs_no_step(app: Holdfast, seconds: int) -> None:
    """By 35 s the store knows that the lease is over, and takes the outcome from the worker."""
    ledger, events = Ledger(), Recorder(app)

    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("reserve", ledger.do, f"reserve {context.claims}")
        if context.claims == 1:
            worker.cut_off("heartbeat")  # until the step, as if all of the process had stood still
            harnessed.clock.advance(seconds)
        await context.step("charge", ledger.do, f"charge {context.claims}")

    async with harness(app, lease="30s") as harnessed:
        worker = await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
    assert ledger.done == ["reserve 1", "charge 2"]
    assert (job.state, job.attempts, job.claims) == (JobState.SUCCEEDED, 2, 2)
    assert len(events.of(JobFailedEvent)) == 1
    assert events.of(JobReleased, JobUnstartable) == []


async def test_refused_steps_use_up_the_attempts(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", max_attempts=2)
    async def order(context: Context) -> None:
        ledger.done.append(f"start {context.claims}")
        worker.cut_off("heartbeat")
        harnessed.clock.advance(25)
        await context.step("charge", ledger.do, "charge")

    async with harness(app, lease="30s") as harnessed:
        worker = await harnessed.start()
        handle = await order.enqueue()
        for _ in range(5):
            await harnessed.run_until_idle()
            worker.thaw()
            await harnessed.advance(60)
        job = await handle.job()
    assert ledger.done == ["start 1", "start 2"]
    assert (job.state, job.reason, job.attempts) == (JobState.DEAD, "crashed", 2)


@pytest.mark.parametrize("is_asked_to_stop", [False, True])
async def test_step_begins_only_before_the_timeout(app: Holdfast, is_asked_to_stop: bool) -> None:
    """The watchdog may not have run yet, or the handler was asked to stop before."""
    ledger = Ledger()

    @app.task("order", timeout=5, max_attempts=1)
    async def order(context: Context) -> None:
        if is_asked_to_stop:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
        harnessed.clock.advance(5)
        await context.step("charge", ledger.do, "charge")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        if is_asked_to_stop:
            await harnessed.advance(1)
            await handle.cancel()
        await harnessed.run_until_idle()
        job = await handle.job()
    assert ledger.done == []
    assert job.error == "timeout: still running after 5 s"


async def test_thread_of_a_process_that_stood_still_runs_no_step(app: Holdfast) -> None:
    ledger, ended = Ledger(), threading.Event()

    @app.task("order")
    def order(context: Context) -> None:
        if context.claims > 1:
            return
        worker.cut_off("heartbeat")
        harnessed.clock.advance(25)
        with contextlib.suppress(LeaseLost):
            context.sync.step("charge", ledger.do_now, "charge")
        ended.set()

    async with harness(app, lease="30s") as harnessed:
        worker = await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await asyncio.to_thread(ended.wait, PATIENT)
        worker.thaw()
        await harnessed.run_until_idle()
        assert await handle.state() == JobState.SUCCEEDED
    assert ledger.done == []


@pytest.mark.parametrize("late", ["step", "call", "sleep", "wait_for"])
async def test_handler_that_swallows_its_timeout_takes_no_step(app: Holdfast, late: str) -> None:
    ledger = Ledger()

    @app.task("child")
    async def child() -> None:
        ledger.done.append("child")

    @app.task("order", timeout=5, max_attempts=1)
    async def order(context: Context) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        takes: dict[str, Any] = {
            "step": lambda: context.step("charge", ledger.do, "charge"),
            "call": lambda: context.call(child),
            "sleep": lambda: context.sleep(10),
            "wait_for": lambda: context.wait_for("approved", timeout=10),
        }
        try:
            await takes[late]()
        except LeaseLost:
            ledger.done.append("refused")

    async with harness(app) as harnessed:
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
        assert await steps_of(app, handle.id) == []
        assert await app.count(JobFilter(tasks=("child",))) == 0
    assert ledger.done == ["refused"]
    assert (job.state, job.error) == (JobState.DEAD, "timeout: still running after 5 s")


async def test_step_is_not_tried_again_once_its_attempt_is_over(app: Holdfast) -> None:
    ledger = Ledger()
    steps: list[asyncio.Task[None]] = []

    async def charge() -> None:
        ledger.done.append("tried")
        raise RuntimeError("down")

    @app.task("order", timeout=5, max_attempts=1)
    async def order(context: Context) -> None:
        often = context.with_options(tries=3, retry=Retry.fixed(60))
        steps.append(asyncio.create_task(often.step("charge", charge)))
        await forever()

    async with harness(app) as harnessed:
        handle = await order.enqueue()
        await harnessed.advance(200)
        assert await handle.state() == JobState.DEAD
        await asyncio.wait(steps, timeout=PATIENT)
    assert ledger.done == ["tried"]
    assert isinstance(steps[0].exception(), LeaseLost)


async def test_handler_may_take_steps_when_it_is_asked_to_stop(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("charge", ledger.do, "charge")
        try:
            await forever()
        except asyncio.CancelledError:
            await context.step("refund", ledger.do, "refund")
            raise

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(1)
        await app.cancel_one(handle.id)
        await harnessed.run_until_idle()
        assert await handle.state() == JobState.CANCELLED
        assert [step.name for step in await steps_of(app, handle.id)] == ["charge", "refund"]
    assert ledger.done == ["charge", "refund"]
