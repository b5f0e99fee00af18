"""Pruning in Redis."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.models import JobState
from holdfast.stores.base import Store
from tests.conformance.support import new_job, put


async def test_job_that_ended_by_an_earlier_clock_than_kept_ones_is_pruned(store: Store) -> None:
    early, *kept = [new_job() for _ in range(3)]
    waiters = [new_job(after=(Dependency(job.id, Condition.END), Dependency(early.id, Condition.END))) for job in kept]
    await put(store, early, *kept, *waiters)
    ended = dict.fromkeys([JobState.CANCELLED], timedelta(0))
    for job in kept:
        assert (await store.admin.cancel([job.id])).changed
    assert await store.maintenance.prune(ended, limit=100) == 0
    first = new_job(id="00000000-0000-7000-8000-000000000001")
    await put(store, first)
    assert (await store.admin.cancel([first.id])).changed
    assert await asyncio.wait_for(store.maintenance.prune(ended, limit=100), 30) == 1
    assert await store.query.get(first.id) is None
    assert await store.query.get(kept[0].id) is not None
