"""A job that one worker could not read, and another one has by now: the first one's late mark must not end it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.models import Job, JobState
from holdfast.stores.base import Store
from holdfast.stores.postgres import claiming
from holdfast.stores.postgres.pool import PostgresPool
from holdfast.stores.redis import queueing
from holdfast.stores.redis.pool import NamespacePool
from tests.conformance.support import ending, failing, lose_all, new_job, put, stored, take


@pytest.mark.parametrize("claimed_before", [False, True])
async def test_late_mark_of_an_unreadable_job_leaves_its_new_holder_alone(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, *, claimed_before: bool
) -> None:
    """As in a rolling deployment: the first worker is older than the job, and frozen before it says so."""
    (job_id,) = await put(store, new_job())
    if claimed_before:
        (first,) = await take(store)
        await store.queueing.settle([failing(first)])
        clock.advance(3600)
    second: list[Job] = []

    def unreadable(*_: object) -> Job:
        raise RecursionError("nested too deep")

    def first_lost(method: Any) -> Any:
        async def call(pool: Any, statement: Any, *arguments: Any, **values: Any) -> Any:
            if not second and "unreadable" in (getattr(statement, "sql", "") or statement.text):
                module.undo()
                await lose_all(store, clock)
                second.extend(await take(store))
            return await method(pool, statement, *arguments, **values)

        return call

    module = pytest.MonkeyPatch()
    for each in (claiming, queueing):
        module.setattr(each, "claimed_job", unreadable)
    monkeypatch.setattr(PostgresPool, "fetch", first_lost(PostgresPool.fetch))
    monkeypatch.setattr(NamespacePool, "run", first_lost(NamespacePool.run))

    assert await take(store) == []
    assert [job.id for job in second] == [job_id]
    assert (await stored(store, job_id)).state is JobState.RUNNING
    (answer,) = await store.queueing.settle([ending(second[0])])
    assert answer.accepted
