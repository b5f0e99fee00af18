"""Ids of jobs: UUIDv7, minted by the client, and their spelling as ULIDs."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
import uuid

from holdfast.core.errors import Invalid


class _IdMint:
    """UUIDv7 (RFC 9562, method 1): a millisecond, then a 12-bit counter that keeps one process's ids in order.

    The random bits come from a generator of its own: no ``random.seed`` in an application can make two processes mint
    the same ids, and a fork begins a new sequence.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0  # millisecond << 12 | counter
        self._millisecond, self._head = 0, ""  # of the last id, and its text up to the counter
        self._random = random.Random()
        os.register_at_fork(after_in_child=self._random.seed)

    def __call__(self) -> str:
        fresh = time.time_ns() // 1_000_000 << 12
        with self._lock:
            self._last = last = fresh if fresh > self._last else self._last + 1
            millisecond = last >> 12
            if millisecond != self._millisecond:
                self._millisecond, self._head = millisecond, f"{millisecond >> 16:08x}-{millisecond & 0xFFFF:04x}-7"
            head = self._head
        tail = self._random.getrandbits(62)
        numbers = last & 0xFFF, 0x8000 | tail >> 48, tail & 0xFFFFFFFFFFFF
        return head + "%03x-%04x-%012x" % numbers  # noqa: UP031 - half the time of an f-string


new_id = _IdMint()


def derive_id(job_id: str, name: str) -> str:
    """The id of what a job starts under this name: always the same, and sorted beside the job's own."""
    digest = hashlib.sha256(f"{job_id}\n{name}".encode("utf-8", "surrogatepass")).digest()
    return make_id(uuid.UUID(job_id).bytes[:6], digest)


def make_id(milliseconds: bytes, digest: bytes) -> str:
    """The id with these six bytes of time and, in place of a counter and random bits, the first bytes of a digest."""
    made = bytearray(milliseconds + digest[:10])
    made[6] = 0x70 | made[6] & 0x0F
    made[8] = 0x80 | made[8] & 0x3F
    return str(uuid.UUID(bytes=bytes(made)))


def parse_id(text: str) -> str | None:
    """The canonical form of a job id: a UUID in any spelling, or a ULID's 26 characters. None if it is neither."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return _from_ulid(text.upper())


_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def _from_ulid(text: str) -> str | None:
    if len(text) != 26 or text[0] > "7" or any(letter not in _CROCKFORD for letter in text):
        return None
    number = 0
    for letter in text:
        number = number << 5 | _CROCKFORD.index(letter)
    return str(uuid.UUID(int=number))


def as_ulid(job_id: str) -> str:
    """The 26-character form of a job id: sorts like the id and is shorter to type."""
    number = uuid.UUID(job_id).int
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))


def check_id(text: str) -> str:
    """Returns the canonical form of an id that a client gives to a new job. Raises Invalid."""
    canonical = parse_id(str(text))
    if canonical is None or not canonical.strip("0-") or not canonical.strip("f-"):  # those mark ends of ranges of ids
        remedy = "give a UUID other than all zeros or all ones (or leave it out, and use key=… for a name of your own)"
        raise Invalid("id", text, remedy)
    return canonical
