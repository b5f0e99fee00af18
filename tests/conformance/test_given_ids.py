"""An id given by a client may return after its job was deleted: no worker of its first life may touch the second."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.models import Job, JobState, NewJob
from holdfast.core.workers import LeaseStatus
from holdfast.stores.base import Store
from tests.conformance.support import LEASE, WORKER, ended, heartbeat, put, running, settle, state_of, stored, take


async def second_life(store: Store, clock: ManualClock, *, worker: str = WORKER) -> tuple[Job, Job]:
    """The job as it was claimed in its first life, and in its second."""
    first = await running(store, has_client_id=True)
    await settle(store, first)
    assert (await store.admin.delete([first.id])).changed
    clock.advance(0.001)
    await put(store, NewJob(id=first.id, task="work", payload="{}", has_client_id=True))
    (second,) = await take(store, 1, worker=worker)
    assert second.id == first.id
    return first, second


@pytest.mark.parametrize("worker", [WORKER, "worker-2"])
async def test_returning_id_never_repeats_a_fencing_token(store: Store, clock: ManualClock, worker: str) -> None:
    first, second = await second_life(store, clock, worker=worker)
    assert 0 < first.claims < second.claims
    assert (first.attempts, second.attempts, (await stored(store, second.id)).attempts) == (1, 1, 1)


@pytest.mark.parametrize("worker", [WORKER, "worker-2"])
async def test_first_life_cannot_settle_or_extend_the_second(store: Store, clock: ManualClock, worker: str) -> None:
    first, second = await second_life(store, clock, worker=worker)
    assert not (await settle(store, first, result='"stale"', worker=WORKER)).accepted
    assert (await store.queueing.heartbeat(heartbeat(), [first.lease], lease_for=LEASE)).statuses == [LeaseStatus.LOST]
    line = NewLine(number=1, ago=timedelta(0), level="info", text="stale", fields=None)
    assert await store.queueing.append_logs([LogBatch(first.lease, [line])]) == [False]
    assert await state_of(store, second.id) is JobState.RUNNING
    assert (await settle(store, second, result='"fresh"', worker=worker)).accepted
    assert (await stored(store, second.id)).result == '"fresh"'


async def test_claims_of_a_given_id_grow_by_one(store: Store, clock: ManualClock) -> None:
    first = await running(store, has_client_id=True)
    await settle(store, first, JobState.QUEUED, refund=True, delay=timedelta(0))
    (again,) = await take(store, 1)
    assert (again.claims, again.attempts) == (first.claims + 1, 1)
    await settle(store, again, JobState.FAILED, delay=timedelta(0), error="boom")
    (last,) = await take(store, 1)
    assert (last.claims, last.attempts) == (first.claims + 2, 2)
    (record,) = await store.query.attempts(first.id)
    assert (record.claims, record.attempt) == (again.claims, 1)
    assert (await settle(store, last)).accepted


async def test_minted_id_begins_its_claims_at_one(store: Store) -> None:
    assert (await running(store)).claims == 1
    assert (await stored(store, await ended(store, JobState.DEAD))).claims == 1


async def test_application_marks_only_ids_that_were_given(home: str) -> None:
    app = Holdfast(home)
    given = app.draft_job("work", {}, id=new_id())
    assert (given.has_client_id, given.options) == (True, None)
    assert not app.draft_job("work", {}).has_client_id


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.DEAD])
async def test_only_the_holder_settles_and_extends(store: Store, state: JobState) -> None:
    """A failover or a restore may forget a claim and give its number to another worker."""
    job = await running(store)
    assert job.worker == WORKER
    assert not (await settle(store, job, state, worker="other")).accepted
    assert (await store.queueing.heartbeat(heartbeat("other"), [job.lease], lease_for=LEASE)).statuses == [
        LeaseStatus.LOST
    ]
    assert (await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)).statuses == [LeaseStatus.HELD]
    assert await state_of(store, job.id) is JobState.RUNNING
    assert (await settle(store, job, state, worker=WORKER)).accepted
