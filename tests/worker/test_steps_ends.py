"""Steps that end their attempt or their job: changed code, results that cannot be stored, failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Conflict, Context, Dead, Holdfast, Invalid, JobState, Retry
from holdfast.core.models import Reason
from tests.worker.stepping import Ledger, steps_of
from tests.worker.support import forever, harness


@pytest.mark.parametrize(
    ("now", "state", "problem"),
    [
        (["reserve", "charge", "pack", "ship"], JobState.SUCCEEDED, None),
        (["reserve", "charge"], JobState.SUCCEEDED, None),
        (
            ["reserve", "pay", "ship"],
            JobState.DEAD,
            "step 'charge' is recorded at this place, and the code calls step 'pay'",
        ),
        (["check", "reserve", "charge"], JobState.DEAD, "step 'reserve' is recorded at this place"),
        (["reserve"], JobState.DEAD, "step 'charge' is recorded, and the code does not call it any more"),
    ],
)
async def test_code_that_no_longer_matches_its_record_is_dead(
    app: Holdfast, now: list[str], state: JobState, problem: str | None
) -> None:
    ledger = Ledger()

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context, *, swallow: bool) -> None:
        for name in ["reserve", "charge"] if context.attempts == 1 else now:
            try:
                await context.step(name, ledger.do, name)
            except Exception:
                if not swallow:
                    raise
        if context.attempts == 1:
            raise RuntimeError("and then a deploy")

    async with harness(app) as harnessed:
        await harnessed.start()
        handles = [await order.enqueue(swallow=False)]
        await harnessed.run_until_idle()
        if problem is not None:
            handles.append(await order.enqueue(swallow=True))
            await harnessed.run_until_idle()
        jobs = [await handle.job() for handle in handles]
    assert [job.state for job in jobs] == [state] * len(jobs)
    if problem is None:
        assert ledger.done == list(dict.fromkeys(["reserve", "charge", *now]))
    else:
        assert {job.reason for job in jobs} == {"steps_changed"}
        assert all(problem in (job.error or "") for job in jobs)
        assert ledger.done == ["reserve", "charge"] * 2  # nothing was guessed


async def test_step_that_takes_too_long_fails(app: Holdfast) -> None:
    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.with_options(timeout=5).step("hangs", forever)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
    assert job.state is JobState.DEAD
    assert "step 'hangs': still running after 5 s" in (job.error or "")


async def test_step_whose_result_cannot_be_stored_is_not_repeated(app: Holdfast) -> None:
    ledger = Ledger()

    def unstorable() -> object:
        ledger.done.append("once")
        return object()

    def large() -> str:
        ledger.done.append("once")
        return "x" * 2000

    @app.task("order")
    async def order(context: Context, what: str) -> None:
        with contextlib.suppress(Exception):  # it cannot be caught away
            await context.step(what, {"unstorable": unstorable, "large": large}[what])

    async with harness(app, result_limit=1024) as harnessed:
        await harnessed.start()
        for what, part in (("unstorable", "cannot be written as JSON"), ("large", "2,002 bytes")):
            handle = await order.enqueue(what)
            await harnessed.run_until_idle()
            job = await handle.job()
            assert (job.state, job.reason) == (JobState.DEAD, "result")
            assert f"step '{what}': result" in (job.error or "")
            assert part in (job.error or "")
    assert ledger.done == ["once", "once"]


async def test_results_of_all_steps_are_bounded(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.tasks.steps.MAX_RESULTS", 1000)
    ledger = Ledger()

    @app.task("order", retry=Retry.immediate())
    async def order(context: Context) -> None:
        await context.step("one", ledger.do, "x" * 600)
        if context.attempts == 1:
            raise RuntimeError
        await context.step("two", ledger.do, "y" * 600)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
    assert (job.state, job.reason) == (JobState.DEAD, "result")
    assert "step 'two': the results of all steps exceed 1,000 characters" in (job.error or "")


@pytest.mark.parametrize("name", ["", "a#2", "a\nb", "x" * 201, 7])
async def test_bad_name_of_a_step_is_refused(app: Holdfast, name: Any) -> None:
    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.step(name, forever)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "step: " in ((await handle.job()).error or "")


async def test_frozen_owner_records_no_step(app: Holdfast) -> None:
    ledger, gate = Ledger(), asyncio.Event()

    @app.task("order", retry=Retry.immediate())
    async def order(context: Context) -> str:
        await context.step("reserve", ledger.do, f"reserve {context.attempts}")
        if context.attempts == 1:
            await gate.wait()
        return await context.step("charge", ledger.do, f"charge {context.attempts}")

    async with harness(app) as harnessed:
        frozen = await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(1)
        frozen.freeze()
        gate.set()
        await harnessed.start()
        await harnessed.advance(120)
        assert await handle.result(timeout=0) == "CHARGE 2"
        frozen.thaw()
        await harnessed.advance(60)
        steps = await steps_of(app, handle.id)
        assert [(each.name, each.result) for each in steps] == [("reserve", '"RESERVE 1"'), ("charge", '"CHARGE 2"')]


async def test_handler_cannot_go_on_behind_a_failed_step(app: Holdfast) -> None:
    """It might take another way in its next attempt, with the steps of both done."""
    ledger, broken = Ledger(), [True]

    async def primary() -> str:
        ledger.done.append("primary")
        if broken[0]:
            raise RuntimeError("down")
        return "primary"

    @app.task("order", retry=Retry.fixed(60), max_attempts=3)
    async def order(context: Context, *, swallow: bool) -> str:
        try:
            return await context.step("primary", primary)
        except RuntimeError:
            with contextlib.suppress(Exception if swallow else TimeoutError):
                await context.step("backup", ledger.do, "backup")
            return "backup"

    async with harness(app) as harnessed:
        await harnessed.start()
        for swallow in (False, True):
            broken[0] = True
            handle = await order.enqueue(swallow=swallow)
            await harnessed.advance(1)
            job = await handle.job()
            assert job.state is JobState.FAILED
            assert "step 'backup' cannot be taken after step 'primary' has failed" in (job.error or "")
            broken[0] = False
            await harnessed.run_until_idle()
            assert await handle.result(timeout=0) == "primary"
    assert ledger.done == ["primary", "primary"] * 2


async def test_failed_branch_stops_no_other_branch(app: Holdfast) -> None:
    ledger = Ledger()

    async def fail() -> None:
        raise RuntimeError

    async def branch(context: Context) -> None:
        for name in ("b1", "b2"):
            await asyncio.sleep(0.02)
            await context.step(name, ledger.do, name)

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await asyncio.gather(context.step("a", fail), branch(context), return_exceptions=True)

    async with harness(app, patience=5) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    assert ledger.done == ["b1", "b2"]


async def test_step_takes_no_steps_itself(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        async def outer() -> None:
            await context.step("inner", ledger.do, "inner")

        await context.step("outer", outer)

    @app.task("nap", max_attempts=1)
    async def nap(context: Context) -> None:
        await context.step("nap", context.sleep, 5)

    async with harness(app) as harnessed:
        await harnessed.start()
        for handle in (await order.enqueue(), await nap.enqueue()):
            await harnessed.run_until_idle()
            job = await handle.job()
            assert job.state is JobState.DEAD
            assert "a step takes no steps itself" in (job.error or "")
    assert ledger.done == []


async def test_what_ends_the_attempt_is_not_lost_when_its_exception_is_wrapped(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", max_attempts=2, retry=Retry.immediate())
    async def order(context: Context, how: str) -> str:
        if context.attempts == 1 and how == "changed":
            await context.step("old", ledger.do, "old")
            raise RuntimeError
        try:
            async with asyncio.TaskGroup():
                if how == "changed":
                    await context.step("new", ledger.do, "new")
                else:
                    await context.sleep(60)
        except BaseException as error:
            if how == "swallowed":
                return "swallowed"
            raise ValueError from error
        return "slept"

    async with harness(app) as harnessed:
        await harnessed.start()
        handles = [await order.enqueue(how) for how in ("changed", "asleep", "swallowed")]
        await harnessed.run_until_idle()
        changed, *slept = [await handle.job() for handle in handles]
    assert (changed.state, changed.reason) == (JobState.DEAD, "steps_changed")
    assert [(job.state, job.attempts, job.return_value()) for job in slept] == [(JobState.SUCCEEDED, 1, "slept")] * 2
    assert ledger.done == ["old"]


class Cents(int):
    """A type that JSON does not know."""


async def test_result_that_its_annotation_cannot_read_ends_the_job_before_it_is_stored(app: Holdfast) -> None:
    def price() -> Cents:
        return Cents(5)

    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("price", price)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
        assert (job.state, job.reason) == (JobState.DEAD, "result")
        assert "does not fit the function's return annotation" in (job.error or "")
        assert await steps_of(app, handle.id) == []


async def test_store_that_is_away_delays_a_step_and_costs_no_attempt(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", max_attempts=2, retry=Retry.fixed(1))
    async def order(context: Context) -> str:
        await context.step("reserve", ledger.do, "reserve")
        if context.attempts == 1:
            raise RuntimeError
        return await context.step("ship", ledger.do, "ship")

    async with harness(app) as harnessed:
        worker = await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(0.5)
        worker.cut_off("read_steps", "save_steps")
        await harnessed.advance(15)
        assert await handle.state() is JobState.RUNNING
        worker.thaw()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "SHIP"
    assert ledger.done == ["reserve", "ship"]


async def test_bug_in_a_store_keeps_no_handler_waiting(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.step("reserve", Ledger().do, "reserve")

    async with harness(app) as harnessed:
        await harnessed.start()
        monkeypatch.setattr("holdfast.stores.forwarding.ForwardingWorkflow.save_steps", broken)
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "the step was not recorded: ZeroDivisionError()" in ((await handle.job()).error or "")


async def test_step_of_a_thread_takes_no_async_function(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", max_attempts=1)
    def order(context: Context) -> None:
        context.sync.step("reserve", ledger.do, "reserve")

    async with harness(app, patience=10) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "give one that is not async to sync.step" in ((await handle.job()).error or "")
    assert ledger.done == []


async def test_handler_in_a_thread_is_refused_what_it_would_have_to_await(app: Holdfast) -> None:
    """Otherwise the call would do nothing, and the job would succeed."""
    calls: dict[str, Callable[[Context], object]] = {
        "complete": lambda context: context.complete(None, "paid"),
        "step": lambda context: context.step("reserve", str),
        "step_in": lambda context: context.step_in(None, "reserve", str),
        "limit": lambda context: context.limit("api"),
        "sleep": lambda context: context.sleep(5),
        "wait_for": lambda context: context.wait_for("approved", timeout=5),
        "call": lambda context: context.call(order, "step"),
        "gather": lambda context: context.gather(),
        "progress": lambda context: context.progress(1, 2),
        "save": lambda context: context.state.save(1),
        "read": lambda context: context.state.read(),
    }

    @app.task("order", max_attempts=1)
    def order(context: Context, name: str) -> None:
        calls[name](context)

    async with harness(app, patience=10) as harnessed:
        handles = [await order.enqueue(name) for name in calls]
        await harnessed.run_until_idle()
        errors = [(await handle.job()).error or "" for handle in handles]
    refusal = "() was called outside an event loop and would never run; await it in an async function"
    twins = [f", or use its blocking form: .sync.{name}(…)" for name in ("complete", "step", "step_in", "limit")]
    ends = [*twins, *[""] * (len(calls) - len(twins))]
    assert errors == [f"HoldfastError: {name}{refusal}{end}" for name, end in zip(calls, ends, strict=True)]


async def test_job_that_is_being_completed_takes_no_step(app: Holdfast) -> None:
    """Its row may be locked by the handler's own transaction, for which the step would wait."""
    refused: list[str] = []

    @app.task("order")
    async def order(context: Context) -> None:
        context.has_called_complete = True  # as complete() does first
        try:
            await context.step("notify", Ledger().do, "notify")
        except Conflict as error:
            refused.append(str(error))
        context.has_called_complete = False

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    assert "is being completed, and takes no further step" in refused[0]


