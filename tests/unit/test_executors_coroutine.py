"""Async handlers driven inside the runner's task: ``worker/executors/coroutine.py``."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from holdfast.worker.executors.coroutine import drive_in_context
from tests.unit.executor_support import on_both_loops

COLOUR = contextvars.ContextVar("COLOUR", default="none")


async def driven(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await drive_in_context(coroutine, contextvars.copy_context(), lambda: None)


@on_both_loops
async def test_values_and_errors_come_out() -> None:
    async def value() -> int:
        return 5

    async def later() -> int:
        await asyncio.sleep(0.001)
        return 6

    async def broken() -> None:
        await asyncio.sleep(0)
        raise KeyError("k")

    assert await driven(value()) == 5
    assert await driven(later()) == 6
    with pytest.raises(KeyError):
        await driven(broken())


@on_both_loops
async def test_context_variables_stay_inside_and_hold_across_suspensions() -> None:
    seen = []

    async def handler(mine: str) -> None:
        seen.append(COLOUR.get())
        token = COLOUR.set(mine)
        await asyncio.sleep(0)
        seen.append(COLOUR.get())
        seen.append(await asyncio.create_task(child()))
        seen.append(await asyncio.to_thread(COLOUR.get))
        COLOUR.reset(token)

    async def child() -> str:
        return COLOUR.get() + "'s child"

    COLOUR.set("runner")
    await driven(handler("red"))
    await driven(handler("blue"))
    assert seen == ["runner", "red", "red's child", "red", "runner", "blue", "blue's child", "blue"]
    assert COLOUR.get() == "runner"


@on_both_loops
async def test_the_handler_runs_in_the_task_that_awaits_it() -> None:
    async def handler() -> object:
        await asyncio.sleep(0)
        return asyncio.current_task()

    assert await driven(handler()) is asyncio.current_task()


@on_both_loops
async def test_a_timeout_inside_the_handler_ends_there() -> None:
    async def handler() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.005)
        await asyncio.sleep(0)
        return "went on"

    assert await driven(handler()) == "went on"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@on_both_loops
async def test_a_timeout_around_the_handler_reaches_it() -> None:
    seen = []

    async def handler() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(COLOUR.get())
            await asyncio.sleep(0)
            seen.append("tidied up")
            raise

    COLOUR.set("outer")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await driven(handler())
    assert seen == ["outer", "tidied up"]


@on_both_loops
async def test_task_groups_and_gather_work_inside() -> None:
    async def number(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def broken() -> None:
        await asyncio.sleep(0)
        raise ValueError("in the group")

    async def fail_together() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(broken())
            group.create_task(asyncio.sleep(60))
            await asyncio.sleep(60)

    async def handler() -> list[int]:
        with pytest.raises(ExceptionGroup) as caught:
            await fail_together()
        assert [type(error) for error in caught.value.exceptions] == [ValueError]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(number(n)) for n in range(3)]
        return [task.result() for task in tasks] + list(await asyncio.gather(number(3), number(4)))

    assert await driven(handler()) == [0, 1, 2, 3, 4]


@on_both_loops
async def test_cancellation_reaches_every_nested_handler() -> None:
    seen = []

    async def inner() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("inner")

    async def outer() -> None:
        try:
            await driven(inner())
        finally:
            seen.append("outer")

    task = asyncio.create_task(driven(outer()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["inner", "outer"]


@on_both_loops
async def test_cancellation_reaches_a_handler_that_only_gives_way() -> None:
    async def handler() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    task = asyncio.create_task(driven(handler()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_both_loops
async def test_a_handler_may_survive_its_cancellation() -> None:
    async def handler() -> str:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()
        await asyncio.sleep(0)
        return "stayed"

    task = asyncio.create_task(driven(handler()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "stayed"


@on_both_loops
async def test_error_thrown_in_is_not_the_context_of_later_ones() -> None:
    async def handler() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        assert sys.exc_info() == (None, None, None)
        raise ValueError("fresh")

    task = asyncio.create_task(driven(handler()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ValueError, match="fresh") as caught:
        await task
    assert caught.value.__context__ is None


@on_both_loops
async def test_closing_what_awaits_closes_the_handler() -> None:
    seen = []

    async def inside() -> None:
        COLOUR.set("handler's")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(COLOUR.get())

    handler = inside()
    waiting = driven(handler)
    waiting.send(None)
    waiting.close()
    assert seen == ["handler's"]


@on_both_loops
async def test_stop_iteration_in_a_handler_is_an_error() -> None:
    async def handler() -> None:
        raise StopIteration("no return value")

    with pytest.raises(RuntimeError, match="StopIteration"):
        await driven(handler())
