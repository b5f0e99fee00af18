"""The file of API keys: read whole or not at all, changed in one step.

TOML, a table for each key under its id. It holds no secret, but its writers may do anything over HTTP, so one
that other users may write to, or that is readable by all, is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.errors import ConfigError, Invalid
from holdfast.web.keys import Key, check_patterns

_MODE = 0o600
_TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO
_SIZE_MOST = 4 * 1024 * 1024
_HEAD = (
    "API keys of Holdfast: made, changed and listed by `holdfast keys`. Hashes only; the keys themselves are nowhere."
)

Stamp = tuple[int, ...] | None
"""What tells one version of the file from the next, its mode included; None: there is no file."""


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
            content = file.read(_SIZE_MOST + 1)
    except FileNotFoundError:
        raise ConfigError(f"keys_file: there is no {path}; `holdfast keys create` makes it") from None
    except OSError as error:
        raise ConfigError(f"keys_file: {path} cannot be read ({error.strerror}); correct its permissions") from None
    return _decoded(path, content)


def _check_status(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > _SIZE_MOST:
        raise ConfigError(f"keys_file: {path} is no file of keys; name another")
    if status.st_mode & _TOO_OPEN:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"keys_file: {path} has mode {mode:04o}, others may use it; chmod 600 it")


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
