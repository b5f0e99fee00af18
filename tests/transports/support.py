"""What tests of transports say often."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from holdfast import Context, Holdfast
from holdfast.core.events import KINDS, Event
from holdfast.core.ids import new_id
from holdfast.core.models import Claim, JobFilter, JobState, NewJob, Settlement
from holdfast.stores.base import ClaimRequest, Store
from holdfast.worker.worker import Worker
from tests.support.redis import Redis

RETRY_FOR = 90.0
"""Seconds for what takes a moment on an idle machine."""


class Pairing:
    """A schema, a Redis, and the settings that join them."""

    def __init__(self, url: str, server: Redis, **settings: str) -> None:
        self.url = url
        self.server = server
        self._settings = settings

    def app(self, **settings: Any) -> Holdfast:
        """An application on this pairing."""
        return Holdfast(self.url, **{**self._settings, **settings})

    @property
    def is_stream(self) -> bool:
        return self.app().settings.transport == "redis_stream"

    def key(self, queue: str = "default") -> str:
        """The key of a queue's ready ids."""
        key = self.app().settings.transport_key
        return key if queue == "default" else f"{key}:{queue}"

    def dead_key(self, queue: str = "default") -> str:
        """The key of a queue's dead letters."""
        key = self.app().settings.transport_dead_key
        return key if queue == "default" else f"{key}:{queue}"

    def execute(self, *words: Any) -> Any:
        return self.server.execute(*words)

    def waiting(self, queue: str = "default") -> list[str]:
        """The ids that are to be delivered, the next first."""
        if not self.is_stream:
            return [each.decode() for each in reversed(self.execute("LRANGE", self.key(queue), 0, -1))]
        read = {each for each, *_ in self.pending(queue)}
        return [fields[b"id"].decode() for entry, fields in self.entries(self.key(queue)) if entry not in read]

    def entries(self, key: str) -> list[Any]:
        """What a stream holds."""
        with self.server.client() as client:
            return list(client.xrange(key))

    def pending(self, queue: str = "default") -> list[Any]:
        """Entries of a stream that were delivered and not acknowledged: id, consumer, idle milliseconds."""
        with self.server.client() as client:
            if not client.exists(self.key(queue)) or not client.xinfo_groups(self.key(queue)):
                return []
            found = client.xpending_range(self.key(queue), "holdfast", "-", "+", 10_000)
            return [(each["message_id"], each["consumer"], each["time_since_delivered"]) for each in found]

    def unacknowledged(self, queue: str = "default") -> int:
        """Deliveries of a stream whose jobs are not settled."""
        return len(self.pending(queue)) if self.is_stream else 0

    def push(self, *ids: str, queue: str = "default") -> None:
        """As another program would."""
        for each in ids:
            if self.is_stream:
                self.execute("XADD", self.key(queue), "*", "id", each)
            else:
                self.execute("LPUSH", self.key(queue), each)

    def lose(self, *ids: str) -> None:
        """These ids of the queue ``default``, wherever they stand."""
        for each in [] if self.is_stream else ids:
            self.execute("LREM", self.key(), 0, each)
        for entry, fields in self.entries(self.key()) if self.is_stream else []:
            if fields[b"id"].decode() in ids:
                self.execute("XDEL", self.key(), entry)

    def dead(self, queue: str = "default") -> list[str]:
        """The ids in a queue's list, or stream, of dead letters."""
        if self.is_stream:
            return [fields[b"id"].decode() for _, fields in self.entries(self.dead_key(queue))]
        return [each.decode() for each in self.execute("LRANGE", self.dead_key(queue), 0, -1)]

    def forget(self) -> None:
        """Lose every key of this pairing, and no other's."""
        for base in (self.key(), self.dead_key()):
            for key in self.execute("KEYS", base.replace("{", "\\{") + "*"):
                self.execute("DEL", key)


class Recorder:
    """Every event of an application."""

    def __init__(self, app: Holdfast) -> None:
        self.events: list[Event] = []
        app.events.subscribe(self.events.append, *KINDS)

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]


def counting(app: Holdfast) -> Counter[str]:
    """Registers the task ``work``; returns how often each job has run."""
    runs: Counter[str] = Counter()

    @app.task("work")
    async def work(ctx: Context) -> None:
        runs[ctx.id] += 1

    return runs


def new_job(**fields: Any) -> NewJob:
    return NewJob(**{"id": new_id(), "task": "work", "payload": "{}", **fields})


async def put(store: Store, *jobs: NewJob) -> list[str]:
    return [answer.job_id for answer in await store.queueing.submit(jobs or [new_job()])]


async def claim(store: Store, limit: int = 10, capacity: dict[str, int] | None = None, **options: Any) -> Claim:
    options = {"worker": "w", "lease_for": timedelta(seconds=30), "max_must_start": 5, **options}
    return await store.queueing.claim(
        ClaimRequest(options.pop("worker"), capacity or {"default": limit}, limit=limit, **options)
    )


async def take(store: Store, limit: int = 10, **options: Any) -> list[str]:
    return [job.id for job in (await claim(store, limit, **options)).jobs]


def ending(job: Any, state: JobState = JobState.SUCCEEDED, **fields: Any) -> Settlement:
    return Settlement(job_id=job.id, claims=job.claims, state=state, **fields)


async def until(condition: Callable[[], bool], what: str, seconds: float = RETRY_FOR) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what} did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def until_true(look: Callable[[], Awaitable[bool]], what: str) -> None:
    """Look until it is so."""
    began = time.monotonic()
    while not await look():
        assert time.monotonic() - began < RETRY_FOR, f"{what} did not happen in time"
        await asyncio.sleep(0.05)


async def until_succeeded(app: Holdfast, number: int) -> None:
    """Wait until so many jobs have succeeded."""

    async def succeeded() -> bool:
        return await app.count(JobFilter(states=(JobState.SUCCEEDED,))) >= number

    await until_true(succeeded, f"{number} successes")


@asynccontextmanager
async def working(*apps: Holdfast) -> AsyncIterator[Sequence[Worker]]:
    """One worker for each application, stopped in the end."""
    workers = [Worker(app) for app in apps]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield workers
    finally:
        for worker in workers:
            if not worker.shared.stopping.is_set():
                worker.stop()
        await asyncio.gather(*running)


QUICK = {"sweep": "300ms", "poll": "300ms"}
"""Intervals a test can wait for."""
