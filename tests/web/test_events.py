"""Events: endings and failed attempts, as a client hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast.core.lifecycle import Failed, Succeeded
from holdfast.web.event_broadcast import EventBroadcaster, Subscriber
from tests.web.following import end, events, run, served

pytestmark = pytest.mark.timeout(300)


def test_every_end_is_streamed_to_its_subscribers_and_after_reconnect(home: str) -> None:
    async def body() -> None:
        async with served(home) as (app, address):
            async with (
                events(address) as everything,
                events(address, event=["dead", "cancelled"], queue="mail", task="send") as some,
            ):
                await everything.begun()
                await some.begun()
                ids = [(await app.enqueue("send", {}, queue="mail", max_attempts=2)).id for _ in range(4)]
                other = (await app.enqueue("send", {}, queue="other")).id
                await end(app, ids[0], Succeeded())
                await end(app, ids[1], Failed(error="first"))
                await end(app, ids[2], Failed(error="final", retryable=False))
                await app.cancel(ids[3])
                await end(app, other, Failed(error="final", retryable=False))

                reported = await everything.take(5)
                assert sorted((kind, data["id"]) for kind, data in reported) == sorted(
                    [
                        ("succeeded", ids[0]),
                        ("failed", ids[1]),
                        ("dead", ids[2]),
                        ("cancelled", ids[3]),
                        ("dead", other),
                    ]
                )
                (failed,) = [data for kind, data in reported if kind == "failed"]
                assert (failed["state"], failed["attempt"], failed["error"]) == ("failed", 1, "first")
                assert (failed["task"], failed["queue"], failed["worker"]) == ("send", "mail", "worker-1")
                assert await some.kinds(2) == [("dead", ids[2]), ("cancelled", ids[3])]

            missed = [(await app.enqueue("work", {})).id for _ in range(3)]
            for job_id in missed:
                await end(app, job_id, Succeeded())
            async with events(address, everything.id) as again:
                repeated = []
                while len(repeated) < 3:  # what ended within the second before the break may come again
                    repeated += [each for each in await again.kinds(1) if each[1] not in [*ids, other]]
                assert repeated == [("succeeded", job_id) for job_id in missed]

    run(body)


def test_job_ended_before_the_first_read_is_streamed(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that look takes to begin: the store may be slow just then."""
    follow = EventBroadcaster.subscribe_from
    ended: list[str] = []

    async def body() -> None:
        async with served(home) as (app, address):

            @asynccontextmanager
            async def late(feed: EventBroadcaster) -> AsyncIterator[Subscriber]:
                ended.append((await app.enqueue("work", {})).id)
                await end(app, ended[0], Succeeded())
                await asyncio.sleep(1.1)  # some stores read the last second again anyhow
                async with follow(feed) as follower:
                    yield follower

            monkeypatch.setattr(EventBroadcaster, "subscribe_from", late)
            async with events(address) as stream:
                assert await stream.kinds(1) == [("succeeded", ended[0])]

    run(body)
