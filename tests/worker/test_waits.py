"""Durable waits of handlers for signals, run by whole workers in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Context, Dead, Holdfast, Invalid, JobState, Retry
from holdfast.core.events import JobSuspended
from holdfast.core.models import Reason, to_datetime
from holdfast.telemetry.metrics import Metrics
from tests.worker.stepping import Ledger, steps_of
from tests.worker.support import Recorder, harness


async def test_handler_waits_for_a_signal_without_a_runner(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order")
    async def order(context: Context, number: int) -> str:
        await context.step("reserve", ledger.do, "reserve")
        approval = await context.wait_for(f"approved:{number}", timeout="7d")
        await context.step("ship", ledger.do, "ship")
        return f"approved by {approval['by']}"

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue(42)
        await harnessed.advance(1)
        job = await handle.job()
        assert (job.state, job.reason, job.attempts) == (JobState.WAITING, "signal", 0)
        waits = await app.read_waits(handle.id)
        assert waits.receiver is not None
        assert (waits.receiver.topic, waits.receiver.step) == ("approved:42", "wait_for approved:42")
        await harnessed.advance(86400)
        assert await handle.state() is JobState.WAITING
        assert (await app.signal("approved:42", {"by": "Ada"})).job_id == handle.id
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "approved by Ada"
        assert ledger.done == ["reserve", "ship"]
        assert [step.name for step in await steps_of(app, handle.id)] == ["reserve", "wait_for approved:42", "ship"]
        assert (await handle.job()).attempts == 1


async def test_suspended_jobs_and_steps_have_events_and_metrics(app: Holdfast) -> None:
    events, metrics = Recorder(app), Metrics(app.events, labels=100)

    @app.task("child")
    async def child(context: Context) -> None:
        await context.step("work", str)

    @app.task("order")
    async def order(context: Context) -> None:
        await context.wait_for("approved", timeout="7d")
        await context.call(child)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(1)
        began_us = (await handle.job()).run_at_us
        await app.signal("approved")
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    suspended = [event for event in events.of(JobSuspended) if event.job_id == handle.id]
    assert [event.reason for event in suspended] == ["signal", "children"]
    assert [event.until for event in suspended] == [to_datetime(began_us), None]
    readings = {each.family.name: each.series for each in metrics.read()}
    assert readings["jobs_suspended_total"] == {("order", "signal"): 1, ("order", "children"): 1}
    assert sum(readings["steps_recorded_total"].values()) == 3  # the child's step, its call, and its result
    metrics.close()


async def test_signal_that_came_first_is_received_at_once(app: Holdfast) -> None:
    @app.task("order")
    async def order(context: Context) -> list[Any]:
        return [await context.wait_for("event", timeout=10) for _ in range(2)]

    async with harness(app) as harnessed:
        await harnessed.start()
        await app.signal("event", 1)
        await app.signal("event")
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == [1, None]
        assert (await handle.job()).claims == 1


async def test_signal_that_does_not_come_is_a_timeout_that_is_kept(app: Holdfast) -> None:
    seen: list[str] = []

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> str:
        try:
            await context.wait_for("approved", timeout=60)
        except TimeoutError as error:
            seen.append(str(error))
            await context.step("remind", seen.append, "reminded")
        if len(seen) < 3:
            raise RuntimeError
        return "gave up"

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(59)
        assert await handle.state() is JobState.WAITING
        await harnessed.advance(1.5)
        await app.signal("approved", "too late")
        await harnessed.advance(3)
        assert await handle.result(timeout=0) == "gave up"
        text = "no signal 'approved' came within 0:01:00"
        assert seen == [text, "reminded", text]
        assert [each.value for each in await app.kept_signals()] == ['"too late"']


async def test_received_signal_stays_in_the_record_of_a_replay(app: Holdfast) -> None:
    values: list[Any] = []

    @app.task("order")
    async def order(context: Context) -> None:
        values.append(await context.wait_for("event", timeout=60))
        raise Dead("always")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(1)
        await app.signal("event", 1, id="one")
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.DEAD
        assert (await app.signal("event", 2, id="one")).job_id == handle.id
        await handle.replay()
        await harnessed.run_until_idle()
        assert values == [1, 1]
        assert await app.kept_signals() == []


async def test_wait_in_a_task_of_the_handler_is_refused(app: Holdfast) -> None:
    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await asyncio.gather(context.wait_for("a", timeout=5), context.wait_for("b", timeout=5))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "call it in the handler itself" in str((await handle.job()).error)


@pytest.mark.parametrize("topic", ["", "a#2", "a\nb", "x" * 201, 5, None])
async def test_topic_that_is_no_line_of_text_is_refused(app: Holdfast, topic: Any) -> None:
    with pytest.raises(Invalid, match="topic"):
        await app.signal(topic, 1)
    with pytest.raises(Invalid, match="topic") if topic is not None else pytest.raises(Invalid, match="limit"):
        await app.kept_signals(topic, limit=0 if topic is None else 5)


async def test_signal_that_cannot_be_stored_is_refused(app: Holdfast) -> None:
    with pytest.raises(Invalid):
        await app.signal("a", object())
    with pytest.raises(Invalid):
        await app.signal("a", "x" * (app.settings.payload_limit + 1))
    with pytest.raises(Invalid, match="id"):
        await app.signal("a", 1, id="")
    assert await app.kept_signals() == []


async def test_wait_of_another_topic_after_a_deploy_is_changed_code(app: Holdfast) -> None:
    topics = ["first", "second"]

    @app.task("order")
    async def order(context: Context) -> None:
        await context.wait_for(topics[0], timeout=60)
        await context.step("ship", str, 1)
        raise Dead("boom")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await app.signal("first")
        await harnessed.run_until_idle()
        topics.reverse()
        await handle.replay()
        await harnessed.run_until_idle()
        job = await handle.job()
        assert (job.state, job.reason) == (JobState.DEAD, Reason.STEPS_CHANGED)
        assert "'wait_for first' is recorded at this place" in str(job.error)
