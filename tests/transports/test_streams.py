"""What a consumer group has beyond a list: deliveries that are known, taken over, acknowledged and trimmed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta

import psycopg
import pytest

from holdfast import Context
from holdfast.core.events import MalformedMessage
from holdfast.core.models import JobState, Lease, Reason
from holdfast.core.workers import WorkerHeartbeat
from holdfast.transports.contract import Delivery
from holdfast.transports.redis import RedisStream
from tests.support.redis import FLOORS, MAIN, Redis
from tests.transports.support import (
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

GROUP = "holdfast"
PULSE = WorkerHeartbeat(worker="w", host="h", pid=1, queues="*", concurrency=1)


@pytest.fixture(params=[MAIN, *FLOORS])
def stream(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[Pairing]:
    """A stream on a Redis of the test's own: versions answer differently."""
    with Redis(request.param) as server:
        yield Pairing(
            postgres_url,
            server,
            transport="redis_stream",
            transport_url=server.url(),
            transport_key="s",
            transport_dead_key="dead",
            lease="300ms",
        )


def consumers(stream: Pairing) -> dict[str, int]:
    """What each consumer has in hand."""
    with stream.server.client() as client:
        return {each["name"].decode(): each["pending"] for each in client.xinfo_consumers("s", GROUP)}


async def test_each_process_is_one_consumer_of_the_group(stream: Pairing) -> None:
    async with stream.app() as one, stream.app() as two:
        await put(await one.open_store(), *[new_job() for _ in range(4)])
        for app in (one, two):
            await claim(await app.open_store(), 2)
        assert sorted(consumers(stream).values()) == [2, 2]
        assert stream.execute("TYPE", "s") == b"stream"


async def test_what_a_dead_consumer_had_in_hand_goes_to_others(stream: Pairing) -> None:
    """It died with two ids it had not claimed yet; and another job runs on."""
    async with stream.app() as app, stream.app() as other:
        store = await app.open_store()
        ids = await put(store, new_job(), new_job(), new_job())
        assert await take(store, 1, lease_for=timedelta(minutes=5)) == ids[:1]
        stream.execute("XREADGROUP", "GROUP", GROUP, "dead", "COUNT", 9, "STREAMS", "s", ">")
        await asyncio.sleep(0.5)
        sweeper = await other.open_store()

        await sweeper.maintenance.reannounce()

        assert sorted(await take(sweeper)) == sorted(ids[1:])
        assert "dead" not in {name for name, number in consumers(stream).items() if number}


async def test_a_long_job_s_delivery_stays_its_worker_s(stream: Pairing) -> None:
    async with stream.app(lease="4s") as app, stream.app(lease="4s") as other:
        store, sweeper = await app.open_store(), await other.open_store()
        await put(store)
        (job,) = (await claim(store, lease_for=timedelta(minutes=5))).jobs
        (holder,) = consumers(stream)
        for _ in range(25):
            await store.queueing.heartbeat(PULSE, [Lease(job.id, job.claims)], lease_for=timedelta(minutes=5))
            await asyncio.sleep(0.2)
            await sweeper.maintenance.reannounce()
        assert {name for name, number in consumers(stream).items() if number} == {holder}
        await store.queueing.settle([ending(job)])
        await until(lambda: not stream.pending(), "the acknowledgement")


async def test_consumers_that_are_silent_and_have_nothing_are_forgotten(stream: Pairing) -> None:
    async with stream.app() as app:
        store = await app.open_store()
        await put(store)
        stream.execute("XGROUP", "CREATE", "s", GROUP, "0")
        stream.execute("XGROUP", "CREATECONSUMER", "s", GROUP, "old")
        await asyncio.sleep(1.1)

        await store.maintenance.reannounce()

        assert "old" not in consumers(stream)


async def test_what_others_have_not_read_is_not_trimmed(stream: Pairing) -> None:
    """A client acknowledged without deleting. What is behind every group goes, and nothing else."""
    async with stream.app() as app:
        store = await app.open_store()
        ids = await put(store, *[new_job() for _ in range(6)])
        for group, read in (("audit", 2), (GROUP, 4)):
            stream.execute("XGROUP", "CREATE", "s", group, "0")
            with stream.server.client() as client:
                ((_, entries),) = client.xreadgroup(group, "c", {"s": ">"}, count=read)
                client.xack("s", group, *[entry for entry, _ in entries])

        await store.maintenance.reannounce()

        assert [fields[b"id"].decode() for _, fields in stream.entries("s")] == ids[2:]
        assert await take(store) == ids[4:]


async def test_entries_that_were_deleted_under_a_consumer_are_forgotten(stream: Pairing) -> None:
    async with stream.app() as app:
        store = await app.open_store()
        await put(store, new_job(), new_job())
        with stream.server.client() as client:
            client.xgroup_create("s", GROUP, "0")
            client.xreadgroup(GROUP, "dead", {"s": ">"})
            client.xdel("s", *[entry for entry, _ in client.xrange("s")])
        await asyncio.sleep(0.5)

        await store.maintenance.reannounce()

        assert stream.pending() == []


