"""Progress of a workflow: each step saves its result with the job, and the last one can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import msgspec
from pydantic import BaseModel

from holdfast import Context, Holdfast


class Checkpoint(BaseModel):
    """The last step that has ended, and its data: what it returned."""

    step: str
    data: Any


class StateManager:
    """Saves the steps of jobs and reads where a job stands. It keeps no state of its own: the steps are Holdfast's."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app

    async def save(
        self,
        context: Context,
        step: str,
        function: Callable[..., Any],
        *arguments: Any,
        connection: asyncpg.Connection | None = None,
    ) -> Any:
        """Runs a step and saves what it returns; a later attempt gets that back, and does not run the step again.

        With a ``connection``, the step is saved in its transaction, together with the rows that the function writes.
        """
        if connection is None:
            return await context.step(step, function, *arguments)
        return await context.step_in(connection, step, function, connection, *arguments)

    async def get(self, job_id: str) -> Checkpoint | None:
        """Returns the last step of a job that has ended; None before the first."""
        steps = await self._app.steps(job_id)
        if not steps:
            return None
        last = steps[-1]
        return Checkpoint(step=last.name, data=None if last.result is None else msgspec.json.decode(last.result))
