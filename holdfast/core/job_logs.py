"""Log lines of handlers, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from holdfast.core.models import Lease


class NewLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A log line on its way into the store: of a running job's handler."""

    number: int  # among the lines of its attempt, from 1
    ago: timedelta  # how long before the call it was said
    level: str
    text: str
    fields: str | None = None  # JSON text of an object


class Record(msgspec.Struct, frozen=True, gc=False):
    """Log lines of one attempt, in the order of their numbers."""

    lease: Lease
    lines: Sequence[NewLine]


class LogLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A log line as its store keeps it."""

    claims: int  # of the lease under which it was said
    number: int
    attempt: int
    at_us: int
    level: str
    text: str
    fields: str | None = None


class LogPage(msgspec.Struct, frozen=True):
    """Oldest first. ``cursor`` continues the listing; None: that was all."""

    lines: list[LogLine]
    cursor: str | None
