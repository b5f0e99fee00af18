"""Output of log lines: rendering, and a writer that a slow reader of the log cannot block.

``write`` adds a line to a bounded buffer and returns; a thread writes the buffer after 10 ms, at 64 KiB, or at once
after an urgent line. While the sink is blocked or full, lines beyond the buffer are dropped and counted, and one line
reports their number later. After a sink is closed, lines are discarded silently.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Protocol, TextIO

import msgspec

from holdfast.core.events import Event, JobDead
from holdfast.core.validation import MASKED, mask_url

FLUSH_SECONDS = 0.010
FLUSH_BYTES = 64 * 1024
FILE_BYTES = 256 * 1024
"""Bytes written to a file at once: each write releases the interpreter lock to the threads that run handlers."""
BUFFER_BYTES = 4 * 1024 * 1024
CLOSE_SECONDS = 1.0
"""Seconds for which ``close`` waits for a blocked sink."""


class LineWriter:
    """Writes lines to ``stream`` in a thread of its own. ``write`` may be called from any thread."""

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], bytes], *, buffer: int = BUFFER_BYTES) -> None:
        self._sink = _sink(stream)
        self._max_chunk = _chunk_limit(stream)
        self._dropped_line = dropped_line
        self._max_buffer = buffer
        self._lines: list[bytes] = []
        self._size = self._dropped = 0
        self._closed = self._gone = False
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._due = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="holdfast-log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes, *, urgent: bool = False) -> None:
        """Buffers one line, its end included. Waits for the sink only in a forked child."""
        if os.getpid() != self._process:
            # A fork has no copy of the thread, and another missing thread may have held the lock.
            self._send([line])
            return
        with self._lock:
            if self._gone or self._closed or self._size + len(line) > self._max_buffer:
                self._dropped += 1
                return
            first = not self._lines
            self._lines.append(line)
            self._size += len(line)
            if urgent or self._size >= FLUSH_BYTES:
                self._due.set()
            if first:
                self._filled.set()

    def close(self) -> None:
        """Writes all lines; gives up on a blocked sink after a second. Idempotent."""
        with self._lock:
            self._closed = True
            self._due.set()
            self._filled.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        closed = False
        while not closed:
            self._filled.wait()
            self._due.wait(FLUSH_SECONDS)
            with self._lock:
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
                self._size, closed = 0, self._closed
                self._filled.clear()
                self._due.clear()
            lost = self._send(lines)
            if dropped and (lost or self._send([self._dropped_line(dropped)])):
                lost += dropped
            with self._lock:
                self._dropped += lost

    def _send(self, lines: list[bytes]) -> int:
        """Writes lines; returns the number that failed, because the sink is full or closed."""
        written = 0
        try:
            for chunk, count in _chunks(lines, self._max_chunk):
                self._sink(chunk)
                written += count
        except (OSError, ValueError) as error:
            # A closed stream raises ValueError. A full disk may have room again later.
            self._gone = not isinstance(error, OSError) or error.errno in (errno.EPIPE, errno.EBADF, errno.ECONNRESET)
        return len(lines) - written


def _chunks(lines: list[bytes], max_size: int) -> Iterator[tuple[bytes, int]]:
    """Yields chunks of whole lines with their numbers."""
    start = size = 0
    for index, line in enumerate(lines):
        if size and size + len(line) > max_size:
            yield b"".join(lines[start:index]), index - start
            start, size = index, 0
        size += len(line)
    if size:
        yield b"".join(lines[start:]), len(lines) - start


def _sink(stream: TextIO) -> Callable[[bytes], None]:
    """Returns a writer to the stream's descriptor, if any: bypassing its buffer keeps ``print`` calls from waiting."""
    try:
        descriptor = stream.fileno()
    except (OSError, io.UnsupportedOperation):
        return lambda chunk: _write_text(stream, chunk)
    stream.flush()
    return _Descriptor(descriptor).write


def _chunk_limit(stream: TextIO) -> int:
    """Returns how many bytes reach the sink atomically, so that processes can share it: few for a pipe."""
    try:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, io.UnsupportedOperation):
        return select.PIPE_BUF
    return FILE_BYTES if regular else select.PIPE_BUF


def _write_text(stream: TextIO, chunk: bytes) -> None:
    stream.write(chunk.decode())
    stream.flush()


