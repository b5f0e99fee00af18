"""What streams of events may cost, and how they end; the same on every store."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Holdfast, JobFilter, JobState
from holdfast.core.lifecycle import Failed, Succeeded, decide
from holdfast.core.models import JobEvent, JobEvents
from holdfast.core.retry import Retry
from holdfast.stores.base import ClaimRequest
from holdfast.web import create_app, event_broadcast
from holdfast.web.event_broadcast import EventBroadcaster, SeenEvents, Subscriber
from tests.support.plain_http import PLAIN
from tests.web.following import PATIENCE, end, events, run, served
from tests.web.keyed import LOSSES, Keys, loses

pytestmark = pytest.mark.timeout(300)


def ending(number: int) -> JobEvent:
    return JobEvent(
        job_id=f"job-{number}",
        task="work",
        queue="default",
        state=JobState.SUCCEEDED,
        claims=1,
        attempt=1,
        worker="w",
        started_at_us=1,
        ended_at_us=2,
        reason=None,
        error=None,
    )


def piece(*numbers: int) -> JobEvents:
    return JobEvents(events=[ending(number) for number in numbers], cursor="1.1", public_cursor="1.1")


# ── who follows ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_repeated_event_is_reported_once() -> None:
    seen = SeenEvents()
    assert seen.filter_new([ending(1), ending(2)]) == [ending(1), ending(2)]
    assert seen.filter_new([ending(2), ending(3)]) == [ending(3)]


def test_subscriber_far_behind_is_late_and_keeps_nothing() -> None:
    async def body() -> None:
        follower = Subscriber()
        for number in range(1000):
            follower.put(piece(number))
        assert follower.is_late
        assert await follower.next(PATIENCE) is None

    run(body)


def test_subscriber_in_time_receives_everything_in_order() -> None:
    async def body() -> None:
        follower = Subscriber()
        for number in range(1000):
            follower.put(piece(number))
            assert await follower.next(PATIENCE) == piece(number)
        assert await follower.next(0.01) is None
        assert not follower.is_late

    run(body)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_streams_share_one_look_at_the_store(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[EventBroadcaster] = []
    look = EventBroadcaster._read_page

    async def counted(each: EventBroadcaster) -> None:
        looks.append(each)
        await look(each)

    monkeypatch.setattr(EventBroadcaster, "_read_page", counted)

    async def body() -> None:
        async with served(home) as (app, address), asyncio.TaskGroup() as group:
            ready = asyncio.Barrier(6)

            async def follow() -> None:
                async with events(address) as stream:
                    await stream.begun()
                    await ready.wait()
                    assert await stream.kinds(1) == [("succeeded", job_id)]

            job_id = (await app.enqueue("work", {})).id
            for _ in range(5):
                group.create_task(follow())
            await ready.wait()
            await end(app, job_id, Succeeded())

    run(body)
    assert len(set(looks)) == 1


@pytest.mark.parametrize("limit", ["event_streams", "event_streams_per_key"])
def test_too_many_streams_are_refused(home: str, limit: str) -> None:
    async def body() -> None:
        async with served(home, **{limit: 2}) as (_, address):
            async with events(address) as first, events(address) as second:
                await first.begun()
                await second.begun()
                async with events(address) as third:
                    assert (third.answer.status_code, third.answer.headers["retry-after"]) == (429, "10")
                    await third.answer.aread()
                    assert third.answer.json()["code"] == "too_many_streams"
                    assert f"the setting {limit} allows" in third.answer.json()["detail"]
            async with asyncio.timeout(PATIENCE):  # a place is free once the server has seen that they left
                status = 429
                while status == 429:
                    async with events(address) as again:
                        status = again.answer.status_code
            assert status == 200

    run(body)


@pytest.mark.parametrize("last", ["no", "1.2.3.4", "9" * 7000, "-1.-1", "é"])
def test_an_id_that_was_never_given_is_refused(home: str, last: str) -> None:
    async def body() -> None:
        async with served(home) as (_, address), httpx.AsyncClient(timeout=PATIENCE, verify=PLAIN) as client:
            answer = await client.get(f"{address}/v1/events", headers={"Last-Event-ID": last.encode()})
            assert (answer.status_code, answer.json()["field"]) == (422, "Last-Event-ID")

    run(body)


def test_subscriber_away_too_long_receives_a_gap(home: str) -> None:
    async def body() -> None:
        async with served(home) as (app, address), events(address, "1.1") as stream:
            ((kind, _),) = await stream.take(1)
            job_id = (await app.enqueue("work", {})).id
            await end(app, job_id, Succeeded())
            assert (kind, await stream.kinds(1)) == ("gap", [("succeeded", job_id)])

    run(body)


def test_forged_event_id_takes_nothing_from_others(home: str) -> None:
    async def body() -> None:
        async with served(home) as (app, address):
            made_up = f"{await (await app.open_store()).health.server_time_us()}.{10**17 - 1}"
            async with events(address, made_up) as first:
                await first.begun()
                await asyncio.sleep(0.1)  # until it is the first to get the event
                async with events(address) as second:
                    await second.begun()
                    job_id = (await app.enqueue("work", {})).id
                    await end(app, job_id, Succeeded())
                    async with asyncio.timeout(60):
                        assert await second.kinds(1) == [("succeeded", job_id)]

    run(body)


def test_catching_up_streams_read_one_at_a_time(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many streams of one key there are: the store has other work."""

    async def body() -> None:
        async with Holdfast(home) as app:
            store = await app.open_store()
            endings, at_once = store.query.events, [0, 0]  # now, and at most

            async def counted(*given: Any, **named: Any) -> JobEvents:
                at_once[:] = at_once[0] + 1, max(at_once[0] + 1, at_once[1])
                try:
                    return await endings(*given, **named)
                finally:
                    at_once[0] -= 1

            monkeypatch.setattr(store.query, "events", counted)
            feed_here = EventBroadcaster(app)
            await asyncio.gather(*[feed_here.read_missed("key", None) for _ in range(5)])
            assert at_once == [0, 1]

    run(body)


