"""A copy of the file while it is in use. Other stores have their own tools for that."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState
from holdfast.stores import open_store
from holdfast.stores.base import Store
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
