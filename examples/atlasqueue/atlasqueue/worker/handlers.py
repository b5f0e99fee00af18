"""Handlers, by the type of the jobs they run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from atlasqueue.app import app
from holdfast import ConfigError, current_job

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def register(job_type: str) -> Callable[[Handler], Handler]:
    """Have jobs of this type run by an ``async def handler(payload)``, or ``handler(payload, job)``.

    ``payload`` is the submitted object. ``job`` has ``id``, ``attempts``, ``max_attempts`` and, as ``job.job``, all
    there is to know. Whatever the handler raises fails the attempt.
    """

    def registered(handler: Handler) -> Handler:
        count = len(inspect.signature(handler).parameters)
        if not inspect.iscoroutinefunction(handler) or count not in (1, 2):
            raise ConfigError(
                f"handler of {job_type!r}: write async def {handler.__name__}(payload), or (payload, job)"
            )

        async def run(**payload: Any) -> Any:
            return await (handler(payload) if count == 1 else handler(payload, current_job()))

        app.task(job_type)(run)
        return handler

    return registered


@register("noop")
async def noop(payload: dict[str, Any]) -> None:
    """Nothing, with any payload."""
