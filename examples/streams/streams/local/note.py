"""The note ``streams.json`` in the working directory: the process of ``start`` and its addresses.

``start`` locks the note while it runs. The system of an unlocked note has ended, however it ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast import ConfigError

NOTE = Path("streams.json")


class Note(BaseModel):
    """A running system. It has no addresses and settings until it is ready."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pid: int = Field(ge=1, lt=2**31)
    started: int | None = Field(description="Ticks from boot to the start of the process; null without /proc.")
    urls: dict[str, str] = {}
    settings: dict[str, dict[str, str]] = Field({}, description="Environment variables of each service.")


@contextmanager
def hold_note() -> Iterator[Callable[[Note], None]]:
    """Creates and locks the note, and deletes it in the end; yields a function that writes it.

    ConfigError if another process holds the note, or if the file is something else.
    """
    try:
        file = NOTE.open("ab+")
    except OSError as error:
        raise ConfigError(f"{NOTE}: cannot be written ({error.strerror})") from None
    with file:
        if not lock_note(file, fcntl.LOCK_EX) or not is_in_place(file):
            raise ConfigError(f"{NOTE}: the system runs already; stop it first: python -m streams stop")
        parse_note(file)

        def write_note(note: Note) -> None:
            file.truncate(0)
            file.write(note.model_dump_json(indent=2).encode())
            file.flush()

        try:
            yield write_note
        finally:
            if is_in_place(file):
                NOTE.unlink()


def read_note() -> Note | None:
    """Returns the note of the running system, None if there is none; ConfigError if the file is something else."""
    try:
        file = NOTE.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{NOTE}: cannot be read ({error.strerror})") from None
    with file:
        note = parse_note(file)
        if note is None or lock_note(file, fcntl.LOCK_SH) or read_start_ticks(note.pid) != note.started:
            return None
        return note


def read_running_note() -> Note:
    """Returns the note of the running system; ConfigError if there is none."""
    note = read_note()
    if note is None:
        raise ConfigError(f"{NOTE}: no system runs in this directory; start it: python -m streams start")
    return note


def read_service_settings(service: str) -> dict[str, str]:
    """Returns the environment variables of a service; ConfigError if the system is not ready."""
    settings = read_running_note().settings
    if service not in settings:
        raise ConfigError(f"{NOTE}: the system is starting; try again when the gateway answers")
    return settings[service]


def parse_note(file: IO[bytes]) -> Note | None:
    """Returns the note in the file, None if it is empty; ConfigError if it is not valid."""
    file.seek(0)
    text = file.read()
    try:
        return Note.model_validate_json(text) if text else None
    except ValidationError:
        raise ConfigError(f"{NOTE}: is not a note of `python -m streams start`; move it away") from None


def lock_note(file: IO[bytes], kind: int) -> bool:
    """Locks the file until it is closed. Returns False if another process has locked it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_in_place(file: IO[bytes]) -> bool:
    """Returns True if the file has not been deleted or replaced since it was opened."""
    try:
        return os.path.samestat(NOTE.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def read_start_ticks(pid: int) -> int | None:
    """Returns when the process started: a recycled process id has another time. None without /proc or process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19])  # field 22: the first two stand before
