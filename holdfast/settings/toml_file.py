"""TOML files for settings: search, reading with the line of each key, editing in place.

Reading uses the standard parser. Writing uses tomlkit, which keeps comments and layout; it is imported only there,
because workers and short commands never write.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.errors import ConfigError

FILE_NAME = "holdfast.toml"
PROJECT_NAME = "pyproject.toml"
MAX_FILE_BYTES = 1024 * 1024

Stamp = tuple[int, int, int] | None
"""Version of a file: modification time, size and inode; None: there is no file."""


class Document(msgspec.Struct, frozen=True):
    """The settings of one file."""

    values: dict[str, Any]
    lines: dict[str, int]  # line of each value, from 1, and of each part of one, such as limits.mail.rate
    stamp: Stamp


def settings_section(path: Path) -> tuple[str, ...]:
    """Returns the path of the table with the settings; () for the top level."""
    return ("tool", "holdfast") if path.name == PROJECT_NAME else ()


def find_file(directory: Path) -> Path | None:
    """Returns the settings file of the directory, or the nearest one above it; None if there is none.

    The search ends at the root of a repository, and below a directory that is writable for every user.
    """
    for folder in (directory, *directory.parents):
        if folder != directory and folder.stat().st_mode & stat.S_IWOTH:
            return None
        if (folder / FILE_NAME).exists():
            return folder / FILE_NAME
        if _mentions_us(folder / PROJECT_NAME):
            return folder / PROJECT_NAME
        if (folder / ".git").exists():
            return None
    return None


def _mentions_us(path: Path) -> bool:
    """Returns True if a project file has our table. An invalid file that seems to have it counts, to be reported."""
    try:
        return path.is_file() and _has_our_table(path.read_bytes())
    except OSError:
        return False


@lru_cache(maxsize=1)
def _has_our_table(content: bytes) -> bool:
    try:
        return b"holdfast" in content and "holdfast" in tomllib.loads(content.decode()).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return b"tool.holdfast" in content


def file_stamp(path: Path) -> Stamp:
    """Returns the current version of the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read(path: Path, label: str) -> Document:
    """Reads the settings of a file. ``label``: its name in messages. ConfigError names file, line and remedy."""
    version = file_stamp(path)  # before the content: a change in between is detected later
    text = _read_text(path, label)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_problem(label, text, str(error))) from None
    keys = settings_section(path)
    for key in keys:
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{label}: {'.'.join(keys)} is not a table; write [{'.'.join(keys)}]")
    lines: dict[str, int] = {}
    for found, line in _lines(text):
        if found[: len(keys)] == keys:
            lines.setdefault(".".join(found[len(keys) :]), line)
    return Document(table, lines, version)


def _read_text(path: Path, label: str) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ConfigError(f"{label}: this is {kind}; name a TOML file")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{label}: {status.st_size} bytes are no settings file; name a TOML file under 1 MiB")
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{label}: no such file; create it, or name another") from None
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror}); correct its owner or permissions") from None
    if content.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{label}:1: begins with a byte order mark; save it as UTF-8 without one")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{label}:{line}: not UTF-8; save it as UTF-8") from None


def _syntax_problem(label: str, text: str, message: str) -> str:
    found = re.search(r" \(at line (\d+), column \d+\)| \(at end of document\)", message)
    line = found[1] if found and found[1] else str(text.count("\n") + 1)
    what = message[: found.start()] if found else message
    remedy = "it stands twice: keep one" if "overwrite" in what or "twice" in what else "correct it"
    return f"{label}:{line}: not valid TOML: {what}; {remedy}"


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields each key path of a valid document with the first line of its statement.

    A statement is the shortest run of lines that is valid TOML by itself: a header, a pair or a comment.
    """
    table: tuple[str, ...] = ()
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        begins = not statement
        statement += line + "\n"
        # Only these end a value of several lines. Otherwise a long array would be parsed once per line.
        if not begins and not any(end in line for end in ("]", '"""', "'''")):
            continue
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        header = statement.lstrip().startswith("[")
        path = tuple(_descend(parsed))
        for length in range(1, len(path) + 1):
            yield (*(() if header else table), *path[:length]), start
        table = path if header else table
        statement, start = "", number + 1


def _descend(parsed: dict[str, Any]) -> Iterator[str]:
    """Yields the key at each level of a parsed statement."""
    level: object = parsed
    while isinstance(level, dict) and level:
        key, level = next(iter(level.items()))
        yield key
        if isinstance(level, list) and level:
            level = level[0]


def write(path: Path, name: str, value: object, check: Callable[[Path], None]) -> None:
    """Sets one value in the file and keeps the rest, comments included; creates the file if there is none.

    The new file is written beside the old one, validated by ``check``, and renamed over it. A lock serializes writers.
    """
    import tomlkit

    path = path.resolve()  # a symbolic link stays one
    with _locked(path.parent):
        text = _read_text(path, path.name) if path.exists() else ""
        try:
            document = tomlkit.parse(text)
        except tomlkit.exceptions.ParseError as error:
            raise ConfigError(f"{path.name}: not valid TOML: {error}; correct it by hand first") from None
        table: Any = document
        for depth, key in enumerate(settings_section(path)):
            if key not in table:
                table[key] = tomlkit.table(is_super_table=depth + 1 < len(settings_section(path)))
            table = table[key]
        table[name] = value
        _replace(path, tomlkit.dumps(document), check)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; make the directory first") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str, check: Callable[[Path], None]) -> None:
    # In a directory of its own: the name of the checked file determines which table is read.
    try:
        fresh_folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        fresh = fresh_folder / path.name
        try:
            _write_durably(fresh, text, like=path)
            check(fresh)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
            fresh_folder.rmdir()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); nothing was changed") from None


def _write_durably(fresh: Path, text: str, *, like: Path) -> None:
    with fresh.open("w", encoding="utf-8", newline="") as file:
        if like.exists():
            status = like.stat()
            os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            if os.geteuid() == 0:  # else the service that owns the file could no longer read it
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
