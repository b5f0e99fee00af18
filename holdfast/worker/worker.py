"""The worker: starts its services, handles signals and commands, and shuts down gracefully.

fetcher ─ claim ─▶ buffer ─▶ runners ─▶ unsettled ─▶ settler         heartbeat (own thread)
                                                                     sweeper: expired, due, pruning
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from holdfast.app import Holdfast
from holdfast.app.alerts import watch_alerts
from holdfast.app.limits import merge_limits
from holdfast.core.clock import run_first
from holdfast.core.errors import HoldfastError, StoreReplaced, Unavailable
from holdfast.core.events import StoreTrouble, WorkerStarted, WorkerStopped, WorkerStopping
from holdfast.core.lifecycle import Cancelled, Released
from holdfast.core.models import Lease
from holdfast.core.validation import format_queues, mask_url
from holdfast.core.workers import WorkerCommand, WorkerHeartbeat
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.worker.context import StopReason, WorkerState
from holdfast.worker.executors.process_group import is_gone
from holdfast.worker.fault_injector import FaultInjector
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.handler_limits import HandlerLimits
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.invocation import HandlerInvoker
from holdfast.worker.log_writer import LogWriter
from holdfast.worker.reloader import Reloader
from holdfast.worker.runner import RunnerPool
from holdfast.worker.settler import Settler
from holdfast.worker.step_writer import StepWriter
from holdfast.worker.stop_signals import StopRequest, StopRequests
from holdfast.worker.supervisor import NAME_TAKEN
from holdfast.worker.sweeper import Sweeper
from holdfast.worker.ticker import Ticker

_CLEANUP_SECONDS = 5.0  # seconds for cancelled handlers to clean up


class Worker:
    """A worker. ``run`` returns when it has stopped."""

    def __init__(
        self, app: Holdfast, *, settings: Settings | None = None, drain: bool = False, supervised: bool = False
    ) -> None:
        """``drain``: stop once the queues are empty. ``supervised``: it may recycle, as a supervisor restarts it."""
        self._app = app
        settings = settings or app.settings
        # A new id at each start: a restarted worker on the same host is another worker.
        self.id = settings.worker_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.shared = WorkerState(app, settings, self.id)
        self._drain = drain
        self.supervised = supervised
        self._stop_now = asyncio.Event()
        self._stop_requests = StopRequests(self.shared.clock.monotonic)
        self._reason = "drained"
        self.recycled = False
        self.started = asyncio.Event()
        """Set when the worker is registered and takes jobs."""
        self.stuck = 0
        """After ``run`` has returned: handlers that swallow cancellation and still run."""
        self.stuck_threads = 0
        """After ``run`` has returned: threads in which a handler still runs."""

    # ── stops and drains ────────────────────────────────────────────────────────────────────────────────────────────
    def stop(self, reason: str = "asked") -> None:
        """Stops claiming and finishes running jobs within the grace. Call it from the event loop.

        A second call more than a second later ends the grace; one within that second is ignored.
        """
        if self._stop_requests.record_signal() is StopRequest.REPEATED:
            self._stop_now.set()
        self.start_stopping(reason)

    def stop_now(self, reason: str = "asked") -> None:
        """Stops claiming and cancels running jobs at once. Each is released when its handler has cleaned up."""
        self._stop_now.set()
        self.start_stopping(reason)

    def start_stopping(self, reason: str) -> None:
        """Stops within the grace. It does not count as a first signal: a call of ``stop`` after it ends no grace."""
        if self.shared.stopping.is_set():
            return
        self._reason = reason
        self.shared.stopping.set()
        self.shared.may_fetch.set()

    def _handle_command(self, command: WorkerCommand) -> None:
        if command is WorkerCommand.STOP:
            self.start_stopping("command")
        elif command is WorkerCommand.DRAIN:
            self.fetcher.drain()

    def _interrupt_job(self, lease: Lease, stop_reason: StopReason) -> None:
        leased = self.shared.claimed.get(lease)
        if stop_reason is StopReason.LOST and leased is not None and leased.has_called_complete:
            self.runner.check_lease(leased)
            return
        unstarted = self.shared.interrupt_job(lease, stop_reason)
        if unstarted is None:
            return
        if stop_reason is StopReason.CANCEL:
            self.shared.queue_settlement(unstarted, Cancelled())
        else:
            self.shared.abandon_job(unstarted)

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """Runs jobs until stopped or, if draining, until the queues are empty."""
        shared, app = self.shared, self._app
        store = await app.open_store()
        injector = FaultInjector(shared) if shared.settings.allow_faults else None
        invoker = await self._open_unless_stopped(store)
        if invoker is None:
            return
        self.invoker = invoker
        if injector is not None:
            store = injector.wrap_store(store)
            invoker.wrap_handlers(injector.run_handler)
            await self._try_step(injector.follow_plan(), "reading the faults")  # before the first job
        self.log_writer = LogWriter(shared, store)
        step_writer = StepWriter(shared, store, injector)
        self.runner = RunnerPool(shared, invoker, self.log_writer, HandlerLimits(shared, store), step_writer)
        self.settler = Settler(shared, store, self.log_writer.flush)
        self.ticker = Ticker(shared, store, app.declared)
        sweeper = Sweeper(shared, store)
        self.fetcher = Fetcher(shared, store, recover_leases=sweeper.recover_leases, drain=self._drain)
        heartbeat = self._new_heartbeat(app.new_store if injector is None else injector.new_store)
        self.runner.resize(shared.settings.concurrency)
        settler_task = asyncio.create_task(self.settler.run(), name="holdfast-settler")
        background = [
            asyncio.create_task(service, name=f"holdfast-{name}")
            for name, service in (
                ("watchdog", self.runner.watch_deadlines()),
                ("log_writer", self.log_writer.run()),
                ("sweeper", sweeper.run()),
                ("alerts", watch_alerts(app, lambda: shared.settings, service="worker")),
                ("reloader", Reloader(shared, self._resize, self._recycle if self.supervised else None).run()),
            )
        ]
        if injector is not None:
            background.append(asyncio.create_task(injector.run(), name="holdfast-fault-injector"))
        # Where another service fails first, asyncio would log this failure as never retrieved.
        heartbeat.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        heartbeat.start()
        self._emit_started(store)
        await self._try_step(self.ticker.write_declared(), "writing the limits and schedules of the code")
        background.append(asyncio.create_task(self.ticker.run(), name="holdfast-ticker"))
        fetcher_task = asyncio.create_task(self.fetcher.run(), name="holdfast-fetcher")
        self.started.set()
        try:
            await self._until_stopped([fetcher_task, settler_task, heartbeat.ended, self.runner.failed, *background])
        finally:
            await self._shut_down(fetcher_task, settler_task, background, heartbeat, invoker)

    def _emit_started(self, store: Store) -> None:
        settings = self.shared.settings
        self.shared.emit(
            WorkerStarted(
                worker_id=self.id,
                store=mask_url(store.url),
                queues=format_queues(settings.queues),
                concurrency=settings.concurrency,
            )
        )

    def _new_heartbeat(self, new_store: Callable[[], Store]) -> Heartbeat:
        return Heartbeat(
            self.shared,
            self._make_heartbeat,
            new_store=new_store,
            interrupt=self._interrupt_job,
            on_command=self._handle_command,
        )

    async def _open_unless_stopped(self, store: Store) -> HandlerInvoker | None:
        """Opens the worker; None if it is stopped meanwhile, since lifespans and dependencies may wait for ever."""
        opening = asyncio.ensure_future(self._open(store))
        stopping = asyncio.ensure_future(self.shared.stopping.wait())
        try:
            await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
                await asyncio.wait([opening], timeout=_CLEANUP_SECONDS)
        finally:
            stopping.cancel()
            opening.cancel()
        if opening.done() and not opening.cancelled():
            return opening.result()
        self.stuck = int(not opening.done())
        await self._try_step(self._deregister(), "deregistering the worker")
        return None

    async def _open(self, store: Store) -> HandlerInvoker:
        """Prepares the resources of handlers and registers the worker; Unavailable if a living one has its id."""
        await self._check_name(store)  # before anything is started
        self._app.limits.check_declared(merge_limits(self._app.declared_limits, self.shared.settings))
        invoker = HandlerInvoker(self._app, self.shared.settings)
        try:
            await invoker.open()
            await self._check_name(store)  # again: another worker may have registered meanwhile
            await self._register()  # not in _try_step: a store that refuses this would refuse every claim
        except BaseException:
            await invoker.close()
            raise
        return invoker

    async def _until_stopped(self, services: Sequence[asyncio.Future[Any]]) -> None:
        """Waits until the worker is stopping. Raises the error of a service that dies of a bug, to end the worker."""
        stopping = asyncio.ensure_future(self.shared.stopping.wait())
        try:
            done, _ = await asyncio.wait([stopping, *services], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        except StoreReplaced:
            self._reason = "store_replaced"
            for lease in list(self.shared.claimed):  # no outcome can be stored
                self._interrupt_job(lease, StopReason.LOST)
            raise
        except Exception:
            self._reason = "internal_error"
            raise
        finally:
            stopping.cancel()
            self.shared.stopping.set()

    async def _shut_down(
        self,
        fetcher_task: asyncio.Task[None],
        settler_task: asyncio.Task[None],
        background: list[asyncio.Task[None]],
        heartbeat: Heartbeat,
        invoker: HandlerInvoker,
    ) -> None:
        shared = self.shared
        grace = shared.settings.grace.total_seconds()
        shared.emit(WorkerStopping(worker_id=self.id, reason=self._reason, running=len(shared.running), grace=grace))
        fetcher_task.cancel()
        self.fetcher.release_buffered()
        await self._finish_running()
        self.stuck = await self.runner.close()
        for service in background:
            service.cancel()
        await asyncio.gather(*background, fetcher_task, return_exceptions=True)
        await self._try_step(self.ticker.cancel_superseded(), "cancelling superseded jobs")
        await self._try_step(self._write_remaining(settler_task), "writing the last settlements")
        await heartbeat.stop()  # not before: leases must be renewed until all settlements are written
        await self._try_step(self._deregister(), "deregistering the worker")
        await self._close_invoker(invoker)
        shared.emit(
            WorkerStopped(worker_id=self.id, succeeded=shared.succeeded, failed=shared.failed, released=shared.released)
        )

    async def _close_invoker(self, invoker: HandlerInvoker) -> None:
        """Closes lifespans and dependencies. A second stop gives them a bounded time."""
        closing, now = asyncio.ensure_future(invoker.close()), asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait([closing, now], return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        await asyncio.wait([closing], timeout=_CLEANUP_SECONDS)
        if closing.done():
            self.stuck_threads = closing.result()
        else:
            closing.cancel()
            self.stuck += 1

    async def _finish_running(self) -> None:
        """Waits for the grace, cancels running jobs, and gives them time to clean up. A second stop ends the grace."""
        shared = self.shared
        await shared.clock.run_bounded(self._wait_until_idle_or_stop_now(), shared.settings.grace.total_seconds())
        for leased in list(shared.running):
            leased.interrupt_handler(StopReason.RELEASE)
        await shared.clock.run_bounded(self._wait_until_idle(), _CLEANUP_SECONDS)
        for leased in list(shared.running):  # its handler swallows cancellation and ends with the process
            shared.running.discard(leased)
            if leased.has_called_complete:
                shared.report_lost_job(leased)
            else:
                shared.queue_settlement(leased, Released())

    async def _wait_until_idle(self) -> None:
        while self.shared.busy:
            self.shared.idle.clear()
            await self.shared.idle.wait()

    async def _wait_until_idle_or_stop_now(self) -> None:
        await run_first(self._wait_until_idle(), self._stop_now.wait())

    async def _write_remaining(self, settler_task: asyncio.Task[None]) -> None:
        """Releases the jobs of the claim in flight and writes every settlement. What a slow store has not answered when
        the time for this step is over is lost with its leases, and runs again."""
        await self.fetcher.close()
        self.settler.finish()
        await settler_task
        await self.log_writer.flush()

    async def _check_name(self, store: Store) -> None:
        """Raises Unavailable if a living worker has the configured ``worker_id``: registering would replace it.

        Not ConfigError, after which no supervisor restarts the worker: the id may become free."""
        if self.shared.settings.worker_id is None:
            return
        ours = (socket.gethostname(), os.getpid())
        for each in await store.query.workers():
            host, pid = each.heartbeat.host, each.heartbeat.pid
            if each.heartbeat.worker == self.id and each.alive and (host, pid) != ours and not is_gone(host, pid):
                taken = Unavailable(
                    f"worker_id: {self.id} is the name of a living worker, process {pid} on {host}; give this one "
                    "another name, or start it again when that one has stopped or, if it died, its lease has ended"
                )
                if self.supervised:
                    taken.exit_code = NAME_TAKEN
                raise taken

    async def _register(self) -> None:
        store = await self._app.open_store()
        await store.queueing.deregister(self.id)  # a dead worker with this id may have an old command
        await store.queueing.heartbeat(self._make_heartbeat(), [], lease_for=self.shared.settings.lease)

    async def _deregister(self) -> None:
        store = await self._app.open_store()
        await store.queueing.deregister(self.id)

    async def _try_step(self, step: Coroutine[Any, Any, None], what: str) -> None:
        """Runs a step of start or shutdown, for a bounded time. Emits ``StoreTrouble`` if it fails."""
        try:
            async with asyncio.timeout(_CLEANUP_SECONDS):
                await step
        except (HoldfastError, TimeoutError) as error:
            worker_ends_by_it = self._reason == "store_replaced" or not self.shared.stopping.is_set()
            if worker_ends_by_it and isinstance(error, StoreReplaced):
                return  # every service gets this error, and the worker raises it
            text = f"{what}: {str(error) or 'no answer'}"
            self.shared.emit(StoreTrouble(service="worker", error=text, retry_in=0.0))

    def _resize(self, concurrency: int) -> None:
        self.runner.resize(concurrency)
        self.invoker.resize(concurrency)

    def _recycle(self) -> None:
        self.recycled = True
        self.start_stopping("recycled")

    def _make_heartbeat(self) -> WorkerHeartbeat:
        shared = self.shared
        return WorkerHeartbeat(
            worker=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=format_queues(shared.settings.queues),
            concurrency=shared.settings.concurrency,
            running=len(shared.running),
            succeeded=shared.succeeded,
            failed=shared.failed,
            version=shared.settings.app_version,
            interval=shared.settings.heartbeat,
        )

    def __repr__(self) -> str:
        return f"<Worker {self.id}>"
