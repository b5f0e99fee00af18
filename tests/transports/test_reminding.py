"""The sweep: what a transport has lost comes again, and nothing piles up."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.events import LeaseRejected, SweepComplete
from holdfast.core.fault_points import InjectedFault, arm_fault
from holdfast.core.models import JobFilter, JobState, Reason
from holdfast.transports import reconciler
from holdfast.worker.worker import Worker
from tests.support.postgres import Postgres
from tests.transports.support import (
    QUICK,
    Pairing,
    Recorder,
    claim,
    ending,
    new_job,
    put,
    take,
    until,
    until_succeeded,
    working,
)

AGED = 2
"""Seconds after which a ready job counts as lost if the transport does not have it, and more."""


def noop(app: Holdfast, done: list[Any], seconds: float = 0.0) -> None:
    """Register the task ``work``, which notes its job."""

    @app.task("work")
    async def work() -> None:
        if seconds:
            await asyncio.sleep(seconds)
        done.append(1)


async def test_what_was_lost_is_announced_again_in_order(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        ids = await put(store, *[new_job() for _ in range(20)], *[new_job(queue="mail") for _ in range(3)])
        pairing.forget()
        clock.advance(AGED)

        assert await store.maintenance.reannounce() == 23
        assert (pairing.waiting(), pairing.waiting("mail")) == (ids[:20], ids[20:])
        assert await store.maintenance.reannounce() == 0


async def test_only_what_is_missing_is_announced(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        ids = await put(store, *[new_job() for _ in range(10)])
        pairing.forget()
        pairing.push(*ids[:5])
        clock.advance(AGED)

        assert await store.maintenance.reannounce() == 5
        assert pairing.waiting() == ids


async def test_what_has_just_become_ready_is_on_its_way(pairing: Pairing) -> None:
    """Between a commit and its push a sweep may look: nothing is announced twice."""
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        await put(store, new_job())
        pairing.forget()

        assert await store.maintenance.reannounce() == 0


async def test_stale_ids_only_delay_what_was_lost(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        (lost,) = await put(store)
        pairing.forget()
        pairing.push(*["01a1feb7-6997-7000-a22a-42bd08d01901"] * 3)
        clock.advance(AGED)
        assert await store.maintenance.reannounce() == 0
        assert (await claim(store)).refused == 3

        assert await store.maintenance.reannounce() == 1
        assert await take(store) == [lost]


async def test_sweeps_of_a_very_deep_queue_repeat_nothing(pairing: Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers sweep at once; what one look cannot hold is announced as the rest is taken."""
    monkeypatch.setattr(reconciler, "MAX_COMPARED", 10)
    clock = ManualClock()
    async with pairing.app(now=clock) as app, pairing.app(now=clock) as other:
        stores = [await app.open_store(), await other.open_store()]
        ids = await put(stores[0], *[new_job(priority=n % 7 - 3) for n in range(50)])
        pairing.forget()
        clock.advance(AGED)

        given: list[int] = []
        taken: list[str] = []
        for _ in range(12):
            given += await asyncio.gather(*[store.maintenance.reannounce() for store in stores])
            waiting = pairing.waiting()
            assert len(waiting) == len(set(waiting)) <= 20
            taken += await take(stores[0], 6)

        assert (sorted(taken), sum(given), max(given)) == (sorted(ids), 50, 10)


