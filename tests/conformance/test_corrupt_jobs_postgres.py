"""Locks that another program holds and triggers that it made: what a store does beside them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.errors import HoldfastError
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.models import JobState
from holdfast.core.steps import NewStep
from holdfast.core.workers import LeaseStatus
from holdfast.stores.base import Store
from tests.conformance.support import (
    LEASE,
    WORKER,
    claim,
    ending,
    heartbeat,
    new_job,
    put,
    running,
    settle,
    state_of,
    stored,
    take,
)
from tests.support.spoiling import session


async def test_what_was_taken_before_a_claim_failed_is_delivered(store: Store) -> None:
    (job_id,) = await put(store, new_job(queue="q00"))
    (stuck,) = await put(store, new_job(queue="q39"))
    capacity = {f"q{number:02}": 2 for number in range(40)}  # more than one statement looks into
    with session(store.url) as other:
        other.execute("create function refuse() returns trigger language plpgsql as $$ begin raise 'no'; end $$")
        other.execute(
            "create trigger refuse before update on job for each row when (new.queue = 'q39') execute function refuse()"
        )
        other.commit()

    assert [job.id for job in await take(store, 2, capacity)] == [job_id]
    with pytest.raises(HoldfastError, match="no"):
        await take(store, 2, capacity)
    assert await state_of(store, stuck) is JobState.QUEUED


async def test_foreign_key_to_a_job_does_not_block_it(store: Store) -> None:
    """Who inserted a row with one holds a key share until its transaction ends."""
    held = await running(store)
    (waiting,) = await put(store)
    with session(store.url) as other:
        other.execute("select from job where id = any(%s) for key share", [[held.id, waiting]])

        reply = await store.queueing.heartbeat(heartbeat(), [held.lease], lease_for=LEASE * 2)
        assert reply.statuses == [LeaseStatus.HELD]
        assert (
            await stored(store, held.id)
        ).lease_until_us == await store.health.server_time_us() + 2 * LEASE.total_seconds() * 1e6
        assert [job.id for job in (await claim(store)).jobs] == [waiting]


async def test_lease_of_a_locked_job_is_said_not_to_be_renewed(store: Store) -> None:
    locked, free = await running(store), await running(store)
    await store.admin.cancel([locked.id])
    leases = [locked.lease, free.lease]
    with session(store.url) as other:
        other.execute("select from job where id = %s for update", [locked.id])
        reply = await store.queueing.heartbeat(heartbeat(), leases, lease_for=LEASE * 2)
        assert reply.statuses == [LeaseStatus.LOCKED, LeaseStatus.HELD]
        now_us = await store.health.server_time_us()
        assert [(await stored(store, each.id)).lease_until_us for each in (locked, free)] == [
            now_us + LEASE.total_seconds() * 1e6,
            now_us + 2 * LEASE.total_seconds() * 1e6,
        ]
    while (reply := await store.queueing.heartbeat(heartbeat(), leases, lease_for=LEASE * 2)).statuses[0] == "locked":
        pass  # the server lets go of the row in its own time
    assert reply.statuses == [LeaseStatus.CANCEL, LeaseStatus.HELD]
    assert (await stored(store, locked.id)).lease_until_us == (await stored(store, free.id)).lease_until_us


async def test_a_worker_s_own_row_is_not_waited_for_either(store: Store) -> None:
    held = await running(store)
    await store.queueing.heartbeat(heartbeat(), [held.lease], lease_for=LEASE)
    with session(store.url) as other:
        other.execute("select from worker for update")

        reply = await store.queueing.heartbeat(heartbeat(running=1), [held.lease], lease_for=LEASE * 2)
        assert reply.statuses == [LeaseStatus.HELD]
        assert (
            await stored(store, held.id)
        ).lease_until_us == await store.health.server_time_us() + 2 * LEASE.total_seconds() * 1e6
    # The server lets go of the row in its own time.
    while [info.heartbeat.running for info in await store.query.workers()] != [1]:
        await store.queueing.heartbeat(heartbeat(running=1), [], lease_for=LEASE)


@pytest.mark.parametrize("state", [0, 7])
async def test_lease_of_a_job_whose_state_was_changed_by_hand_allows_nothing(store: Store, state: int) -> None:
    job, other = await running(store), await running(store)
    with session(store.url) as hand:
        hand.execute("update job set state = %s where id = %s", [state, job.id])  # and its lease is left
        hand.commit()
    steps = [NewStep(each.lease, "s", 1, is_ordered=True) for each in (job, other)]
    records = [LogBatch(each.lease, [NewLine(1, timedelta(0), "info", "a line")]) for each in (job, other)]
    assert await store.workflow.save_steps(steps[:1]) == [False]
    assert await store.workflow.save_steps(steps) == [False, True]
    assert await store.queueing.append_logs(records) == [False, True]
    assert await store.workflow.start_children(job.lease, [new_job()], WORKER) is None
    reply = await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)
    assert reply.statuses == [LeaseStatus.LOST]
    assert [each.accepted for each in await store.queueing.settle([ending(job), ending(other)])] == [False, True]
    assert not (await settle(store, job)).accepted


async def test_expiries_of_jobs_deleted_by_hand_do_not_block_others(store: Store, clock: ManualClock) -> None:
    gone = await put(store, *[new_job(expires_in=LEASE) for _ in range(3)])
    (job_id,) = await put(store, new_job(expires_in=LEASE * 2))
    with session(store.url) as other:
        other.execute("delete from job where id = any(%s)", [gone])
        other.commit()
    clock.advance(10 * LEASE.total_seconds())

    assert [each.job_id for each in await store.maintenance.expire_unstarted(limit=3)] == [job_id]
