"""The Redis store. Composes its verb families, for each event loop that uses it: connections belong to one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from importlib.resources import files
from typing import Any, TypeVar

from holdfast.errors import ConfigError, ForkedConnection, HoldfastError, Invalid
from holdfast.job import (
    Attempt,
    Beat,
    Claim,
    Finding,
    Job,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    Operated,
    Order,
    Page,
    Pulse,
    QueueInfo,
    Settled,
    Settlement,
    Submitted,
    WorkerInfo,
)
from holdfast.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE
from holdfast.portal import Portal
from holdfast.store import Selection
from holdfast.stores.redis import care
from holdfast.stores.redis.address import Address, parse_url
from holdfast.stores.redis.hot import Hot, Wish
from holdfast.stores.redis.links import Links
from holdfast.stores.redis.news import News
from holdfast.stores.redis.operate import Chosen, Operate, named
from holdfast.stores.redis.read import Read
from holdfast.stores.redis.rows import Kinds
from holdfast.stores.redis.scripts import Script, load_scripts

T = TypeVar("T")


class RedisStore:
    """A store in one namespace. ``now`` (microseconds since 1970) replaces the server's clock; only tests give one."""

    def __init__(self, url: str, *, now: Callable[[], int] | None = None) -> None:
        self.address = parse_url(url)
        self.url = self.address.shown
        self._now = now
        self._scripts = load_scripts(files("holdfast.stores.redis") / "scripts")
        self._opened: dict[asyncio.AbstractEventLoop, _Opened] = {}
        self._migrated: list[str] = []  # what opening applied, for who asks
        self._portal: Portal | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._opened.get(loop) is not None:
            _ = self._open
            return
        self._check_process()
        opened = _Opened(self.address, self._scripts, self._now)
        try:
            self._migrated += await care.migrate(opened.links, self._scripts)
        except BaseException:
            await opened.close()
            raise
        if loop in self._opened:  # somebody else was quicker
            await opened.close()
            return
        for ended in [each for each in self._opened if each.is_closed()]:
            del self._opened[ended]
        self._opened[loop] = opened

    async def absent(self) -> str | None:
        links = Links(self.address, now=None)
        try:
            return await care.absent(links)
        finally:
            await links.close()

    async def close(self) -> None:
        opened = self._opened.pop(asyncio.get_running_loop(), None)
        if opened is not None and self._process == os.getpid():
            await opened.close()
        portal = self._portal
        if portal is not None and self._process == os.getpid() and not portal.is_here():
            self._portal = None
            await asyncio.to_thread(portal.end)

    async def migrate(self) -> list[str]:
        applied, self._migrated = self._migrated, []
        return applied + await care.migrate(self._open.links, self._scripts)

    def migration_sql(self, span: str) -> str:
        raise Invalid("migrations", span, "leave it out: Redis has no tables, opening the store is all there is to do")

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._portal is None or self._process != os.getpid():
                self._portal = Portal(at_exit=self.close)
            portal = self._portal
        return portal.run(call)

    @property
    def _open(self) -> _Opened:
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
        return await self._open.hot.submit(jobs) if jobs else []

    async def claim(
        self,
        worker: str,
        wants: Mapping[str, int],
        *,
        limit: int,
        lease_for: timedelta,
        suspects: int = 0,
        alone: bool = False,
        only: Sequence[str] | None = None,
        promote: bool = True,
    ) -> Claim:
        return await self._open.hot.claim(Wish(worker, wants, limit, lease_for, suspects, alone, only, promote))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        return await self._open.hot.settle(settlements) if settlements else []

    async def beat(self, pulse: Pulse, leases: Sequence[Lease], *, lease_for: timedelta) -> Beat:
        return await self._open.hot.beat(pulse, leases, lease_for=lease_for)

    async def leave(self, worker: str) -> None:
        await self._open.operate.leave(worker)

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        opened = self._open
        awaited = [topic.removeprefix("job:") for topic in topics if topic.startswith("job:")]
        await opened.news.wait(topics, timeout, lambda: opened.read.over(awaited))

    # ── maintenance ───────────────────────────────────────────────────────────────────────────────────────────
    async def promote(self, *, limit: int) -> int:
        return await self._open.operate.promote(limit=limit)

    async def expired(self, *, limit: int) -> list[Job]:
        return await self._open.operate.expired(limit=limit)

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        return await self._open.operate.prune(ended_for, limit=limit)

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    async def cancel(self, selection: Selection, *, limit: int = 1000) -> Operated:
        chosen = await self._chosen(selection, CANCELLABLE, limit, unasked=True)
        return await self._open.operate.cancel(chosen) if chosen.ids else Operated([], [])

    async def replay(
        self, selection: Selection, *, force: bool = False, payload: str | None = None, limit: int = 1000
    ) -> Operated:
        chosen = await self._chosen(selection, REPLAYABLE | {JobState.SUCCEEDED} if force else REPLAYABLE, limit)
        operate = self._open.operate
        return await operate.replay(chosen, force=force, payload=payload) if chosen.ids else Operated([], [])

    async def delete(self, selection: Selection, *, limit: int = 1000) -> Operated:
        chosen = await self._chosen(selection, DELETABLE, limit)
        return await self._open.operate.delete(chosen) if chosen.ids else Operated([], [])

    async def _chosen(
        self, selection: Selection, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen:
        if not isinstance(selection, JobFilter):
            return named(selection, limit)
        return await self._open.operate.choose(selection, legal, limit, unasked=unasked)

    async def pause(self, queue: str) -> None:
        await self._open.operate.pause(queue, paused=True)

    async def resume(self, queue: str) -> None:
        await self._open.operate.pause(queue, paused=False)

    async def order(self, order: Order, workers: Sequence[str] | None = None) -> list[str]:
        return await self._open.operate.order(order, workers)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────
    async def get(self, job_id: str) -> Job | None:
        return await self._open.read.get(job_id)

    async def by_key(self, key: str) -> Job | None:
        return await self._open.read.by_key(key)

    async def find(self, where: JobFilter, *, limit: int = 50, cursor: str | None = None) -> Page:
        return await self._open.read.find(where, limit=limit, cursor=cursor)

    async def count(self, where: JobFilter) -> int:
        return await self._open.read.count(where)

    async def attempts(self, job_id: str) -> list[Attempt]:
        return await self._open.read.attempts(job_id)

    async def queues(self) -> list[QueueInfo]:
        return await self._open.read.queues()

    async def workers(self) -> list[WorkerInfo]:
        return await self._open.read.workers()

    # ── care ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def doctor(self) -> list[Finding]:
        return await care.examine(self._open.links, self._scripts)

    async def backup(self, path: str) -> None:
        raise ConfigError(
            f"Redis is backed up by its own tools: redis-cli -u {self.url.partition('?')[0]} --rdb {path}, or copy its "
            "append-only folder"
        )

    async def now_us(self) -> int:
        return await self._open.read.now_us()


class _Opened:
    """What the store holds for one event loop, and lets go of together."""

    def __init__(self, address: Address, scripts: Mapping[str, Script], now: Callable[[], int] | None) -> None:
        self.links = Links(address, now=now)
        self.news = News(self.links)
        kinds = Kinds()
        self.hot = Hot(self.links, self.news, scripts, kinds)
        self.read = Read(self.links, scripts, kinds)
        self.operate = Operate(self.links, self.news, scripts, self.read, kinds)
        self._watching = asyncio.create_task(self._close_with_loop(), name="holdfast-connections")

    async def _close_with_loop(self) -> None:
        """``asyncio.run`` cancels what is left before it ends: the last moment to part in peace."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._part()

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def _part(self) -> None:
        await self.news.close()
        await self.links.close()
