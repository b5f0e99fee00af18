"""Stop signals: SIGTERM and SIGINT, of which a burst counts as one.

``timeout``, ``tini -g``, service managers and package runners signal a program and its process group at nearly the same
time. If the second of these signals meant "at once", the first one's grace would be lost.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

BURST_SECONDS = 1.0
"""Requests to stop that come this soon after the first one belong to it."""


class StopRequest(Enum):
    """Meaning of a request to stop, given the earlier ones."""

    FIRST = "first"
    DUPLICATE = "duplicate"
    REPEATED = "repeated"


class StopRequests:
    """Tells a repeated request to stop from the rest of the first one's burst."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._first_at: float | None = None

    def record_signal(self) -> StopRequest:
        """Records a request and returns its meaning."""
        now = self._monotonic()
        if self._first_at is None:
            self._first_at = now
            return StopRequest.FIRST
        return StopRequest.REPEATED if now - self._first_at > BURST_SECONDS else StopRequest.DUPLICATE


def handle_stop_signals(stop: Callable[[str], object]) -> None:
    """Calls ``stop`` with the name of each stop signal, in the running event loop.

    The loop must be uvloop's: it wakes up for every signal. Closing a loop restores the default action for handlers
    of its own; these handlers stay until ``ignore_rest_of_burst`` replaces them.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int, _: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop, signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, handle)


class _BurstFilter:
    """Signal handler that ignores the rest of a burst; a later signal has its default action."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + BURST_SECONDS

    def __call__(self, number: int, _: FrameType | None) -> None:
        if not self.is_burst():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)

    def is_burst(self) -> bool:
        return time.monotonic() <= self._ends_at


def ignore_rest_of_burst() -> None:
    """Ignores stop signals for a second: the process has stopped already, and only its exit code is left to give.

    Call it from the main thread, before the event loop is closed.
    """
    handler = _BurstFilter()
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


@atexit.register  # on import: exit callbacks of the application are registered later and run earlier
def _ignore_while_finalizing() -> None:
    """Finalization restores the default action for a Python handler, but leaves SIG_IGN in place."""
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _BurstFilter) and handler.is_burst():
            signal.signal(number, signal.SIG_IGN)
