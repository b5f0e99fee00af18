"""The clocks: what moves them, who is woken in which order, and what is bounded by them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from holdfast.core.clock import Clock, ManualClock, SystemClock

NAME: ContextVar[str] = ContextVar("name")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=60))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_manual_time_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(1_000_000)
    assert (clock(), clock.monotonic()) == (1_000_000, 1.0)
    clock.advance(2.5)
    assert (clock(), clock.monotonic()) == (3_500_000, 3.5)


def test_sleepers_wake_by_instant_and_equal_ones_in_order() -> None:
    async def test() -> None:
        clock, woken = ManualClock(), list[str]()

        async def sleep(seconds: float, name: str) -> None:
            await clock.sleep(seconds)
            woken.append(name)

        sleepers = [
            asyncio.create_task(sleep(seconds, name))
            for seconds, name in ((3, "c"), (1, "a"), (2, "b1"), (2, "b2"), (9, "never"))
        ]
        await settle()
        assert clock.next_wake() == 1
        clock.advance(0.999)
        await settle()
        assert woken == []
        clock.advance(5)
        await settle()
        assert woken == ["a", "b1", "b2", "c"]
        assert clock.next_wake() == pytest.approx(9 - 5.999)
        assert [clock.is_sleeping(task, NAME, None) for task in sleepers] == [False, False, False, False, True]
        sleepers[-1].cancel()
        await settle()
        assert clock.next_wake() is None

    run(test())


def test_zero_sleep_yields_once_and_takes_no_time() -> None:
    async def test() -> None:
        clock, turns = ManualClock(), list[str]()
        other = asyncio.create_task(settle())
        other.add_done_callback(lambda _: turns.append("other"))
        for _ in range(10):
            await clock.sleep(0)
        await clock.sleep(-1)
        assert turns == ["other"]

    run(test())


def test_sleeper_of_a_closed_loop_is_skipped() -> None:
    clock = ManualClock()

    async def leave_sleeping() -> None:
        asyncio.ensure_future(clock.sleep(1))  # noqa: RUF006 - it is to be left behind
        await settle()

    asyncio.run(leave_sleeping())
    clock.advance(2)
    assert clock.next_wake() is None


def test_time_is_moved_for_a_loop_in_another_thread() -> None:
    async def test() -> None:
        clock = ManualClock()
        sleeping = asyncio.ensure_future(clock.sleep(60))
        await settle()
        await asyncio.to_thread(clock.advance, 60)
        await sleeping

    run(test())


class _Work:
    """Something that waits, and knows how it ended."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cancelled = False

    async def __call__(self, error: Exception | None = None) -> None:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if error is not None:
            raise error


def test_work_that_takes_too_long_is_cancelled_without_error() -> None:
    async def test() -> None:
        clock, work = ManualClock(), _Work()
        bounded = asyncio.ensure_future(clock.run_bounded(work(), 5))
        await settle()
        clock.advance(4.9)
        await settle()
        assert not bounded.done()
        clock.advance(0.1)
        await bounded
        assert work.cancelled
        real = _Work()
        await SystemClock().run_bounded(real(), 0.01)
        assert real.cancelled

    run(test())


@pytest.mark.parametrize("clock", [ManualClock(), SystemClock()], ids=["manual", "system"])
def test_work_that_ends_in_time_raises_its_error(clock: Clock) -> None:
    async def test() -> None:
        work = _Work()
        asyncio.get_running_loop().call_soon(work.go.set)
        await clock.run_bounded(work(), 3600)
        for error in (ValueError("mine"), TimeoutError("mine too")):
            with pytest.raises(type(error), match="mine"):
                await clock.run_bounded(work(error), 3600)
        assert not work.cancelled
        if isinstance(clock, ManualClock):
            await settle()
            assert clock.next_wake() is None, "the limit sleeps on"

    run(test())


@pytest.mark.parametrize("clock", [ManualClock(), SystemClock()], ids=["manual", "system"])
def test_cancelled_from_outside_the_work_is_cancelled_too(clock: Clock) -> None:
    async def test() -> None:
        work = _Work()
        bounded = asyncio.ensure_future(clock.run_bounded(work(), 3600))
        await settle()
        bounded.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded
        assert work.cancelled

    run(test())


def test_system_clock_goes_on_while_the_machine_is_suspended() -> None:
    assert SystemClock.monotonic.args == (getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC),)
