"""A process of the history checker: ``actor ROLE NAME SEED FOLDER UNTIL``. It makes random calls to the store.

Roles: ``client`` submits and reads, ``worker`` claims, settles and sweeps, also under leases that it has lost,
``product`` is the product's own worker, ``operator`` cancels, replays, deletes and prunes, ``finisher`` works until
every job has ended. ``HISTORY_CLOCK``: seconds by which the process's own clock is wrong. ``HISTORY_FAULT``: a fault of
``faults.py`` to build in.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.core.ids import new_id
from holdfast.core.lifecycle import Cancelled, Failed, Lost, Outcome, Released, Snoozed, Succeeded, decide
from holdfast.core.models import (
    TERMINAL,
    BulkResult,
    Job,
    JobFilter,
    JobState,
    NewJob,
    Options,
    Settled,
    Settlement,
    UniqueKey,
)
from holdfast.core.steps import NewStep
from holdfast.core.workers import LeaseStatus, WorkerHeartbeat
from holdfast.stores.base import ClaimRequest, Store
from tests.storm.history.faults import build_in
from tests.storm.history.items import (
    describe_changes,
    describe_claim,
    describe_heartbeat,
    describe_job,
    describe_leases,
    describe_new_jobs,
    describe_settled,
    describe_settlements,
    describe_submitted,
    span_us,
)
from tests.storm.history.product import RecordedApp, work
from tests.storm.history.records import Recorder

LEASE = timedelta(seconds=1)
LEASE_US = span_us(LEASE)
KEPT = timedelta(seconds=2)
"""Time for which ended jobs are kept."""
QUEUES = ("mail", "reports")
CLOCK_FILE = "clock"
"""Microseconds by which the host's clock was turned on, for the processes of a SQLite file."""
UNENDED = tuple(state for state in JobState if state not in TERMINAL)


class ShortBackoff:
    """Retries follow within moments."""

    priority = None

    def delay_after(self, failures: int, rng: random.Random) -> timedelta:
        return timedelta(milliseconds=rng.choice((0, 50, 300)))


class Actor(ABC):
    """Makes random calls of one role, one after the other."""

    def __init__(self, store: Store, recorder: Recorder, name: str, seed: int) -> None:
        self.store = store
        self.record = recorder.call
        self.name = name
        self.rng = random.Random(seed)
        self.is_done = False
        self._marks = 0

    async def open(self) -> bool:
        """Opens the store; returns whether that has succeeded."""

        async def opened() -> bool:
            await self.store.open()
            return True

        return bool(await self.record("open", [], opened(), lambda _: []))

    @abstractmethod
    async def act(self) -> None:
        """Makes one call, or a few."""

    def mark(self) -> str:
        """Returns a text that no other call writes."""
        self._marks += 1
        return f"{self.name}-{self._marks}"

    async def find(self, states: tuple[JobState, ...] = (), limit: int = 30) -> list[str]:
        """Reads the newest jobs in these states; returns their ids."""
        finding = self.store.query.find(JobFilter(states=states), limit=limit)
        page = await self.record("read", [], finding, lambda page: [describe_job(job.id, job) for job in page.jobs])
        return [] if page is None else [job.id for job in page.jobs]


class Client(Actor):
    """Submits jobs, some with keys, and reads them."""

    _known: Sequence[str] = ()

    async def act(self) -> None:
        if self._known and self.rng.random() < 0.3:
            ids = list(dict.fromkeys(self.rng.choices(self._known, k=4)))
            reading = self.store.query.summaries(ids)
            await self.record(
                "read", [{"job": each} for each in ids], reading, lambda jobs: [*map(describe_job, ids, jobs)]
            )
            return
        jobs = [self._draft_job() for _ in range(self.rng.randint(1, 3))]
        self._known = [*self._known, *(job.id for job in jobs)][-40:]
        submitting = self.store.queueing.submit(jobs)
        await self.record("submit", describe_new_jobs(jobs), submitting, lambda got: describe_submitted(jobs, got))
        await asyncio.sleep(self.rng.uniform(0, 0.06))

    def _draft_job(self) -> NewJob:
        rng = self.rng
        fields: dict[str, Any] = {}
        match rng.randrange(8):
            case 0:
                fields |= {"key": f"k{rng.randrange(30)}", "key_for": timedelta(hours=1)}
            case 1:
                fields["options"] = Options(unique=UniqueKey(f"\x1fu{rng.randrange(6)}", "active"))
            case 2:
                fields["delay"] = timedelta(milliseconds=rng.randint(50, 1500))
        fields |= {"queue": rng.choice(QUEUES), "priority": rng.choice((0, 0, 5)), "max_attempts": rng.randint(1, 4)}
        return NewJob(id=new_id(), task="history", payload="{}", **fields)


