"""Jobs inside a transaction that the caller holds, on the caller's own connection."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.core.errors import Invalid
from holdfast.core.models import Lease, NewJob, Settled, Submitted
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.stores.base import External, StatementFlow, Store
from holdfast.stores.connection_adapters import ConnectionAdapter, adapt_connection, failed_transaction_error, is_failed

T = TypeVar("T")


class RunInLoop(Protocol):
    """Runs a coroutine of the store on the event loop of the caller, or without one."""

    def __call__(self, call: Coroutine[Any, Any, T], /) -> Coroutine[Any, Any, T]: ...


class ExternalTransactions:
    """Operations of an application inside its callers' transactions.

    On a connection without an event loop everything happens in the thread of the caller, and nothing there waits for a
    loop: ``portal.drive_coroutine`` can run it.
    """

    def __init__(self, opened: Callable[[], Coroutine[Any, Any, Store]], run_in_loop: RunInLoop) -> None:
        self._opened = opened
        self._run_in_loop = run_in_loop
        self._known: weakref.WeakKeyDictionary[Store, weakref.WeakSet[object]] = weakref.WeakKeyDictionary()

    async def submit(self, connection: object, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Submit on ``connection``: the jobs exist once its owner commits, and never if they roll back."""
        caller, external = await self._verified(connection)
        return await _run_on_connection(caller, external.submit_flow(jobs))

    async def complete(
        self, connection: object, lease: Lease, result: str | None, worker: str | None = None
    ) -> Settled:
        """End a running job on ``connection``: it has succeeded once its owner commits."""
        caller, external = await self._verified(connection)
        return await _run_on_connection(caller, external.complete_flow(lease, result, worker))

    async def verify_connection(self, connection: object) -> None:
        """Raises Invalid or Conflict for a connection that cannot take a job or a step into its transaction."""
        await self._verified(connection)

    async def record_step(self, connection: object, step: NewStep, previous: str | None) -> StepReceipt:
        """Record a step on ``connection``: the job has it once its owner commits, and never if they roll back."""
        caller, external = await self._verified(connection)
        return await _run_on_connection(caller, external.record_step_flow(step, previous))

    async def _verified(self, connection: object) -> tuple[ConnectionAdapter, External]:
        """The connection, verified to be one to this application's store, and the store's family for it."""
        store = await self._run_in_loop(self._opened())
        external = store.external
        if external is None:
            raise Invalid(
                "connection",
                type(connection).__name__,
                f"leave it out: this application's jobs are in {store.url}, which shares no transaction with a caller",
            )
        caller = await adapt_connection(connection)
        known = self._known.setdefault(store, weakref.WeakSet())
        if caller.physical is not None and caller.physical in known:
            return caller, external
        if caller.dialect != external.dialect:
            raise Invalid(
                "connection",
                caller.dialect,
                f"it is open on another database; this application's jobs are in {store.url}",
            )
        await _run_on_connection(caller, await self._run_in_loop(external.verify()))
        if caller.physical is not None:
            known.add(caller.physical)
        return caller, external


async def _run_on_connection(caller: ConnectionAdapter, flow: StatementFlow[T]) -> T:
    """Run the statements of a flow on the caller's connection. The errors of its driver are for the caller."""
    try:
        statement = next(flow)
        while True:
            try:
                rows = await caller.fetch(statement)
            except Exception as error:
                if is_failed(error):
                    raise failed_transaction_error() from error
                raise
            statement = flow.send(rows)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
