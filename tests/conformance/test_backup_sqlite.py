"""A copy of the file while it is in use. Other stores have their own tools for that."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState
from holdfast.stores import open_store
from holdfast.stores.base import Store
from holdfast.stores.sqlite import health
from holdfast.stores.sqlite.connection import connect
from tests.conformance.support import Submitted, ended, new_job, put, running, settle, state_of


async def test_a_backup_is_a_consistent_copy_while_everything_goes_on(store: Store, tmp_path: Path) -> None:
    queued = await put(store, *[new_job(key=f"k{n}") for n in range(100)])
    dead = await ended(store, JobState.DEAD)
    busy = await running(store)
    target = tmp_path / "copies of it" / "copy.db"
    target.parent.mkdir()

    async def traffic() -> None:
        for _ in range(20):
            await put(store, new_job(), new_job())

    await asyncio.gather(store.health.backup(str(target)), traffic())

    await settle(store, busy)
    copy = open_store(f"sqlite:///{target}", now=ManualClock())
    await copy.open()
    assert [await state_of(copy, each) for each in (*queued, dead)] == [JobState.QUEUED] * 100 + [JobState.DEAD]
    assert await state_of(copy, busy.id) is JobState.RUNNING
    assert await copy.query.count(JobFilter()) % 2 == 0, "half a batch was copied"
    assert await copy.queueing.submit([new_job(key="k7")]) == [Submitted(queued[7], False)]
    await copy.close()
    assert await store.query.count(JobFilter()) == 142


async def test_two_backups_under_one_name_at_a_time_leave_a_whole_copy(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = await put(store)
    target = tmp_path / "copy.db"
    first_has_copied, second_has_begun, first_has_ended = threading.Event(), threading.Event(), threading.Event()
    fsync = os.fsync

    def connect_late(path: str) -> sqlite3.Connection:
        if first_has_copied.is_set():
            second_has_begun.set()
            assert first_has_ended.wait(60)
        return connect(path)

    def fsync_late(file: int) -> None:
        if not first_has_copied.is_set():
            first_has_copied.set()
            assert second_has_begun.wait(60)
        fsync(file)

    monkeypatch.setattr(health, "connect", connect_late)
    monkeypatch.setattr(os, "fsync", fsync_late)

    async def backup_second() -> None:
        assert await asyncio.to_thread(first_has_copied.wait, 60)
        await store.health.backup(str(target))

    second = asyncio.create_task(backup_second())
    await store.health.backup(str(target))
    copied = [target.read_bytes()]
    first_has_ended.set()
    await second
    copied.append(target.read_bytes())

    for number, content in enumerate(copied):
        target.with_name(f"{number}.db").write_bytes(content)
        copy = open_store(f"sqlite:///{target.with_name(f'{number}.db')}", now=ManualClock())
        await copy.open()
        assert await state_of(copy, job_id) is JobState.QUEUED
        await copy.close()
    assert [each.name for each in tmp_path.glob("copy.db*")] == ["copy.db"]