class Worker(Actor):
    """Claims jobs and settles them, sooner or later, or not at all; also tries what only a lease allows without one."""

    def __init__(self, store: Store, recorder: Recorder, name: str, seed: int) -> None:
        super().__init__(store, recorder, name, seed)
        self._held: list[Job] = []
        self._former: list[Job] = []  # jobs of leases that this process did not end, or that ended as a failed attempt

    async def act(self) -> None:
        actions = [
            self.claim,
            self.settle_held,
            self.beat,
            self.settle_former,
            self.save_step,
            self.sweep,
            self.oversleep,
        ]
        (action,) = self.rng.choices(actions, (30, 30, 12, 8, 5, 7, 2))
        await action()
        await asyncio.sleep(self.rng.uniform(0, 0.01))

    async def claim(self) -> None:
        """Claims jobs of both queues."""
        self._held += await self.take_jobs(self.rng.randint(1, 4), isolated=self.rng.random() < 0.2)

    async def take_jobs(self, limit: int, *, isolated: bool) -> list[Job]:
        """Claims up to so many jobs; returns those of which it knows."""
        request = ClaimRequest(self.name, dict.fromkeys(QUEUES, limit), limit, LEASE, isolated=isolated)
        claiming = self.store.queueing.claim(request)
        claim = await self.record("claim", [], claiming, lambda claim: describe_claim(claim, LEASE))
        return [] if claim is None else claim.jobs

    async def settle_held(self) -> None:
        """Settles a few held jobs, one by one."""
        self.rng.shuffle(self._held)
        jobs, self._held = self._held[:2], self._held[2:]
        for job in jobs:
            await self.settle_job(job, self._draw_outcome())

    def _draw_outcome(self) -> Outcome:
        mark = self.mark()
        failed = Failed(error=mark, retryable=self.rng.random() < 0.8)
        snoozed = Snoozed(timedelta(milliseconds=200))
        outcomes: list[Outcome] = [Succeeded(f'"{mark}"'), failed, snoozed, Released(error=mark), Cancelled()]
        return self.rng.choices(outcomes, (40, 35, 5, 15, 5))[0]

    async def settle_job(self, job: Job, outcome: Outcome) -> None:
        """Settles a job. Of a lost answer to another settlement of its lease a server store knows too little to
        tell it from this one, unless an attempt that failed is recorded: only such leases are tried again."""
        settlement = decide(job, outcome, ShortBackoff(), self.rng)
        answers = await self.settle([settlement])
        failed = settlement.state in (JobState.FAILED, JobState.DEAD)
        if answers is not None and (failed or not answers[0].accepted):
            self._former.append(job)

    async def settle(self, settlements: list[Settlement]) -> list[Settled] | None:
        """Settles and records it."""
        settling = self.store.queueing.settle(settlements)
        return await self.record("settle", describe_settlements(settlements), settling, describe_settled)

    async def settle_former(self) -> None:
        """Settles under a lease that has ended or ends now, without the name of its worker or with it."""
        if self._former:
            job = self.rng.choice(self._former[-20:])
            outcomes: tuple[Outcome, ...] = (Succeeded(f'"{self.mark()}"'), Failed(error=self.mark()))
            settlement = decide(job, self.rng.choice(outcomes), ShortBackoff(), self.rng)
            await self.settle([replace(settlement, worker=self.rng.choice((None, self.name)))])

    async def beat(self) -> None:
        """Sends a heartbeat for the held leases and for a few former ones."""
        jobs = {job.lease: job for job in [*self._held, *self._former[-3:]]}
        beat = WorkerHeartbeat(worker=self.name, host="host", pid=os.getpid(), queues=",".join(QUEUES), concurrency=4)
        leases = list(jobs)
        reply = await self.record(
            "heartbeat",
            describe_leases(leases, LEASE),
            self.store.queueing.heartbeat(beat, leases, lease_for=LEASE),
            lambda reply: describe_heartbeat(leases, reply),
        )
        for job, status in zip(jobs.values(), reply.statuses if reply else [], strict=False):
            if status is LeaseStatus.LOST and job in self._held:
                self._held.remove(job)
                self._former.append(job)

    async def save_step(self) -> None:
        """Saves a step under a lease, held or former."""
        if not (jobs := [*self._held, *self._former[-3:]]):
            return
        job = self.rng.choice(jobs)
        step = NewStep(job.lease, self.mark(), self.rng.randrange(1, 1 << 30), is_ordered=False)
        given = [{"job": job.id, "claims": job.claims, "mark": step.name}]
        saving = self.store.workflow.save_steps([step])
        await self.record("step", given, saving, lambda answers: [{"job": job.id, "accepted": answers[0]}])

    async def sweep(self) -> None:
        """Settles expired leases of any worker, as each sweep does."""
        finding = self.store.maintenance.find_expired_leases(limit=10)
        expired = await self.record("expired", [], finding, lambda jobs: [{"job": job.id} for job in jobs])
        if expired:
            await self.settle([decide(job, Lost(), ShortBackoff(), self.rng) for job in expired])

    async def oversleep(self) -> None:
        """Lets the leases end."""
        await asyncio.sleep(1.2 * LEASE.total_seconds())
        self._former += self._held
        self._held = []


