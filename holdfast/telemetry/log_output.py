"""Output of log lines; a slow reader of the log never blocks work.

``write`` puts a line into a bounded buffer and returns; one thread writes the buffer out after 10 ms, at 64 KiB, or at
once after an urgent line. While the sink is blocked or full the buffer fills; then lines are dropped and counted, and
one line says how many as soon as lines pass again. A sink that is gone for good takes everything silently.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

FLUSH_SECONDS = 0.010
FLUSH_BYTES = 64 * 1024
FILE_BYTES = 256 * 1024
"""What a file is given in one piece: each piece has this thread and those at work change places."""
BUFFER_BYTES = 4 * 1024 * 1024
CLOSE_SECONDS = 1.0
"""How long ``close`` waits for a sink that does not take the last lines."""


class LineWriter:
    """Writes lines to ``stream`` in a thread of its own. ``write`` may be called from any thread."""

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], bytes], *, buffer: int = BUFFER_BYTES) -> None:
        self._sink = _sink(stream)
        self._most = _most(stream)
        self._dropped_line = dropped_line
        self._room = buffer
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
        """Take one line, its end included. Never waits for the sink, but in a fork of the process that made this."""
        if os.getpid() != self._process:
            # The thread did not come along, and the lock may have been held by one that did not either.
            self._send([line])
            return
        with self._lock:
            if self._gone or self._closed or self._size + len(line) > self._room:
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
        """Write out all lines; a sink that takes nothing is left after a second. Idempotent."""
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
        """Write the lines out; returns how many were not written, because the sink is full or gone."""
        written = 0
        try:
            for chunk, count in _chunks(lines, self._most):
                self._sink(chunk)
                written += count
        except (OSError, ValueError) as error:
            # A closed stream is a ValueError. A full disk may have room again: its lines are lost, not the later ones.
            self._gone = not isinstance(error, OSError) or error.errno in (errno.EPIPE, errno.EBADF, errno.ECONNRESET)
        return len(lines) - written


def _chunks(lines: list[bytes], most: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines, as many as go in one piece."""
    start = size = 0
    for index, line in enumerate(lines):
        if size and size + len(line) > most:
            yield b"".join(lines[start:index]), index - start
            start, size = index, 0
        size += len(line)
    if size:
        yield b"".join(lines[start:]), len(lines) - start


def _sink(stream: TextIO) -> Callable[[bytes], None]:
    """Past the stream's own buffer where it has a descriptor: a ``print`` elsewhere does not wait with us then."""
    try:
        descriptor = stream.fileno()
    except (OSError, io.UnsupportedOperation):
        return lambda chunk: _write_text(stream, chunk)
    stream.flush()
    return _Descriptor(descriptor).write


def _most(stream: TextIO) -> int:
    """Bytes that reach the sink in one piece: processes that share it do not cut each other's lines. A pipe takes few,
    a file takes what it is given."""
    try:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, io.UnsupportedOperation):
        return select.PIPE_BUF
    return FILE_BYTES if regular else select.PIPE_BUF


def _write_text(stream: TextIO, chunk: bytes) -> None:
    stream.write(chunk.decode())
    stream.flush()


class _Descriptor:
    """A file, pipe, socket or terminal that is written to in whole lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._torn = False

    def write(self, chunk: bytes) -> None:
        """All of it, however long the other end takes; after a failure halfway the next line starts a new one."""
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
        except BlockingIOError:  # Another process that shares the terminal or pipe has made it non-blocking.
            select.select([], [self._descriptor], [])
            return 0
