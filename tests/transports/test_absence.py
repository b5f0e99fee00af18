"""A transport that is away, slow, full, read-only or not what it should be delays wake-ups and nothing else."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.core.events import StoreTrouble, TransportAway, TransportBack
from holdfast.core.models import Finding, JobFilter, JobState
from holdfast.stores.base import Store
from tests.support.fault_proxy import FaultProxy
from tests.transports.support import (
    QUICK,
    RETRY_FOR,
    Pairing,
    Recorder,
    claim,
    counting,
    new_job,
    put,
    take,
    until,
    until_succeeded,
    until_true,
    working,
)

FOREVER = "1h"
TRANSPORTS_PAGE = Path(__file__).parents[2] / "docs" / "transports.md"


def noop(app: Holdfast) -> list[int]:
    """Register the task ``work``; what it has run."""
    done: list[int] = []

    @app.task("work")
    async def work() -> None:
        done.append(1)

    return done


def documented_rights() -> list[str]:
    """The commands that docs/transports.md gives to an ACL user."""
    found = re.search(r"`(\+@connection [^`]+)`", TRANSPORTS_PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1].split()


async def transport_of(app: Holdfast) -> Finding:
    """What the doctor finds."""
    return next(each for each in await app.doctor() if each.name == "transport")


async def is_well(app: Holdfast) -> bool:
    """Whether the doctor is content."""
    return (await transport_of(app)).level == "ok"


async def is_prompt(app: Holdfast) -> bool:
    """Whether a submission is announced."""
    return not (await app.enqueue("work")).wake_up_delayed


async def reminds(store: Store, number: int) -> bool:
    """Whether a sweep announces so many."""
    return await store.maintenance.reannounce() == number


async def test_redis_goes_and_comes_back_under_a_worker(rough: Pairing) -> None:
    app = rough.app(sweep="500ms", poll=FOREVER)
    done, events = noop(app), Recorder(app)
    async with app, working(app):
        await app.enqueue("work")
        await until(lambda: len(done) == 1, "the first job")
        rough.server.kill()
        handles = [await app.enqueue("work") for _ in range(5)]
        assert all(handle.wake_up_delayed for handle in handles)
        await until(lambda: len(done) == 6, "what the store itself tells of")
        (away,) = events.of(TransportAway)
        assert "Redis at 127.0.0.1" in away.error

        rough.server.start()
        await until(lambda: bool(events.of(TransportBack)), "its return")
        await until_true(lambda: is_prompt(app), "a submission that is announced")
        await until(lambda: len(done) >= 7, "what the transport carries again")
    assert events.of(StoreTrouble) == []


async def test_a_worker_may_start_while_redis_is_away(rough: Pairing) -> None:
    rough.server.stop()
    app = rough.app(**QUICK)
    done = noop(app)
    async with app, working(app):
        await app.enqueue_many(app.draft_job("work", {}) for _ in range(30))
        await until(lambda: len(done) == 30, "the jobs")
        assert (await transport_of(app)).level == "error"
        rough.server.start()
        await until_true(lambda: is_well(app), "the transport")


async def test_a_restart_with_an_empty_memory_loses_nothing(rough: Pairing) -> None:
    app = rough.app(sweep="500ms", poll=FOREVER)
    done = noop(app)
    async with app:
        await app.enqueue_many(app.draft_job("work", {}) for _ in range(200))
        rough.server.execute("FLUSHALL")
        rough.server.kill()
        rough.server.start()
        async with working(app):
            await until(lambda: len(done) == 200, "the jobs")


async def test_jobs_submitted_during_a_redis_outage_are_announced_afterwards(rough: Pairing) -> None:
    clock = ManualClock()
    async with rough.app(now=clock) as app:
        store = await app.open_store()
        rough.server.kill()
        ids = await put(store, new_job(), new_job())
        rough.server.start()
        clock.advance(2)
        await until_true(lambda: reminds(store, 2), "the sweep that finds them")
        assert rough.waiting() == ids


async def test_silent_redis_delays_only_one_call(rough: Pairing) -> None:
    with FaultProxy(rough.server.port) as proxy:
        app = rough.app(transport_url=f"redis://127.0.0.1:{proxy.port}/0", **QUICK)
        done = noop(app)
        async with app, working(app):
            await app.enqueue("work")
            await until(lambda: len(done) == 1, "the first job")
            proxy.hold()
            assert (await app.enqueue("work")).wake_up_delayed
            began = time.monotonic()
            for _ in range(50):
                assert (await app.enqueue("work")).wake_up_delayed
            assert time.monotonic() - began < 50  # 50 deadlines are 100 s
            await until(lambda: len(done) == 52, "the jobs")


async def test_redis_falls_silent_while_a_worker_connects_to_wait(rough: Pairing) -> None:
    with FaultProxy(rough.server.port) as proxy:
        proxy.hold_from(b"CLIENT\r\n$2\r\nID")
        app = rough.app(transport_url=f"redis://127.0.0.1:{proxy.port}/0", **QUICK)
        done = noop(app)
        async with app, working(app):
            await until(lambda: not proxy.traps[0].left, "the silence")
            assert (await app.enqueue("work")).wake_up_delayed
            await until(lambda: len(done) == 1, "the job")


async def test_a_slow_redis_is_still_a_transport(rough: Pairing) -> None:
    with FaultProxy(rough.server.port) as proxy:
        proxy.delay(0.06)
        app = rough.app(transport_url=f"redis://127.0.0.1:{proxy.port}/0", **QUICK)
        done, events = noop(app), Recorder(app)
        async with app, working(app):
            for _ in range(10):
                assert not (await app.enqueue("work")).wake_up_delayed
            await until(lambda: len(done) == 10, "the jobs")
        assert events.of(TransportAway) == []


async def test_connections_that_are_cut_lose_nothing(rough: Pairing) -> None:
    app = rough.app(sweep="300ms", poll=FOREVER)
    done = noop(app)
    async with app, working(app):
        for _ in range(20):
            await app.enqueue_many(app.draft_job("work", {}) for _ in range(5))
            rough.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.02)
        await until(lambda: len(done) == 100, "the jobs")


async def test_connections_that_are_cut_between_waits_are_no_absence(rough: Pairing) -> None:
    """A server with a ``timeout`` cuts those of a worker that is busy for longer."""
    async with rough.app() as app:
        store, events = await app.open_store(), Recorder(app)
        for _ in range(3):
            waiting = asyncio.create_task(store.queueing.wait(["queue:default"], timeout=3600))
            ids = await put(store)
            async with asyncio.timeout(RETRY_FOR):
                await waiting
            assert await take(store) == ids
            rough.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.1)  # the ends of the connections are here: they are read in the loop's next round
        assert events.of(TransportAway) == []


async def test_key_of_another_type_is_reported_and_left_untouched(rough: Pairing) -> None:
    rough.execute("SET", rough.key(), "another client's")
    app = rough.app(**QUICK)
    done = noop(app)
    async with app, working(app):
        assert (await app.enqueue("work")).wake_up_delayed
        await until(lambda: bool(done), "the job")
        finding = await transport_of(app)
        assert (finding.level, "is a string" in finding.text) == ("error", True)
        assert rough.execute("GET", rough.key()) == b"another client's"
        rough.execute("DEL", rough.key())
        await until_true(lambda: is_prompt(app), "a prompt wake-up")


async def test_a_full_redis_takes_no_ids_and_submissions_go_on(rough: Pairing) -> None:
    app = rough.app(**QUICK)
    done, events = noop(app), Recorder(app)
    async with app, working(app):
        await app.enqueue("work")
        await until(lambda: len(done) == 1, "the first job")
        rough.execute("CONFIG", "SET", "maxmemory", "1")
        assert (await app.enqueue("work")).wake_up_delayed
        await until(lambda: len(done) == 2, "the second")
        rough.execute("CONFIG", "SET", "maxmemory", "0")
        await until_true(lambda: is_prompt(app), "a prompt wake-up")
    assert all("full" in event.error for event in events.of(TransportAway))


async def test_scripts_that_were_flushed_are_loaded_again(rough: Pairing) -> None:
    async with rough.app() as app:
        store = await app.open_store()
        ids = await put(store)
        rough.execute("SCRIPT", "FLUSH")
        ids += await put(store)
        assert await take(store) == ids


async def test_flushing_scripts_all_the_time_delays_no_wake_up(rough: Pairing) -> None:
    app = rough.app(sweep=FOREVER, poll=FOREVER)
    runs, events = counting(app), Recorder(app)
    with rough.server.flushing_scripts():
        async with app, working(app):
            handles = await asyncio.gather(*[app.enqueue("work") for _ in range(100)])
            handles += await app.enqueue_many([app.draft_job("work", {}) for _ in range(500)])
            await until_succeeded(app, len(handles))
    assert runs == Counter(handle.id for handle in handles)
    assert not any(handle.wake_up_delayed for handle in handles)
    assert events.of(StoreTrouble, TransportAway) == []


async def test_a_user_without_the_right_to_unblock_still_works(rough: Pairing) -> None:
    rough.execute("ACL", "SETUSER", "shop", "on", ">secret", "~atlas:*", *documented_rights(), "-client", "+client|id")
    app = rough.app(transport_url=f"redis://shop:secret@127.0.0.1:{rough.server.port}/0", sweep="300ms", poll="50ms")
    done = noop(app)
    async with app, working(app):
        for number in range(10):
            await app.enqueue("work")
            await until(lambda number=number: len(done) > number, "the job")


async def test_the_documented_rights_suffice(rough: Pairing) -> None:
    rough.execute("ACL", "SETUSER", "shop", "on", ">secret", "~atlas:*", *documented_rights())
    app = rough.app(transport_url=f"redis://shop:secret@127.0.0.1:{rough.server.port}/0", **QUICK)
    done, events = noop(app), Recorder(app)
    async with app, working(app):
        assert not (await app.enqueue("work", queue="mail")).wake_up_delayed
        await until(lambda: bool(done), "the job")
        store = await app.open_store()
        await store.maintenance.reannounce()
        assert await is_well(app)
        assert events.of(TransportAway) == []
    assert rough.server.execute("ACL", "LOG") == []  # nothing that we call is denied


async def test_the_doctor_finds_that_a_right_is_missing_that_only_other_queues_need(rough: Pairing) -> None:
    rights = [right for right in documented_rights() if right != "+time"]
    rough.execute("ACL", "SETUSER", "shop", "on", ">secret", "~atlas:*", *rights)
    async with rough.app(transport_url=f"redis://shop:secret@127.0.0.1:{rough.server.port}/0") as app:
        assert not await is_well(app)


async def test_wrong_password_is_reported_and_jobs_still_run(rough: Pairing) -> None:
    app = rough.app(transport_url=f"redis://nobody:wrong@127.0.0.1:{rough.server.port}/0", **QUICK)
    done = noop(app)
    async with app, working(app):
        assert (await app.enqueue("work")).wake_up_delayed
        await until(lambda: bool(done), "the job")
        finding = await transport_of(app)
        assert (finding.level, "refuses us" in finding.text, "wrong" in finding.text) == ("error", True, False)


async def test_queues_show_what_the_transport_holds(rough: Pairing) -> None:
    async with rough.app() as app:
        store = await app.open_store()
        await put(store, new_job(), new_job(), new_job(queue="mail"))
        await claim(store, 1)
        assert {queue.name: queue.announced for queue in await app.queues()} == {"default": 1, "mail": 1}
        rough.server.kill()
        assert {queue.name: queue.announced for queue in await app.queues()} == {"default": None, "mail": None}


@pytest.mark.parametrize("silent", [False, True])
async def test_a_worker_stops_in_order_without_its_transport(rough: Pairing, silent: bool) -> None:
    with FaultProxy(rough.server.port) as proxy:
        app = rough.app(transport_url=f"redis://127.0.0.1:{proxy.port}/0", **QUICK)
        done = noop(app)
        async with app:
            async with working(app):
                await app.enqueue("work")
                await until(lambda: bool(done), "the job")
                if silent:
                    proxy.hold()
                else:
                    proxy.refuse()
            assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 1