class Finisher(Worker):
    """Sweeps, claims and succeeds, so that every job ends."""

    async def act(self) -> None:
        await self.sweep()
        await self.record("reannounce", [], self.store.maintenance.reannounce(), lambda _: [])
        for isolated in (False, True):
            for job in await self.take_jobs(50, isolated=isolated):
                await self.settle_job(job, Succeeded(f'"{self.mark()}"'))
        self.is_done = not await self.find(UNENDED, limit=1)
        await asyncio.sleep(0.05)


class Operator(Actor):
    """Cancels, replays, deletes and prunes; makes due jobs ready."""

    async def act(self) -> None:
        found = await self.find(self.rng.choice([(), UNENDED, tuple(TERMINAL)]))
        ids = self.rng.sample(found, min(len(found), self.rng.randint(1, 3)))
        admin, maintenance = self.store.admin, self.store.maintenance
        match self.rng.randrange(12):
            case 0 | 1 | 2:
                await self._change("cancel", ids, admin.cancel(ids))
            case 3 | 4 | 5:
                await self._change("replay", ids, admin.replay(ids, force=self.rng.random() < 0.5))
            case 6:
                await self._change("delete", ids[:1], admin.delete(ids[:1]))
            case 7 | 8:
                kept = {state.value: KEPT for state in TERMINAL}
                await self.record("prune", [], maintenance.prune(kept, limit=100), lambda count: [{"count": count}])
            case 9:
                await self.record("promote", [], maintenance.promote_due(limit=100), lambda count: [{"count": count}])
            case 10:
                await self.record("reannounce", [], maintenance.reannounce(), lambda count: [{"count": count}])
        await asyncio.sleep(self.rng.uniform(0, 0.1))

    async def _change(self, verb: str, ids: Sequence[str], call: Coroutine[Any, Any, BulkResult]) -> None:
        given = [{"job": job_id} for job_id in ids]
        await self.record(verb, given, call, lambda answer: describe_changes(ids, answer))


ROLES: dict[str, type[Actor]] = {"client": Client, "worker": Worker, "operator": Operator, "finisher": Finisher}


def turn_own_clock(seconds: float) -> None:
    """Turns the clock that this process reads; servers do not see that."""
    true, true_ns = time.time, time.time_ns
    time.time = lambda: true() + seconds
    time.time_ns = lambda: true_ns() + round(seconds * 1e9)


def shared_clock(folder: Path) -> Callable[[], int]:
    """Returns a function that reads how far the host's clock was turned on."""
    with (folder / CLOCK_FILE).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    return lambda: int.from_bytes(memory[:8], "little")


async def _run(role: str, name: str, seed: int, folder: Path, until: float) -> None:
    recorder = Recorder(folder / f"{name}.jsonl", shared_clock(folder))
    app = RecordedApp(os.environ["HOLDFAST_URL"], recorder)
    if role == "product":
        await work(app, name, seed, until)
        return
    store = app.plain_store()
    actor = ROLES[role](store, recorder, name, seed)
    is_open = False
    try:
        while time.monotonic() < until and not actor.is_done:
            if is_open:
                await actor.act()
            else:
                is_open = await actor.open()
    finally:
        await store.close()


if __name__ == "__main__":
    role, name, seed, folder, until = sys.argv[1:]
    turn_own_clock(float(os.environ.get("HISTORY_CLOCK", "0")))
    if fault := os.environ.get("HISTORY_FAULT"):
        build_in(fault)
    asyncio.run(_run(role, name, int(seed), Path(folder), float(until)))
