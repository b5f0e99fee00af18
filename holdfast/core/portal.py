"""Blocking callers: the bridge from threads to coroutines.

Holdfast has one implementation, as coroutines. For a caller without an event loop ``Store.blocking`` runs them:
``drive_coroutine`` in the calling thread, for a coroutine that never waits for a loop; a ``Portal`` on an event loop
in a thread of its own, for any other.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

from holdfast.core.errors import HoldfastError

P = ParamSpec("P")
T = TypeVar("T")


def drive_coroutine(call: Coroutine[Any, Any, T]) -> T:
    """Run ``call`` in this thread. It must not wait for an event loop."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    call.close()
    raise HoldfastError("this call waits for an event loop and cannot be driven in the calling thread")


_AT_EXIT = 2.0  # seconds that ``at_exit`` of a portal may take


class Portal:
    """An event loop in a daemon thread, for callers without one."""

    def __init__(self, *, at_exit: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """``at_exit`` runs on the loop before it ends, at process exit at the latest."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="holdfast-portal", daemon=True)
        self._thread.start()
        self._at_exit = at_exit
        atexit.register(self.stop_thread)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs ``call`` on the loop and returns its result. An interrupt cancels it."""
        running = asyncio.run_coroutine_threadsafe(call, self.loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def is_here(self) -> bool:
        """Returns True if the caller runs on this portal's loop."""
        return running_loop() is self.loop

    def stop_thread(self) -> None:
        """Run ``at_exit`` and end the thread."""
        atexit.unregister(self.stop_thread)
        if not self._thread.is_alive():
            return
        last_words = asyncio.run_coroutine_threadsafe(self._close_loop(), self.loop)
        wait([last_words], timeout=_AT_EXIT)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_AT_EXIT)
        if not self._thread.is_alive():
            self.loop.close()

    async def _close_loop(self) -> None:
        """Closes the loop as ``asyncio.run`` does: cancels the remaining tasks and lets them end."""
        try:
            await self._at_exit()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop
"""Returns the event loop that runs in this thread; None if there is none."""


def call_off_loop(call: Callable[[], T]) -> T:
    """Returns what a blocking call returns; it is made in a thread of its own if an event loop runs in this one."""
    if running_loop() is None:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def forbid_running_loop(advice: str) -> None:
    """Raises HoldfastError, with ``advice``, inside an event loop: a blocking call would stop it."""
    if running_loop() is not None:
        raise HoldfastError(f"this blocks, and an event loop runs in this thread; {advice}")


def requires_loop(method: Callable[P, T]) -> Callable[P, T]:
    """Refuse a call outside an event loop at once, instead of returning an awaitable that never runs."""
    name = method.__name__

    @functools.wraps(method)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> T:
        if running_loop() is None:
            has_blocking_form = hasattr(getattr(args[0], "sync", None), name)
            raise HoldfastError(
                f"{name}() was called outside an event loop and would never run; await it in an async function"
                + (f", or use its blocking form: .sync.{name}(…)" if has_blocking_form else "")
            )
        return method(*args, **kwargs)

    return checked_call
