"""Children of a running job: calls of other tasks, and what they have come to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from holdfast.core.errors import JobCancelled, JobFailed, JobOutcome
from holdfast.core.models import Job, JobState, NewJob
from holdfast.tasks.codec import decode_json, encode_result

T = TypeVar("T")

_RESULT = '{"result":'


class Gatherer(Protocol):
    """Protocol of an object that waits for children."""

    async def gather(
        self, children: Sequence[Child[Any]], *, is_ordered: bool, return_exceptions: bool
    ) -> list[Any]: ...


class Child(Generic[T]):
    """A call of another task by ``context.call``: await it, or give it to ``context.gather``."""

    __slots__ = ("_decode", "_steps", "job", "name", "number")

    def __init__(self, steps: Gatherer, name: str, number: int, job: NewJob, decode: Callable[[str | None], T]) -> None:
        """``job``: to be submitted. ``decode``: reads its result."""
        self._steps = steps
        self.name = name
        self.number = number
        self.job = job
        self._decode = decode

    def __await__(self) -> Generator[Any, Any, T]:
        return self._value().__await__()

    async def _value(self) -> T:
        [value] = await self._steps.gather([self], is_ordered=True, return_exceptions=False)
        result: T = value
        return result

    def decode_outcome(self, record: str) -> T | JobOutcome:
        """Reads a record: the result of the child, or the error with which it ended."""
        if record.startswith(_RESULT):
            text = record[len(_RESULT) : -1]
            return self._decode(None if text == "null" else text)
        outcome = decode_json(record)
        kind = JobCancelled if outcome["failed"] == JobState.CANCELLED else JobFailed
        return kind(outcome["id"], outcome["error"])


def child_record(job_id: str, job: Job | None, failure: JobOutcome | None) -> str:
    """The record of a child that has ended: ``{"result": VALUE}``, or its id, state and error."""
    if failure is None and job is not None:
        return f"{_RESULT}{job.result or 'null'}}}"
    state = JobState.CANCELLED if isinstance(failure, JobCancelled) else JobState.DEAD
    return str(encode_result({"failed": state, "id": job_id, "error": str(failure)}))