def test_a_stream_ends_after_its_time_though_it_is_behind(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_broadcast, "_PAGE_SIZE", 1)

    async def body() -> None:
        async with served(home, event_stream_for="1ms") as (app, address):
            async with events(address) as stream:
                await stream.ended()
            handles = await app.enqueue_many([app.draft_job("work", {}) for _ in range(100)])
            await app.cancel(JobFilter())
            async with events(address, stream.id) as again:
                assert len(await again.take(len(handles))) < len(handles)

    run(body)


def test_a_stream_may_be_about_some_jobs(home: str) -> None:
    async def body() -> None:
        async with served(home) as (app, address):
            ids = [(await app.enqueue("work", {})).id for _ in range(3)]
            async with events(address, job_id=[ids[1], ids[2]]) as stream:
                await stream.begun()
                for job_id in ids:
                    await end(app, job_id, Succeeded())
                assert await stream.kinds(2) == [("succeeded", ids[1]), ("succeeded", ids[2])]

    run(body)


def test_a_long_absence_is_made_up_for(home: str) -> None:
    """More endings than one piece holds, and than a stream may be behind."""

    async def body() -> None:
        async with served(home) as (app, address):
            async with events(address) as stream:
                await stream.begun()
            handles = await app.enqueue_many([app.draft_job("work", {}) for _ in range(1200)])
            while (await app.cancel(JobFilter(), limit=500)).more:
                pass
            async with events(address, stream.id) as again:
                assert sorted(await again.kinds(1200)) == sorted(("cancelled", handle.id) for handle in handles)

    run(body)


def test_a_head_request_is_answered_at_once(home: str) -> None:
    async def body() -> None:
        async with served(home) as (_, address), httpx.AsyncClient(timeout=PATIENCE, verify=PLAIN) as client:
            answer = await client.head(f"{address}/v1/events")
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")

    run(body)


# ── how they end ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_server_that_stops_ends_its_streams_at_once(home: str) -> None:
    async def body() -> None:
        stream_over = asyncio.Event()

        async def follow(address: str, begun: asyncio.Event) -> None:
            async with events(address) as stream:
                await stream.begun()
                begun.set()
                await stream.ended()
                stream_over.set()

        async with asyncio.timeout(PATIENCE):
            async with served(home, grace="10m") as (_, address):
                begun = asyncio.Event()
                following = asyncio.create_task(follow(address, begun))
                await begun.wait()
            await following
            assert stream_over.is_set()

    run(body)


