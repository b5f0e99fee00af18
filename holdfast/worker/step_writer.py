"""The step writer: stores steps for the handlers of one worker, those that end while a write is under way together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast.core.errors import ConfigError, HoldfastError, Unavailable
from holdfast.core.fault_injection import fault_point
from holdfast.core.steps import NewStep, Step
from holdfast.stores.base import Store
from holdfast.worker.context import StoreBackoff, WorkerContext

T = TypeVar("T")

_BATCH_SIZE = 500
"""Steps in one write."""


class StepWriter:
    """Steps of one worker. Lives in its event loop; threads come by ``run_blocking``."""

    def __init__(self, shared: WorkerContext, store: Store) -> None:
        self.clock = shared.clock
        self.result_limit = shared.settings.result_limit
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._backoff = StoreBackoff(shared, "step_writer")
        self._waiting: list[tuple[NewStep, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def read_steps(self, job_id: str) -> list[Step]:
        """The steps of a job."""
        return await self._store.workflow.read_steps(job_id)

    async def save_step(self, step: NewStep) -> bool:
        """Stores a step; False if its lease is lost. While the store is away it tries again: the step has been done."""
        saved: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.append((step, saved))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="holdfast-step-writer")
        return await saved

    async def server_time_us(self) -> int:
        """The store's clock."""
        return await self._store.health.server_time_us()

    def run_blocking(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call in the worker's loop, for a handler in a thread."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH_SIZE], self._waiting[_BATCH_SIZE:]
                try:
                    fault_point("step.before")
                    kept = await self._store.workflow.save_steps([step for step, _ in batch])
                    fault_point("step.after")
                except (Unavailable, ConfigError) as error:
                    self._waiting[:0] = [each for each in batch if not each[1].done()]  # the others were interrupted
                    await self._backoff.wait_after(error)
                    continue
                except HoldfastError as error:
                    await self._write_singly(batch, error)
                    continue
                self._backoff.reset()
                for (_, saved), each in zip(batch, kept, strict=True):
                    if not saved.done():
                        saved.set_result(each)
        finally:
            self._writing = None

    async def _write_singly(self, batch: list[tuple[NewStep, asyncio.Future[bool]]], error: HoldfastError) -> None:
        """The store refuses the batch: the step that is to blame gets the error."""
        if len(batch) == 1:
            if not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        for step, saved in batch:
            try:
                kept = (await self._store.workflow.save_steps([step]))[0]
            except HoldfastError as own:
                if not saved.done():
                    saved.set_exception(own)
            else:
                if not saved.done():
                    saved.set_result(kept)
