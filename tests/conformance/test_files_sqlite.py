"""Files of an open store that are removed, replaced or cut: nothing that was acknowledged is lost without a word."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import HoldfastError, StoreMismatch, StoreReplaced, Unavailable
from holdfast.core.models import JobFilter
from holdfast.stores.sqlite import identity
from holdfast.stores.sqlite.store import SQLiteStore
from tests.conformance.support import LEASE, Opener, claim, ending, heartbeat, new_job, put, running

OTHER_PROGRAM = """
import asyncio, sys
from holdfast import Holdfast
from holdfast.core.errors import HoldfastError

app = Holdfast(url=sys.argv[1])

async def main():
    async with app:
        await app.enqueue("first", {})
        print("open", flush=True)
        for line in iter(sys.stdin.readline, ""):
            try:
                print((await app.enqueue("later", {})).id, flush=True)
            except HoldfastError as error:
                print(type(error).__name__, flush=True)

asyncio.run(main())
"""


UNCLOSED = """
import sys
from holdfast import Holdfast

app = Holdfast(url=sys.argv[1])
app.sync.enqueue("first", {})
print("open", flush=True)
sys.stdin.readline()
"""


class OtherProgram:
    """Another process that has the store open."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def submit(self) -> str:
        """The new job's id, or the name of the error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("submit\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Closes its store and ends."""
        self.process.communicate(timeout=60)


@contextmanager
def other_program(home: str, source: str = OTHER_PROGRAM) -> Iterator[OtherProgram]:
    with subprocess.Popen(
        [sys.executable, "-c", source, home], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield OtherProgram(process)
        finally:
            process.kill()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


@pytest.fixture
def opener(clock: ManualClock, home: str) -> Opener:
    """The SQLite store alone, closed by each test's own end."""
    return Opener(home, clock)


def side(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)


def cut(path: Path) -> None:
    os.truncate(path, 0)


DAMAGE = [
    *[(suffix, remove, "was removed") for suffix in ("", "-wal", "-shm")],
    *[(suffix, replace, "was replaced") for suffix in ("", "-wal", "-shm")],
    *[(suffix, cut, "was cut to 0 bytes") for suffix in ("", "-wal", "-shm")],
]


@pytest.mark.parametrize(("suffix", "change", "word"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
async def test_open_store_refuses_replaced_files(
    opener: Opener, file: Path, suffix: str, change: Callable[[Path], None], word: str
) -> None:
    store: Any = await opener()
    job = await running(store)
    damaged = side(file, suffix)
    change(damaged)
    for call in (
        put(store),
        claim(store),
        store.queueing.settle([ending(job)]),
        store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE),
        store.query.find(JobFilter()),
        store.health.doctor(),
        store.health.durability(),
    ):
        with pytest.raises(StoreReplaced, match=f"{damaged} {word} while this program had it open; restart"):
            await call
    for start in (
        lambda: store.external.submit_flow([new_job()]),
        lambda: store.external.complete_flow(job.lease, None),
    ):
        with pytest.raises(StoreReplaced):
            start()
    await opener.close()


async def test_new_program_is_refused_while_another_has_the_old_shm(
    home: str, file: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "BUSY_SECONDS", 0.2)
    with other_program(home) as other:
        side(file, "-shm").unlink()
        with pytest.raises(Unavailable, match=r"holdfast.db-shm was removed while another program has .* open"):
            await opener()
        await opener.close()
        other.process.kill()
        other.process.wait(60)
        store = await opener()
        assert await store.query.count(JobFilter(tasks=("first",))) == 1
    await opener.close()


async def test_opening_with_a_deadline_waits_no_longer(home: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API opens its store on the event loop: a wait there holds up every request."""
    monkeypatch.setattr(identity, "BUSY_SECONDS", 100.0)
    with other_program(home):
        side(file, "-shm").unlink()
        began = time.monotonic()
        with pytest.raises(Unavailable, match="-shm was removed"):
            await SQLiteStore(str(file), call_deadline=0.2).open()
        assert time.monotonic() - began < 60


async def test_waiting_program_opens_once_the_old_shm_is_closed(home: str, file: Path, opener: Opener) -> None:
    with other_program(home) as other:
        side(file, "-shm").unlink()
        assert other.submit() == "StoreReplaced"
        other.end()
        store = await opener()
        await put(store)
        assert await store.query.count(JobFilter()) == 2
    await opener.close()


async def test_old_program_ends_without_harm_to_a_newer_log(home: str, file: Path, opener: Opener) -> None:
    """A plain connection makes a new index, so that a later program cannot know of the old one."""
    with other_program(home) as other:
        side(file, "-shm").unlink()
        with closing(sqlite3.connect(file)) as outsider:
            assert outsider.execute("select count(*) from holdfast_job").fetchone() == (1,)
            store = await opener()
            await put(store, new_job(task="acknowledged"))
            await opener.close()
        assert other.submit() == "StoreReplaced"
        other.end()
    store = await opener()
    assert await store.query.count(JobFilter(tasks=("acknowledged",))) == 1
    await opener.close()


@pytest.mark.parametrize("source", [OTHER_PROGRAM, UNCLOSED], ids=["closes", "exits"])
@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_idle_program_ends_without_harm_to_a_newer_log(
    home: str, file: Path, opener: Opener, source: str, suffix: str
) -> None:
    with other_program(home, source) as other:
        replace(side(file, suffix))
        store = await opener()
        await put(store, new_job(task="acknowledged"))
        await opener.close()
        other.end()
    store = await opener()
    assert await store.query.count(JobFilter(tasks=("acknowledged",))) == 1
    await opener.close()


@pytest.mark.parametrize(
    ("suffix", "damage", "words"),
    [("-shm", Path.unlink, "-shm"), ("-wal", cut, "-wal was cut to 0 bytes")],
    ids=["shm-vanished", "log-cut"],
)
async def test_commit_is_not_acknowledged_after_damage_meanwhile(
    opener: Opener,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    damage: Callable[[Path], object],
    words: str,
) -> None:
    store: Any = await opener()
    await put(store)
    queueing = store.queueing
    submit = queueing._submit

    def submit_and_damage(*arguments: object) -> object:
        answers = submit(*arguments)
        damage(side(file, suffix))
        return answers

    monkeypatch.setattr(queueing, "_submit", submit_and_damage)
    with pytest.raises(StoreReplaced, match=words):
        await put(store)
    await opener.close()


async def test_store_goes_on_after_a_truncating_checkpoint_of_another_program(opener: Opener, file: Path) -> None:
    store: Any = await opener()
    await put(store)
    for expected in (2, 3):
        with closing(sqlite3.connect(file)) as outsider:
            assert outsider.execute("pragma wal_checkpoint(truncate)").fetchone() == (0, 0, 0)
        assert side(file, "-wal").stat().st_size == 0
        await put(store)
        assert await store.query.count(JobFilter()) == expected
    cut(side(file, "-wal"))
    with pytest.raises(StoreReplaced, match=r"-wal was cut to 0 bytes"):
        await put(store)
    await opener.close()


async def test_emptied_database_with_a_log_is_named_as_cut(home: str, file: Path, opener: Opener) -> None:
    with other_program(home) as other:
        cut(file)
        with pytest.raises(StoreMismatch, match=r"holdfast.db was cut to 0 bytes, though its log .*-wal holds data"):
            await opener()
        with pytest.raises(HoldfastError, match="was cut to 0 bytes"):
            await opener.unopened().missing()
        assert other.submit() == "StoreReplaced"
    assert side(file, "-wal").stat().st_size
    await opener.close()
