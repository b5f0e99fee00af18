"""What only a SQLite file can do wrong, or promise."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import ConfigError, ForkedConnection, HoldfastError, StoreMismatch, StoreReplaced, Unavailable
from holdfast.core.models import Finding, JobFilter, JobState
from holdfast.stores import open_store
from holdfast.stores.base import Store
from holdfast.stores.sqlite import connection as connections
from holdfast.stores.sqlite import health, writer
from holdfast.stores.sqlite.store import SQLiteStore
from tests.conformance.support import Opener, new_job, put, state_of, take_ids

NOBODY = 65534


@pytest.fixture
def opener(clock: ManualClock, home: str) -> Opener:
    """The SQLite store alone, closed by each test's own end."""
    return Opener(home, clock)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


@pytest.fixture
def connection(file: Path) -> sqlite3.Connection:
    """The user's own connection to the same file."""
    return sqlite3.connect(file, isolation_level=None)


async def refused(opener: Opener, kind: type[HoldfastError] = StoreMismatch) -> str:
    """The message of the refusal to open the file."""
    with pytest.raises(kind) as caught:
        await opener()
    await opener.close()
    return str(caught.value)


async def test_another_programs_database_is_refused_and_not_touched(opener: Opener, file: Path) -> None:
    with closing(sqlite3.connect(file)) as foreign:
        foreign.executescript("PRAGMA application_id = 42; CREATE TABLE theirs (n); INSERT INTO theirs VALUES (7);")
    before = file.read_bytes()

    message = await refused(opener)

    assert str(file) in message
    assert file.read_bytes() == before


async def test_first_opening_inside_an_own_transaction_says_what_to_do(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = Opener(f"sqlite:///{tmp_path}/new.db", clock)
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(tmp_path / "new.db", isolation_level=None)) as own:
        own.executescript("create table orders (id integer primary key); begin; insert into orders values (1)")

        assert "open the application, before it" in await refused(opener, Unavailable)

        own.execute("commit")
        await (await opener()).close()


async def test_a_file_made_by_a_newer_holdfast_is_refused(opener: Opener, file: Path) -> None:
    await (await opener()).close()
    with closing(sqlite3.connect(file)) as ours:
        ours.execute("INSERT INTO holdfast_migration SELECT max(number) + 1, 'from_the_future' FROM holdfast_migration")
        ours.commit()

    assert "upgrade Holdfast" in await refused(opener)


