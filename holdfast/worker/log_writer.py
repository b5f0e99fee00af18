"""The log writer: writes handlers' log lines in batches: when a batch is full, when the first line has waited for a
moment, and before the settlement of the job if the store takes lines then."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.events import LinesLost
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.models import Lease
from holdfast.stores.base import Store
from holdfast.tasks.job_logger import JobLog, LogEntry, LogLimits
from holdfast.worker.context import StoreBackoff, WorkerState

_MAX_DELAY = 0.5  # seconds the first line may wait for more
_BATCH_SIZE = 500  # lines in one call; as many are written at once
_MAX_PENDING = 20_000  # lines kept in memory while the store is away


class _Line(NamedTuple):
    """A line that is not stored yet."""

    lease: Lease
    number: int
    logged_at: float  # clock reading
    entry: LogEntry


class LogWriter:
    """Log lines of one worker. Lines may come from any thread; everything else runs in the worker's event loop."""

    def __init__(self, shared: WorkerState, store: Store) -> None:
        self._shared = shared
        self._store = store
        self._backoff = StoreBackoff(shared, "log_writer")
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: list[_Line] = []
        self._has_lines = asyncio.Event()
        self._has_full_batch = asyncio.Event()
        self._write_lock = asyncio.Lock()

    def open_log(self, lease: Lease) -> JobLog:
        """Returns the log of the attempt with this lease."""
        settings = self._shared.settings
        limits = LogLimits(settings.job_lines, settings.job_line_size)
        return JobLog(limits, functools.partial(self._add_line, lease))

    def _add_line(self, lease: Lease, number: int, entry: LogEntry) -> None:
        line = _Line(lease, number, self._shared.clock.monotonic(), entry)
        with self._lock:
            self._pending.append(line)
            count = len(self._pending)
        if count == 1 or count == _BATCH_SIZE:
            self._wake(self._has_lines if count == 1 else self._has_full_batch)

    def _wake(self, event: asyncio.Event) -> None:
        if not self._loop.is_closed():  # else the thread has outlived its worker
            self._loop.call_soon_threadsafe(event.set)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """Writes log lines until cancelled."""
        while True:
            await self._has_lines.wait()
            await self._shared.clock.run_bounded(self._has_full_batch.wait(), _MAX_DELAY)
            self._has_lines.clear()
            self._has_full_batch.clear()
            error = await self.flush()
            if error is None:
                self._backoff.reset()
            else:
                await self._backoff.wait_after(error)
                self._has_lines.set()

    async def flush(self) -> HoldfastError | None:
        """Writes the lines that are pending now. Returns the error if the store is away; the lines are kept then."""
        if not self._pending and not self._write_lock.locked():
            return None
        async with self._write_lock:
            for _ in range(0, len(self._pending), _BATCH_SIZE):  # not for ever, however fast handlers log
                with self._lock:
                    batch, self._pending = self._pending[:_BATCH_SIZE], self._pending[_BATCH_SIZE:]
                try:
                    await self._write(batch)
                except (Unavailable, ConfigError) as error:
                    return error
        if self._pending:
            self._has_lines.set()
        return None

    async def _write(self, batch: list[_Line]) -> None:
        records = _records(batch, self._shared.clock.monotonic())
        try:
            stored = await self._store.queueing.append_logs(records)
        except (Unavailable, ConfigError, asyncio.CancelledError):
            self._put_back(batch)
            raise
        except HoldfastError as error:  # the store will never accept them
            self._shared.emit(LinesLost(count=len(batch), error=str(error)))
        else:
            lost = sum(len(each.lines) for each, is_stored in zip(records, stored, strict=True) if not is_stored)
            if lost:
                self._shared.emit(LinesLost(count=lost, error="their jobs' leases were over before they were written"))

    def _put_back(self, batch: list[_Line]) -> None:
        with self._lock:
            self._pending[:0] = batch
            lost = len(self._pending) - _MAX_PENDING
            del self._pending[: max(0, lost)]
        if lost > 0:
            self._shared.emit(LinesLost(count=lost, error="the store is away, and too many lines wait for it"))


def _records(batch: Sequence[_Line], now: float) -> list[LogBatch]:
    """Groups lines by lease."""
    found: dict[Lease, list[NewLine]] = {}
    for lease, number, logged_at, entry in batch:
        ago = timedelta(seconds=max(0.0, now - logged_at))
        found.setdefault(lease, []).append(NewLine(number, ago, *entry))
    return [LogBatch(lease, lines) for lease, lines in found.items()]
