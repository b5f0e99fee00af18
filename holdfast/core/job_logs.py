"""Log lines of handlers, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from holdfast.core.models import Lease


class NewLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A log line of a running job's handler, to be stored."""

    number: int  # among the lines of its attempt, from 1
    ago: timedelta  # time between the log call and the store call
    level: str
    text: str
    fields: str | None = None  # JSON text of an object


class LogBatch(msgspec.Struct, frozen=True, gc=False):
    """Log lines of one attempt, in the order of their numbers."""

    lease: Lease
    lines: Sequence[NewLine]


class LogLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stored log line."""

    claims: int  # of the lease that was held
    number: int
    attempt: int
    at_us: int
    level: str
    text: str
    fields: str | None = None


class LogPage(msgspec.Struct, frozen=True):
    """A page of log lines, oldest first. ``cursor``: of the next page; None: this is the last."""

    lines: list[LogLine]
    cursor: str | None
