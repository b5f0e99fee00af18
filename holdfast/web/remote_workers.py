"""The workers over HTTP that one process serves: their claims, their state, and sweeps for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from contextvars import Context
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import HoldfastError
from holdfast.core.events import Event, JobDead, JobFailedEvent, JobSucceeded
from holdfast.core.lifecycle import Failed, Outcome, Released, decide
from holdfast.core.metric_events import SettlementsWritten
from holdfast.core.models import Job, JobState, Lease, Settled, Settlement
from holdfast.core.workers import HeartbeatReply, WorkerCommand, WorkerHeartbeat
from holdfast.worker.context import WorkerState
from holdfast.worker.policy import Deferrals, backoff_of
from holdfast.worker.reporting import dlq_key_of, emit_lease_lost, emit_success, emit_unsuccessful, measure_settled
from holdfast.worker.sweeper import Sweeper

_MAX_KNOWN = 10_000  # workers kept in memory
_TIMED: tuple[type[Event], ...] = (SettlementsWritten, JobDead, JobFailedEvent, JobSucceeded)
"""Events with an attempt's duration: the store's time is read only for subscribers."""
_LOCKED = (0.05, 0.1, 0.2, 0.4)  # seconds between looks at jobs locked by another transaction


class RemoteWorker:
    """Cached state of a worker. Optional: another process may serve the worker's next request."""

    __slots__ = ("command", "failed", "heartbeat_at", "queues", "reported", "succeeded")

    def __init__(self) -> None:
        self.queues = ""  # not known yet
        self.reported: WorkerHeartbeat | None = None
        self.succeeded = 0  # as counted here since the last heartbeat
        self.failed = 0
        self.heartbeat_at: float | None = None
        self.command = WorkerCommand.NONE


class RemoteEnding(msgspec.Struct, frozen=True):
    """A claimed job and the outcome of its attempt."""

    job: Job
    outcome: Outcome


