"""The heartbeat: renews leases in its own thread, on its own connection, so a handler that blocks the event loop keeps
its job. It receives cancellations, lost leases and commands, interrupts jobs whose leases it cannot renew, and reports
a blocked event loop, with the handler and the stack."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

from msgspec.structs import replace

from holdfast.core.clock import wait_first
from holdfast.core.errors import HoldfastError, StoreReplaced
from holdfast.core.events import LoopBlocked, StoreTrouble
from holdfast.core.fault_points import fault_point
from holdfast.core.metric_events import LoopDelayMeasured
from holdfast.core.models import Job, Lease
from holdfast.core.workers import LeaseStatus, WorkerCommand, WorkerHeartbeat
from holdfast.stores.base import Store
from holdfast.worker.context import StopReason, WorkerState, lease_valid_until_of
from holdfast.worker.executors.process_group import resident_bytes

_MAX_CALL_FRACTION = 0.5  # of the lease: how long one heartbeat call may take
_MIN_INTERVAL = 1.0  # seconds between two heartbeats, even if notifications arrive
_STATE_CHECK_INTERVAL = 2.0  # seconds between checks if the reported state has changed
_LOOP_CHECK_INTERVAL = 1.0  # seconds between checks of the event loop
_STOP_TIMEOUT = 10.0  # seconds to wait for the thread, which may wait for the store
_BLOCKED_AFTER = 2.0  # seconds the loop may be blocked before that is reported


class Heartbeat:
    """Sends one worker's heartbeats until it is stopped."""

    def __init__(
        self,
        shared: WorkerState,
        heartbeat: Callable[[], WorkerHeartbeat],
        *,
        new_store: Callable[[], Store],
        interrupt: Callable[[Lease, StopReason], None],
        on_command: Callable[[WorkerCommand], None],
    ) -> None:
        """``interrupt`` and ``on_command`` are called in the worker's event loop."""
        self._shared = shared
        self._make_heartbeat = heartbeat
        self._new_store = new_store
        self._interrupt = interrupt
        self._on_command = on_command
        self._worker_loop = asyncio.get_running_loop()
        self._worker_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)
        self.ended: asyncio.Future[None] = self._worker_loop.create_future()
        """Done when the thread has ended; has the exception of a bug. The worker must stop without its heartbeat."""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._must_retry_soon = False  # soon: the last heartbeat failed, or did not renew each lease
        self._sent: WorkerHeartbeat | None = None  # state of the worker in the last heartbeat
        self._reported_at: float | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        self._ready.wait(5)

    async def stop(self) -> None:
        """Stops the thread and waits for its end."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        await asyncio.wait([self.ended], timeout=_STOP_TIMEOUT)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._send_until_stopped())
        except BaseException as caught:  # raised again where ``ended`` is awaited
            error = caught
        self._call_in_worker_loop(self._set_ended, error)

    def _set_ended(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    async def _send_until_stopped(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        store = self._new_store()
        watching = asyncio.create_task(self._watch_loop())
        self._ready.set()
        try:
            while not self._stop.is_set():
                await self._send(store)
                if self._must_retry_soon:
                    self._interrupt_expiring()
                await self._pause(store)
        finally:
            watching.cancel()
            await store.close()

    async def _send(self, store: Store) -> None:
        shared = self._shared
        leases, heartbeat, lease_for = list(shared.claimed), self._make_heartbeat(), shared.settings.lease
        started = shared.clock.monotonic()
        try:
            async with asyncio.timeout(lease_for.total_seconds() * _MAX_CALL_FRACTION):
                await store.open()
                fault_point("heartbeat.before")
                sized = replace(heartbeat, memory=resident_bytes())  # not compared: it changes all the time
                reply = await store.queueing.heartbeat(sized, leases, lease_for=lease_for)
        except StoreReplaced:
            raise
        except (HoldfastError, TimeoutError) as error:
            retry_in = min(1.0, shared.settings.heartbeat.total_seconds())
            shared.emit(StoreTrouble(service="heartbeat", error=str(error) or "no answer", retry_in=retry_in))
            self._must_retry_soon = True
            return
        self._must_retry_soon, self._sent = LeaseStatus.LOCKED in reply.statuses, heartbeat
        shared.heartbeat_at = started
        for lease, status in zip(leases, reply.statuses, strict=True):
            leased = shared.claimed.get(lease)
            if leased is not None and status in (LeaseStatus.HELD, LeaseStatus.CANCEL):
                leased.lease_valid_until = lease_valid_until_of(started, lease_for)
            if status is LeaseStatus.LOST:
                self._call_in_worker_loop(self._interrupt, lease, StopReason.LOST)
            elif status is LeaseStatus.CANCEL:
                self._call_in_worker_loop(self._interrupt, lease, StopReason.CANCEL)
        if reply.command is not WorkerCommand.NONE:
            self._call_in_worker_loop(self._on_command, reply.command)

    def _interrupt_expiring(self) -> None:
        """Interrupts jobs whose leases could not be renewed, before another worker may claim them."""
        shared = self._shared
        now = shared.clock.monotonic()
        for lease, leased in list(shared.claimed.items()):
            if now > leased.lease_valid_until:
                self._call_in_worker_loop(self._interrupt, lease, StopReason.LOST)

    async def _pause(self, store: Store) -> None:
        """Waits until the next heartbeat is due, a notification arrives, or the worker's state has changed."""
        shared = self._shared
        assert self._stop is not None  # noqa: S101 - set before the first heartbeat
        interval = shared.settings.heartbeat.total_seconds()
        gap = min(_MIN_INTERVAL, interval)
        await shared.clock.run_bounded(self._stop.wait(), gap)
        if self._stop.is_set() or self._must_retry_soon or interval <= gap:
            return
        notifications = asyncio.ensure_future(store.queueing.wait([f"worker:{shared.worker_id}"], timeout=interval))
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            left = interval - gap
            while left > 0:
                await shared.clock.run_bounded(wait_first(notifications, stopped), min(left, _STATE_CHECK_INTERVAL))
                left -= _STATE_CHECK_INTERVAL
                if notifications.done() or stopped.done() or self._make_heartbeat() != self._sent:
                    break
        except StoreReplaced:
            raise
        except HoldfastError:
            await shared.clock.run_bounded(self._stop.wait(), gap)
        finally:
            notifications.cancel()
            stopped.cancel()

    def _call_in_worker_loop(self, call: Callable[..., object], *arguments: object) -> None:
        if not self._worker_loop.is_closed():
            self._worker_loop.call_soon_threadsafe(call, *arguments)

    # ── the event loop's health ───────────────────────────────────────────────────────────────────────────────
    async def _watch_loop(self) -> None:
        """Checks that the event loop runs callbacks; emits ``LoopBlocked`` once per blockage."""
        shared = self._shared
        while True:
            asked_at = time.monotonic()  # real time, whatever clock the worker uses
            self._call_in_worker_loop(self._record_answer)
            await asyncio.sleep(_LOOP_CHECK_INTERVAL)
            self._interrupt_expiring()
            blocked_for = time.monotonic() - shared.loop_answered_at
            if shared.events.has_subscriber(LoopDelayMeasured):
                delay = shared.loop_answered_at - asked_at
                shared.emit(LoopDelayMeasured(seconds=delay if delay >= 0 else blocked_for))
            if blocked_for < _BLOCKED_AFTER:
                self._reported_at = None
            elif self._reported_at != shared.loop_answered_at:
                self._reported_at = shared.loop_answered_at
                self._emit_blocked(blocked_for)

    def _record_answer(self) -> None:
        self._shared.loop_answered_at = time.monotonic()

    def _emit_blocked(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._worker_thread)
        job = self._running_job()
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""
        self._shared.emit(
            LoopBlocked(
                seconds=round(seconds, 3),
                job_id=None if job is None else job.id,
                task=None if job is None else job.task,
                stack=stack,
            )
        )

    def _running_job(self) -> Job | None:
        """Returns the job whose handler occupies the event loop: its runner is the current task."""
        task = asyncio.current_task(self._worker_loop)
        return next((leased.job for leased in list(self._shared.running) if leased.runner is task), None)