@pytest.mark.parametrize("content", [b"no database, " * 400, b"\0" * 4096, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_file_that_is_no_database_is_refused_and_kept(opener: Opener, file: Path, content: bytes) -> None:
    file.write_bytes(content)

    await refused(opener)

    assert file.read_bytes() == content


async def test_a_truncated_file_is_refused_and_not_repaired(opener: Opener, file: Path) -> None:
    store = await opener()
    await put(store, *[new_job(payload='{"a":"' + "x" * 2000 + '"}') for _ in range(200)])
    await opener.close()
    with closing(sqlite3.connect(file)) as ours:
        ours.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for left in file.parent.glob("holdfast.db-*"):
        left.unlink()
    content = file.read_bytes()[: file.stat().st_size // 2]
    file.write_bytes(content)

    await refused(opener)

    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EACCES, ConfigError), (errno.EROFS, ConfigError), (errno.EMFILE, Unavailable)]
)
async def test_what_the_system_refuses_raises_an_error_of_ours(
    opener: Opener, file: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[HoldfastError]
) -> None:
    def refuse(_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("holdfast.stores.sqlite.store.create_private", refuse)

    message = await refused(opener, kind)

    assert str(file) in message
    assert os.strerror(number) in message


async def test_an_empty_file_is_a_new_store(opener: Opener, file: Path) -> None:
    file.touch()
    store = await opener()

    assert await take_ids(store) == []
    await opener.close()


async def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "missing" / "x.db", tmp_path / "file" / "x.db"):
        store = open_store(f"sqlite:///{path}")
        with pytest.raises(ConfigError) as caught:
            await store.open()
        await store.close()
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("file_mode", "turn_mode", "folder_mode", "problem"),
    [
        (0o444, 0o666, 0o755, "holdfast.db cannot be read or written"),
        (0o222, 0o666, 0o755, "holdfast.db cannot be read or written"),
        (0o666, 0o444, 0o777, "holdfast.db-turn cannot be used"),
        (0o644, 0o666, 0o000, "holdfast.db cannot be read or written"),
    ],
    ids=["read_only", "write_only", "side_file", "folder"],
)
def test_what_this_user_cannot_use_is_refused_by_name(
    file_mode: int, turn_mode: int, folder_mode: int, problem: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, turn = Path(folder) / "holdfast.db", Path(folder) / "holdfast.db-turn"
        for path, mode in ((file, file_mode), (turn, turn_mode)):
            path.touch()
            path.chmod(mode)
        Path(folder).chmod(folder_mode)
        store = open_store(f"sqlite:///{file}")
        child = _fork()
        if child == 0:
            os._exit(_exit_code_of_opening(store, problem))
        _, status = os.waitpid(child, 0)
        Path(folder).chmod(0o700)

    assert os.waitstatus_to_exitcode(status) == 0


def _exit_code_of_opening(store: Store, problem: str) -> int:
    """In the child: 0 if it is refused with this problem. Root may write anything, so root becomes another user."""
    try:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        store.blocking(store.open())
    except BaseException as error:
        if isinstance(error, ConfigError) and problem in str(error):
            return 0
        os.write(2, repr(error).encode())
        return 1
    return 2


async def test_the_database_is_safe_against_power_cuts(opener: Opener, connection: sqlite3.Connection) -> None:
    store = await opener()

    findings = {finding.name: finding for finding in await store.health.doctor()}

    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert any("FULL" in finding.text.upper() for finding in findings.values()), "synchronous=FULL is not reported"
    connection.close()
    await opener.close()


async def test_doctor_reports_a_full_disk(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener()
    for free, level in ((0, "error"), (1 << 20, "error"), (1 << 30, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        (place,) = [each for each in await store.health.doctor() if each.name == "file system"]
        assert (place.level, "free space" in place.remedy) == (level, level == "error")
        assert f"{free >> 20:,} MiB free" in place.text
    await opener.close()


async def test_doctor_reports_a_damaged_database(opener: Opener, connection: sqlite3.Connection) -> None:
    store = await opener()
    connection.executescript("""
        create table damaged (value); insert into damaged values (null); pragma writable_schema = on;
        update sqlite_master set sql = 'create table damaged (value not null)' where name = 'damaged'""")
    connection.close()
    (finding,) = [each for each in await store.health.doctor() if each.name == "integrity"]
    assert (finding.level, finding.text) == ("error", "NULL value in damaged.value")
    await opener.close()


async def test_the_files_are_for_their_owner_only(opener: Opener, file: Path) -> None:
    previous = os.umask(0)
    try:
        store = await opener()
        await put(store)
    finally:
        os.umask(previous)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.glob("holdfast.db*")}
    assert modes[file.name] == 0o600
    assert set(modes.values()) == {0o600}, modes
    await opener.close()


async def test_the_users_own_tables_live_in_the_same_file(opener: Opener, file: Path) -> None:
    with closing(sqlite3.connect(file)) as mine:
        mine.executescript("CREATE TABLE invoices (n); INSERT INTO invoices VALUES (1), (2);")
    store = await opener()
    (job_id,) = await put(store)
    await store.migrate()

    with closing(sqlite3.connect(file)) as mine:
        assert mine.execute("SELECT sum(n) FROM invoices").fetchone() == (3,)
    assert await state_of(store, job_id) is JobState.QUEUED
    await opener.close()


async def test_long_reader_blocks_no_writer(opener: Opener, connection: sqlite3.Connection) -> None:
    store = await opener()
    await put(store)
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()

    ids = await put(store, *[new_job() for _ in range(50)])

    assert set(ids) <= set(await take_ids(store))
    connection.close()
    await opener.close()


@pytest.mark.parametrize(("work", "verb"), [("copy_file", "backup"), ("_integrity", "doctor")])
async def test_reading_the_whole_file_delays_no_other_reader(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, work: str, verb: str
) -> None:
    began, going_on = threading.Event(), threading.Event()

    def take_long(*_: object) -> Finding:
        began.set()
        assert going_on.wait(60)
        return Finding("file", "ok", "read")

    monkeypatch.setattr(health, work, take_long)
    store = await opener()
    (job_id,) = await put(store)
    reading = asyncio.create_task(store.health.doctor() if verb == "doctor" else store.health.backup("copy.db"))
    assert await asyncio.to_thread(began.wait, 10)

    seen = await asyncio.wait_for(state_of(store, job_id), 60)

    going_on.set()
    await reading
    assert seen is JobState.QUEUED
    await opener.close()


async def test_a_file_deleted_under_the_store_is_noticed(opener: Opener, file: Path) -> None:
    """Writing on into a file without a name would be a lost job with an acknowledgement."""
    store = await opener()
    await put(store)
    for path in file.parent.glob("holdfast.db*"):
        path.unlink()

    for call in (put(store), store.health.doctor(), store.health.backup(str(file.parent / "copy.db"))):
        with pytest.raises(StoreReplaced, match="was removed"):
            await call
    assert list(file.parent.iterdir()) == []
    await opener.close()


async def test_no_connection_checkpoints_automatically(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that checkpoint and write at once can corrupt a file: the store's own checkpoints run under a lock."""
    limits: dict[sqlite3.Connection, int] = {}

    class Watched(sqlite3.Connection):
        def close(self) -> None:
            limits[self] = self.execute("pragma wal_autocheckpoint").fetchone()[0]
            super().close()

    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, factory=Watched, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", watched)
    store = SQLiteStore(str(file), call_deadline=5.0)
    for _ in range(2):  # a new file, and one that is there
        await store.missing()
        await store.open()
        await put(store)
        await store.query.find(JobFilter(tasks=("work",)))
        await store.health.doctor()
        await store.health.backup(str(file.with_name(f"copy-{len(made)}.db")))
        await store.close()
    assert len(made) > 16
    assert set(map(id, limits)) == set(map(id, made))
    assert set(limits.values()) == {0}


async def test_every_sync_reaches_the_disk_on_macos_too(opener: Opener) -> None:
    store: Any = await opener()
    assert store._current().writer.connection.execute("pragma fullfsync").fetchone() == (1,)
    assert store._current().writer.connection.execute("pragma synchronous").fetchone() == (2,)
    await opener.close()


async def test_checkpoint_copies_nothing_while_another_program_writes(
    opener: Opener, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_CHECKPOINT_PAGES", 1)
    checkpoint = writer.Writer._checkpoint_if_due
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as outsider:

        def checkpoint_beside_the_outsider(self: writer.Writer) -> None:
            outsider.execute("begin immediate")
            checkpoint(self)
            outsider.execute("rollback")

        store = await opener()
        await put(store)
        before = file.read_bytes()
        monkeypatch.setattr(writer.Writer, "_checkpoint_if_due", checkpoint_beside_the_outsider)
        await put(store)
        assert file.read_bytes() == before
        monkeypatch.setattr(writer.Writer, "_checkpoint_if_due", checkpoint)
        await put(store)
        assert file.read_bytes() != before
    await opener.close()


async def test_pages_of_other_programs_count_for_the_checkpoint(opener: Opener, file: Path) -> None:
    store, log = await opener(), file.with_name(f"{file.name}-wal")
    with closing(sqlite3.connect(file, isolation_level=None)) as outsider:
        outsider.execute("pragma wal_autocheckpoint=0")
        outsider.execute("create table theirs (content)")
        sizes: list[int] = []
        for _ in range(4):
            outsider.execute("insert into theirs values (zeroblob(5000000))")
            await put(store)
            sizes.append(log.stat().st_size)
    assert sizes[1:] == sizes[:1] * 3
    await opener.close()


async def test_a_damaged_file_raises_an_error_of_ours(opener: Opener, file: Path) -> None:
    store = await opener()
    await put(store, *[new_job(payload='{"a":"' + "x" * 3000 + '"}') for _ in range(100)])
    await opener.close()
    with closing(sqlite3.connect(file)) as ours:
        ours.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = file.stat().st_size
    with file.open("r+b") as raw:
        raw.seek(8192)
        raw.write(b"\xa5" * (size - 8192))

    async def exercise() -> None:
        store = await opener()
        await store.query.find(JobFilter(), limit=1000)
        await take_ids(store)
        await put(store)

    with pytest.raises(HoldfastError):
        await exercise()
    await opener.close()


async def test_dropped_table_raises_an_error_of_the_library(opener: Opener, connection: sqlite3.Connection) -> None:
    store = await opener()
    await put(store)
    connection.execute("DROP TABLE holdfast_job")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: put(store),
        lambda: take_ids(store),
        lambda: store.query.find(JobFilter()),
        lambda: store.admin.cancel(JobFilter()),
        lambda: store.maintenance.find_expired_leases(limit=1),
        lambda: store.maintenance.prune({}, limit=1),
    ]

    for call in calls:
        with pytest.raises(HoldfastError):
            await call()
    connection.close()
    await opener.close()


async def test_a_store_is_refused_in_a_forked_child(opener: Opener) -> None:
    store = await opener()
    (job_id,) = await put(store)
    sys.stdout.flush()
    child = _fork()
    if child == 0:
        os._exit(await _exit_code_of_use(store))
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert await take_ids(store) == [job_id]
    await opener.close()


async def _exit_code_of_use(store: Store) -> int:
    """In the child: 0 if the store refuses to be used here, and lets itself be closed without a word."""
    try:
        await put(store)
    except ForkedConnection:
        return 0
    except BaseException as error:
        os.write(2, repr(error).encode())
        return 1
    return 2


def _fork() -> int:
    """``os.fork``; that a store's thread runs beside it is what the test is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_an_in_memory_database_is_refused() -> None:
    """It would be gone with the process: nothing it acknowledges could survive."""
    for url in ("sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?cache=shared"):
        with pytest.raises(ConfigError):
            open_store(url)


async def test_a_relative_path_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///here.db")
    await store.open()
    await put(store)
    await store.close()

    assert (tmp_path / "here.db").is_file()


async def test_a_path_with_odd_characters_works(tmp_path: Path, clock: ManualClock) -> None:
    folder = tmp_path / "ä b#c"
    folder.mkdir()
    for name in ("50% sure.db", "what?.db", "a+b.db"):
        quoted = str(folder / name).replace("%", "%25").replace("?", "%3F").replace("#", "%23")
        store = open_store(f"sqlite:///{quoted}", now=clock)
        await store.open()
        await put(store)
        await store.close()

        assert (folder / name).is_file()