class _Descriptor:
    """Writer of whole lines to a file, pipe, socket or terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._torn = False

    def write(self, chunk: bytes) -> None:
        """Writes all of it, however long that takes. After a partial failure the next write begins with a line end."""
        rest = memoryview(b"\n" + chunk if self._torn else chunk)
        whole = len(rest)
        try:
            while rest:
                rest = rest[self._write_some(rest) :]
        finally:
            self._torn = 0 < len(rest) < whole or (self._torn and len(rest) == whole)

    def _write_some(self, rest: memoryview) -> int:
        try:
            return os.write(self._descriptor, rest)
        except BlockingIOError:  # Another process has made the shared terminal or pipe non-blocking.
            select.select([], [self._descriptor], [])
            return 0


_EQUALS, _DELETE = b"=\x7f"  # bytes for a search; one byte is found ten times as fast as a string
_DEPTH = 8
"""Maximum nesting of logged values; deeper ones are shown as text."""

_SECRET_NAME = re.compile(rf"{MASKED}$", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    rf"[a-z0-9+.-]{{1,32}}://\S+|{MASKED}\s{{0,9}}=\s{{0,9}}(?:'[^']*'|\"[^\"]*\"|\S+)", re.IGNORECASE
)
# Delete, the C1 controls, line separators, and characters that change the direction of text.
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_UNSEEN_OR_CONTROL = re.compile("[\x00-\x1f]|" + _UNSEEN.pattern)
_BLOCKS = ("stack", "exception")


class Renderer(Protocol):
    """Protocol of a renderer of log lines."""

    def renderer_for(self, kind: type[Event], level: str) -> Callable[[Event], bytes]:
        """Returns the function that renders an event of this kind, its line end included."""
        ...

    def render_line(self, moment: float, level: str, name: str, fields: Mapping[str, Any]) -> bytes:
        """Renders any other line. ``moment``: seconds since 1970; ``name``: of the event."""
        ...


class JsonRenderer:
    """Renders JSON lines: ``{"timestamp": …, "level": …, "event": …, …}`` in UTF-8."""

    def __init__(self, task_field: str = "task") -> None:
        self._encode = msgspec.json.Encoder().encode
        self._stamp = Stamp()
        self._task_field = task_field

    def renderer_for(self, kind: type[Event], level: str) -> Callable[[Event], bytes]:
        encode, stamp, task_field = self._encode, self._stamp, self._task_field
        # Quotation marks inside texts are escaped, so the first match is the event's field.
        renamed = None if task_field == "task" else f'"{task_field}":'.encode()
        middle = f'","level":"{level}","event":"{kind.name}",'.encode()

        def render_line(event: Event) -> bytes:
            moment = time.time()
            try:
                fields = encode(event)
            except UnicodeEncodeError:
                return self.render_line(moment, level, kind.name, event_fields(event, task_field))
            if not fields.isascii() or _EQUALS in fields or _DELETE in fields or fields.find(b"://") >= 0:
                return self.render_line(moment, level, kind.name, event_fields(event, task_field))
            if renamed is not None:
                fields = fields.replace(b'"task":', renamed, 1)
            return b"".join((b'{"timestamp":"', stamp(moment).encode(), middle, fields[1:], b"\n"))

        return render_line

    def render_line(self, moment: float, level: str, name: str, fields: Mapping[str, Any]) -> bytes:
        line = {"timestamp": self._stamp(moment), "level": level, "event": name}
        encoded = self._encode(safe_fields({**line, **fields, **line}))
        if b"\x7f" in encoded or not encoded.isascii():
            encoded = _UNSEEN.sub(_escape, encoded.decode()).encode()
        return encoded + b"\n"


class PrettyRenderer:
    """Renders lines for people with structlog, optionally in colours."""

    def __init__(self, task_field: str = "task", *, program: str, colors: bool) -> None:
        import structlog  # and rich with it: a third of a worker's start

        self._stamp = Stamp()
        self._task_field = task_field
        self._program = program
        self._render = structlog.dev.ConsoleRenderer(
            colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )

    def renderer_for(self, kind: type[Event], level: str) -> Callable[[Event], bytes]:
        task_field, program = self._task_field, self._program
        return lambda event: self.render_line(
            time.time(), level, kind.name, event_fields(event, task_field) | traceback_pointer(event, program)
        )

    def render_line(self, moment: float, level: str, name: str, fields: Mapping[str, Any]) -> bytes:
        line = {"timestamp": self._stamp(moment), "level": level, "event": name}
        plain = safe_fields({**line, **fields, **line})
        shown = {_escaped(key): _visible(key, value) for key, value in plain.items()}
        rendered = self._render(None, "", shown)
        return str(rendered).encode() + b"\n"


class Stamp:
    """Formats seconds since 1970 as ``2031-01-01T00:00:00.000Z``. Callable from any thread."""

    def __init__(self) -> None:
        self._last = (-1, "")

    def __call__(self, moment: float) -> str:
        last, text = self._last
        if (millisecond := int(moment * 1000)) != last:
            second, rest = divmod(millisecond, 1000)
            text = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))}.{rest:03d}Z"
            self._last = (millisecond, text)
        return text


def event_fields(event: Event, task_field: str) -> dict[str, Any]:
    """Returns the fields of an event, with the task's name under ``task_field``."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    if task_field == "task":
        return fields
    return {task_field if name == "task" else name: value for name, value in fields.items()}


def traceback_pointer(event: Event, program: str) -> dict[str, str]:
    """Returns a pointer to more information: the command that shows a dead job's traceback."""
    return {"see": f"{program} show {event.job_id}"} if isinstance(event, JobDead) else {}


def safe_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converts fields to plain JSON values and hides secrets; other values become text."""
    return {mask_secrets(str(key)): _harmless(str(key), value, _DEPTH) for key, value in fields.items()}


def exception_text(exception: Any) -> str:
    """Formats the traceback of an ``exc_info``."""
    return logging.Formatter().formatException(exception)


def _harmless(key: str, value: Any, depth: int) -> Any:
    if _SECRET_NAME.search(key) and value is not None:
        return "***"
    if isinstance(value, str):
        return mask_secrets(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, Mapping) and depth:
        return {mask_secrets(str(name)): _harmless(str(name), each, depth - 1) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [_harmless("", each, depth - 1) for each in value]
    return mask_secrets(str(value))


def mask_secrets(text: str) -> str:
    """Masks passwords, and escapes lone surrogates, which UTF-8 cannot represent."""
    if "://" in text or "=" in text:
        text = _SECRET_TEXT.sub(lambda found: mask_url(found.group()), text)
    return text.encode("utf-8", "backslashreplace").decode()


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"


def _escaped(text: str) -> str:
    return _UNSEEN_OR_CONTROL.sub(_escape, text)


def _visible(key: str, value: Any) -> Any:
    """Escapes a value for a terminal: on one line; a traceback indented, so no line of it looks like a log line."""
    if key in _BLOCKS:
        return "\n".join(f"    {_escaped(line)}" for line in str(value).splitlines())
    return _escaped(str(value)) if isinstance(value, str | dict | list) else value
