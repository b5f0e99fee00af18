"""Handlers that end their job inside a transaction of their own, together with their rows.

Whether such a job has ended is decided by a commit that we never hear of. So the handler is not believed: when it has
returned or raised, the store is asked.
"""

from __future__ import annotations

from typing import Any, cast

from holdfast.core.errors import HoldfastError, LeaseLost
from holdfast.core.models import TxOutcome
from holdfast.stores.base import External
from holdfast.tasks import Context, encode_result
from holdfast.worker.context import RetryDelay, TaskRun, WorkerContext

_PAUSE, _PAUSE_MOST = 0.01, 0.5  # seconds between looks at a transaction that is still open

UNDONE = "the transaction in which it was completed was not committed"
"""The error of an attempt whose handler returned as if it had not been."""


class TxCompletion:
    """Completion of jobs in their handlers' transactions, by ``context.complete``."""

    def __init__(self, shared: WorkerContext) -> None:
        self._shared = shared

    async def complete(self, context: Context, connection: Any, result: Any) -> None:
        """End the job of ``context`` on ``connection``; LeaseLost, and nothing written, where it is not ours to end.

        Without an event loop it runs in the thread of its handler.
        """
        job, shared = context.job, self._shared
        text = encode_result(result, shared.settings.result_limit)
        answer = await shared.app.within.complete(connection, job.lease, text)
        if not answer.accepted:
            raise LeaseLost(
                f"job {job.id} is not this attempt's to complete: it is {answer.state or 'gone'} now; roll back"
            )

    async def is_lost(self, run: TaskRun) -> bool:
        """Returns True if another worker may have the job: not if it has ended, nor while its transaction holds it."""
        external = cast(External, (await self._shared.app.open_store()).external)
        try:
            fate = await external.tx_outcome(run.lease)
        except HoldfastError:
            return True  # cut off from the store: unknown
        return fate in (TxOutcome.ROLLED_BACK, TxOutcome.LEASE_LOST)

    async def read_outcome(self, run: TaskRun) -> TxOutcome:
        """Outcome of the job. Waits while its transaction is open, but for no longer than a lease lasts."""
        shared = self._shared
        external = cast(External, (await shared.app.open_store()).external)
        patience = RetryDelay(shared, "runner")
        give_up = shared.clock.monotonic() + shared.settings.lease.total_seconds()
        pause = _PAUSE
        while True:
            try:
                fate = await external.tx_outcome(run.lease)
            except HoldfastError as error:
                fate = TxOutcome.PENDING
                await patience.wait_after(error)
            if fate is not TxOutcome.PENDING or shared.clock.monotonic() > give_up:
                return fate
            await shared.clock.sleep(pause)
            pause = min(2 * pause, _PAUSE_MOST)
