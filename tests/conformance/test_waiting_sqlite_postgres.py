"""Jobs in the state waiting are found by their own index: counted, and never claimed."""

from __future__ import annotations

from datetime import timedelta

from holdfast.core.dependencies import Dependency
from holdfast.core.models import JobState
from holdfast.stores.base import Store
from tests.conformance.support import new_job, put

RECENT = timedelta(minutes=5)


async def test_stats_count_waiting_jobs(store: Store) -> None:
    (first,) = await put(store, new_job(queue="other"))
    await put(store, *[new_job(queue="steps", after=(Dependency(first),)) for _ in range(3)])

    whole = await store.query.stats(recent=RECENT, max_count=9)
    assert whole.count_by(lambda group: (group.queue, group.state))["steps", JobState.WAITING] == 3
    assert whole.at_least == frozenset()
    part = await store.query.stats(recent=RECENT, max_count=3)
    assert JobState.WAITING in part.at_least