async def test_changed_code_goes_on_from_a_named_step(app: Holdfast) -> None:
    ledger, old = Ledger(), [True]

    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("reserve", ledger.do, "reserve")
        await context.step("charge" if old[0] else "bill", ledger.do, "charge")
        if old[0]:
            raise Dead("boom")

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        old[0] = False
        await handle.replay()
        await harnessed.run_until_idle()
        assert (await handle.job()).reason == Reason.STEPS_CHANGED
        with pytest.raises(Invalid, match="recorded are reserve, charge"):
            await handle.replay(from_step="bill")
        await handle.replay(from_step="charge")
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
        assert ledger.done == ["reserve", "charge", "charge"]
        assert [step.name for step in await steps_of(app, handle.id)] == ["reserve", "bill"]


async def test_step_beside_one_that_fails_is_recorded_before_the_retry(app: Holdfast) -> None:
    ledger, failing = Ledger(), iter([True, False])

    async def reserve() -> str:
        if next(failing):
            raise RuntimeError("no shelf")
        return "reserved"

    async def charge() -> str:
        await ledger.do("begins")
        await harnessed.clock.sleep(30)
        return await ledger.do("charged")

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> list[str]:
        return list(await asyncio.gather(context.step("reserve", reserve), context.step("charge", charge)))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == ["reserved", "CHARGED"]
    assert ledger.done == ["begins", "charged"]


async def test_step_that_a_handler_leaves_behind_is_waited_for_until_the_timeout(app: Holdfast) -> None:
    tasks: list[asyncio.Task[None]] = []

    @app.task("order", timeout=60, max_attempts=1)
    async def order(context: Context) -> None:
        tasks.append(asyncio.ensure_future(context.step("hangs", forever)))
        await asyncio.sleep(0.01)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "timeout: still running after 60 s" in ((await handle.job()).error or "")
        assert tasks[0].cancelled()


async def test_no_step_begins_behind_the_end_of_its_handler(app: Holdfast) -> None:
    ledger, tasks = Ledger(), []

    async def late(context: Context) -> None:
        await harnessed.clock.sleep(5)
        await context.step("late", ledger.do, "late")

    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("first", ledger.do, "first")
        tasks.append(asyncio.ensure_future(late(context)))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
        await harnessed.advance(10)
        [error] = await asyncio.gather(*tasks, return_exceptions=True)
    assert ledger.done == ["first"]
    assert str(error) == "the attempt has ended"