class RemoteWorkers:
    """The remote workers of one ``Api``."""

    def __init__(self, app: Holdfast) -> None:
        self.app = app
        self._known: dict[str, RemoteWorker] = {}
        self._deferrals = Deferrals(app)
        self._rng = random.Random()
        self._sweeping: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    # ── known workers ──────────────────────────────────────────────────────────────────────────────────────────
    def get_worker(self, worker: str) -> RemoteWorker:
        """Returns the state of this worker; drops the least recently seen beyond a limit."""
        known = self._known.pop(worker, None) or RemoteWorker()
        self._known[worker] = known
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return known

    def remove_worker(self, worker: str) -> None:
        """Forgets a worker that has deregistered."""
        self._known.pop(worker, None)

    async def heartbeat(
        self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], lease_for: timedelta
    ) -> HeartbeatReply:
        """Registers the worker and extends its leases. Unless it counts itself, what was counted here is added to what
        other processes have counted."""
        known = self.get_worker(heartbeat.worker)
        succeeded, failed, known.succeeded, known.failed = known.succeeded, known.failed, 0, 0
        if heartbeat.has_deltas:
            heartbeat = msgspec.structs.replace(heartbeat, succeeded=succeeded, failed=failed)
        try:
            return await self._send(heartbeat, leases, lease_for)
        except (HoldfastError, asyncio.CancelledError):
            known.succeeded += succeeded
            known.failed += failed
            raise

    async def renew_heartbeat(self, heartbeat: WorkerHeartbeat, lease_for: timedelta) -> HeartbeatReply:
        """Keeps a worker listed whose claim waits. What it has reported since that ``heartbeat`` stays as it is."""
        latest = self.get_worker(heartbeat.worker).reported or heartbeat
        if latest.has_deltas:
            return await self.heartbeat(latest, [], lease_for)
        return await self._send(msgspec.structs.replace(latest, succeeded=0, failed=0, has_deltas=True), [], lease_for)

    async def _send(self, heartbeat: WorkerHeartbeat, leases: Sequence[Lease], lease_for: timedelta) -> HeartbeatReply:
        store = await self.app.open_store()
        heartbeat_at = self.app.clock.monotonic()
        reply = await store.queueing.heartbeat(heartbeat, leases, lease_for=lease_for)
        known = self.get_worker(heartbeat.worker)
        known.heartbeat_at, known.command = heartbeat_at, reply.command
        return reply

    # ── settlements ────────────────────────────────────────────────────────────────────────────
    def decide_settlement(self, ending: RemoteEnding) -> Settlement:
        """Decides the job's settlement as for a local worker."""
        settings, job = self.app.settings, ending.job
        backoff = backoff_of(job, self.app, settings) if isinstance(ending.outcome, Failed) else settings.retry
        return decide(job, ending.outcome, backoff, self._rng)

    async def settle(self, worker: str, endings: Sequence[RemoteEnding]) -> list[Settled]:
        """Settles jobs of a worker and emits their events."""
        if not endings:
            return []
        store = await self.app.open_store()
        endings = await self._with_deferred(endings)
        settlements = [self.decide_settlement(each) for each in endings]
        now_us = await store.health.server_time_us() if any(map(self.app.events.has_subscriber, _TIMED)) else 0
        answers = await store.queueing.settle(settlements)
        for pause in _LOCKED:
            locked = [index for index, answer in enumerate(answers) if answer.locked]
            if not locked:
                break
            await self.app.clock.sleep(pause)
            for index, answer in zip(
                locked, await store.queueing.settle([settlements[each] for each in locked]), strict=True
            ):
                answers[index] = answer
        succeeded: list[tuple[str, float]] = []
        for ending, settlement, answer in zip(endings, settlements, answers, strict=True):
            seconds = max(0, now_us - (ending.job.started_at_us or now_us)) / 1e6
            if answer.accepted and answer.state is JobState.SUCCEEDED:
                succeeded.append((ending.job.task, seconds))
            if not answer.locked:
                self._emit_answer(worker, ending.job, settlement, answer, seconds)
        if self.app.events.has_subscriber(SettlementsWritten):
            measure_settled(self.app.events, sum(answer.accepted for answer in answers), succeeded)
        return answers

    async def _with_deferred(self, endings: Sequence[RemoteEnding]) -> Sequence[RemoteEnding]:
        """Returns the endings; jobs that another worker may be able to run are released."""
        deferrable = {
            index: each.outcome for index, each in enumerate(endings) if Deferrals.is_deferrable(each.outcome, each.job)
        }
        if not deferrable:
            return endings
        jobs = [endings[index].job for index in deferrable]
        outcomes = await self._deferrals.defer_or_fail(jobs, list(deferrable.values()), self.app.settings)
        changed = dict(zip(deferrable, map(RemoteEnding, jobs, outcomes), strict=True))
        return [changed.get(index, each) for index, each in enumerate(endings)]

    def _emit_answer(self, worker: str, job: Job, settlement: Settlement, answer: Settled, seconds: float) -> None:
        events, known = self.app.events, self.get_worker(worker)
        if not answer.accepted:
            emit_lease_lost(events, job, worker)
        elif answer.state is JobState.SUCCEEDED:
            known.succeeded += 1
            emit_success(events, job, seconds)
        else:
            known.failed += answer.state in (JobState.FAILED, JobState.DEAD)
            dlq_key = dlq_key_of(self.app.settings, job.queue)
            emit_unsuccessful(events, job, settlement, answer, seconds=seconds, dlq_key=dlq_key)

    async def release_jobs(self, worker: str, jobs: Sequence[Job]) -> None:
        """Releases jobs that were not started. Where the store is away, their leases end."""
        try:
            await self.settle(worker, [RemoteEnding(job, Released()) for job in jobs])
        except HoldfastError:
            return

    def run_in_background(self, call: Coroutine[Any, Any, None]) -> None:
        """Runs in the background."""
        task = asyncio.ensure_future(call)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle_unknown(self, worker: str, jobs: Sequence[Job], tasks: frozenset[str]) -> None:
        """Settles jobs whose task the worker does not know, as a local worker does."""
        known, settings = sorted(tasks), self.app.settings
        endings = [RemoteEnding(job, self._deferrals.unknown_task_failure(job, known, settings)) for job in jobs]
        try:
            await self.settle(worker, endings)
        except HoldfastError:
            return

    # ── maintenance ───────────────────────────────────────────────────────────────────────────────────────────
    async def start_sweeper(self) -> None:
        """Starts a sweeper, if none runs: without a local worker no other process would settle expired leases."""
        store = await self.app.open_store()
        sweeping = self._sweeping
        if sweeping is not None and not sweeping.done() and sweeping.get_loop().is_running():
            return
        sweeper = Sweeper(WorkerState(self.app, self.app.settings, "api"), store)
        self._sweeping = asyncio.create_task(sweeper.run(), name="holdfast-api-sweeper", context=Context())
