"""The keys in force: read again when their file changes, the last good ones while it is broken.

The times at which they were last used are in a file beside it, since the API never writes the file of keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.events import Events, KeysRead, KeysUnreadable
from holdfast.web.keys import Key, KeyCheck, check_token, valid_key_id
from holdfast.web.keys_file import Stamp, file_stamp, read_keys

_AGAIN = 1.0  # seconds after which a broken file is read again, though nothing seems to have changed


class Keyring:
    """Every key of a file. ConfigError where the file cannot be used at the start."""

    def __init__(self, path: Path, clock: Clock, events: Events) -> None:
        self._path = path
        self._clock = clock
        self._events = events
        self._stamp: Stamp = file_stamp(path)
        self._failed = 0.0
        self._keys: Mapping[str, Key] = read_keys(path)
        self._problem: str | None = None

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys in force, by id."""
        self._look()
        return self._keys

    @property
    def problem(self) -> str | None:
        """The problem of the file as it is now; the last good keys stay in force."""
        self._look()
        return self._problem

    def find(self, token: str) -> tuple[str, Key] | None:
        """The key that this token is, with its id."""
        keys = self.keys
        key_id = valid_key_id(keys, token, datetime.now(UTC))
        return None if key_id is None else (key_id, keys[key_id])

    def check_token(self, token: str) -> KeyCheck:
        """Returns the verdict on a token, for the log."""
        return check_token(self.keys, token, datetime.now(UTC))

    def _look(self) -> None:
        version = file_stamp(self._path)
        if version == self._stamp and (self._problem is None or self._clock.monotonic() - self._failed < _AGAIN):
            return
        self._stamp = version
        try:
            self._keys = read_keys(self._path)
        except HoldfastError as error:
            if str(error) != self._problem:
                self._events.emit(KeysUnreadable(problem=str(error), kept=len(self._keys)))
            self._problem, self._failed = str(error), self._clock.monotonic()
        else:
            self._problem = None
            self._events.emit(KeysRead(keys=len(self._keys)))


_EVERY = 60.0  # seconds between two writes
_SIZE_MOST = 4 * 1024 * 1024


def usage_path(keys_file: Path) -> Path:
    """Returns the path of the usage file."""
    return keys_file.with_name(keys_file.name + ".used")


def read_usage(keys_file: Path) -> dict[str, datetime]:
    """When each key was last used, by its id; nothing where that is not known."""
    try:
        content = usage_path(keys_file).read_bytes()[:_SIZE_MOST]
        return msgspec.json.decode(content, type=dict[str, datetime])
    except (OSError, msgspec.DecodeError):
        return {}


class KeyUsage:
    """Remembers which keys were used, and writes it down once a minute, as well as can be: it is no record."""

    def __init__(self, keys_file: Path, clock: Clock) -> None:
        self._keys_file = keys_file
        self._clock = clock
        self._used: dict[str, datetime] = {}
        self._written = float("-inf")
        self._writing: asyncio.Task[None] | None = None

    def record_use(self, key_id: str) -> None:
        """This key was used now."""
        self._used[key_id] = datetime.now(UTC)
        now = self._clock.monotonic()
        if now - self._written >= _EVERY and (self._writing is None or self._writing.done()):
            self._written = now
            used, self._used = self._used, {}
            self._writing = asyncio.create_task(asyncio.to_thread(write_usage, self._keys_file, used))


def write_usage(keys_file: Path, used: Mapping[str, datetime]) -> None:
    """Add this to the known uses. A folder that cannot be written to, as of a mounted secret, is no error."""
    known = read_usage(keys_file)
    merged = {key_id: max(at, known.get(key_id, at)) for key_id, at in used.items()}
    path = usage_path(keys_file)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.encode({**known, **merged}))
        fresh.replace(path)
