"""Log lines that a handler stores with its job: ``context.log("fetched", rows=3)``.

A call never waits and never fails the handler: a value that cannot be stored as JSON is stored as its text. The number
of lines of an attempt is bounded; dropped lines are counted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

LEVELS = ("debug", "info", "warning", "error", "critical")


class LogLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of one attempt's log."""

    lines: int
    size: int  # maximum bytes of a line's text, and of its fields


NOTHING = LogLimits(0, 0)


class LogEntry(NamedTuple):
    """A log line that every store can represent."""

    level: str
    text: str
    fields: str | None  # JSON text of an object


Keep = Callable[[int, LogEntry], None]
"""Callback that receives a line and its number, in any thread. It must not wait."""


class JobLog:
    """The log of one attempt. Callable from any thread."""

    def __init__(self, limits: LogLimits, keep: Keep) -> None:
        self._limits = limits
        self._keep = keep
        self._lock = threading.Lock()
        self._kept = self._dropped = 0
        self._ended = False

    def __call__(self, text: object, /, **fields: object) -> None:
        """Stores a line of level ``info`` with the job. ``fields``: JSON values, as its details."""
        self.append_entry("info", text, fields)

    def debug(self, text: object, /, **fields: object) -> None:
        """Stores a line of level ``debug``."""
        self.append_entry("debug", text, fields)

    def info(self, text: object, /, **fields: object) -> None:
        """Stores a line of level ``info``."""
        self.append_entry("info", text, fields)

    def warning(self, text: object, /, **fields: object) -> None:
        """Stores a line of level ``warning``."""
        self.append_entry("warning", text, fields)

    def error(self, text: object, /, **fields: object) -> None:
        """Stores a line of level ``error``."""
        self.append_entry("error", text, fields)

    def critical(self, text: object, /, **fields: object) -> None:
        """Stores a line of level ``critical``."""
        self.append_entry("critical", text, fields)

    # ── for the runner ──────────────────────────────────────────────────────────────────────────────
    def append_entry(self, level: str, text: object, fields: Mapping[str, object]) -> None:
        """Stores a line unless the attempt has reached its limit."""
        if self._kept < self._limits.lines and not self._ended:
            self.take(make_entry(level, text, fields, self._limits.size))
        else:
            self.count_dropped(1)

    def take(self, line: LogEntry) -> None:
        """Stores a line that is already encoded."""
        with self._lock:
            if self._ended:
                return
            if self._kept >= self._limits.lines:
                self._dropped += 1
                return
            self._kept += 1
            self._keep(self._kept, line)

    def count_dropped(self, count: int) -> None:
        """Counts dropped lines."""
        with self._lock:
            if not self._ended:
                self._dropped += count

    def close_log(self) -> int:
        """Stops storing lines; returns the number of dropped ones."""
        with self._lock:
            self._ended = True
            return self._dropped

    def finish_log(self) -> None:
        """Stops storing lines. A last line reports the number of dropped ones, if any."""
        if dropped := self.close_log():
            lines = self._limits.lines
            text = f"{dropped} more lines were dropped: an attempt may keep {lines} (job_lines)"
            self._keep(lines + 1, LogEntry("warning", text, None))


def make_entry(level: str, text: object, fields: Mapping[str, object], size: int) -> LogEntry:
    """Encodes a handler's values as a line: no NUL, no lone surrogate, at most ``size`` bytes."""
    line = _cut(_text(text), size)
    encoded = _encoded(fields) if fields else None
    if encoded is not None and len(encoded.encode()) > size:
        left_out = f"fields of {len(encoded.encode())} bytes were left out"
        line, encoded = f"{line} ({left_out})", None
    return LogEntry(level if level in LEVELS else "info", line, encoded)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # the application's __str__
        return f"({type(value).__name__}: it cannot be shown: {type(error).__name__})"


def _storable(text: str) -> str:
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _cut(text: str, size: int) -> str:
    """Cuts a text to ``size`` bytes, in a form that every store can represent; the cut is marked."""
    data = _storable(text[:size]).encode()
    if len(data) <= size and len(text) <= size:
        return data.decode()
    return f"{data[:size].decode('utf-8', 'ignore')}… ({len(text)} characters)"


def _encoded(fields: Mapping[str, object]) -> str:
    try:
        return msgspec.json.encode(fields, enc_hook=_shown).decode()
    except Exception:  # not JSON: a key of another type, a lone surrogate, a cycle
        return json.dumps({_storable(name): _storable(_shown(value)) for name, value in fields.items()})


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # the application's __repr__
        return f"({type(value).__name__}: it cannot be shown: {type(error).__name__})"
