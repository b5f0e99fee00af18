"""When each key was last used: beside the file of keys, which the API itself never writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.core.clock import Clock

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
    """Add this to what is known. A folder that cannot be written to, as of a mounted secret, is no error."""
    known = read_usage(keys_file)
    merged = {key_id: max(at, known.get(key_id, at)) for key_id, at in used.items()}
    path = usage_path(keys_file)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.encode({**known, **merged}))
        fresh.replace(path)
