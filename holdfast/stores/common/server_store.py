"""Base of the stores on a server: one opening for each event loop, since connections belong to one."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from holdfast.core.errors import ForkedConnection, HoldfastError
from holdfast.core.job_logs import Record
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE
from holdfast.core.models import (
    BulkResult,
    Claim,
    HeartbeatReply,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    ReplayRate,
    Settled,
    Settlement,
    Submitted,
    WorkerCommand,
    WorkerHeartbeat,
)
from holdfast.core.portal import Portal
from holdfast.stores.base import AT_ONCE, Maintenance, Query, Selection
from holdfast.stores.common.requests import Chosen, WorkerClaim, awaited_jobs, replayable_states, select_ids

T = TypeVar("T")
OpenedT = TypeVar("OpenedT", bound="Opened")


class ServedQueueing(Protocol):
    """The verbs of every job's way."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]: ...
    async def claim(self, wish: WorkerClaim) -> Claim: ...
    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]: ...
    async def heartbeat(
        self, pulse: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply: ...
    async def append_logs(self, records: Sequence[Record]) -> list[bool]: ...


class ServedAdmin(Protocol):
    """Operating, and the upkeep anyone may do."""

    async def deregister(self, worker: str) -> None: ...
    async def select_jobs(
        self, where: JobFilter, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen: ...
    async def cancel(self, chosen: Chosen) -> BulkResult: ...
    async def replay(self, chosen: Chosen, *, force: bool, payload: str | None, pace: ReplayRate) -> BulkResult: ...
    async def delete(self, chosen: Chosen) -> BulkResult: ...
    async def pause(self, queue: str, *, paused: bool) -> None: ...
    async def send_command(self, order: WorkerCommand, workers: Sequence[str] | None) -> list[str]: ...


class ServerQuery(Query, Protocol):
    """Reads, and what the store itself asks."""

    async def server_time_us(self) -> int: ...
    async def any_finished(self, job_ids: Sequence[str]) -> bool: ...


class ServedNotifications(Protocol):
    """Waiting."""

    async def wait(self, topics: Sequence[str], timeout: float, settled: Callable[[], Awaitable[bool]]) -> None: ...
    async def close(self) -> None: ...


class Closing(Protocol):
    """Protocol of an object that can be closed."""

    async def close(self) -> None: ...


class Opened(ABC):
    """The parts of a store opened for one event loop, closed together. Made in that loop."""

    links: Closing
    news: ServedNotifications
    queueing: ServedQueueing
    admin: ServedAdmin
    maintenance: Maintenance
    query: ServerQuery

    def __init__(self) -> None:
        self._watching = asyncio.create_task(self._close_with_loop(), name="holdfast-connections")

    async def _close_with_loop(self) -> None:
        """``asyncio.run`` cancels what is left before it ends: last chance to close connections cleanly."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.news.close()
            await self.links.close()

    async def close(self) -> None:
        """Let go."""
        self._watching.cancel()
        await asyncio.wait([self._watching])

    @abstractmethod
    async def migrate(self) -> list[str]:
        """Check that what is there is ours, and bring it up to date; what was applied."""


class ServedStore(ABC, Generic[OpenedT]):
    """All of ``Store`` but what differs from server to server."""

    def __init__(self) -> None:
        self._opened: dict[asyncio.AbstractEventLoop, OpenedT] = {}
        self._migrated: list[str] = []  # what opening applied, for who asks
        self._portal: Portal | None = None
        self._callers = 0  # in the portal
        self._lock = threading.Lock()
        self._process = os.getpid()

    @abstractmethod
    def _opening(self) -> OpenedT:
        """Returns the parts to hold for the running event loop, not connected yet."""

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._opened.get(loop) is not None:
            _ = self._open
            return
        self._check_process()
        opened = self._opening()
        try:
            self._migrated += await opened.migrate()
        except BaseException:
            await opened.close()
            raise
        if loop in self._opened:  # another caller was quicker
            await opened.close()
            return
        for ended in [each for each in self._opened if each.is_closed()]:
            del self._opened[ended]
        self._opened[loop] = opened

    async def close(self) -> None:
        opened = self._opened.pop(asyncio.get_running_loop(), None)
        if opened is not None and self._process == os.getpid():
            await opened.close()
        portal = self._portal
        if portal is not None and self._process == os.getpid() and not portal.is_here():
            self._portal = None
            await asyncio.to_thread(portal.stop_thread)

    async def migrate(self) -> list[str]:
        applied, self._migrated = self._migrated, []
        return applied + await self._open.migrate()

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._portal is None or self._process != os.getpid():
                self._portal, self._callers = Portal(at_exit=self.close), 0
            portal = self._portal
            self._callers += 1
        try:
            return portal.run(call)
        finally:
            self._leave(portal)

    def _leave(self, portal: Portal) -> None:
        """A call of ``blocking`` is over. The last one to see the store closed ends the portal and its thread."""
        with self._lock:
            if portal is not self._portal:
                return
            self._callers -= 1
            if not self._callers and portal.loop not in self._opened:
                portal.stop_thread()  # while no other can be opened: ``close`` ends the one it finds
                self._portal = None

    @property
    def _open(self) -> OpenedT:
        self._check_process()
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is None:
            raise HoldfastError("this store is not open; await open() first, or use the application as a context")
        return opened

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ForkedConnection("this store was opened before fork(); make another one in the child process")

    # ── hot path ──────────────────────────────────────────────────────────────────────────────────────────────
    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        return await self._open.queueing.submit(jobs) if jobs else []

    async def claim(
        self,
        worker: str,
        wants: Mapping[str, int],
        *,
        limit: int,
        lease_for: timedelta,
        startable: int | None = None,
        alone: bool = False,
        only: Sequence[str] | None = None,
        promote: bool = True,
        elsewhere: bool = False,
    ) -> Claim:
        startable = limit if startable is None else startable
        wish = WorkerClaim(worker, wants, limit, lease_for, startable, alone, only, promote, elsewhere)
        return await self._open.queueing.claim(wish)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        return await self._open.queueing.settle(settlements) if settlements else []

    async def heartbeat(
        self, pulse: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        return await self._open.queueing.heartbeat(pulse, leases, lease_for=lease_for)

    async def append_logs(self, records: Sequence[Record]) -> list[bool]:
        return await self._open.queueing.append_logs(records) if records else []

    async def deregister(self, worker: str) -> None:
        await self._open.admin.deregister(worker)

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        opened = self._open
        awaited = awaited_jobs(topics)

        async def is_settled() -> bool:
            return bool(awaited) and await opened.query.any_finished(awaited)

        await opened.news.wait(topics, timeout, is_settled)

    # ── maintenance ───────────────────────────────────────────────────────────────────────────────────────────
    async def reannounce(self) -> int:
        return 0

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    async def cancel(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        chosen = await self._chosen(selection, CANCELLABLE, limit, unasked=True)
        return await self._open.admin.cancel(chosen) if chosen.ids else BulkResult([], [])

    async def replay(
        self,
        selection: Selection,
        *,
        force: bool = False,
        payload: str | None = None,
        limit: int = 1000,
        pace: ReplayRate = AT_ONCE,
    ) -> BulkResult:
        chosen = await self._chosen(selection, replayable_states(force=force), limit)
        admin = self._open.admin
        return await admin.replay(chosen, force=force, payload=payload, pace=pace) if chosen.ids else BulkResult([], [])

    async def delete(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        chosen = await self._chosen(selection, DELETABLE, limit)
        return await self._open.admin.delete(chosen) if chosen.ids else BulkResult([], [])

    async def _chosen(
        self, selection: Selection, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen:
        if not isinstance(selection, JobFilter):
            return select_ids(selection, limit)
        return await self._open.admin.select_jobs(selection, legal, limit, unasked=unasked)

    async def pause(self, queue: str) -> None:
        await self._open.admin.pause(queue, paused=True)

    async def resume(self, queue: str) -> None:
        await self._open.admin.pause(queue, paused=False)

    async def send_command(self, order: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        return await self._open.admin.send_command(order, workers)

    @property
    def maintenance(self) -> Maintenance:
        """Maintenance in the running event loop."""
        return self._open.maintenance

    @property
    def query(self) -> Query:
        """Reads in the running event loop."""
        return self._open.query

    async def server_time_us(self) -> int:
        return await self._open.query.server_time_us()
