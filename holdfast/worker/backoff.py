"""Backoff of a loop whose store calls fail: one log line a try, growing waits, no end. Only a store whose files were
replaced ends the worker: this process cannot open the new ones.
"""

from __future__ import annotations

from holdfast.core.errors import HoldfastError, StoreReplaced
from holdfast.core.events import StoreTrouble
from holdfast.worker.context import WorkerContext

_FIRST, _MOST = 0.1, 5.0  # seconds


class RetryDelay:
    """The waits of one loop between failures: doubled, capped, with full jitter."""

    def __init__(self, shift: WorkerContext, service: str) -> None:
        self._shift = shift
        self._service = service
        self._failures = 0

    def reset(self) -> None:
        """The store has answered."""
        self._failures = 0

    async def wait_after(self, error: HoldfastError) -> None:
        """Tell of the failure and wait; a stopping worker does not wait long. Raises ``StoreReplaced`` again."""
        if isinstance(error, StoreReplaced):
            raise error
        shift = self._shift
        most = min(_MOST, _FIRST * 2 ** min(self._failures, 10))
        self._failures += 1
        pause = _FIRST / 2 + shift.rng.uniform(0, most)
        shift.emit(StoreTrouble(service=self._service, error=str(error), retry_in=round(pause, 3)))
        await shift.clock.run_bounded(shift.stopping.wait(), pause)
        if shift.stopping.is_set():
            await shift.clock.sleep(_FIRST)
