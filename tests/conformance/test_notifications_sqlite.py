"""Notifications on SQLite: the commits of other connections. An idle worker must not wake itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.core.ids import new_id
from holdfast.core.models import NewJob
from holdfast.core.workers import WorkerCommand
from holdfast.stores.base import Store
from holdfast.stores.sqlite import notifications
from holdfast.stores.sqlite.store import SQLiteStore
from tests.conformance.support import LEASE, heartbeat, put, take


def job() -> NewJob:
    return NewJob(id=new_id(), task="noop", payload="{}")


async def versions(path: Path) -> list[int]:
    """The version one store sees: at first, after its own commit, and after another's."""
    ours, theirs = SQLiteStore(str(path)), SQLiteStore(str(path))
    await ours.open()
    await theirs.open()
    writer = ours._current().writer
    seen = [writer.data_version()]
    for store in (ours, theirs):
        await store.queueing.submit([job()])
        seen.append(writer.data_version())
    await theirs.close()
    await ours.close()
    return seen


def test_commits_of_other_connections_change_the_data_version(tmp_path: Path) -> None:
    first, after_own, after_another = asyncio.run(versions(tmp_path / "jobs.db"))
    assert after_own == first
    assert after_another != first


async def test_waiter_is_noticed_although_the_clock_went_back(tmp_path: Path) -> None:
    """The folder of the sockets has changed before it was last read, by its time stamp."""
    ours, theirs = SQLiteStore(str(tmp_path / "jobs.db")), SQLiteStore(str(tmp_path / "jobs.db"))
    try:
        await ours.open()
        await theirs.open()
        wakes, others = ours._current().notifications, theirs._current().notifications
        assert not wakes.has_end_waiters()
        waiter = notifications._Waiter(["job:j"], lambda: None, lambda: False)
        others._register(waiter)
        assert others._folder is not None
        os.utime(others._folder, (0, 0))
        assert wakes.has_end_waiters()
        others._unregister(waiter)
        os.utime(others._folder, (1, 1))
        assert not wakes.has_end_waiters()
    finally:
        await theirs.close()
        await ours.close()


async def command_worker(store: Store) -> None:
    assert await store.admin.send_command(WorkerCommand.DRAIN, ["w"]) == ["w"]


async def cancel_its_job(store: Store) -> None:
    (running,) = await take(store, worker="w")
    await store.admin.cancel([running.id])


@pytest.mark.parametrize("call", [command_worker, cancel_its_job])
async def test_heartbeats_of_other_workers_cause_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Store], Awaitable[None]]
) -> None:
    """Its wait polls the file, and ends for a commit that its next heartbeat would bring, without a datagram."""
    monkeypatch.setattr(notifications, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(notifications.SqliteNotifications, "_notify_processes", lambda *_: None)
    ours, theirs = SQLiteStore(str(tmp_path / "jobs.db")), SQLiteStore(str(tmp_path / "jobs.db"))
    looked: asyncio.Queue[None] = asyncio.Queue()
    try:
        await ours.open()
        await theirs.open()
        await ours.queueing.heartbeat(heartbeat("w"), [], lease_for=LEASE)
        await put(theirs)
        wakes = ours._current().notifications
        read_version = wakes._read_version

        def look() -> int:
            looked.put_nowait(None)
            return read_version()

        async def look_twice() -> None:
            while not looked.empty():
                looked.get_nowait()
            for _ in range(2):
                await looked.get()

        monkeypatch.setattr(wakes, "_read_version", look)
        waiting = asyncio.ensure_future(ours.queueing.wait(["worker:w"], timeout=60))
        for _ in range(3):
            await theirs.queueing.heartbeat(heartbeat("other"), [], lease_for=LEASE)
            await asyncio.wait([waiting, asyncio.ensure_future(look_twice())], return_when=asyncio.FIRST_COMPLETED)
            assert not waiting.done()
        await call(theirs)
        await asyncio.wait_for(waiting, 30)
    finally:
        await theirs.close()
        await ours.close()
