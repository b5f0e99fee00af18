"""The file of API keys: read whole or not at all, changed in one step.

TOML, a table for each key under its id. It holds no secret, but its writers may do anything over HTTP, so one
that other users may write to, or that is readable by all, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextvars import Context
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.clock import Clock
from holdfast.core.errors import ConfigError, HoldfastError, Invalid
from holdfast.core.events import Events, KeysRead, KeysUnreadable
from holdfast.web.keys import Key, KeyCheck, check_patterns, check_token, valid_key_id

_TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO
_MAX_SIZE = 4 * 1024 * 1024
_HEAD = (
    "API keys of Holdfast: made, changed and listed by `holdfast keys`. Hashes only; the keys themselves are nowhere."
)

Stamp = tuple[int, ...] | None
"""Identity of a version of the file, including its mode; None: the file does not exist."""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, Key] = {}


def file_stamp(path: Path) -> Stamp:
    """The version that stands there now."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode


def read_keys(path: Path) -> dict[str, Key]:
    """Every key by its id. ConfigError names the problem of the file."""
    try:
        with path.open("rb") as file:
            _check_status(path, os.fstat(file.fileno()))
            content = file.read(_MAX_SIZE + 1)
    except FileNotFoundError:
        raise ConfigError(f"keys_file: there is no {path}; `holdfast keys create` makes it") from None
    except OSError as error:
        raise ConfigError(f"keys_file: {path} cannot be read ({error.strerror}); correct its permissions") from None
    return _decoded(path, content)


def _check_status(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_SIZE:
        raise ConfigError(f"keys_file: {path} is no file of keys; name another")
    if status.st_mode & _TOO_OPEN:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"keys_file: {path} has mode {mode:04o}, others may use it; chmod 600 it, or mount it 0440")


def _decoded(path: Path, content: bytes) -> dict[str, Key]:
    try:
        keys = msgspec.convert(tomllib.loads(content.decode()), _Document).keys
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"keys_file: {path} is no file of keys: {error}; correct it") from None
    for key_id, key in keys.items():
        if not re.fullmatch("[a-z2-7]{8}", key_id):
            raise ConfigError(
                f"keys_file: {path}: {key_id[:20]!r} is no id of a key; `holdfast keys create` makes them"
            )
        try:
            check_patterns(key.queues)
        except Invalid as error:
            raise ConfigError(f"keys_file: {path}: key {key_id}: {error}") from None
    return keys


def change_keys(path: Path, decide: Callable[[dict[str, Key]], Mapping[str, Key]]) -> None:
    """Write the keys as ``decide`` changes them, everything else as it is; nothing if it raises.

    Two at once wait for each other. The file is made where there is none.
    """
    import tomlkit

    path = path.resolve()  # a symbolic link keeps being one
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"keys_file: {path.parent}: {error.strerror}; make the directory first") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = read_keys(path) if path.exists() else {}
        document: Any = tomlkit.parse(path.read_text("utf-8")) if keys else _empty()
        for key_id, key in decide(dict(keys)).items():
            if keys.get(key_id) != key:
                document["keys"][key_id] = _table(key)
        _replace(path, tomlkit.dumps(document))
        with contextlib.suppress(OSError):  # the new keys are in force, whether they outlive a power cut or not
            os.fsync(folder)
    except OSError as error:
        raise ConfigError(f"keys_file: {path} cannot be written ({error.strerror}); nothing was changed") from None
    finally:
        os.close(folder)


def _empty() -> Any:
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment(_HEAD))
    document.add("keys", tomlkit.table(is_super_table=True))
    return document


def _table(key: Key) -> Any:
    import tomlkit

    made = tomlkit.table()
    for name, value in msgspec.structs.asdict(key).items():
        if value is not None:
            made.add(name, list(value) if isinstance(value, tuple) else value)
    return made


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                status = path.stat()
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
                if os.geteuid() == 0:  # or the service that owns the file could no longer read it
                    os.fchown(descriptor, status.st_uid, status.st_gid)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


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


def usage_path(keys_file: Path) -> Path:
    """Returns the path of the usage file."""
    return keys_file.with_name(keys_file.name + ".used")


def read_usage(keys_file: Path) -> dict[str, datetime]:
    """When each key was last used, by its id; nothing where that is not known."""
    try:
        content = usage_path(keys_file).read_bytes()[:_MAX_SIZE]
        return msgspec.json.decode(content, type=dict[str, datetime])
    except (OSError, msgspec.DecodeError):
        return {}


class KeyUsage:
    """Remembers when keys were used, and writes that down once a minute and at the end, if it can."""

    def __init__(self, keys_file: Path, clock: Clock) -> None:
        self._keys_file = keys_file
        self._clock = clock
        self._used: dict[str, datetime] = {}
        self._due_at = float("-inf")  # reading of the clock
        self._writing: asyncio.Task[None] | None = None

    def record_use(self, key_id: str) -> None:
        """This key was used now."""
        self._used[key_id] = datetime.now(UTC)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_when_due(), context=Context())

    async def _write_when_due(self) -> None:
        while self._used:
            pause = self._due_at - self._clock.monotonic()
            try:
                if pause > 0:
                    await self._clock.sleep(pause)
            except asyncio.CancelledError:  # the server stops
                write_usage(self._keys_file, self._used)
                raise
            self._due_at = self._clock.monotonic() + _EVERY
            used, self._used = self._used, {}
            await asyncio.to_thread(write_usage, self._keys_file, used)


def write_usage(keys_file: Path, used: Mapping[str, datetime]) -> None:
    """Add this to the known uses. A folder that cannot be written to, as of a mounted secret, is no error."""
    known = read_usage(keys_file)
    merged = {key_id: max(at, known.get(key_id, at)) for key_id, at in used.items()}
    path = usage_path(keys_file)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.encode({**known, **merged}))
        fresh.replace(path)
