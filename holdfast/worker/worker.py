"""The worker: starts its services, hears signals and orders, and stops in good order.

fetcher ─ claim ─▶ buffer ─▶ runners ─▶ outcomes ─▶ settler          heartbeat (own thread): beat
                                                                     sweeper: expired, due, pruning
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from holdfast.app import Holdfast
from holdfast.core.errors import HoldfastError, StoreReplaced, Unavailable
from holdfast.core.events import StoreTrouble, WorkerStarted, WorkerStopped, WorkerStopping
from holdfast.core.lifecycle import Cancelled, Released
from holdfast.core.models import Lease, WorkerCommand, WorkerHeartbeat
from holdfast.core.validation import format_queues, mask_url
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.worker.context import StopReason, WorkerContext
from holdfast.worker.executors.process_group import is_gone
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.handler_limits import HandlerLimits
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.invocation import HandlerInvoker
from holdfast.worker.log_writer import LogWriter
from holdfast.worker.reloader import Reloader
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from holdfast.worker.stop_signals import StopRequest, StopRequests
from holdfast.worker.supervisor import NAME_TAKEN
from holdfast.worker.sweeper import Sweeper
from holdfast.worker.ticker import Ticker

_AFTER_GRACE = 5.0  # seconds for cancelled handlers to clean up


class Worker:
    """A worker process's work. ``run`` returns when it has stopped."""

    def __init__(
        self, app: Holdfast, *, settings: Settings | None = None, drain: bool = False, supervised: bool = False
    ) -> None:
        """``drain``: stop once the queues have nothing to run. ``supervised``: a supervisor starts the next when this
        one is recycled; else it never is."""
        self._app = app
        settings = settings or app.settings
        # Minted at each start: a restarted worker under the same host name is another one.
        self.id = settings.worker_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.shared = WorkerContext(app, settings, self.id)
        self._drain = drain
        self.supervised = supervised
        self._stop_now = asyncio.Event()
        self._stop_requests = StopRequests(self.shared.clock.monotonic)
        self._reason = "drained"
        self.recycled = False
        self.stuck = 0
        """Once ``run`` has returned: handlers that swallow every cancellation and still run."""
        self.stuck_threads = 0
        """The same: threads in which a handler still runs."""

    # ── stops and drains ────────────────────────────────────────────────────────────────────────────────────────────
    def stop(self, reason: str = "asked") -> None:
        """Takes no more jobs and finishes the running ones within the grace. Call it from the event loop.

        A second call more than a second later releases them at once; one within that second changes nothing.
        """
        if self._stop_requests.record() is StopRequest.REPEATED:
            self._stop_now.set()
        self._begin_to_stop(reason)

    def _begin_to_stop(self, reason: str) -> None:
        if self.shared.stopping.is_set():
            return
        self._reason = reason
        self.shared.stopping.set()
        self.shared.may_fetch.set()

    def _obey(self, command: WorkerCommand) -> None:
        if command is WorkerCommand.STOP and not self.shared.stopping.is_set():
            self.stop("ordered")
        elif command is WorkerCommand.DRAIN:
            self.fetcher.drain()

    def _interrupt(self, lease: Lease, why: StopReason) -> None:
        run = self.shared.held.get(lease)
        if why is StopReason.LOST and run is not None and run.completing:
            self.runner.check_lease(run)
            return
        unstarted = self.shared.interrupt_run(lease, why)
        if unstarted is None:
            return
        if why is StopReason.CANCEL:
            self.shared.settle(unstarted, Cancelled())
        else:
            self.shared.discard_run(unstarted)

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """Works until stopped (or, draining, until there is nothing to run)."""
        shared, app = self.shared, self._app
        store = await app.open_store()
        self.calls = calls = await self._open(store)
        self.recorder = LogWriter(shared, store)
        self.runner = Runner(shared, calls, self.recorder, HandlerLimits(shared, store))
        self.settler = Settler(shared, store, self.recorder.flush)
        self.ticker = Ticker(shared, store, app.declared)
        self.fetcher = Fetcher(shared, store, drain=self._drain)
        heartbeat = Heartbeat(shared, self._pulse, interrupt=self._interrupt, command=self._obey)
        self.runner.resize(shared.settings.concurrency)
        settling = asyncio.create_task(self.settler.run(), name="holdfast-settler")
        background = [
            asyncio.create_task(service, name=f"holdfast-{name}")
            for name, service in (
                ("watchdog", self.runner.watch_deadlines()),
                ("log_writer", self.recorder.run()),
                ("sweeper", Sweeper(shared, store).run()),
                ("reloader", Reloader(shared, self._resize, self._recycle if self.supervised else None).run()),
            )
        ]
        # Where another service fails first, asyncio would log this failure as never retrieved.
        heartbeat.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        heartbeat.start()
        shared.emit(
            WorkerStarted(
                worker_id=self.id,
                store=mask_url(store.url),
                queues=format_queues(shared.settings.queues),
                concurrency=shared.settings.concurrency,
            )
        )
        await self._or_reported(self.ticker.write_limits(), "writing the declared limits")
        background.append(asyncio.create_task(self.ticker.run(), name="holdfast-ticker"))
        fetching = asyncio.create_task(self.fetcher.run(), name="holdfast-fetcher")
        try:
            await self._until_stopped([fetching, settling, heartbeat.ended, self.runner.failed, *background])
        finally:
            await self._wind_down(fetching, settling, background, heartbeat, calls)

    async def _open(self, store: Store) -> HandlerInvoker:
        """Prepares the parts that handlers need, and registers the worker's name in the store. Unavailable where a
        living worker has that name.
        """
        await self._check_name(store)  # before anything is started for nothing
        calls = HandlerInvoker(self._app, self.shared.settings)
        await calls.open()
        try:
            await self._check_name(store)  # that took its time: another one may have signed on meanwhile
        except BaseException:
            await calls.close()
            raise
        await self._or_reported(self._sign_on(), "signing on")  # who claims can be seen
        return calls

    async def _until_stopped(self, services: Sequence[asyncio.Future[Any]]) -> None:
        """Until the worker is stopping. A service that dies of a bug takes the worker down, loudly: its supervisor
        starts another, and no promise depends on one that half works."""
        stopping = asyncio.ensure_future(self.shared.stopping.wait())
        try:
            done, _ = await asyncio.wait([stopping, *services], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        except StoreReplaced:
            self._reason = "store_replaced"
            for lease in list(self.shared.held):  # no outcome can be stored
                self._interrupt(lease, StopReason.LOST)
            raise
        finally:
            stopping.cancel()
            self.shared.stopping.set()

    async def _wind_down(
        self,
        fetching: asyncio.Task[None],
        settling: asyncio.Task[None],
        background: list[asyncio.Task[None]],
        heartbeat: Heartbeat,
        calls: HandlerInvoker,
    ) -> None:
        shared = self.shared
        grace = shared.settings.grace.total_seconds()
        shared.emit(WorkerStopping(worker_id=self.id, reason=self._reason, running=len(shared.running), grace=grace))
        fetching.cancel()
        self.fetcher.release_buffered()
        await self._finish_running()
        self.stuck = await self.runner.close()
        for service in background:
            service.cancel()
        await asyncio.gather(*background, fetching, return_exceptions=True)
        await self._or_reported(self._write_rest(settling), "writing the last settlements")
        heartbeat.stop()  # not before: leases must last until what they stand for is written
        await self._or_reported(self._sign_off(), "signing off")
        self.stuck_threads = await calls.close()
        shared.emit(
            WorkerStopped(worker_id=self.id, succeeded=shared.succeeded, failed=shared.failed, released=shared.released)
        )

    async def _finish_running(self) -> None:
        """The grace, then cancellation, then a moment to clean up; a second stop cuts the grace short."""
        shared = self.shared
        await shared.clock.run_bounded(self._quiet_or_now(), shared.settings.grace.total_seconds())
        for run in list(shared.running):
            run.interrupt_run(StopReason.RELEASE)
        await shared.clock.run_bounded(self._quiet(), _AFTER_GRACE)
        for run in list(shared.running):  # it swallows its cancellation: it ends with this process
            shared.running.discard(run)
            if run.completing:
                shared.drop_run(run)
            else:
                shared.settle(run, Released())

    async def _quiet(self) -> None:
        while self.shared.busy:
            self.shared.full.clear()
            await self.shared.full.wait()

    async def _quiet_or_now(self) -> None:
        quiet = asyncio.ensure_future(self._quiet())
        now = asyncio.ensure_future(self._stop_now.wait())
        try:
            await asyncio.wait([quiet, now], return_when=asyncio.FIRST_COMPLETED)
        finally:
            quiet.cancel()
            now.cancel()

    async def _write_rest(self, settling: asyncio.Task[None]) -> None:
        """The claim under way is given back, and every settlement written. The settler ends by itself: cancelled, it
        would drop the batch it is writing."""
        await self.fetcher.close()
        self.settler.finish()
        await settling
        await self.recorder.flush()

    async def _check_name(self, store: Store) -> None:
        """Unavailable if a living worker goes by the name that we were given: signing on would end its registration.

        It is no ConfigError, after which no supervisor starts us again: the name becomes free."""
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

    async def _sign_on(self) -> None:
        store = await self._app.open_store()
        await store.queueing.deregister(
            self.id
        )  # one of the same name may have died with an order: that was not meant for us
        await store.queueing.heartbeat(self._pulse(), [], lease_for=self.shared.settings.lease)

    async def _sign_off(self) -> None:
        store = await self._app.open_store()
        await store.queueing.deregister(self.id)

    async def _or_reported(self, ending: Coroutine[Any, Any, None], what: str) -> None:
        """Do that, but not for long: where the store is away, the leases end by themselves."""
        try:
            async with asyncio.timeout(_AFTER_GRACE):
                await ending
        except (HoldfastError, TimeoutError) as error:
            ending_by_it = self._reason == "store_replaced" or not self.shared.stopping.is_set()
            if ending_by_it and isinstance(error, StoreReplaced):
                return  # every service meets this error, and the worker ends with it
            self.shared.emit(StoreTrouble(service="worker", error=f"{what}: {error}", retry_in=0.0))

    def _resize(self, concurrency: int) -> None:
        self.runner.resize(concurrency)
        self.calls.resize(concurrency)

    def _recycle(self) -> None:
        self.recycled = True
        self._begin_to_stop("recycled")  # a stop signal from now on is the first

    def _pulse(self) -> WorkerHeartbeat:
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
        )

    def __repr__(self) -> str:
        return f"<Worker {self.id}>"
