"""What the conformance suite says often: the verbs of a store with the defaults most tests want."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.resources import files
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core import models
from holdfast.core.clock import ManualClock
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.ids import new_id
from holdfast.core.lifecycle import Lost, decide
from holdfast.core.models import (
    TERMINAL,
    BulkResult,
    Claim,
    Job,
    JobEvent,
    JobState,
    Lease,
    NewJob,
    QueueInfo,
    Reason,
    Settled,
    Settlement,
)
from holdfast.core.workers import WorkerHeartbeat
from holdfast.stores.base import ClaimRequest, Store
from holdfast.stores.common.named_sql import Migration, load_migrations
from tests.support.keys import Keys

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
LEASE = timedelta(seconds=30)
WORKER = "worker-1"


class Opener:
    """Opens any number of store objects on one database, as so many processes would."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self._url = url
        self._clock = clock
        self._opened: list[Store] = []

    async def __call__(self) -> Store:
        store = self.unopened()
        await store.open()
        return store

    def unopened(self) -> Store:
        store = Holdfast(self._url, now=self._clock).new_store()
        self._opened.append(store)
        return store

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


class Submitted(models.Submitted, frozen=True):
    """An answer to a submission, whenever the job was stored."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, models.Submitted) and _but_instant(self) == _but_instant(other)

    def __hash__(self) -> int:
        return hash(self.job_id)


def _but_instant(answer: models.Submitted) -> tuple[object, ...]:
    return answer.job_id, answer.created, answer.changed, answer.wake_up_delayed


class _NoBackoff:
    """A lost lease asks no policy."""

    priority = None

    def delay_after(self, failures: int, rng: random.Random) -> timedelta:
        raise AssertionError("a lost lease must not ask for a delay")


def new_job(task: str = "work", **fields: Any) -> NewJob:
    """A job to submit, with an id of its own and an empty payload by default."""
    return NewJob(**{"id": new_id(), "task": task, "payload": "{}", **fields})


def after(*job_ids: str, on: Condition = Condition.SUCCESS, **fields: Any) -> NewJob:
    """A job that waits for others."""
    return new_job(after=tuple(Dependency(job_id, on) for job_id in job_ids), **fields)


async def put(store: Store, *jobs: NewJob) -> list[str]:
    """Submit the jobs (one plain job if none is given); their ids."""
    return [answer.job_id for answer in await store.queueing.submit(jobs or [new_job()])]


async def claim(store: Store, limit: int = 100, capacity: dict[str, int] | None = None, **options: Any) -> Claim:
    options = {"worker": WORKER, "lease_for": LEASE, **options}
    worker = options.pop("worker")
    return await store.queueing.claim(
        ClaimRequest(worker, {"default": limit} if capacity is None else capacity, limit=limit, **options)
    )


async def take(store: Store, limit: int = 100, capacity: dict[str, int] | None = None, **options: Any) -> list[Job]:
    """The jobs a claim brings."""
    return (await claim(store, limit, capacity, **options)).jobs


async def take_ids(store: Store, limit: int = 100, capacity: dict[str, int] | None = None, **options: Any) -> list[str]:
    return [job.id for job in await take(store, limit, capacity, **options)]


async def running(store: Store, **fields: Any) -> Job:
    """A job that has just been submitted and claimed."""
    job_id = fields.setdefault("id", new_id())
    await put(store, new_job(**fields))
    (job,) = await take(store, 1, {fields.get("queue", "default"): 1}, ids=[job_id])
    return job


async def queues(store: Store, max_count: int = 1000) -> list[QueueInfo]:
    """Every queue, looked at as the faces do, but at fewer jobs."""
    return await store.query.queues(recent=5 * MINUTE, max_count=max_count)


@asynccontextmanager
async def notified(store: Store) -> AsyncIterator[None]:
    """While entered, this process is notified of new jobs: it waits for some. The store has no ready job yet."""

    async def wait_forever() -> None:
        while True:
            await store.queueing.wait(["queue:nothing"], timeout=30)

    waiting = asyncio.create_task(wait_forever())
    async with asyncio.timeout(60):
        while not (await claim(store)).none_left:  # noqa: ASYNC110 - no event tells of this
            await asyncio.sleep(0.01)
    yield
    waiting.cancel()


async def until_claimed(store: Store) -> Job:
    """The job that is made ready."""
    async with asyncio.timeout(30):
        while not (jobs := await take(store, 1)):
            await store.queueing.wait(["queue:default"], timeout=0.05)
    return jobs[0]


def ending(job: Job | Lease, state: JobState = JobState.SUCCEEDED, **fields: Any) -> Settlement:
    """A settlement of ``job`` under the lease it was claimed with."""
    job_id = job.id if isinstance(job, Job) else job.job_id
    return Settlement(job_id=job_id, claims=job.claims, state=state, **fields)


def failing(job: Job, error: str = "boom", **fields: Any) -> Settlement:
    """A failed attempt that will be retried at once."""
    return ending(job, JobState.FAILED, **{"reason": Reason.ERROR, "error": error, "delay": timedelta(0), **fields})


async def settle(store: Store, job: Job | Lease, state: JobState = JobState.SUCCEEDED, **fields: Any) -> Settled:
    """Settle one job; the answer."""
    (answer,) = await store.queueing.settle([ending(job, state, **fields)])
    return answer


async def ended(store: Store, state: JobState, **fields: Any) -> str:
    """The id of a new job that has come to ``state`` the regular way: through a claim, or by cancellation."""
    job = await running(store, **fields)
    reason = {JobState.SUCCEEDED: None, JobState.CANCELLED: Reason.CANCELLED}.get(state, Reason.ERROR)
    error = None if state is JobState.SUCCEEDED else "boom"
    delay = None if state in TERMINAL else timedelta(hours=1)
    answer = await settle(store, job, state, reason=reason, error=error, delay=delay)
    assert answer.accepted
    return job.id


async def lose_all(store: Store, clock: ManualClock) -> dict[str, Settled]:
    """Let every lease run out and settle the lost attempts as a sweeper does; the answers by job."""
    clock.advance(LEASE.total_seconds() + 1)
    found = await store.maintenance.find_expired_leases(limit=1000)
    answers = await store.queueing.settle([decide(job, Lost(), _NoBackoff(), random.Random(0)) for job in found])
    assert all(answer.accepted for answer in answers)
    return {answer.job_id: answer for answer in answers}


async def lose(store: Store, clock: ManualClock, job: Job) -> Settled:
    """Let the job's lease run out and settle the lost attempt; the answer."""
    return (await lose_all(store, clock))[job.id]


