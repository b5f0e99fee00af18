"""The ways of blocking callers into coroutines."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.core.errors import HoldfastError
from holdfast.core.portal import Portal, drive_coroutine, forbid_running_loop


async def _answer(value: int) -> int:
    return value


async def _nested(value: int) -> int:
    return await _answer(value) + await _answer(1)


def test_what_never_waits_is_driven_in_the_calling_thread() -> None:
    async def where() -> threading.Thread:
        return threading.current_thread()

    assert drive_coroutine(_nested(41)) == 42
    assert drive_coroutine(where()) is threading.current_thread()


def test_its_error_is_the_caller_s() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        drive_coroutine(fail())


def test_what_waits_for_a_loop_is_refused_and_closed() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append("closed")

    waiting = wait()
    with pytest.raises(HoldfastError, match="waits for an event loop"):
        drive_coroutine(waiting)
    assert ended == ["closed"]


def test_blocking_inside_a_loop_is_refused_with_advice() -> None:
    forbid_running_loop("await it")

    async def inside() -> None:
        with pytest.raises(HoldfastError, match="an event loop runs in this thread; await it"):
            forbid_running_loop("await it")

    asyncio.run(inside())


def test_tasks_of_a_portal_end_cleanly_before_it() -> None:
    seen: list[str] = []

    async def go_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("what went on")

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(go_on())

    async def last_words() -> None:
        seen.append("last words")

    portal = Portal(at_exit=last_words)
    task = portal.run(begin())
    portal.stop_thread()
    assert seen == ["last words", "what went on"]
    assert task.cancelled()
