"""Heartbeats: keep live leases alive, report lost ones, carry commands to workers."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.clock import ManualClock
from holdfast.core.ids import new_id
from holdfast.core.models import JobState, Lease
from holdfast.core.workers import HeartbeatReply, LeaseStatus, WorkerCommand
from holdfast.stores.base import Store
from tests.conformance.support import (
    LEASE,
    Opener,
    ending,
    heartbeat,
    lose,
    new_job,
    put,
    running,
    settle,
    stored,
    take,
)


async def test_a_beat_extends_a_live_lease(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    for _ in range(5):
        clock.advance(LEASE.total_seconds() - 1)
        assert await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE) == HeartbeatReply(
            [LeaseStatus.HELD]
        )
        assert (await stored(store, job.id)).lease_until_us == clock() + LEASE // timedelta(microseconds=1)

    assert await store.maintenance.find_expired_leases(limit=10) == []
    assert (await settle(store, job)).accepted


@pytest.mark.parametrize("late", [0, 1])
async def test_an_expired_lease_is_not_revived(store: Store, clock: ManualClock, late: int) -> None:
    job = await running(store)
    clock.advance(LEASE.total_seconds() + late)

    assert (await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)).statuses == [LeaseStatus.LOST]

    assert [each.id for each in await store.maintenance.find_expired_leases(limit=10)] == [job.id]
    assert not (await settle(store, job)).accepted


async def test_superseded_lease_is_lost_and_new_lease_is_kept(store: Store, clock: ManualClock) -> None:
    old = await running(store)
    await lose(store, clock, old)
    (new,) = await take(store, max_must_start=1)
    until = (await stored(store, new.id)).lease_until_us
    clock.advance(1)

    assert (await store.queueing.heartbeat(heartbeat("other"), [old.lease], lease_for=LEASE)).statuses == [
        LeaseStatus.LOST
    ]
    assert (await stored(store, new.id)).lease_until_us == until


async def test_settled_deleted_and_unknown_leases_are_lost(store: Store) -> None:
    settled, deleted = await running(store), await running(store)
    await settle(store, settled)
    await settle(store, deleted)
    await store.admin.delete([deleted.id])
    leases = [settled.lease, deleted.lease, Lease(new_id(), 1)]

    assert (await store.queueing.heartbeat(heartbeat(), leases, lease_for=LEASE)).statuses == [LeaseStatus.LOST] * 3


async def test_a_queued_job_is_not_held(store: Store) -> None:
    (job_id,) = await put(store)

    assert (await store.queueing.heartbeat(heartbeat(), [Lease(job_id, 0)], lease_for=LEASE)).statuses == [
        LeaseStatus.LOST
    ]
    assert (await stored(store, job_id)).lease_until_us is None


async def test_cancelled_running_job_is_reported_by_heartbeat_and_stays_held(store: Store, clock: ManualClock) -> None:
    job = await running(store)
    await store.admin.cancel([job.id])
    clock.advance(LEASE.total_seconds() - 1)

    assert (await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)).statuses == [LeaseStatus.CANCEL]

    clock.advance(LEASE.total_seconds() - 1)
    assert (await store.queueing.heartbeat(heartbeat(), [job.lease], lease_for=LEASE)).statuses == [LeaseStatus.CANCEL]
    answer = await settle(store, job, JobState.CANCELLED)
    assert (answer.accepted, answer.state) == (True, JobState.CANCELLED)


async def test_verdicts_answer_the_leases_in_their_order(store: Store) -> None:
    await put(store, *[new_job() for _ in range(300)])
    jobs = await take(store, 300)
    await store.admin.cancel([job.id for job in jobs[1::3]])
    await store.queueing.settle([ending(job) for job in jobs[2::3]])

    held = (await store.queueing.heartbeat(heartbeat(), [job.lease for job in jobs[::-1]], lease_for=LEASE)).statuses

    assert held == ([LeaseStatus.HELD, LeaseStatus.CANCEL, LeaseStatus.LOST] * 100)[::-1]


async def test_the_same_job_under_two_leases_is_answered_for_each(store: Store, clock: ManualClock) -> None:
    old = await running(store)
    await lose(store, clock, old)
    (new,) = await take(store, max_must_start=1)

    held = (await store.queueing.heartbeat(heartbeat(), [old.lease, new.lease, old.lease], lease_for=LEASE)).statuses

    assert held == [LeaseStatus.LOST, LeaseStatus.HELD, LeaseStatus.LOST]


async def test_a_beat_without_leases_registers_the_worker(store: Store, clock: ManualClock) -> None:
    status = {"concurrency": 7, "running": 3, "succeeded": 10, "failed": 2, "version": "2.4.1+é", "memory": 1 << 40}
    given = heartbeat("w", host="höst", pid=42, queues="a:2,*", **status)
    started = clock()
    await store.queueing.heartbeat(heartbeat("w", host="höst", pid=42), [], lease_for=LEASE)
    clock.advance(10)

    assert await store.queueing.heartbeat(given, [], lease_for=LEASE) == HeartbeatReply([], WorkerCommand.NONE)

    (info,) = await store.query.workers()
    assert (info.heartbeat, info.started_at_us, info.seen_at_us) == (given, started, clock())
    assert (info.alive, info.command) == (True, WorkerCommand.NONE)


async def test_a_worker_is_alive_while_its_last_beats_lease_lasts(store: Store, clock: ManualClock) -> None:
    await store.queueing.heartbeat(heartbeat("quiet"), [], lease_for=LEASE)
    clock.advance(LEASE.total_seconds() - 1)
    assert [info.alive for info in await store.query.workers()] == [True]

    clock.advance(2)
    assert [info.alive for info in await store.query.workers()] == [False]

    await store.queueing.heartbeat(heartbeat("quiet"), [], lease_for=LEASE)
    assert [info.alive for info in await store.query.workers()] == [True]


async def test_a_worker_that_leaves_is_forgotten(store: Store) -> None:
    await store.queueing.heartbeat(heartbeat("stays"), [], lease_for=LEASE)
    await store.queueing.heartbeat(heartbeat("goes"), [], lease_for=LEASE)

    await store.queueing.deregister("goes")
    await store.queueing.deregister("never came")

    assert [info.heartbeat.worker for info in await store.query.workers()] == ["stays"]


async def test_pruning_forgets_workers_that_fell_silent_long_ago(store: Store, clock: ManualClock) -> None:
    await store.queueing.heartbeat(heartbeat("silent"), [], lease_for=LEASE)
    clock.advance(86_400 - 60)
    await store.maintenance.prune({}, limit=100)
    assert [info.heartbeat.worker for info in await store.query.workers()] == ["silent"]
    clock.advance(60 + 2 * LEASE.total_seconds())
    await store.queueing.heartbeat(heartbeat("alive"), [], lease_for=LEASE)

    await store.maintenance.prune({}, limit=100)

    assert [info.heartbeat.worker for info in await store.query.workers()] == ["alive"]


async def test_an_order_reaches_the_worker_at_its_next_beat(store: Store, opener: Opener) -> None:
    for worker in ("a", "b"):
        await store.queueing.heartbeat(heartbeat(worker), [], lease_for=LEASE)

    assert await (await opener()).admin.send_command(WorkerCommand.DRAIN, ["a"]) == ["a"]

    assert (await store.queueing.heartbeat(heartbeat("a"), [], lease_for=LEASE)).command is WorkerCommand.DRAIN
    assert (await store.queueing.heartbeat(heartbeat("b"), [], lease_for=LEASE)).command is WorkerCommand.NONE
    assert {info.heartbeat.worker: info.command for info in await store.query.workers()} == {
        "a": WorkerCommand.DRAIN,
        "b": WorkerCommand.NONE,
    }


async def test_a_later_order_replaces_an_earlier_one(store: Store) -> None:
    await store.queueing.heartbeat(heartbeat("a"), [], lease_for=LEASE)
    await store.admin.send_command(WorkerCommand.DRAIN, ["a"])
    await store.admin.send_command(WorkerCommand.STOP, ["a"])

    assert (await store.queueing.heartbeat(heartbeat("a"), [], lease_for=LEASE)).command is WorkerCommand.STOP


async def test_command_to_all_reaches_every_live_worker(store: Store, clock: ManualClock) -> None:
    await store.queueing.heartbeat(heartbeat("silent"), [], lease_for=LEASE)
    clock.advance(LEASE.total_seconds() + 1)
    for worker in ("a", "b"):
        await store.queueing.heartbeat(heartbeat(worker), [], lease_for=LEASE)

    assert sorted(await store.admin.send_command(WorkerCommand.STOP)) == ["a", "b"]


async def test_command_to_unknown_worker_reaches_no_worker(store: Store) -> None:
    await store.queueing.heartbeat(heartbeat("a"), [], lease_for=LEASE)

    assert await store.admin.send_command(WorkerCommand.STOP, ["unknown"]) == []
    assert await store.admin.send_command(WorkerCommand.STOP, []) == []
    assert (await store.queueing.heartbeat(heartbeat("a"), [], lease_for=LEASE)).command is WorkerCommand.NONE


async def test_worker_is_lost_after_three_heartbeats_and_its_leases_stay(store: Store, clock: ManualClock) -> None:
    job = await running(store)

    async def is_alive() -> bool:
        (worker,) = await store.query.workers()
        return worker.alive

    interval = LEASE / 10
    reported = heartbeat(interval=interval)
    await store.queueing.heartbeat(reported, [job.lease], lease_for=LEASE)
    clock.advance(3 * interval.total_seconds() - 0.1)
    assert await is_alive()
    clock.advance(0.2)
    assert not await is_alive()
    assert await store.maintenance.find_expired_leases(limit=10) == []
    assert await store.admin.send_command(WorkerCommand.STOP) == []
    assert (await store.queueing.heartbeat(reported, [job.lease], lease_for=LEASE)).statuses == [LeaseStatus.HELD]
    assert await is_alive(), "it was late, not lost"
    await store.queueing.heartbeat(heartbeat(interval=LEASE), [], lease_for=LEASE)
    clock.advance(LEASE.total_seconds() + 0.1)
    assert not await is_alive(), "no longer than its lease"


async def test_counts_replace_what_is_stored_or_are_added_to_it(store: Store) -> None:
    found = []
    for succeeded, failed, has_deltas in ((3, 1, True), (2, 0, True), (9, 4, False), (0, 0, True)):
        reported = heartbeat(succeeded=succeeded, failed=failed, has_deltas=has_deltas)
        await store.queueing.heartbeat(reported, [], lease_for=LEASE)
        (worker,) = await store.query.workers()
        found.append((worker.heartbeat.succeeded, worker.heartbeat.failed))
    assert found == [(3, 1), (5, 1), (9, 4), (9, 4)]
