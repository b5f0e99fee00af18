"""Authorization of submissions, without a word about jobs in other principals' queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from holdfast.app import JobHandle
from holdfast.core.errors import Conflict
from holdfast.core.models import NewJob
from holdfast.tasks.command_policy import COMMAND
from holdfast.web.responses import Refusal
from holdfast.web.routing import RequestContext

T = TypeVar("T")
Handle = JobHandle[Any]
_ASKED_MOST = 100  # jobs that are asked for together: each may have a large payload


def check_task(call: RequestContext, task: str) -> None:
    """A command job is a program of the caller's choosing: only ``admin`` may choose one."""
    if task == COMMAND and not call.caller.has_scope("admin"):
        raise Refusal(403, "forbidden", "a command job needs the scope admin", "use a key with scope admin")


async def submit_authorized(
    call: RequestContext,
    jobs: Sequence[NewJob],
    store: Callable[[], Awaitable[T]],
    handles_of: Callable[[T], Sequence[Handle]],
) -> T:
    """Stores these jobs if the caller may submit all of them. ``handles_of``: their handles in the answer.

    A key, or an id, that stands for a job in another's queue is a conflict which says nothing of that job. Who takes
    a key for one in the same instant is found afterwards; then the conflict says what is stored all the same.
    """
    for job in jobs:
        call.caller.check_queue(job.queue)
        check_task(call, job.task)
    if not call.caller.limited:
        return await store()
    if await _is_taken(call, jobs):
        raise _taken()
    try:
        answer = await store()
    except Conflict as error:
        if await _is_taken(call, jobs):  # it may name a job that came in between
            raise _taken(error.stored) from None
        raise
    handles = handles_of(answer)
    if await _is_foreign(call, [handle.id for handle in handles if not handle.created]):
        raise _taken([handle.id if handle.created else None for handle in handles])
    return answer


def _taken(stored: Sequence[str | None] = ()) -> Conflict:
    error = Conflict("the key, or the id, of a job stands for something else already; use another")
    error.stored = stored
    return error


async def _is_taken(call: RequestContext, jobs: Sequence[NewJob]) -> bool:
    """Returns True if one of the keys, or of the ids that the caller gave, is that of a job in another's queue."""
    bodies = call.body.get("jobs", [call.body])
    if await _is_foreign(call, [job.id for job, said in zip(jobs, bodies, strict=True) if "id" in said]):
        return True
    store = await call.app.open_store()
    keys = [job.key for job in jobs if job.key is not None]
    for start in range(0, len(keys), _ASKED_MOST):
        found = await store.query.by_keys(keys[start : start + _ASKED_MOST])
        if any(job is not None and not call.caller.allows_queue(job.queue) for job in found):
            return True
    return False


async def _is_foreign(call: RequestContext, ids: Sequence[str]) -> bool:
    """Returns True if one of these ids is that of a job in another's queue."""
    if not ids:
        return False
    found = await (await call.app.open_store()).query.summaries(ids)
    return any(job is not None and not call.caller.allows_queue(job.queue) for job in found)
