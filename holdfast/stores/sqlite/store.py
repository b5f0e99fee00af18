"""The SQLite store: one file, any number of processes on one host. Composes its verb families; see ``writer.py``."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from importlib.resources import files
from typing import Any, TypeVar

from holdfast.core.errors import ForkedConnection, HoldfastError
from holdfast.core.job_logs import Record
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE
from holdfast.core.models import (
    BulkResult,
    Claim,
    Finding,
    HeartbeatReply,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    ReplayRate,
    Settled,
    Settlement,
    Submitted,
    TxOutcome,
    WorkerCommand,
    WorkerHeartbeat,
)
from holdfast.core.portal import drive_coroutine, running_loop
from holdfast.stores.base import AT_ONCE, Maintenance, Query, Selection, StatementFlow
from holdfast.stores.common.named_sql import chosen_migrations, load_migrations, load_statements
from holdfast.stores.common.requests import (
    CHOOSE,
    Chosen,
    WorkerClaim,
    awaited_jobs,
    replayable_states,
    select_ids,
)
from holdfast.stores.sqlite import external_tx, maintenance
from holdfast.stores.sqlite.admin import SqliteAdmin, SqliteMaintenance
from holdfast.stores.sqlite.connection import check_owner, check_place, create_private, translate_errors
from holdfast.stores.sqlite.identity import check_side_files
from holdfast.stores.sqlite.opened import OpenedSqlite
from holdfast.stores.sqlite.query import Reads, SqliteQuery
from holdfast.stores.sqlite.queueing import SqliteQueueing
from holdfast.stores.sqlite.writer import Transaction

T = TypeVar("T")

_FORKED = "this store was opened before fork(); make another one in the child process"


class SQLiteStore:
    """A store in one file. ``now`` (microseconds since 1970) replaces the host's clock; only tests give one.
    ``patience``: seconds a call from an event loop waits for a file that another program has locked, if fewer than
    usual."""

    dialect = "sqlite"

    def __init__(self, path: str, *, now: Callable[[], int] | None = None, patience: float | None = None) -> None:
        self.path = os.path.realpath(path)  # links resolved: all of us lock the same files
        self.url = f"sqlite:///{self.path}"
        self._now = now or _host_clock
        here = files("holdfast.stores.sqlite")
        self._sql = load_statements(here / "queries.sql")
        self._patience = patience
        self._migrations = load_migrations(here / "migrations")
        self._hot = SqliteQueueing(self._sql)
        self._operate = SqliteAdmin(self._sql)
        self._reads = Reads(self._sql)
        self.maintenance: Maintenance = SqliteMaintenance(lambda: self._open, self._now, self._operate)
        self.query: Query = SqliteQuery(lambda: self._open, self._now, self._sql)
        self._opened: OpenedSqlite | None = None
        self._lock = threading.Lock()

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def open(self) -> None:
        with self._lock:
            if self._opened is None:
                self._opened = self._opening()
            elif self._opened.forked:
                raise ForkedConnection(_FORKED)

    def _opening(self) -> OpenedSqlite:
        check_place(self.path)
        with translate_errors(self.path):
            create_private(self.path)
            opened = self._opened_together()
            try:
                if not opened.reader.run_search(lambda reader: maintenance.is_current(reader, self._migrations)):
                    opened.migrated = opened.writer.write(self._migrating)
            except BaseException:
                opened.close()
                raise
        return opened

    def _opened_together(self) -> OpenedSqlite:
        """Opens the files that every other open store uses: once more if their last user removes them meanwhile."""
        while True:
            seen = check_side_files(self.path, self._patience)
            check_owner(self.path)
            opened = OpenedSqlite(self.path, self._now, self._patience)
            if seen is None or seen == opened.identity.inodes:
                return opened
            opened.close()

    async def missing(self) -> str | None:
        return maintenance.missing(self.path)

    def _migrating(self, transaction: Transaction) -> list[str]:
        return maintenance.migrate(transaction.connection, self._migrations, self.path)

    async def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and not opened.forked:
            opened.close()

    async def migrate(self) -> list[str]:
        opened = self._open
        applied, opened.migrated = opened.migrated, []
        return applied + await opened.writer.call(self._migrating)

    def migration_sql(self, span: str) -> str:
        return maintenance.render_migrations(chosen_migrations(self._migrations, span))

    def blocking(self, call: Coroutine[Any, Any, T]) -> T:
        return drive_coroutine(call)

    @property
    def _open(self) -> OpenedSqlite:
        opened = self._opened
        if opened is None:
            raise HoldfastError("this store is not open; await open() first, or use the application as a context")
        if opened.forked:
            raise ForkedConnection(_FORKED)
        return opened

    # ── hot path ──────────────────────────────────────────────────────────────────────────────────────────────
    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        if not jobs:
            return []
        return await self._open.writer.call(lambda transaction: self._hot.submit(transaction, jobs))

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
        opened = self._open
        return await opened.writer.call(
            lambda transaction: self._hot.claim(transaction, wish),
            # Delivered ids are worth a look at the rows themselves: refused ones must be counted.
            None
            if only is not None
            else lambda: opened.glance.run_search(lambda reader: self._hot.search_claim(reader, wish, self._now())),
        )

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        if not settlements:
            return []
        return await self._open.writer.call(lambda transaction: self._hot.settle(transaction, settlements))

    async def heartbeat(
        self, pulse: WorkerHeartbeat, leases: Sequence[Lease], *, lease_for: timedelta
    ) -> HeartbeatReply:
        return await self._open.writer.call(
            lambda transaction: self._hot.heartbeat(transaction, pulse, leases, lease_for=lease_for)
        )

    async def append_logs(self, records: Sequence[Record]) -> list[bool]:
        if not records:
            return []
        return await self._open.writer.call(lambda transaction: self._hot.append_logs(transaction, records))

    async def deregister(self, worker: str) -> None:
        await self._open.writer.call(lambda transaction: self._operate.deregister(transaction, worker))

    async def wait(self, topics: Sequence[str], *, timeout: float) -> None:
        opened = self._open
        awaited = awaited_jobs(topics)

        def is_settled() -> bool:
            return bool(awaited) and opened.glance.run_search(lambda reader: self._reads.any_finished(reader, awaited))

        if running_loop() is None:
            opened.wakes.wait_here(topics, timeout, is_settled)
        else:
            await opened.wakes.wait(topics, timeout, is_settled)

    # ── inside the caller's transaction ───────────────────────────────────────────────────────────────────────
    async def verify(self) -> StatementFlow[None]:
        return external_tx.verify(self.path)

    def submit_steps(self, jobs: Sequence[NewJob]) -> StatementFlow[list[Submitted]]:
        self._open.identity.check_files()
        return self._hot.submit_steps(jobs, self._now())

    def complete_steps(self, lease: Lease, result: str | None) -> StatementFlow[Settled]:
        self._open.identity.check_files()
        return external_tx.complete_steps(self._sql, lease, result, self._now)

    async def tx_outcome(self, lease: Lease) -> TxOutcome:
        return await self._open.writer.call(lambda transaction: external_tx.tx_outcome(transaction, self._sql, lease))

    # ── maintenance ───────────────────────────────────────────────────────────────────────────────────────────
    async def reannounce(self) -> int:
        return 0

    # ── operating ─────────────────────────────────────────────────────────────────────────────────────────────
    async def cancel(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        chosen = await self._chosen(selection, CANCELLABLE, limit, unasked=True)
        return await self._operated(chosen, lambda transaction: self._operate.cancel(transaction, chosen))

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
        return await self._operated(
            chosen,
            lambda transaction: self._operate.replay(transaction, chosen, force=force, payload=payload, pace=pace),
        )

    async def delete(self, selection: Selection, *, limit: int = 1000) -> BulkResult:
        chosen = await self._chosen(selection, DELETABLE, limit)
        return await self._operated(chosen, lambda transaction: self._operate.delete(transaction, chosen))

    async def _chosen(
        self, selection: Selection, legal: frozenset[JobState], limit: int, *, unasked: bool = False
    ) -> Chosen:
        if not isinstance(selection, JobFilter):
            return select_ids(selection, limit)
        return await self._open.search(
            lambda reader: self._operate.select_jobs(reader, selection, legal, limit, unasked=unasked),
            selection,
            seconds=CHOOSE,
        )

    async def _operated(self, chosen: Chosen, operation: Callable[[Transaction], BulkResult]) -> BulkResult:
        return await self._open.writer.call(operation) if chosen.ids else BulkResult([], [])

    async def pause(self, queue: str) -> None:
        await self._open.writer.call(lambda transaction: self._operate.pause(transaction, queue, paused=True))

    async def resume(self, queue: str) -> None:
        await self._open.writer.call(lambda transaction: self._operate.pause(transaction, queue, paused=False))

    async def send_command(self, order: WorkerCommand, workers: Sequence[str] | None = None) -> list[str]:
        return await self._open.writer.call(lambda transaction: self._operate.send_command(transaction, order, workers))

    # ── care ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def doctor(self) -> list[Finding]:
        self._open.identity.check_files()
        durability, now_us = self._open.durability, self._now()
        return [durability, *await _aside(lambda: maintenance.run_checks(self._sql, self.path, now_us))]

    async def durability(self) -> Finding:
        self._open.identity.check_files()
        return self._open.durability

    async def repair(self) -> list[Finding]:
        return []  # a file holds together or is restored from a backup

    async def backup(self, path: str) -> None:
        self._open.identity.check_files()
        await _aside(lambda: maintenance.copy_file(self.path, path))

    async def server_time_us(self) -> int:
        return self._now()


async def _aside(work: Callable[[], T]) -> T:
    """Run what reads a whole file: on a thread of its own beside an event loop, right here otherwise."""
    if running_loop() is None:
        return work()
    return await asyncio.to_thread(work)


def _host_clock() -> int:
    return time.time_ns() // 1000
