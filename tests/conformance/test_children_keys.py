"""Children under keys that other jobs hold, which then stand for them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from holdfast.core.clock import ManualClock
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.core.unique import Unique
from holdfast.core.waits import ChildStatus
from holdfast.stores.base import Store
from tests.conformance.support import ended, new_job, put, running, settle, take, take_ids
from tests.conformance.test_children import start, suspend


async def test_children_with_keys_are_those_that_hold_them(store: Store) -> None:
    (holder,) = await put(store, new_job(key="one"))
    parent = await running(store)
    assert await start(store, parent, new_job(key="one")) == [ChildStatus(holder, JobState.QUEUED)]
    await suspend(store, parent)
    await store.admin.cancel([holder])
    assert await take_ids(store) == [parent.id]


@pytest.mark.parametrize("during", ["unstarted", "active"])
async def test_holder_of_a_key_stands_for_a_child_after_it_has_ended(store: Store, during: str) -> None:
    """Else the child would be stored once the key is free, and its work be done twice."""
    (holder,) = await put(store, Unique(during).bind(new_job()))
    child, parent = Unique(during).bind(new_job()), await running(store)
    for _ in range(2):
        assert await start(store, parent, child) == [ChildStatus(holder, JobState.QUEUED)]
    assert [each.job_id for each in (await store.workflow.read_waits(parent.id)).dependencies] == [holder]
    (job,) = await take(store)
    assert await start(store, parent, child) == [ChildStatus(holder, JobState.RUNNING)]
    assert await suspend(store, parent) is JobState.WAITING
    await settle(store, job)
    (again,) = await take(store)
    assert await start(store, again, child) == [ChildStatus(holder, JobState.SUCCEEDED)]
    await store.admin.delete([holder])
    assert await start(store, again, child) == [ChildStatus(holder, None)]
    assert await store.query.count(JobFilter()) == 1
    assert await start(store, again, other := Unique(during).bind(new_job())) == [
        ChildStatus(other.id, JobState.QUEUED)
    ]


async def test_holder_of_a_key_stands_for_a_child_of_a_replayed_parent(store: Store) -> None:
    """As a child that was started stays one: its work is done once."""
    (holder,) = await put(store, Unique("active").bind(new_job()))
    child, parent = Unique("active").bind(new_job()), await running(store)
    await start(store, parent, child)
    await settle(store, parent, JobState.DEAD, reason=Reason.ERROR, error="boom")
    (job,) = await take(store)
    await settle(store, job)
    await store.admin.replay([parent.id])
    (again,) = await take(store)
    assert await start(store, again, child) == [ChildStatus(holder, JobState.SUCCEEDED)]


async def test_child_stands_for_others_with_its_key(store: Store) -> None:
    children = [Unique("active").bind(new_job()) for _ in range(3)]
    parent = await running(store)
    assert await start(store, parent, *children) == [ChildStatus(children[0].id, JobState.QUEUED)] * 3
    await suspend(store, parent)
    (job,) = await take(store)
    await settle(store, job)
    (again,) = await take(store)
    assert await start(store, again, *children) == [ChildStatus(children[0].id, JobState.SUCCEEDED)] * 3
    assert await store.query.count(JobFilter()) == 2


async def test_job_that_is_gone_stands_for_no_child_once_its_key_is_free(store: Store, clock: ManualClock) -> None:
    holder = await ended(store, JobState.SUCCEEDED, key="one", key_for=timedelta(seconds=500))
    clock.advance(100)
    await store.maintenance.prune({"succeeded": timedelta(seconds=10)}, limit=10)
    parent, child = await running(store), new_job(key="one")
    assert await start(store, parent, child) == [ChildStatus(holder, None)]
    await settle(store, parent, JobState.DEAD, reason=Reason.ERROR, error="no")
    clock.advance(1000)
    await store.admin.replay([parent.id])
    (parent,) = await take(store)
    assert await start(store, parent, child) == [ChildStatus(child.id, JobState.QUEUED)]


async def test_stored_jobs_under_the_keys_of_each_other_are_children(store: Store) -> None:
    parent = await running(store)
    first, second = await put(store, new_job(key="one"), new_job(key="two"))
    crossed = [replace(new_job(key=key), id=job_id) for job_id, key in ((first, "two"), (second, "one"))]
    statuses = await start(store, parent, *crossed)
    assert {status.job_id for status in statuses or ()} <= {first, second}
    assert await suspend(store, parent) is JobState.WAITING