async def test_lost_id_of_a_deep_queue_is_announced_once_shallow(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it stood behind what can be looked at, and others are in front of it by their priority."""
    monkeypatch.setattr(reconciler, "MAX_COMPARED", 10)
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        ids = await put(store, *[new_job(priority=n % 2) for n in range(15)])
        pairing.forget()
        pairing.push(*(each for each in ids if each != ids[12]))
        clock.advance(AGED)
        assert await store.maintenance.reannounce() == 0
        first = await take(store, 5)

        assert (await store.maintenance.reannounce(), await store.maintenance.reannounce()) == (1, 0)
        assert pairing.waiting()[-1] == ids[12]
        assert sorted(first + await take(store)) == sorted(ids)


async def test_lost_id_of_a_deep_queue_is_announced_while_deep(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any priority, and again where it is lost again. Several workers sweep, and nothing else is repeated."""
    monkeypatch.setattr(reconciler, "MAX_COMPARED", 10)
    clock = ManualClock()
    async with pairing.app(now=clock) as app, pairing.app(now=clock) as other:
        stores = [await app.open_store(), await other.open_store()]
        taken: list[str] = []
        ids: list[str] = []

        async def turn(takes: int = 4) -> list[str]:
            """Four jobs come, some go, and both sweep; what was announced again."""
            clock.advance(5)
            ids.extend(await put(stores[0], *[new_job(priority=n % 3) for n in range(4)]))
            taken.extend(await take(stores[0], takes))
            before = pairing.waiting()
            given = sum(await asyncio.gather(*[store.maintenance.reannounce() for store in stores]))
            waiting = pairing.waiting()
            assert len(waiting) > reconciler.MAX_COMPARED or not taken
            assert (waiting[: len(before)], len(waiting)) == (before, len(before) + given)
            return waiting[len(before) :]

        for _ in range(5):
            assert await turn(0) == []
        lost = ids[-3:]
        for _ in range(2):
            pairing.lose(*lost)
            for _ in range(12):
                again = await turn()
                if again:
                    break
            assert sorted(again) == sorted(lost)
        for _ in range(12):
            assert await turn() == []
        assert set(lost) <= set(taken)


async def test_paused_queue_is_not_reannounced_until_resumed(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        ids = await put(store, new_job(), new_job())
        await store.admin.pause("default")
        pairing.forget()
        clock.advance(AGED)
        assert (await store.maintenance.reannounce(), pairing.waiting()) == (0, [])

        await store.admin.resume("default")

        assert pairing.waiting() == ids


async def test_a_suspect_that_was_lost_is_announced_again(pairing: Pairing) -> None:
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        (job_id,) = await put(store)
        await claim(store, lease_for=timedelta(seconds=1))
        clock.advance(AGED)
        (lost,) = await store.maintenance.find_expired_leases(limit=10)
        settlement = ending(lost, JobState.QUEUED, reason=Reason.CRASHED, error="lost", lease_expired=True)
        await store.queueing.settle([settlement])
        pairing.forget()

        assert await store.maintenance.reannounce() == 1
        assert await take(store) == [job_id]


async def test_the_dead_letters_list_is_a_mirror(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, *[new_job() for _ in range(4)])
        jobs = (await claim(store)).jobs
        await store.queueing.settle(
            [ending(job, JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error="boom") for job in jobs]
        )
        assert sorted(pairing.dead()) == sorted(ids)

        await store.admin.replay([ids[1]])
        await store.admin.delete([ids[2]])
        assert sorted(pairing.dead()) == sorted([ids[0], ids[3]])

        pairing.forget()
        await store.maintenance.reannounce()
        assert pairing.dead() == [ids[0], ids[3]]
        await store.admin.delete(JobFilter(states=(JobState.DEAD,)))
        assert pairing.dead() == []


async def test_each_queue_lists_its_latest_dead_letters(pairing: Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue's dead push out no other's, and an old job that dies now is among the newest. Many lists are looked
    at in turn."""
    monkeypatch.setattr(reconciler, "MAX_DEAD_LETTERS", 2)
    monkeypatch.setattr(reconciler, "_LISTS_PER_SWEEP", 1)
    clock = ManualClock()
    async with pairing.app(now=clock) as app:
        store = await app.open_store()
        (mail,) = await put(store, new_job(queue="mail"))
        old, *young = await put(store, *[new_job() for _ in range(4)])
        jobs = {job.id: job for job in (await claim(store, capacity={"*": 10})).jobs}
        for job_id in (mail, *young, old):
            clock.advance(1)
            await store.queueing.settle([ending(jobs[job_id], JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error="boom")])

        for lost in (False, True):
            if lost:
                pairing.forget()
            for _ in range(2):
                await store.maintenance.reannounce()
            assert (pairing.dead(), pairing.dead("mail")) == ([young[-1], old], [mail])
        await store.admin.delete([mail])
        assert (pairing.dead(), pairing.dead("mail")) == ([young[-1], old], [])


async def test_replay_and_delete_wait_only_for_lists_of_their_queues(pairing: Pairing) -> None:
    async with pairing.app() as app:
        store = await app.open_store()
        ids = await put(store, *[new_job(queue=queue) for queue in ("mail", "mail", "mail", "other")])
        jobs = (await claim(store, capacity={"*": 10})).jobs
        await store.queueing.settle(
            [ending(job, JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error="boom") for job in jobs]
        )
        pairing.execute("DEL", pairing.dead_key("other"))

        await store.admin.replay([ids[0]])
        assert (pairing.dead("mail"), pairing.dead("other")) == (ids[1:3], [])
        await store.admin.delete([ids[1]])
        assert (pairing.dead("mail"), pairing.dead("other")) == (ids[2:3], [])
        await store.admin.delete(JobFilter(queue="mail"))
        assert (pairing.dead("mail"), pairing.dead("other")) == ([], [])
        await store.maintenance.reannounce()
        assert pairing.dead("other") == [ids[3]]


async def test_nothing_piles_up_under_load(pairing: Pairing) -> None:
    """Submitters, workers and sweeps at once: the transport never holds more ids than there are ready jobs, but for
    those on their way, and no claim is refused. An id that a starved process has received and not claimed for a
    second is announced again: few are."""
    done: list[int] = []
    app, other = pairing.app(concurrency=5, sweep="50ms"), pairing.app(concurrency=5, sweep="50ms")
    noop(app, done, 0.005)
    noop(other, done, 0.005)
    rejected = [Recorder(app), Recorder(other)]
    excess: list[int] = []
    async with app, other, working(app, other):
        store = await app.open_store()
        rng = random.Random(7)
        for _ in range(60):
            await put(store, *[new_job() for _ in range(rng.randint(1, 40))])
            ready = await store.query.count(JobFilter(states=(JobState.QUEUED,)))  # it only falls until the next round
            excess.append(len(pairing.waiting()) - ready)
            await asyncio.sleep(rng.uniform(0, 0.05))
        total = await store.query.count(JobFilter())
        await until_succeeded(app, total)
    assert max(excess) <= 10
    announced_again = sum(event.reannounced for each in rejected for event in each.of(SweepComplete))
    assert sum(event.count for each in rejected for event in each.of(LeaseRejected)) <= announced_again
    assert announced_again <= total // 50


@pytest.mark.parametrize("transport", ["redis_list", "redis_stream"])
async def test_emptied_in_the_middle_of_5000_jobs_nothing_is_lost(
    transport: str, postgres: Postgres, postgres_url: str, redis_of_its_own: Any
) -> None:
    """The sweep of each second announces what is missing; no other wake-up is left."""
    done: list[int] = []
    settings = {"transport": transport, "transport_url": redis_of_its_own.url(), "transport_key": "atlas:jobs"}
    app = Holdfast(postgres_url, concurrency=20, sweep="1s", poll="1s", **settings)
    noop(app, done, 0.002)
    async with app:
        store = await app.open_store()
        await put(store, *[new_job() for _ in range(5000)])
        async with working(app):
            await until(lambda: len(done) >= 1500, "the first jobs")
            redis_of_its_own.execute("FLUSHALL")
            lost_at = len(done)
            await until_succeeded(app, 5000)
    assert lost_at < 5000


async def test_an_announcement_that_never_came_is_made_up_for(pairing: Pairing) -> None:
    """The submitter dies between its commit and its push; here the push fails."""
    done: list[int] = []
    app = pairing.app(**QUICK)
    noop(app, done)
    async with app:
        arm_fault(InjectedFault("announce.before", "fail"))
        handle = await app.enqueue("work")
        assert (handle.wake_up_delayed, pairing.waiting()) == (True, [])
        async with working(app):
            await until(lambda: bool(done), "the job to run")


async def test_a_draining_worker_leaves_nothing_that_was_lost(pairing: Pairing) -> None:
    done: list[int] = []
    app = pairing.app()
    noop(app, done)
    async with app:
        await app.enqueue_many(app.draft_job("work", {}) for _ in range(20))
        pairing.forget()
        await asyncio.sleep(AGED)
        await Worker(app, drain=True).run()
    assert len(done) == 20


async def test_a_transactional_submission_is_found_by_the_sweep(pairing: Pairing) -> None:
    done: list[int] = []
    app = pairing.app(**QUICK)
    noop(app, done)
    async with app, working(app):
        async with await psycopg.AsyncConnection.connect(pairing.url.partition("?")[0]) as connection:
            await app.enqueue("work", connection=connection)
        await until(lambda: bool(done), "the job to run")
