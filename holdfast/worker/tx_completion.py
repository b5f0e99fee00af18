"""Handlers that complete their job, or record steps, in their own database transaction, together with their rows.

The commit decides the outcome, and it happens outside Holdfast. So after the handler has returned or raised, the
outcome is read from the store.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import HoldfastError, LeaseLost
from holdfast.core.models import TxOutcome
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.tasks import Context, encode_result
from holdfast.worker.context import LeasedJob, StoreBackoff, WorkerState

_MIN_PAUSE, _MAX_PAUSE = 0.01, 0.5  # seconds between reads while the transaction is open

UNDONE = "the transaction in which it was completed was not committed"
"""Error of an attempt whose handler returned although its transaction was rolled back."""


class TxCompletion:
    """Jobs in their handlers' transactions: their completion by ``context.complete``, steps by ``context.step_in``."""

    def __init__(self, shared: WorkerState) -> None:
        self._shared = shared

    async def complete(self, context: Context, connection: Any, result: Any) -> None:
        """Completes the job on ``connection``. Raises LeaseLost, and writes nothing, if the lease is lost.

        Without an event loop it runs in the thread of its handler.
        """
        job, shared = context.job, self._shared
        text = encode_result(result, shared.settings.result_limit)
        answer = await shared.app.external_tx.complete(connection, job.lease, text, job.worker)
        if not answer.accepted:
            hint = ", and let the test commit the job's own transaction" if shared.app.under_test else ""
            raise LeaseLost(
                f"job {job.id} is not this attempt's to complete: it is {answer.state or 'gone'} now; roll back{hint}"
            )

    async def verify_connection(self, connection: Any) -> None:
        """Raises Invalid or Conflict for a connection that cannot take a step into its transaction."""
        await self._shared.app.external_tx.verify_connection(connection)

    async def record_step(self, connection: Any, step: NewStep, previous: str | None) -> StepReceipt:
        """Records a step on ``connection``. Without an event loop it runs in the thread of its handler."""
        return await self._shared.app.external_tx.record_step(connection, step, previous)

    async def is_lost(self, leased: LeasedJob) -> bool:
        """Returns True if another worker may have the job: it has not ended, and no open transaction completes it."""
        try:
            outcome = await self._outcome(leased)
        except HoldfastError:
            return True  # the store is away: unknown
        return outcome in (TxOutcome.ROLLED_BACK, TxOutcome.LEASE_LOST)

    async def read_outcome(self, leased: LeasedJob) -> TxOutcome:
        """Returns the outcome of the job. Waits while its transaction is open, at most for the duration of a lease."""
        shared = self._shared
        backoff = StoreBackoff(shared, "runner")
        give_up_at = shared.clock.monotonic() + shared.settings.lease.total_seconds()
        pause = _MIN_PAUSE
        while True:
            try:
                outcome = await self._outcome(leased)
            except HoldfastError as error:
                outcome = TxOutcome.PENDING
                await backoff.wait_after(error)
            if outcome is not TxOutcome.PENDING or shared.clock.monotonic() > give_up_at:
                return outcome
            await shared.clock.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    async def _outcome(self, leased: LeasedJob) -> TxOutcome:
        external = (await self._shared.app.open_store()).external
        if external is None:  # the completion was refused
            return TxOutcome.ROLLED_BACK
        return await external.tx_outcome(leased.lease)
