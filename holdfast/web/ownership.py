"""What a caller may submit, and that no word of a job in another's queue comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from holdfast.errors import Conflict
from holdfast.executors.policy import COMMAND
from holdfast.job import Job, NewJob
from holdfast.web.messages import Refusal
from holdfast.web.routing import Call

T = TypeVar("T")


def check_task(call: Call, task: str) -> None:
    """A command job is a program of the caller's choosing: only ``admin`` may choose one."""
    if task == COMMAND and not call.caller.may("admin"):
        raise Refusal(403, "forbidden", "a command job needs the scope admin", "use a key with scope admin")


async def stored(call: Call, jobs: Sequence[NewJob], store: Callable[[], Awaitable[T]]) -> T:
    """Store these jobs by ``store``, if all of them are the caller's to submit.

    A key, or an id, that stands for a job in another's queue is a conflict which says nothing of that job.
    """
    for job in jobs:
        call.caller.check_queue(job.queue)
        check_task(call, job.task)
    if not call.caller.limited:
        return await store()
    await _check_free(call, jobs)
    try:
        answer = await store()
    except Conflict:
        await _check_free(call, jobs)  # it may name a job that came in between
        raise
    await _check_free(call, jobs)
    return answer


async def _check_free(call: Call, jobs: Sequence[NewJob]) -> None:
    store = await call.app.opened()
    for job in jobs:
        found: list[Job | None] = [await store.get(job.id)]
        if job.key is not None:
            found.append(await store.by_key(job.key))
        if any(each is not None and not call.caller.allows(each.queue) for each in found):
            raise Conflict("the key, or the id, of a job stands for something else already; use another")
