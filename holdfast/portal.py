"""Blocking callers: one way in, and no second copy of anything.

Everything in Holdfast is written once, as coroutines. A caller without an event loop has them run the way its store
says (``Store.blocking``): ``drive`` runs a coroutine that never waits for a loop to its end in the calling thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast.errors import HoldfastError

T = TypeVar("T")


def drive(call: Coroutine[Any, Any, T]) -> T:
    """Run ``call`` to its end in this thread. It must not wait for an event loop."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    call.close()
    raise HoldfastError("this call waits for an event loop and cannot be driven in the calling thread")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def forbid_running_loop(advice: str) -> None:
    """Raise, with ``advice``, when called from inside an event loop: blocking there would stop it."""
    if running_loop() is None:
        return
    raise HoldfastError(f"this blocks, and an event loop runs in this thread; {advice}")
