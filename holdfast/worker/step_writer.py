"""The step writer: stores steps for the handlers of one worker, those that end while a write is under way together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.fault_points import fault_point
from holdfast.core.metric_events import StepsRecorded
from holdfast.core.models import Job, Lease, NewJob, Step
from holdfast.core.steps import NewStep
from holdfast.core.waits import ChildStatus, SignalReceipt, SignalWait
from holdfast.stores.base import Store
from holdfast.telemetry.trace_context import submission
from holdfast.worker.context import StoreBackoff, WorkerState
from holdfast.worker.fault_injector import FaultInjector

T = TypeVar("T")
_Pending = tuple[NewStep, "asyncio.Future[bool]"]

_BATCH_SIZE = 500
"""Steps in one write."""

_READ_AT_ONCE = 50
"""Children read side by side."""


class StepWriter:
    """Steps of one worker. Lives in its event loop; threads come by ``run_blocking``."""

    def __init__(self, shared: WorkerState, store: Store, injector: FaultInjector | None = None) -> None:
        self._injector = injector
        self.clock = shared.clock
        self.result_limit = shared.settings.result_limit
        self.has_codec = shared.app.codec is not None
        self.outcome_if_over = shared.outcome_if_over
        self._store = store
        self._spans = shared.app.spans
        self._events = shared.events
        self._loop = asyncio.get_running_loop()
        self._backoff = StoreBackoff(shared, "step_writer")
        self._pending: list[_Pending] = []
        self._writing: asyncio.Task[None] | None = None

    def open_span(self, name: str) -> AbstractContextManager[object]:
        """Opens a span around the function of a step, if there are traces."""
        return nullcontext() if self._spans is None else self._spans.step_span(name)

    def step_function(self, job: Job, name: str, function: Callable[..., Any], *, blocking: bool) -> Callable[..., Any]:
        """Returns the function of a step as it is to be called: with injected faults, where there are any."""
        if self._injector is None:
            return function
        return self._injector.step_function(job, name, function, blocking=blocking)

    async def read_steps(self, job_id: str) -> list[Step]:
        """The steps of a job. Waits for a store that is away: that is no fault of the handler."""
        return await self._retry_unavailable(lambda: self._store.workflow.read_steps(job_id))

    async def save_step(self, step: NewStep) -> bool:
        """Stores a step; False if its lease is lost. While the store is away it tries again: the step has been done."""
        saved: asyncio.Future[bool] = self._loop.create_future()
        self._pending.append((step, saved))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="holdfast-step-writer")
        return await saved

    async def receive_signal(self, wait: SignalWait) -> SignalReceipt:
        """Takes a signal for a step, or makes its job the receiver."""
        fault_point("signal.before")
        receipt = await self._retry_unavailable(lambda: self._store.workflow.receive_signal(wait))
        fault_point("signal.after")
        return receipt

    async def start_children(self, lease: Lease, children: Sequence[NewJob], worker: str) -> list[ChildStatus] | None:
        """Starts children of a job. None: its lease is lost."""
        with submission(self._spans, children) as traced:
            fault_point("children.before")
            statuses = await self._retry_unavailable(lambda: self._store.workflow.start_children(lease, traced, worker))
            fault_point("children.after")
            return statuses

    async def read_jobs(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Jobs in their order, whole; None for one that is not there."""
        jobs: list[Job | None] = []
        for start in range(0, len(job_ids), _READ_AT_ONCE):
            some = job_ids[start : start + _READ_AT_ONCE]
            jobs += await asyncio.gather(
                *[self._retry_unavailable(functools.partial(self._store.query.get, job_id)) for job_id in some]
            )
        return jobs

    async def server_time_us(self) -> int:
        """The store's clock."""
        return await self._retry_unavailable(self._store.health.server_time_us)

    async def _retry_unavailable(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except (Unavailable, ConfigError) as error:
                await self._backoff.wait_after(error)

    async def close(self) -> None:
        """Gives up what is not stored. Call it when the handlers have ended."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def run_blocking(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call in the worker's loop, for a handler in a thread."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _write(self) -> None:
        batch: list[_Pending] = []
        try:
            while self._pending:
                batch = self._next_batch()
                await self._write_batch(batch)
        except BaseException as error:  # a bug, or the end of the worker: no handler may wait for ever
            for _, saved in (*batch, *self._pending):
                if not saved.done():
                    saved.set_exception(HoldfastError(f"the step was not recorded: {error!r}"))
            self._pending = []
            raise
        finally:
            self._writing = None

    def _next_batch(self) -> list[_Pending]:
        """Takes steps to write: a value that another one replaces ends the batch."""
        size, values = 0, set()
        for step, _ in self._pending[:_BATCH_SIZE]:
            if step.number == 0:
                place = step.lease.job_id, step.name
                if place in values:
                    break
                values.add(place)
            size += 1
        batch, self._pending = self._pending[:size], self._pending[size:]
        return batch

    async def _write_batch(self, batch: list[_Pending]) -> None:
        try:
            fault_point("step.before")
            are_saved = await self._store.workflow.save_steps([step for step, _ in batch])
            fault_point("step.after")
        except (Unavailable, ConfigError) as error:
            self._pending[:0] = [each for each in batch if not each[1].done()]  # the others were interrupted
            await self._backoff.wait_after(error)
        except HoldfastError as error:
            if len(batch) > 1:  # the step that is to blame gets the error
                for each in batch:
                    await self._write_batch([each])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
        else:
            self._backoff.reset()
            if self._events.has_subscriber(StepsRecorded):
                self._events.emit(StepsRecorded(count=sum(are_saved)))
            for (_, saved), is_saved in zip(batch, are_saved, strict=True):
                if not saved.done():
                    saved.set_result(is_saved)
