"""Exceptions by which a handler says how its attempt ends.

HandlerSignal
├── RetryAfter(delay)      failed; retry after exactly this delay
├── Snooze(delay)          not a failure: run again later, the attempt is given back
└── Dead(reason)           failed for good: no further attempt
"""

from __future__ import annotations

from datetime import timedelta

from holdfast.core.validation import check_span


class HandlerSignal(Exception):
    """Base of the exceptions by which a handler says how its attempt ends."""


class RetryAfter(HandlerSignal):
    """The attempt failed; try again after ``delay``: seconds, a timedelta or text such as ``5m``.

    The policy is not asked. The budget still counts: on the last attempt the job is dead.
    """

    def __init__(self, delay: float | timedelta | str, message: str = "") -> None:
        self.delay = check_span(delay, "delay")
        super().__init__(message or f"retry after {self.delay}")


class Snooze(HandlerSignal):
    """Not a failure: run the job again after ``delay``: seconds, a timedelta or text like ``5m``. The attempt is given
    back."""

    def __init__(self, delay: float | timedelta | str) -> None:
        self.delay = check_span(delay, "delay")
        super().__init__(f"snoozed for {self.delay}")


class Dead(HandlerSignal):
    """The job cannot succeed: it is dead at once, with this message, however many attempts are left."""
