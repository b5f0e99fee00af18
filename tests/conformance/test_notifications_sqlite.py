"""Notifications on SQLite: the commits of other connections. An idle worker must not wake itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.core.ids import new_id
from holdfast.core.models import NewJob
from holdfast.stores.sqlite.store import SQLiteStore


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
