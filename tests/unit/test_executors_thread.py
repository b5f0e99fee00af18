"""Sync handlers in threads: ``worker/executors/thread.py``."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.worker.executors.thread import LoopThreads, ThreadExecutor
from tests.unit.executor_support import on_both_loops, until

COLOUR = contextvars.ContextVar("COLOUR", default="none")


def nothing() -> None: ...


async def run(threads: ThreadExecutor, function: Callable[[], Any], cancel: Callable[[], None] = nothing) -> Any:
    return await threads.run(function, contextvars.copy_context(), cancel)


@on_both_loops
async def test_values_and_errors_come_out() -> None:
    threads = ThreadExecutor(2)

    def broken() -> None:
        raise KeyError("k")

    def stopped() -> None:
        raise StopIteration

    def leaving() -> None:
        raise SystemExit(3)

    thread = await run(threads, threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon, "a handler that never ends would keep the worker from stopping"
    with pytest.raises(KeyError):
        await run(threads, broken)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run(threads, stopped)
    with pytest.raises(SystemExit):
        await run(threads, leaving)
    assert threads.close() == 0


@on_both_loops
async def test_context_variables_go_in_and_never_out() -> None:
    threads = ThreadExecutor(1)
    COLOUR.set("red")

    def change() -> str:
        before = COLOUR.get()
        COLOUR.set("blue")
        return before

    assert [await run(threads, change), await run(threads, change)] == ["red", "red"]
    assert COLOUR.get() == "red"
    threads.close()


@on_both_loops
async def test_threads_are_reused_and_bounded() -> None:
    threads = ThreadExecutor(3)
    first = await run(threads, threading.get_ident)
    assert await run(threads, threading.get_ident) == first
    meeting = threading.Barrier(3, timeout=60)

    def meet() -> int:
        meeting.wait()
        return threading.get_ident()

    assert len(set(await asyncio.gather(*[run(threads, meet) for _ in range(6)]))) == 3
    threads.close()


@on_both_loops
async def test_cancelled_thread_is_notified_and_counted_until_it_ends() -> None:
    threads = ThreadExecutor(2)
    started, cancelled, leave = threading.Event(), threading.Event(), threading.Event()

    def stubborn() -> None:
        started.set()
        leave.wait(60)

    task = asyncio.create_task(run(threads, stubborn, cancelled.set))
    await until(started.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()
    assert threads.stuck == 1
    assert await run(threads, lambda: "others go on") == "others go on"
    before = time.monotonic()
    assert threads.close() == 1
    assert time.monotonic() - before < 30
    leave.set()
    await until(lambda: threads.stuck == 0)


@on_both_loops
async def test_handler_is_notified_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ThreadExecutor(1)
    started, cancelled = threading.Event(), threading.Event()

    def wait_for_cancellation() -> None:
        started.set()
        cancelled.wait(60)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first = asyncio.create_task(run(threads, wait_for_cancellation, cancelled.set))
    await until(started.is_set)
    queued = asyncio.create_task(run(threads, lambda: "queued"))
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert cancelled.is_set()
    assert await queued == "queued"
    threads.close()


@on_both_loops
async def test_a_call_cancelled_before_it_starts_never_starts() -> None:
    threads = ThreadExecutor(1)
    started, leave, ran = threading.Event(), threading.Event(), threading.Event()

    def busy() -> None:
        started.set()
        leave.wait(60)

    first = asyncio.create_task(run(threads, busy))
    await until(started.is_set)
    second = asyncio.create_task(run(threads, ran.set))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert threads.stuck == 0
    leave.set()
    await first
    await run(threads, nothing)
    assert not ran.is_set()
    threads.close()


def test_a_thread_that_outlives_its_loop_does_no_harm() -> None:
    threads = ThreadExecutor(1)
    started, leave, done = threading.Event(), threading.Event(), threading.Event()

    def stubborn() -> None:
        started.set()
        leave.wait(60)
        done.set()

    async def give_up() -> None:
        task = asyncio.create_task(run(threads, stubborn))
        await until(started.is_set)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(give_up())
    leave.set()
    assert done.wait(60)
    named = [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-handler")]
    for thread in named:
        thread.join(60)
        assert not thread.is_alive()


# ── the loop's own threads ────────────────────────────────────────────────────────────────────────────────────────
@on_both_loops
async def test_the_loops_threads_do_what_to_thread_asks_of_them() -> None:
    asyncio.get_running_loop().set_default_executor(LoopThreads())

    def broken() -> None:
        raise KeyError("k")

    COLOUR.set("red")
    assert await asyncio.to_thread(COLOUR.get) == "red"
    assert (await asyncio.to_thread(threading.current_thread)).daemon
    with pytest.raises(KeyError, match="k"):
        await asyncio.to_thread(broken)
    assert await asyncio.gather(*(asyncio.to_thread(pow, number, 2) for number in range(100))) == [
        number**2 for number in range(100)
    ]


@on_both_loops
async def test_a_loop_closes_though_one_of_its_threads_hangs() -> None:
    threads, release = LoopThreads(), threading.Event()
    hanging = threads.submit(release.wait)
    await until(hanging.running)
    assert threads.wait_calls(0.05) == 1
    threads.shutdown(wait=True)
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(nothing)
    release.set()
    assert threads.wait_calls(20) == 0


@on_both_loops
async def test_call_cancelled_before_a_free_thread_never_starts() -> None:
    threads, release, started = LoopThreads(), threading.Event(), threading.Event()
    busy = [threads.submit(release.wait) for _ in range(40)]
    late = threads.submit(started.set)
    assert late.cancel()
    release.set()
    assert threads.wait_calls(20) == 0
    assert all(each.result() for each in busy)
    assert not started.is_set()
    threads.shutdown()
