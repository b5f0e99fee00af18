"""Opening the file: pragmas, whose file it is, where it lies; and the meaning of SQLite's errors."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from holdfast.core.errors import ConfigError, HoldfastError, Invalid, StoreMismatch, Unavailable
from holdfast.core.models import Finding

APPLICATION_ID = 0x484F4C44  # "HOLD"
OLDEST_SQLITE = (3, 38, 0)  # STRICT tables and ->>
WAL_RESET_FIXED_VERSION = (3, 51, 3)
"""Below this version two connections that checkpoint and write at once can corrupt a file (SQLite's WAL-reset fault).
Automatic checkpoints are therefore off on every connection of ours, and ours run alone (see ``writer.py``)."""

BUSY_SECONDS = 5.0
_PAUSE = 0.002  # seconds between attempts to turn a new file to WAL
DRIVER_ERRORS = (sqlite3.Error, UnicodeEncodeError, OverflowError, MemoryError)
"""Errors of sqlite3: its own, those of Python for values it cannot store, and MemoryError for SQLITE_NOMEM."""

_MISPLACED = frozenset(
    {errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
"""What the system says of a place that waiting does not mend."""
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre"})


def connect(path: str) -> sqlite3.Connection:
    """A connection as every part of the store uses it: WAL, durable commits, no hidden transactions."""
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        _enter_wal(connection, path)
        for pragma in (
            "synchronous=full",
            "fullfsync=on",  # on macOS fsync alone leaves data in the disk's cache; no effect elsewhere
            "wal_autocheckpoint=0",
            "foreign_keys=on",
            "journal_size_limit=67108864",
            "cache_size=-65536",
            "temp_store=memory",
            "mmap_size=0",
        ):
            connection.execute(f"pragma {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def bare_connection(
    path: str, *, timeout: float = BUSY_SECONDS, uri: bool = False, shared: bool = False
) -> sqlite3.Connection:
    """A connection that leaves the file as it is; ``shared``: threads take turns on it."""
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, uri=uri, check_same_thread=not shared)
    connection.execute("pragma wal_autocheckpoint=0").fetchall()
    return connection


def _enter_wal(connection: sqlite3.Connection, path: str) -> None:
    """A new file is turned to WAL under all its locks, and SQLite does not wait for them: so we do."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("pragma journal_mode=wal").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            if time.monotonic() > deadline:
                text = f"{path} cannot be made ready for jobs while a transaction is open on it, maybe your own"
                raise Unavailable(f"{text}; run `holdfast migrate`, or open the application, before it") from error
            time.sleep(_PAUSE)
        else:
            return


def check_place(path: str) -> None:
    """Refuse, before SQLite touches anything, a place where a queue cannot be safe."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise ConfigError(
            f"SQLite {sqlite3.sqlite_version} is too old; Holdfast needs 3.38 or newer (a newer Python brings it)"
        )
    folder = Path(path).parent
    # Not the methods of Path: they raise where this user may not look.
    if os.path.isdir(path):  # noqa: PTH112
        raise ConfigError(f"{path} is a directory; name a file in it, as in sqlite:///{path.rstrip('/')}/holdfast.db")
    if not os.path.isdir(folder):  # noqa: PTH112
        raise ConfigError(f"the folder {folder} does not exist or is closed to this user; create it or name another")
    known = os.access(path, os.F_OK)
    if not os.access(folder, os.W_OK | os.X_OK) or (known and not os.access(path, os.R_OK | os.W_OK)):
        raise ConfigError(f"{path} cannot be read or written by this user; change its owner or mode")
    kind = file_system(folder)
    if kind in _NETWORK or kind.startswith("fuse."):
        raise ConfigError(f"{path} lies on {kind}, where SQLite's locks do not hold; use a local disk or PostgreSQL")


def file_system(folder: Path) -> str:
    """The kind of file system a folder lies on; empty where the system does not tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    target = os.path.realpath(folder)
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        mount = fields[1].replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, kind = len(mount), fields[2]
    return kind


def create_private(path: str) -> None:
    """Create a missing file readable by its owner only; SQLite gives its side files the same mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return


def check_owner(path: str) -> None:
    """Refuse a file that another program marked as its own, without changing a byte of it."""
    with closing(bare_connection(path)) as connection:
        (application,) = connection.execute("pragma application_id").fetchone()
    if application not in (0, APPLICATION_ID):
        raise StoreMismatch(
            f"{path} belongs to another program (application id {application:#x}); give Holdfast a file of its own"
        )


@contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Errors inside of the driver and the operating system become ours, with a remedy."""
    try:
        yield
    except (*DRIVER_ERRORS, OSError) as error:
        raise translate_error(error, path) from error


def translate_error(error: Exception, path: str) -> HoldfastError:
    """Translates an error of SQLite, or of the system under it, for callers."""
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        if error.errno in _MISPLACED:
            found = error.filename if error.filename and os.path.exists(error.filename) else path  # noqa: PTH110
            return ConfigError(f"{found} cannot be used ({text}); change its owner or mode, or name another file")
        return Unavailable(f"{path} cannot be used right now ({text}); free space or descriptors, or mend the disk")
    if isinstance(error, UnicodeEncodeError):
        return Invalid("text", error.object, "no store can hold a lone surrogate; encode or remove it")
    if isinstance(error, OverflowError):
        return Invalid("number", str(error), "give a number of at most 64 bits")
    if isinstance(error, MemoryError):
        return Unavailable(f"{path} cannot be used right now: out of memory; free memory")
    code = getattr(error, "sqlite_errorname", "") or ""
    text = str(error)
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Unavailable(f"{path} is busy: another program has held its write lock for {BUSY_SECONDS:.0f} s")
    if code.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN")):
        return Unavailable(f"{path} cannot be used right now: {text} ({code}); free space or mend the disk")
    if code.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return ConfigError(f"{path} cannot be written ({text}); change its owner or mode")
    if code.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_FORMAT")):
        return StoreMismatch(f"{path} is not a sound SQLite database ({text}); restore a backup or name another file")
    return HoldfastError(f"SQLite refused a statement on {path}: {text} {code}".rstrip())


def durability(writer: sqlite3.Connection) -> Finding:
    """Returns the durability in effect on the writer's connection."""
    (journal,) = writer.execute("pragma journal_mode").fetchone()
    (level,) = writer.execute("pragma synchronous").fetchone()
    name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(level, str(level))
    text = f"journal_mode={journal}, synchronous={name}"
    if journal == "wal" and level >= 2:
        return Finding("durability", "ok", f"{text}: an acknowledged job survives a power cut")
    return Finding("durability", "error", f"{text}: acknowledged jobs can be lost", "open the file through Holdfast")
