"""Sync handlers: run in daemon threads of our own.

A thread cannot be killed. After a cancellation or timeout its context is notified and the thread goes on until it
ends by itself: it is *stuck* until then and keeps its place. That is why nothing here waits for a thread, and why the
threads are daemons: one that never ends must not keep the worker from stopping.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Value = TypeVar("Value")


class _Call:
    """A function on its way through a thread. Popping the only ticket decides: it starts, or it never does."""

    def __init__(self, function: Callable[[], Any], context: contextvars.Context) -> None:
        self.function = function
        self.context = context
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[tuple[Any, BaseException | None]] = self.loop.create_future()
        self.tickets = [True]
        self.over = False

    def take(self) -> bool:
        """Returns True if the caller is the first to take the ticket. Atomic: a pop is."""
        try:
            return self.tickets.pop()
        except IndexError:
            return False


class NoThread(Exception):
    """The system has no thread for the call now."""


class ThreadExecutor:
    """At most ``limit`` threads, started when first needed. Used from one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads = 0
        self._unended = 0  # calls queued or running, stuck ones too
        self._stuck: set[_Call] = set()

    def resize(self, limit: int) -> None:
        """Have at most ``limit`` threads from now on; running ones stay."""
        self._limit = limit

    @property
    def stuck(self) -> int:
        """Threads still running an abandoned handler."""
        return len(self._stuck)

    async def run(
        self, function: Callable[[], Value], context: contextvars.Context, cancel: Callable[[], None]
    ) -> Value:
        """Call ``function`` in ``context`` in a thread, as soon as one is free.

        Cancelled before it started: it never starts. Cancelled later: ``cancel`` is called (it should tell the handler)
        and the thread counts as stuck until it ends.
        """
        call = _Call(function, context)
        self._enlist(call)
        try:
            value, error = await call.ended
        except asyncio.CancelledError:
            if not call.take() and not call.over:
                self._stuck.add(call)
                self._hire()  # others wait behind it
            cancel()
            raise
        if error is not None:
            # Raised from here, inside a coroutine, StopIteration becomes RuntimeError, as it must.
            raise error
        result: Value = value
        return result

    def close(self) -> int:
        """Let every thread end that can; returns how many are stuck: those end with their handler or the process."""
        for _ in range(self._threads):
            self._calls.put(None)
        self._threads = 0
        return self.stuck

    def _enlist(self, call: _Call) -> None:
        self._unended += 1
        try:
            self._hire()
        except RuntimeError as error:
            self._unended -= 1
            raise NoThread(str(error)) from error
        self._calls.put(call)

    def _hire(self) -> None:
        """Start a thread if there are more calls than threads; stuck ones do not count against the limit."""
        if self._unended > self._threads < self._limit + len(self._stuck):
            name = f"holdfast-handler-{self._threads + 1}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._threads += 1

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            value: Any = None
            failure: BaseException | None = None
            if call.take():
                try:
                    value = call.context.run(call.function)
                except BaseException as error:  # raised again where it is awaited
                    failure = error
            try:
                call.loop.call_soon_threadsafe(self._end, call, value, failure)
            except RuntimeError:
                return  # The loop is closed: the worker has stopped, and no waiter is left.
            del call, value, failure

    def _end(self, call: _Call, value: Any, error: BaseException | None) -> None:
        self._unended -= 1
        call.over = True
        self._stuck.discard(call)
        if not call.ended.done():
            call.ended.set_result((value, error))


class LoopThreads(ThreadPoolExecutor):
    """The threads of ``asyncio.to_thread`` on an event loop of ours: as the standard library's, but daemons.

    Those of the standard library are waited for without end, by the loop that closes and by the interpreter that
    exits: a single call that hangs would keep the process of a stopped worker for ever. (A loop takes nothing but a
    ThreadPoolExecutor; of it we use the interface alone.)
    """

    def __init__(self) -> None:
        self._most = min(32, (os.cpu_count() or 1) + 4)  # as many as the standard library would have
        super().__init__(self._most)
        self._tickets: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._hired = 0
        self._calls: set[Future[Any]] = set()  # queued or running
        self._closed = False

    def submit(self, fn: Callable[P, Value], /, *args: P.args, **kwargs: P.kwargs) -> Future[Value]:
        future: Future[Value] = Future()
        with self._guard:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if len(self._calls) >= self._hired < self._most:
                name = f"holdfast-loop-{self._hired + 1}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._hired += 1
            self._calls.add(future)
        self._tickets.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls and let the threads end that can. Waits for none, even if ``wait`` is set."""
        with self._guard:
            self._closed = True
        for _ in range(self._hired):
            self._tickets.put(None)

    def wait_calls(self, seconds: float) -> int:
        """Wait so long, blocking, for the calls under way; how many go on."""
        with self._guard:
            calls = list(self._calls)
        return sum(call.running() for call in wait(calls, seconds).not_done)

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            future, call = ticket
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised again where it is awaited
                    future.set_exception(error)
            with self._guard:
                self._calls.discard(future)
            del ticket, future, call
