"""Handlers, by the type of the jobs they run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from atlasqueue import canvas
from atlasqueue.app import app
from atlasqueue.worker.completion import ChainCompletion
from atlasqueue.worker.limiter import Limiter
from holdfast import ConfigError, Holdfast, current_job
from holdfast.tasks.codec import encode_result

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

limiter = Limiter(app.settings.transport_url, app.settings.transport_key)
completion = ChainCompletion(app)
_log = logging.getLogger(__name__)
_REMEDY = "the job has succeeded with the result null; return a value that JSON can hold, or none"
_RETURN = "the handler called job.complete, so the next job was not submitted; let it return its result instead"


def register(job_type: str, *, per_second: float | None = None) -> Callable[[Handler], Handler]:
    """Have jobs of this type run by an ``async def handler(payload)``, or ``handler(payload, job)``.

    ``payload`` is the submitted object. ``job`` has ``id``, ``attempts``, ``max_attempts`` and, as ``job.job``, all
    there is to know. Whatever the handler raises fails the attempt, and a return is success: a result that JSON cannot
    hold is logged and stored as null. ``per_second``: so many may begin a second, in all workers together.
    """
    if per_second is not None and per_second <= 0:
        raise ConfigError(f"per_second of {job_type!r}: give a number above 0")

    def registered(handler: Handler) -> Handler:
        count = len(inspect.signature(handler).parameters)
        if not inspect.iscoroutinefunction(handler) or count not in (1, 2):
            raise ConfigError(
                f"handler of {job_type!r}: write async def {handler.__name__}(payload), or (payload, job)"
            )

        async def run(**payload: Any) -> Any:
            job = current_job()
            follower = canvas.next_job(app, job)
            if per_second is not None:
                await limiter.turn(job_type, per_second, job.id)
            result = _storable(await (handler(payload) if count == 1 else handler(payload, job)))
            if follower is not None and job.has_called_complete:
                _log.error("next_job_lost", extra={"job_id": job.id, "next": follower.task, "remedy": _RETURN})
                return result
            return result if follower is None else await completion.complete(job, follower, result)

        app.task(job_type)(run)
        return handler

    return registered


def _storable(result: Any) -> Any:
    """Returns the result, or None for one that cannot be stored: that must not fail a job whose work is done."""
    try:
        encode_result(result, app.settings.result_limit)
    except Exception as error:  # encoding runs code of the result's type
        _log.warning("result_not_stored", extra={"error": str(error), "remedy": _REMEDY})
        return None
    return result


@register("noop")
async def noop(payload: dict[str, Any]) -> None:
    """Nothing, with any payload."""


@register(canvas.JOIN)
async def join(payload: dict[str, Any]) -> None:
    """What waits for the members of a group."""
    await canvas.wait_for_group(app, payload)


@app.lifespan
@asynccontextmanager
async def _connected(_: Holdfast) -> AsyncIterator[None]:
    async with completion.opened():
        yield
    await limiter.close()
