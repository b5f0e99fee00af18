"""The heartbeat: renews the leases from a thread of its own, on a connection of its own, so that a handler which blocks
the event loop keeps its job. It hears cancellations, lost leases and orders, fences the worker when it cannot renew,
and says which handler blocks the loop and where."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

from holdfast.core.clock import wait_first
from holdfast.core.errors import HoldfastError, StoreReplaced
from holdfast.core.events import LoopBlocked, LoopHeard, StoreTrouble
from holdfast.core.fault_injection import fault_point
from holdfast.core.models import Job, Lease, LeaseStatus, WorkerCommand, WorkerHeartbeat
from holdfast.stores.base import Store
from holdfast.worker.context import FENCE, StopReason, WorkerContext

_DEADLINE = 0.5  # of the lease: how long one beat may take
_GAP = 1.0  # seconds at least between two beats, however much news there is
_RECENT = 2.0  # seconds what the last beat said of this worker may be outdated before it beats again
_LOOK = 1.0  # seconds between looks at the event loop
_BLOCKED = 2.0  # seconds the loop may be blocked before that is reported


class Heartbeat:
    """Sends one worker's heartbeats until it is stopped."""

    def __init__(
        self,
        shared: WorkerContext,
        heartbeat: Callable[[], WorkerHeartbeat],
        *,
        interrupt: Callable[[Lease, StopReason], None],
        command: Callable[[WorkerCommand], None],
    ) -> None:
        """``interrupt`` and ``command`` are called on the worker's event loop."""
        self._shared = shared
        self._pulse = heartbeat
        self._interrupt = interrupt
        self._command = command
        self._main = asyncio.get_running_loop()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)
        self.ended: asyncio.Future[None] = self._main.create_future()
        """Done when the heartbeat has ended: with the error, if of a bug. No worker may go on without its heartbeat."""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._failing = False
        self._sent: WorkerHeartbeat | None = None  # what the last beat said of this worker
        self._reported_at: float | None = None

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()
        self._ready.wait(5)

    def stop(self) -> None:
        """Beat no more; returns when the thread has ended."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        self._thread.join(timeout=10)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._keep())
        except BaseException as caught:  # raised again where ``ended`` is awaited
            error = caught
        self._on_main(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    async def _keep(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        store = self._shared.app.new_store()
        watching = asyncio.create_task(self._watch_loop())
        self._ready.set()
        try:
            while not self._stop.is_set():
                await self._beat(store)
                await self._pause(store)
        finally:
            watching.cancel()
            await store.close()

    async def _beat(self, store: Store) -> None:
        shared = self._shared
        started = shared.clock.monotonic()
        leases, heartbeat = list(shared.held), self._pulse()
        try:
            async with asyncio.timeout(shared.settings.lease.total_seconds() * _DEADLINE):
                await store.open()
                fault_point("beat.before")
                beat = await store.queueing.heartbeat(heartbeat, leases, lease_for=shared.settings.lease)
        except StoreReplaced:
            raise
        except (HoldfastError, TimeoutError) as error:
            retry_in = min(1.0, shared.settings.beat.total_seconds())
            shared.emit(StoreTrouble(service="heartbeat", error=str(error) or "no answer", retry_in=retry_in))
            self._failing = True
            self._fence()
            return
        self._failing, self._sent = False, heartbeat
        shared.renewed_at = started
        for lease, held in zip(leases, beat.held, strict=True):
            if held is LeaseStatus.LOST:
                self._on_main(self._interrupt, lease, StopReason.LOST)
            elif held is LeaseStatus.CANCEL:
                self._on_main(self._interrupt, lease, StopReason.CANCEL)
        if beat.command is not WorkerCommand.NONE:
            self._on_main(self._command, beat.command)

    def _fence(self) -> None:
        """Nothing could be renewed: give up every lease that is about to end, before another worker takes the job."""
        shared = self._shared
        limit = shared.settings.lease.total_seconds() * FENCE
        now = shared.clock.monotonic()
        for lease, run in list(shared.held.items()):
            if now - max(run.since, shared.renewed_at) > limit:
                self._on_main(self._interrupt, lease, StopReason.LOST)

    async def _pause(self, store: Store) -> None:
        """Until the next beat is due, there may be news for this worker, or its own state is to be reported."""
        shared = self._shared
        assert self._stop is not None  # noqa: S101 - set before the first beat
        interval = shared.settings.beat.total_seconds()
        gap = min(_GAP, interval)
        await shared.clock.run_bounded(self._stop.wait(), gap)
        if self._stop.is_set() or self._failing or interval <= gap:
            return
        notifications = asyncio.ensure_future(store.queueing.wait([f"worker:{shared.worker_id}"], timeout=interval))
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            left = interval - gap
            while left > 0:
                await shared.clock.run_bounded(wait_first(notifications, stopped), min(left, _RECENT))
                left -= _RECENT
                if notifications.done() or stopped.done() or self._pulse() != self._sent:
                    break
        except StoreReplaced:
            raise
        except HoldfastError:
            await shared.clock.run_bounded(self._stop.wait(), gap)
        finally:
            notifications.cancel()
            stopped.cancel()

    def _on_main(self, call: Callable[..., object], *arguments: object) -> None:
        if not self._main.is_closed():
            self._main.call_soon_threadsafe(call, *arguments)

    # ── the event loop's health ───────────────────────────────────────────────────────────────────────────────
    async def _watch_loop(self) -> None:
        """Ask the loop to answer; tell, once a blockage, when it does not."""
        shared = self._shared
        while True:
            asked_at = time.monotonic()  # the loop's health is a matter of real time, whatever the clock
            self._on_main(self._hear)
            await asyncio.sleep(_LOOK)
            self._fence()
            blocked_for = time.monotonic() - shared.heard_at
            if shared.events.has_subscriber(LoopHeard):
                shared.emit(
                    LoopHeard(seconds=shared.heard_at - asked_at if shared.heard_at >= asked_at else blocked_for)
                )
            if blocked_for < _BLOCKED:
                self._reported_at = None
            elif self._reported_at != shared.heard_at:
                self._reported_at = shared.heard_at
                self._tell_blocked(blocked_for)

    def _hear(self) -> None:
        self._shared.heard_at = time.monotonic()

    def _tell_blocked(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._main_thread)
        job = self._job_at_work()
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""
        self._shared.emit(
            LoopBlocked(
                seconds=round(seconds, 3),
                job_id=None if job is None else job.id,
                task=None if job is None else job.task,
                stack=stack,
            )
        )

    def _job_at_work(self) -> Job | None:
        """The job whose handler has the loop: its runner is the task that runs there."""
        task = asyncio.current_task(self._main)
        return next((run.job for run in list(self._shared.running) if run.runner is task), None)
