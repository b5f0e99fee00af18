"""Steps of workflows, run by whole workers in virtual time."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobState, Retry, Snooze
from holdfast.core.errors import Invalid
from tests.worker.stepping import Ledger, Receipt, steps_of
from tests.worker.support import harness


async def test_step_that_has_ended_is_not_run_again(app: Holdfast) -> None:
    ledger, failures = Ledger(), iter([True, True, False])

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context, item: str) -> list[str]:
        first = await context.step("reserve", ledger.do, f"reserve {item}")
        second = await context.step("charge", ledger.do_now, what="charge")
        if next(failures):
            raise RuntimeError("after two steps")
        return [first, second, await context.step("ship", ledger.do, "ship")]

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue("book")
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == ["RESERVE BOOK", "CHARGE", "SHIP"]
        assert ledger.done == ["reserve book", "charge", "ship"]
        assert [(each.name, each.number, each.is_ordered) for each in await steps_of(app, handle.id)] == [
            ("reserve", 1, True),
            ("charge", 2, True),
            ("ship", 3, True),
        ]


@pytest.mark.rows("S47", "S49", "S57")
async def test_retry_goes_on_at_the_third_of_four_steps(app: Holdfast) -> None:
    ledger, seen = Ledger(), []

    async def third(failing: bool) -> str:
        await ledger.do("three")
        if failing:
            raise RuntimeError("declined")
        return "3"

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        for name in ("one", "two"):
            await context.step(name, ledger.do, name)
            seen.append([step.name for step in await app.steps(context.id)])
        await context.step("three", third, context.attempts == 1)
        await context.step("four", ledger.do, "four")
        seen.append([step.name for step in await app.steps(context.id)])

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    assert ledger.done == ["one", "two", "three", "three", "four"]
    assert seen[:2] == [["one"], ["one", "two"]]
    assert seen[-1] == ["one", "two", "three", "four"]


async def test_failed_step_runs_again_with_its_job(app: Holdfast) -> None:
    ledger, failures = Ledger(), iter([True, False])

    async def charge() -> str:
        await ledger.do("charge")
        if next(failures):
            raise RuntimeError("declined")
        return "paid"

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> str:
        await context.step("reserve", ledger.do, "reserve")
        return await context.step("charge", charge)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "paid"
        assert ledger.done == ["reserve", "charge", "charge"]


async def test_result_has_the_same_type_when_it_is_made_and_when_it_is_read(app: Holdfast) -> None:
    seen: list[Any] = []

    async def charge() -> Receipt:
        return Receipt(7, ("a", "b"))

    async def nothing() -> None: ...

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        receipt: Receipt = await context.step("charge", charge)
        seen.append(
            [receipt, await context.step("nothing", nothing), await context.step("untyped", lambda: {"at": [1, 2]})]
        )
        if len(seen) == 1:
            raise RuntimeError

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    assert seen == [[Receipt(7, ("a", "b")), None, {"at": [1, 2]}]] * 2


async def test_name_that_is_called_again_gets_a_number(app: Holdfast) -> None:
    ledger, failures = Ledger(), iter([True, False])

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> list[str]:
        found = [await context.step("page", ledger.do, f"page {n}") for n in range(3)]
        if next(failures):
            raise RuntimeError
        return found

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == ["PAGE 0", "PAGE 1", "PAGE 2"]
        assert [each.name for each in await steps_of(app, handle.id)] == ["page", "page#2", "page#3"]
    assert len(ledger.done) == 3


async def test_steps_side_by_side_are_found_whatever_their_order(app: Holdfast) -> None:
    ledger, failures, hurries = Ledger(), iter([True, True, False]), iter("abbaab")

    async def pair(context: Context, name: str) -> str:
        first = await context.step(f"{name}1", ledger.do, f"{name}1")
        if next(hurries) != name:
            await asyncio.sleep(0.02)
        return first + await context.step(f"{name}2", ledger.do, f"{name}2")

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> list[str]:
        same = await asyncio.gather(*[context.step("same", ledger.do, f"same{n}") for n in range(3)])
        found = await asyncio.gather(pair(context, "a"), pair(context, "b"))
        if next(failures):
            raise RuntimeError
        return [*same, *found]

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == ["SAME0", "SAME1", "SAME2", "A1A2", "B1B2"]
        assert sorted(ledger.done) == ["a1", "a2", "b1", "b2", "same0", "same1", "same2"]
        assert {each.is_ordered for each in await steps_of(app, handle.id)} == {False}


async def test_first_step_of_a_task_of_the_handler_is_not_in_order(app: Holdfast) -> None:
    """Which of two branches comes first may differ from one attempt to the next."""
    ledger, first = Ledger(), iter("ab")

    async def branch(context: Context, name: str, now: str) -> None:
        if name != now:
            await asyncio.sleep(0.02)
        if context.attempts == 1 and name == "b":
            raise RuntimeError("b1 is not recorded")
        await context.step(f"{name}1", ledger.do, f"{name}1")

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        now = next(first)
        async with asyncio.TaskGroup() as group:
            for name in "ab":
                group.create_task(branch(context, name, now))
        await context.step("end", ledger.do, "end")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
        found = {each.name: each.is_ordered for each in await steps_of(app, handle.id)}
        assert found == {"a1": False, "b1": False, "end": True}
    assert ledger.done == ["a1", "b1", "end"]


async def test_steps_of_threads_that_the_handler_started_are_not_in_order(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order")
    def order(context: Context) -> None:
        context.sync.step("own", ledger.do_now, "own")
        thread = threading.Thread(target=lambda: context.sync.step("other", ledger.do_now, "other"))
        thread.start()
        thread.join()

    async with harness(app, patience=10) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
        found = {each.name: each.is_ordered for each in await steps_of(app, handle.id)}
        assert found == {"own": True, "other": False}


@pytest.mark.rows("S50")
async def test_steps_stay_with_a_replay(app: Holdfast) -> None:
    ledger, broken = Ledger(), [True]

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> str:
        await context.step("reserve", ledger.do, "reserve")
        if broken[0]:
            raise RuntimeError
        return await context.step("ship", ledger.do, "ship")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.DEAD
        broken[0] = False
        await handle.replay()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "SHIP"
        await handle.replay(force=True)
        await harnessed.run_until_idle()
    assert ledger.done == ["reserve", "ship"]


async def test_step_of_a_thread_is_kept(app: Holdfast) -> None:
    ledger, failures = Ledger(), iter([True, False])

    @app.task("order", retry=Retry.fixed(1))
    def order(context: Context) -> str:
        reserved = context.sync.step("reserve", ledger.do_now, "reserve")
        if next(failures):
            raise RuntimeError
        return reserved + context.sync.step("ship", ledger.do_now, what="ship")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "RESERVESHIP"
    assert ledger.done == ["reserve", "ship"]


async def test_step_is_tried_several_times_within_an_attempt(app: Holdfast) -> None:
    tried: list[float] = []

    async with harness(app) as harnessed:

        async def flaky() -> str:
            tried.append(harnessed.clock.monotonic())
            if len(tried) < 3:
                raise RuntimeError("not yet")
            return "done"

        @app.task("order", max_attempts=1)
        async def order(context: Context) -> str:
            with pytest.raises(Invalid, match=r"retry\.priority: 5 is not valid; leave it out"):
                context.with_options(retry=Retry.fixed(10, priority=5))
            return await context.with_options(tries=3, retry=Retry.fixed(10)).step("flaky", flaky)

        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "done"
    assert [round(at - tried[0]) for at in tried] == [0, 10, 20]


async def test_handler_sleeps_for_days_without_a_runner_and_without_an_attempt(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> str:
        await context.step("reserve", ledger.do, "reserve")
        try:
            await context.sleep("3d")
            await context.step("remind", ledger.do, "remind")
            await context.sleep(60)
        except Exception:
            ledger.done.append("caught")
        finally:
            ledger.done.append("finally")
        return await context.step("ship", ledger.do, "ship")

    @app.task("other")
    async def other() -> None:
        ledger.done.append("other")

    async with harness(app, concurrency=1) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(5)
        job = await handle.job()
        assert (job.state, job.attempts) == (JobState.SCHEDULED, 0)
        await other.enqueue()
        await harnessed.advance("2d")
        await app.edit(handle.id, delay=0)  # an operator is impatient: it sleeps on
        await harnessed.advance(60)
        assert await handle.state() is JobState.SCHEDULED
        assert ledger.done == ["reserve", "finally", "other", "finally"]
        await harnessed.advance("1d")
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "SHIP"
        names = [each.name for each in await steps_of(app, handle.id)]
        assert names == ["reserve", "sleep", "remind", "sleep#2", "ship"]
    assert ledger.done[4:] == ["remind", "finally", "finally", "ship"]


async def test_sleep_goes_on_where_a_killed_worker_left_it(app: Holdfast) -> None:
    began: list[float] = []

    async with harness(app) as harnessed:

        @app.task("order", retry=Retry.immediate())
        async def order(context: Context) -> float:
            began.append(harnessed.clock.monotonic())
            await context.sleep(90)
            return harnessed.clock.monotonic()

        first = await harnessed.start()
        first.cut_off("settle")
        handle = await order.enqueue()
        await harnessed.advance(1)
        first.freeze()  # the step is recorded, and its settlement never comes
        await harnessed.start()
        await harnessed.advance(150)
        assert 90 <= await handle.result(timeout=0) - began[0] <= 91


async def test_sleep_in_a_task_of_the_handler_is_refused(app: Holdfast) -> None:
    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await asyncio.gather(context.sleep(5), context.sleep(6))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "call it in the handler itself" in ((await handle.job()).error or "")


async def test_annotations_of_wrapped_functions_are_read(app: Holdfast) -> None:
    class Charger:
        async def __call__(self, number: int) -> Receipt:
            return Receipt(number, ())

    async def charge(number: int) -> Receipt:
        return Receipt(number, ())

    def later(number: int) -> Awaitable[Receipt]:
        return charge(number)

    @app.task("order")
    async def order(context: Context) -> list[int]:
        found = [
            await context.step("partial", functools.partial(charge, 1)),
            await context.step("object", Charger(), 2),
            await context.step("later", later, 3),
        ]
        assert all(isinstance(each, Receipt) for each in found)
        return [each.number for each in found]

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == [1, 2, 3]


async def test_snooze_inside_a_step_is_obeyed(app: Holdfast) -> None:
    ledger = Ledger()

    async def wait_once() -> str:
        if not ledger.done:
            ledger.done.append("snoozed")
            raise Snooze(60)
        return "done"

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> str:
        return await context.with_options(tries=5).step("wait", wait_once)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        await harnessed.advance(61)
        assert await handle.result(timeout=0) == "done"
