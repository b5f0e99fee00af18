"""Stop signals: SIGTERM and SIGINT, of which a burst counts as one.

``timeout``, ``tini -g``, service managers and package runners signal a program and its process group at nearly the same
time. If the second of these signals meant "at once", the first one's grace would be lost.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

BURST_SECONDS = 1.0
"""Requests to stop that come this soon after the first one belong to it."""


class StopRequest(Enum):
    """What a request to stop means beside the earlier ones."""

    FIRST = "first"
    DUPLICATE = "duplicate"
    REPEATED = "repeated"


class StopRequests:
    """Tells a repeated request to stop from the rest of the first one's burst."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._first_at: float | None = None

    def record(self) -> StopRequest:
        """Records a request and returns its meaning."""
        now = self._monotonic()
        if self._first_at is None:
            self._first_at = now
            return StopRequest.FIRST
        return StopRequest.REPEATED if now - self._first_at > BURST_SECONDS else StopRequest.DUPLICATE


def ignore_rest_of_burst() -> None:
    """Ignores stop signals for a second: the process has stopped already, and only its exit code is left to give.

    Call it from the main thread, after the event loop with its own signal handlers is closed.
    """
    until = time.monotonic() + BURST_SECONDS

    def ignore(number: int, _: FrameType | None) -> None:
        if time.monotonic() > until:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
            signal.raise_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, ignore)
