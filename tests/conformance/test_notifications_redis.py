"""Notifications of Redis as other processes receive them: each topic of a script once, in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.stores.base import Store
from tests.conformance.support import failing, new_job, put, take
from tests.support.keys import Keys

_PATIENCE = 60.0


@contextmanager
def listening(keys: Keys, channel: str) -> Iterator[Callable[[], list[str]]]:
    """Subscribes to a channel; yields what waits for the next message, and returns its topics."""

    def next_topics() -> list[str]:
        message = listener.get_message(timeout=_PATIENCE)
        assert message is not None
        assert message["type"] == "message"
        return message["data"].split("\n")[1:]

    with keys.client.pubsub() as listener:
        listener.subscribe(keys.prefix + channel)
        assert listener.get_message(timeout=_PATIENCE)["type"] == "subscribe"
        yield next_topics


async def test_worker_is_notified_once_of_two_cancellations(store: Store, keys: Keys) -> None:
    ids = await put(store, new_job(), new_job())
    await take(store, worker="w")
    with listening(keys, "commands") as next_topics:
        await store.admin.cancel(ids)
        assert await asyncio.to_thread(next_topics) == ["worker:w"]


async def test_each_queue_is_notified_once_of_retries(store: Store, keys: Keys) -> None:
    await put(store, *[new_job(queue=queue, max_attempts=3) for queue in ("a", "b", "b")])
    jobs = await take(store, 3, {"a": 1, "b": 2})
    with listening(keys, "ready_jobs") as next_topics:
        await store.queueing.settle([failing(job) for job in jobs])
        assert sorted(await asyncio.to_thread(next_topics)) == ["queue:a", "queue:b"]
