"""Errors of the disk or of memory in a transaction: its callers hear the cause, and a later try works."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import Unavailable
from holdfast.core.models import JobState
from holdfast.stores.sqlite.identity import FileIdentity
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.stores.sqlite.writer import Transaction, Writer
from tests.conformance.support import ending, new_job, put, state_of, states_of, take

BIG = '"' + "x" * 900_000 + '"'

WITHOUT_MEMORY = """
import asyncio, sys
from holdfast.stores.sqlite.store import SQLiteStore
from tests.conformance.support import new_job, put

async def main():
    store = SQLiteStore(sys.argv[1])
    await store.open()
    store._current().writer.connection.execute("pragma hard_heap_limit=10000000")
    try:
        await put(store, new_job(payload="1" * 20_000_000))
    except Exception as error:
        print(type(error).__name__, error)
    await put(store)
    print("later", flush=True)
    await store.close()

asyncio.run(main())
"""


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process can grow to ``size`` bytes at most."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> SQLiteStore:
    return SQLiteStore(str(tmp_path / "holdfast.db"), now=clock)


def writer_of(store: SQLiteStore) -> Writer:
    """The writer of the open store, which writes large transactions to the disk before their commit."""
    writer = store._current().writer
    writer.connection.execute("pragma cache_size=10")
    return writer


async def test_settlements_refused_by_a_full_disk_can_be_written_later(store: SQLiteStore) -> None:
    await store.open()
    writer_of(store)
    job_ids = await put(store, *[new_job() for _ in range(4)])
    settlements = [ending(job, result=BIG) for job in await take(store)]

    with full_disk(2_000_000), pytest.raises(Unavailable, match="SQLITE_IOERR"):
        await store.queueing.settle(settlements)

    assert await states_of(store, job_ids) == [JobState.RUNNING] * 4
    assert all(answer.accepted for answer in await store.queueing.settle(settlements))
    assert await states_of(store, job_ids) == [JobState.SUCCEEDED] * 4
    await store.close()


async def test_calls_that_share_a_transaction_with_a_disk_error_all_fail_with_it(store: SQLiteStore) -> None:
    await store.open()
    writer = writer_of(store)
    began, going_on = threading.Event(), threading.Event()

    def hold(_: Transaction) -> None:
        began.set()
        assert going_on.wait(60)

    holding = asyncio.create_task(writer.call(hold))
    assert await asyncio.to_thread(began.wait, 60)
    jobs = [new_job(), *[new_job(payload=BIG) for _ in range(4)], new_job()]
    calls = [asyncio.create_task(put(store, job)) for job in jobs]
    async with asyncio.timeout(60):
        while writer._pending.qsize() < len(jobs):  # noqa: ASYNC110 - the next transaction has all of them
            await asyncio.sleep(0)
    with full_disk(2_000_000):
        going_on.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
    await holding

    assert [type(answer) for answer in answers] == [Unavailable] * 6
    assert all("SQLITE_IOERR" in str(answer) for answer in answers)
    assert [await state_of(store, job.id) for job in jobs] == [None] * 6
    await put(store, *jobs)
    assert [await state_of(store, job.id) for job in jobs] == [JobState.QUEUED] * 6
    await store.close()


def test_lack_of_memory_is_an_error_of_the_library(tmp_path: Path) -> None:
    """In a process of its own: the limit can only be lowered."""
    program = [sys.executable, "-c", WITHOUT_MEMORY, str(tmp_path / "holdfast.db")]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("Unavailable "), ended.stdout
    assert "out of memory" in ended.stdout
    assert ended.stdout.endswith("later\n")


@pytest.mark.parametrize("look", ["check_side_files", "wal_has_frame"])
async def test_committed_call_succeeds_where_files_cannot_be_looked_at(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    await store.open()
    monkeypatch.setattr(FileIdentity, look, refuse)
    (job_id,) = await put(store)
    assert await state_of(store, job_id) is JobState.QUEUED
    await store.close()
