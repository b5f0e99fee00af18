"""The audit file: an append-only, hash-chained file of JSON lines that several processes write.

    {"hash": "…", "previous": "…", "entry": {…}}

``hash`` is the SHA-256 of ``previous`` and the entry's bytes. A changed, removed or inserted entry breaks the chain,
and ``verify`` reports its line. The last hash, stored elsewhere, also detects a truncated or replaced file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import queue
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable

MAX_ENTRY = 16 * 1024
"""Maximum size of an entry in bytes."""
_MAX_LINE = MAX_ENTRY + 1024
_MAX_PENDING = 1000
_MAX_BATCH = 200
_PAUSE = 0.005  # seconds between attempts to take the lock


class AuditLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file."""

    hash: str
    previous: str
    entry: msgspec.Raw


class TruncatedTail(msgspec.Struct, frozen=True, tag_field="operation", tag="audit.torn"):
    """Entry that records the removal of an incomplete last line, which a crash had left."""

    bytes: int


_decode = msgspec.json.Decoder(AuditLine).decode
_encode = msgspec.json.Encoder().encode


def chain_entry(previous: str, entry: bytes) -> tuple[str, bytes]:
    """Returns the hash of an entry that follows ``previous``, and its line."""
    digest = hashlib.sha256(previous.encode() + entry).hexdigest()
    return digest, b'{"hash":"%s","previous":"%s","entry":%s}\n' % (digest.encode(), previous.encode(), entry)


# ── verifying ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class AuditBroken(HoldfastError):
    """A file is damaged; the message names the line."""

    code = "audit_broken"


class Verified(NamedTuple):
    """Summary of a verified file."""

    entries: int
    last: str  # the hash of its last entry; "" where it has none
    found: bool  # True if the expected hash is in the file, or none was given


def verify(path: Path, wanted: str | None = None, after: str = "") -> Verified:
    """Verifies the chain from the first line to the last. AuditBroken names the line where it breaks.

    ``wanted``: a hash that must occur. ``after``: the last hash of the previous file, whose chain this one continues.
    """
    entries, last, found = 0, after, wanted is None or (after != "" and wanted == after)
    try:
        with path.open("rb") as file:
            for number, text in enumerate(_lines(file), 1):
                line = _checked(path, number, text)
                if line.previous != last:
                    raise _broken(path, number, _unfollowing(number, line.previous))
                entries, last = number, line.hash
                found = found or line.hash == wanted
    except OSError as error:
        raise ConfigError(f"audit_file: {path} cannot be read ({error.strerror})") from None
    if not entries:
        raise AuditBroken(f"{path} has no lines: nothing was recorded yet, or all of it was taken out")
    return Verified(entries, last, found)


def _unfollowing(number: int, previous: str) -> str:
    if number > 1:
        return "it does not follow the line before it"
    if not previous:
        return "it follows nothing: a chain begins with it"
    return f"it follows {previous[:64]}: say --after with that where a file before ends so, else lines are missing"


def _lines(file: Any) -> Iterator[bytes]:
    while text := file.readline(_MAX_LINE):
        yield text


def _checked(path: Path, number: int, text: bytes) -> AuditLine:
    if not text.endswith(b"\n"):
        raise _broken(path, number, "it is no whole line")
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _broken(path, number, "it is no line of an audit file") from None
    if chain_entry(line.previous, bytes(line.entry)) != (line.hash, text):
        raise _broken(path, number, "it was changed")
    return line


def _broken(path: Path, number: int, why: str) -> AuditBroken:
    return AuditBroken(f"{path}:{number}: {why}")


# ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class OpenAuditFile:
    """Keeps the last written file open: after a rotation other processes may still append to it."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def set_open_file(self, descriptor: int) -> None:
        """Remembers this file."""
        if self._descriptor is not None and os.path.sameopenfile(self._descriptor, descriptor):
            return
        former, self._descriptor = self._descriptor, os.dup(descriptor)
        if former is not None:
            os.close(former)

    def last_hash(self, path: Path, successor: int, until: float) -> str:
        """Returns its last hash, with which a new file begins; "" if there is no new file, or no hash."""
        if self._descriptor is None or os.path.sameopenfile(self._descriptor, successor):
            return ""
        _lock(path, self._descriptor, until)  # waits for the last writer
        try:
            return _end(path, self._descriptor)[1]
        except ConfigError:  # corrupt: the caller uses the last hash that it wrote
            return ""
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def add(path: Path, entries: Sequence[bytes], previous: str, timeout: float, kept: OpenAuditFile | None = None) -> str:
    """Appends entries, all or none, and syncs them; returns the last hash. OSError or ConfigError if that fails.

    ``previous``: the hash before a new file's first entry, unless ``kept`` has a newer one. ``timeout``: seconds to
    wait for the lock.
    """
    until = time.monotonic() + timeout
    with _locked(path, until) as descriptor:
        size, last, torn = _end(path, descriptor)
        if size == 0:
            last = (kept.last_hash(path, descriptor, until) if kept is not None else "") or previous
        lines: list[bytes] = []
        for entry in [*([_encode(TruncatedTail(torn))] if torn else []), *entries]:
            last, line = chain_entry(last, entry)
            lines.append(line)
        try:
            if torn:
                os.ftruncate(descriptor, size)
            _write(descriptor, b"".join(lines))
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
        if kept is not None:
            kept.set_open_file(descriptor)
        return last


def check_writable(path: Path) -> None:
    """Raises ConfigError if entries cannot be appended."""
    try:
        with _opened(path) as descriptor:
            _end(path, descriptor)
    except OSError as error:
        raise ConfigError(f"audit_file: {path} cannot be written ({error.strerror}); name another") from None


@contextlib.contextmanager
def _locked(path: Path, until: float) -> Iterator[int]:
    """Yields the open and locked file. If it was rotated before the lock was taken, opens the new one."""
    while True:
        with _opened(path) as descriptor:
            _lock(path, descriptor, until)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    try:
                        yield descriptor
                    finally:
                        fcntl.flock(descriptor, fcntl.LOCK_UN)  # its duplicate in ``kept`` must not hold the lock
                    return


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yields the open file, which is created if there is none."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"audit_file: {path} is no file; name another")
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int, until: float) -> None:
    while time.monotonic() <= until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return
    raise OSError(None, f"{path} is locked by another process")


def _end(path: Path, descriptor: int) -> tuple[int, str, int]:
    """Returns the end of the last whole line, its hash, and the number of bytes after it."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 2 * _MAX_LINE, max(0, size - 2 * _MAX_LINE))
    whole, newline, torn = tail.rpartition(b"\n")
    if not newline:
        if len(torn) < size:
            raise _no_audit_file(path)
        return 0, "", len(torn)
    text = whole.rpartition(b"\n")[2] + b"\n"
    try:
        return size - len(torn), _decode(text).hash, len(torn)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _no_audit_file(path) from None


def _no_audit_file(path: Path) -> ConfigError:
    return ConfigError(f"audit_file: {path}: its end is no line of an audit file; put it aside")


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


class _Pending(NamedTuple):
    entry: bytes
    until: float
    answer: asyncio.Future[None] | None


class AuditFile:
    """Appends entries from event loops, in a thread of its own. Pending entries share a write."""

    def __init__(self, path: Path, timeout: float = 1.5) -> None:
        self._path = path
        self._timeout = timeout
        self._pending: queue.Queue[_Pending] = queue.Queue(_MAX_PENDING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._last = ""
        self._kept = OpenAuditFile()

    async def add(self, entry: bytes) -> None:
        """Appends an entry and waits until it is synced; Unavailable on a timeout or an error."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.add_later(entry, answer):
            raise Unavailable(f"{self._path} takes no entries: {_MAX_PENDING:,} wait to be written")
        try:
            async with asyncio.timeout(self._timeout * 1.3):
                await answer
        except TimeoutError:
            raise Unavailable(f"{self._path} could not be written within {self._timeout:g} s") from None

    def add_later(self, entry: bytes, answer: asyncio.Future[None] | None = None) -> bool:
        """Queues an entry; returns False if the queue is full."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="holdfast-audit", daemon=True)
                self._thread.start()
        try:
            self._pending.put_nowait(_Pending(entry, time.monotonic() + self._timeout, answer))
        except queue.Full:
            return False
        return True

    def _work(self) -> None:
        while True:
            batch = [self._pending.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _MAX_BATCH:
                    batch.append(self._pending.get_nowait())
            now = time.monotonic()
            wanted = [each for each in batch if each.until > now and not (each.answer and each.answer.done())]
            if not wanted:
                continue
            error = self._add([each.entry for each in wanted])
            for each in wanted:
                if each.answer is not None:
                    _answer_caller(each.answer, error)

    def _add(self, entries: Sequence[bytes]) -> Exception | None:
        try:
            self._last = add(self._path, entries, self._last, self._timeout, self._kept)
        except OSError as error:
            return Unavailable(f"{self._path} cannot be written: {error.strerror or error}")
        except ConfigError as error:
            return Unavailable(str(error))
        return None


def _answer_caller(answer: asyncio.Future[None], error: Exception | None) -> None:
    def settle() -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    with contextlib.suppress(RuntimeError):  # its event loop is closed
        answer.get_loop().call_soon_threadsafe(settle)
