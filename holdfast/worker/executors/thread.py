"""Sync handlers: run in daemon threads.

A thread cannot be killed. After a cancellation or timeout its context is notified, and the thread counts as *stuck*
until its handler returns. Nothing here waits for a thread, and threads are daemons, so a stuck thread cannot keep the
worker from stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    """A call to run in a thread. Taking its only ticket decides between a start and a cancellation."""

    def __init__(self, function: Callable[[], Any], context: contextvars.Context) -> None:
        self.function = function
        self.context = context
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[tuple[Any, BaseException | None]] = self.loop.create_future()
        self.tickets = [True]
        self.is_done = False

    def take(self) -> bool:
        """Returns True if the caller is the first to take the ticket. Atomic, as ``list.pop`` is."""
        try:
            return self.tickets.pop()
        except IndexError:
            return False


class NoThread(Exception):
    """No thread could be started for a call."""


class ThreadExecutor:
    """A pool of at most ``max_threads`` threads, started on demand. For one event loop."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads = 0
        self._active = 0  # calls queued or running, including stuck ones
        self._stuck: set[_Call] = set()

    def resize(self, max_threads: int) -> None:
        """Sets the maximum number of threads; running ones stay."""
        self._max_threads = max_threads

    @property
    def stuck(self) -> int:
        """Number of threads that still run an abandoned handler."""
        return len(self._stuck)

    async def run(
        self, function: Callable[[], Value], context: contextvars.Context, cancel: Callable[[], None]
    ) -> Value:
        """Calls ``function`` in ``context`` in a thread, as soon as one is free.

        If cancelled before its start, it never starts. If cancelled later, ``cancel`` is called to notify the handler,
        and the thread counts as stuck until the handler returns.
        """
        call = _Call(function, context)
        self._queue_call(call)
        try:
            value, error = await call.ended
        except asyncio.CancelledError:
            if not call.take() and not call.is_done:
                self._stuck.add(call)
                with contextlib.suppress(RuntimeError):  # No thread can be started: the next call tries again.
                    self._add_thread()  # queued calls need another thread
            cancel()
            raise
        if error is not None:
            # Raised inside a coroutine, StopIteration becomes RuntimeError.
            raise error
        result: Value = value
        return result

    def close(self) -> int:
        """Ends idle threads. Returns the number of stuck ones, which end with their handler or with the process."""
        for _ in range(self._threads):
            self._calls.put(None)
        self._threads = 0
        return self.stuck

    def _queue_call(self, call: _Call) -> None:
        self._active += 1
        try:
            self._add_thread()
        except RuntimeError as error:
            self._active -= 1
            raise NoThread(str(error)) from error
        self._calls.put(call)

    def _add_thread(self) -> None:
        """Starts a thread if there are more calls than threads. Stuck threads do not count against the maximum."""
        if self._active > self._threads < self._max_threads + len(self._stuck):
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
                return  # The loop is closed: the worker has stopped.
            del call, value, failure

    def _end(self, call: _Call, value: Any, error: BaseException | None) -> None:
        self._active -= 1
        call.is_done = True
        self._stuck.discard(call)
        if not call.ended.done():
            call.ended.set_result((value, error))


class LoopThreads(ThreadPoolExecutor):
    """The default executor of the worker's event loop (``asyncio.to_thread``), with daemon threads.

    The standard executor waits for its threads without a timeout, when the loop closes and when the interpreter exits:
    one hanging call would keep the process of a stopped worker alive. asyncio accepts only a ThreadPoolExecutor, so
    this class derives from it and overrides its methods.
    """

    def __init__(self, max_threads: int | None = None) -> None:
        """``max_threads``: None: as many as in the standard library."""
        self._max_threads = max_threads or min(32, (os.cpu_count() or 1) + 4)
        super().__init__(self._max_threads)
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads_started = 0
        self._calls: set[Future[Any]] = set()  # queued or running
        self._closed = False

    def submit(self, fn: Callable[P, Value], /, *args: P.args, **kwargs: P.kwargs) -> Future[Value]:
        future: Future[Value] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if len(self._calls) >= self._threads_started < self._max_threads:
                name = f"holdfast-loop-{self._threads_started + 1}"
                threading.Thread(target=self._run_calls, name=name, daemon=True).start()
                self._threads_started += 1
            self._calls.add(future)
        self._queue.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more calls and ends idle threads. Never waits, even if ``wait`` is set."""
        with self._lock:
            self._closed = True
        for _ in range(self._threads_started):
            self._queue.put(None)

    def wait_calls(self, seconds: float) -> int:
        """Waits up to ``seconds``, blocking, for running calls. Returns the number that still run."""
        with self._lock:
            calls = list(self._calls)
        return sum(call.running() for call in wait(calls, seconds).not_done)

    def _run_calls(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, call = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised again where it is awaited
                    future.set_exception(error)
            with self._lock:
                self._calls.discard(future)
            del entry, future, call
