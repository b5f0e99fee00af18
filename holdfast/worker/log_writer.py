"""The recorder: gathers handlers' log lines and writes them in batches: when many wait, when the first has waited for
a moment, and always before the settlement of their job."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.events import LinesLost
from holdfast.core.job_logs import NewLine, Record
from holdfast.core.models import Lease
from holdfast.stores.base import Store
from holdfast.tasks.job_logger import JobLog, LogEntry, LogLimits
from holdfast.worker.context import RetryDelay, WorkerContext

_LINGER = 0.5  # seconds the first line may wait for others
_BATCH = 500  # lines that are written without waiting for more, and in one call
_MOST = 20_000  # lines that may wait for a store that is away


class _Line(NamedTuple):
    """A line on its way."""

    lease: Lease
    number: int
    said_at: float  # the clock's reading
    given: LogEntry


class LogWriter:
    """The log lines of one worker. Lines come from any thread; all else happens on the worker's event loop."""

    def __init__(self, shared: WorkerContext, store: Store) -> None:
        self._shared = shared
        self._store = store
        self._patience = RetryDelay(shared, "log_writer")
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[_Line] = []
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self._writing = asyncio.Lock()

    def open_log(self, lease: Lease) -> JobLog:
        """A log for the attempt under this lease."""
        settings = self._shared.settings
        limits = LogLimits(settings.job_lines, settings.job_line_size)
        return JobLog(limits, functools.partial(self._keep, lease))

    def _keep(self, lease: Lease, number: int, given: LogEntry) -> None:
        line = _Line(lease, number, self._shared.clock.monotonic(), given)
        with self._lock:
            self._waiting.append(line)
            count = len(self._waiting)
        if count == 1 or count == _BATCH:
            self._wake(self._some if count == 1 else self._many)

    def _wake(self, event: asyncio.Event) -> None:
        if not self._loop.is_closed():  # else a thread has outlived its worker
            self._loop.call_soon_threadsafe(event.set)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """Write log lines, until cancelled."""
        while True:
            await self._some.wait()
            await self._shared.clock.run_bounded(self._many.wait(), _LINGER)
            self._some.clear()
            self._many.clear()
            error = await self.flush()
            if error is None:
                self._patience.reset()
            else:
                await self._patience.wait_after(error)
                self._some.set()

    async def flush(self) -> HoldfastError | None:
        """Write everything that waits; the error of a store that is away. Then the lines wait on."""
        if not self._waiting and not self._writing.locked():
            return None
        async with self._writing:
            while self._waiting:
                with self._lock:
                    batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                try:
                    await self._write(batch)
                except (Unavailable, ConfigError) as error:
                    return error
        return None

    async def _write(self, batch: list[_Line]) -> None:
        now = self._shared.clock.monotonic()
        try:
            await self._store.queueing.append_logs(_records(batch, now))
        except (Unavailable, ConfigError, asyncio.CancelledError):
            self._put_back(batch)
            raise
        except HoldfastError as error:  # the store does not take them, and never will
            self._shared.emit(LinesLost(count=len(batch), error=str(error)))

    def _put_back(self, batch: list[_Line]) -> None:
        with self._lock:
            self._waiting[:0] = batch
            lost = len(self._waiting) - _MOST
            del self._waiting[: max(0, lost)]
        if lost > 0:
            self._shared.emit(LinesLost(count=lost, error="the store is away, and too many lines wait for it"))


def _records(batch: Sequence[_Line], now: float) -> list[Record]:
    """The lines by their leases."""
    found: dict[Lease, list[NewLine]] = {}
    for lease, number, said_at, given in batch:
        ago = timedelta(seconds=max(0.0, now - said_at))
        found.setdefault(lease, []).append(NewLine(number, ago, *given))
    return [Record(lease, lines) for lease, lines in found.items()]