async def test_a_group_that_was_destroyed_is_made_again(stream: Pairing) -> None:
    done: list[int] = []
    app = stream.app(sweep="300ms", poll="10s")

    @app.task("work")
    async def work() -> None:
        done.append(1)

    async with app, working(app):
        await app.enqueue("work")
        await until(lambda: len(done) == 1, "the first job")
        stream.execute("XGROUP", "DESTROY", "s", GROUP)
        await app.enqueue("work")
        await until(lambda: len(done) == 2, "the second")
        stream.execute("DEL", "s")
        await app.enqueue("work")
        await until(lambda: len(done) == 3, "the third")


async def test_malformed_messages_are_kept_in_a_stream_aside(stream: Pairing) -> None:
    async with stream.app() as app:
        events = Recorder(app)
        store = await app.open_store()
        stream.push("hello", "x" * 1_000_000)
        stream.execute("XADD", "s", "*", "event", "user.created", "body", b"\xff")
        stream.execute("XADD", "s", "*", *[word for n in range(500) for word in (f"name{n}", "value")])
        assert await take(store, 100) == []

        kept = [fields for _, fields in stream.entries("s@malformed")]
        reports = events.of(MalformedMessage)
        assert [each.pop(b"entry").decode() for each in kept] == [each.entry for each in reports]
        assert [each.pop(b"queue") for each in kept] == [b"default"] * 4
        assert kept == [
            {b"id": b"hello"},
            {b"id": b"x" * 65534},  # 64 KiB with the name
            {b"event": b"user.created", b"body": b"\xff"},
            {f"name{n}".encode(): b"value" for n in range(100)},
        ]
        assert {each.kept_in for each in reports} == {"s@malformed"}
        assert (stream.entries("s"), stream.pending()) == ([], [])


async def test_stream_of_malformed_messages_is_capped(stream: Pairing) -> None:
    async with stream.app() as app:
        stream.push(*[f"message {n}" for n in range(250)])
        assert await take(await app.open_store(), 500) == []

        kept = [fields[b"id"].decode() for _, fields in stream.entries("s@malformed")]
        assert kept == [f"message {n}" for n in range(150, 250)]


async def test_malformed_message_that_is_deleted_meanwhile_holds_up_no_other(
    stream: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aside = RedisStream.set_aside

    async def set_aside_late(transport: RedisStream, deliveries: Sequence[Delivery]) -> str:
        stream.execute("XDEL", "s", deliveries[0].receipt)
        return await set_aside(transport, deliveries)

    async with stream.app() as app:
        monkeypatch.setattr(RedisStream, "set_aside", set_aside_late)
        stream.push("first", "second")
        (job_id,) = await put(await app.open_store())

        assert await take(await app.open_store()) == [job_id]

        assert [fields[b"id"] for _, fields in stream.entries("s@malformed")] == [b"second"]
        assert [entry for entry, *_ in stream.pending()] == [entry for entry, _ in stream.entries("s")]


async def test_malformed_message_of_a_dead_consumer_is_reported(stream: Pairing) -> None:
    async with stream.app() as app:
        events = Recorder(app)
        store = await app.open_store()
        stream.push("hello")
        with stream.server.client() as client:
            client.xgroup_create("s", GROUP, "0")
            client.xreadgroup(GROUP, "dead", {"s": ">"})
        await asyncio.sleep(0.5)

        await store.maintenance.reannounce()

        assert [each.text for each in events.of(MalformedMessage)] == ["hello"]
        assert (stream.entries("s"), stream.pending()) == ([], [])
        assert len(stream.entries("s@malformed")) == 1


async def test_consumer_group_on_the_dead_letters_keeps_working(stream: Pairing) -> None:
    async with stream.app() as app:
        store = await app.open_store()
        ids = await put(store, new_job(), new_job())
        jobs = (await claim(store)).jobs
        await store.queueing.settle(
            [ending(job, JobState.DEAD, reason=Reason.MAX_ATTEMPTS, error="boom") for job in jobs]
        )
        stream.execute("XGROUP", "CREATE", "dead", "mailer", "0")
        await store.admin.replay([ids[0]])

        with stream.server.client() as client:
            ((_, entries),) = client.xreadgroup("mailer", "c", {"dead": ">"})
        assert [fields[b"id"].decode() for _, fields in entries] == [ids[1]]


async def test_a_handler_that_completes_its_job_itself_leaves_no_entry(stream: Pairing) -> None:
    app = stream.app(lease="30s")

    @app.task("work")
    async def work(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(stream.url.partition("?")[0]) as connection:
            await ctx.complete(connection)

    async with app, working(app):
        await app.enqueue("work")
        await until_succeeded(app, 1)
        await until(lambda: not stream.pending(), "the acknowledgement")