def test_subscriber_that_does_not_read_is_disconnected(home: str) -> None:
    async def body() -> None:
        async with served(home, event_streams=1, body_timeout="200ms") as (app, address):
            host, _, port = address.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"id: ")
            writer.transport.pause_reading()
            await _make_dead_letters(app, 2500)
            async with asyncio.timeout(PATIENCE):
                status = 429
                while status == 429:
                    async with events(address) as stream:
                        status = stream.answer.status_code
                    await asyncio.sleep(0.05)
            assert status == 200
            writer.close()

    run(body)


async def _make_dead_letters(app: Holdfast, number: int) -> None:
    """With errors as long as they may be."""
    store = await app.open_store()
    await app.enqueue_many([app.draft_job("work", {}) for _ in range(number)])
    failed = Failed(error="x" * 4096, retryable=False)
    while jobs := (
        await store.queueing.claim(ClaimRequest("w", {"*": 500}, limit=500, lease_for=timedelta(minutes=1)))
    ).jobs:
        await store.queueing.settle([decide(job, failed, Retry.fixed(1), random.Random(0)) for job in jobs])


def test_a_stream_that_never_began_leaves_its_place(home: str) -> None:
    """The client went before its answer did."""

    async def body() -> None:
        async with Holdfast(home, event_streams=1) as app:
            api, statuses = create_app(app), []

            async def send(message: dict[str, Any]) -> None:
                statuses.append(message["status"])
                raise ConnectionResetError

            for _ in range(3):
                with pytest.raises(ConnectionResetError):
                    await api(_SCOPE, asyncio.Event().wait, send)
            assert statuses == [200, 200, 200]

    run(body)


_SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/v1/events",
    "headers": [(b"host", b"localhost")],
    "client": ("127.0.0.1", 1),
}


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_limited_key_receives_only_events_of_its_queues(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    mail, nothing = keys.make("read", queues=("mail",)), keys.make("submit")

    async def body() -> None:
        async with served(home, keys_file=str(keys.path)) as (app, address):
            for token, query, status in ((nothing, {}, 403), (mail, {"queue": "other"}, 403), (None, {}, 401)):
                async with events(address, token=token, **query) as refused:
                    assert refused.answer.status_code == status
            async with events(address, token=mail) as stream:
                await stream.begun()
                ids = [(await app.enqueue("work", {}, queue=queue)).id for queue in ("other", "mail")]
                for job_id in ids:
                    await end(app, job_id, Succeeded())
                assert await stream.kinds(1) == [("succeeded", ids[1])]

    run(body)


def test_no_id_says_which_jobs_there_are_in_other_queues(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_broadcast, "_PAGE_SIZE", 2)
    keys = Keys(tmp_path)
    mail = keys.make("read", queues=("mail",))

    async def body() -> None:
        async with served(home, keys_file=str(keys.path)) as (app, address):
            async with events(address, token=mail) as stream:
                await stream.begun()
            others = [(await app.enqueue("work", {}, queue="other")).id for _ in range(9)]
            await app.cancel(JobFilter())
            mine = (await app.enqueue("work", {}, queue="mail")).id
            await app.cancel(mine)
            seen = []
            async with events(address, stream.id, token=mail) as again, asyncio.timeout(PATIENCE):
                async for block in again.blocks():
                    seen.append(block)
                    if "data" in block:
                        break
            assert len(seen) >= 5
            assert mine in seen[-1]["data"]
            assert not [(block, job_id) for block in seen for job_id in others if job_id in str(block)]

    run(body)


@loses
def test_a_stream_ends_once_its_key_has_lost_rights(home: str, tmp_path: Path, loss: str) -> None:
    keys = Keys(tmp_path)
    token = keys.make("read")

    async def body() -> None:
        async with served(home, keys_file=str(keys.path)) as (_, address), events(address, token=token) as stream:
            await stream.begun()
            keys.change(token, LOSSES[loss])
            await stream.ended()

    run(body)


def test_errors_are_omitted_if_settings_redact_anything(home: str) -> None:
    async def body() -> None:
        async with served(home, redacted="payload.password") as (app, address), events(address) as stream:
            await stream.begun()
            job_id = (await app.enqueue("work", {"password": "canary"})).id
            await end(app, job_id, Failed(error="canary is wrong", retryable=False))
            ((_, data),) = await stream.take(1)
            assert (data["id"], data["error"]) == (job_id, None)

    run(body)


def test_a_stream_ends_after_its_time(home: str) -> None:
    async def body() -> None:
        async with served(home, event_stream_for="50ms") as (_, address), events(address) as stream:
            await stream.ended()
            assert stream.id

    run(body)