async def end(store: Store, job: Job, state: JobState = JobState.SUCCEEDED) -> None:
    """Ends a running job in this state."""
    reason = None if state is JobState.SUCCEEDED else Reason.ERROR
    answer = await settle(store, job, state, reason=reason, error=reason and "boom")
    assert answer.accepted


async def everything_agrees(store: Store, keys: Keys) -> None:
    """Asserts that the structures of a namespace in Redis agree, and that a repair finds nothing to do."""
    assert list(keys.strays()) == []
    assert await store.health.repair() == []
    (finding,) = [each for each in await store.health.doctor() if each.name == "structures"]
    assert finding.level == "ok", finding


async def state_of(store: Store, job_id: str) -> JobState | None:
    job = await store.query.get(job_id)
    return None if job is None else job.state


async def states_of(store: Store, job_ids: Iterable[str]) -> list[JobState | None]:
    return [await state_of(store, job_id) for job_id in job_ids]


async def stored(store: Store, job_id: str) -> Job:
    """The job as it stands; it must be there."""
    job = await store.query.get(job_id)
    assert job is not None
    return job


async def until_done(operation: Callable[[], Any], rounds: int = 50) -> list[BulkResult]:
    """Repeat a bounded operation until it says there is no more; every answer. It must come to an end."""
    answers: list[BulkResult] = []
    for _ in range(rounds):
        answers.append(await operation())
        if not answers[-1].more:
            return answers
    raise AssertionError(f"still more after {rounds} rounds")


def changed_ids(answers: Sequence[BulkResult]) -> list[str]:
    return [job_id for answer in answers for job_id, _ in answer.changed]


def heartbeat(worker: str = WORKER, **fields: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        **{"worker": worker, "host": "here", "pid": 1, "queues": "default", "concurrency": 1, **fields}
    )


class EventReader:
    """Reads job events page by page from a cursor."""

    def __init__(self, store: Store, limit: int = 500, within: timedelta = timedelta(hours=1)) -> None:
        self.store, self.limit, self.max_age = store, limit, within
        self.cursor = ""
        self.gap = False

    async def begin(self) -> None:
        self.cursor = (await self.store.query.events(None, limit=self.limit, max_age=self.max_age)).cursor

    async def new_events(self) -> list[JobEvent]:
        """Returns the events since the last call."""
        found: list[JobEvent] = []
        while True:
            page = await self.store.query.events(self.cursor, limit=self.limit, max_age=self.max_age)
            self.cursor, self.gap = page.cursor, page.gap
            found += page.events
            if not page.more:
                return found


LATER_MIGRATIONS = (
    ("note", "-- expand.\nalter table {}job add column note text;\n"),
    ("notes", "-- expand.\ncreate table {}note (job_id text primary key, note text);\n"),
    ("fill", "-- expand.\ninsert into {}note select id, queue from {}job;\nupdate {}job set note = task;\n"),
)
"""Name and script of each later migration; the prefix of a table goes into the braces."""


def lengthen_migrations(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Gives every SQL store that is made from now on a longer chain of migrations; their names by store."""
    names: dict[str, list[str]] = {}
    for store, prefix in (("sqlite", "holdfast_"), ("postgres", "holdfast.")):
        known = load_migrations(files(f"holdfast.stores.{store}") / "migrations")
        later = [
            Migration(number, f"{number:04}_{name}", script.replace("{}", prefix))
            for number, (name, script) in enumerate(LATER_MIGRATIONS, len(known) + 1)
        ]
        names[store] = [each.name for each in (*known, *later)]
        monkeypatch.setattr(f"holdfast.stores.{store}.store.load_migrations", lambda _, chain=[*known, *later]: chain)
    return names
