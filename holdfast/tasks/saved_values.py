"""Values that handlers keep with their jobs: state, progress, cursors; and the protocol of what stores them."""

from __future__ import annotations

import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from holdfast.core.clock import Clock
from holdfast.core.encryption import describe_encrypted, is_encrypted
from holdfast.core.errors import Invalid, LeaseLost
from holdfast.core.lifecycle import Failed, Outcome
from holdfast.core.models import Job, Lease, NewJob, Reason, Step
from holdfast.core.portal import requires_loop
from holdfast.core.retry import Retry
from holdfast.core.steps import CHILDREN, MAX_NAME, MAX_RESULTS, PROGRESS, STATE, NewStep, Progress, StepReceipt
from holdfast.core.waits import ChildStatus, SignalReceipt, SignalWait, step_value
from holdfast.tasks.codec import decode_json, encode_result

T = TypeVar("T")

_MAX_PROGRESS = 1e300
_PROGRESS_SECONDS = 1.0  # between two writes of progress


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a step. tries: within one attempt of its job. retry: delays between them. timeout: seconds of each."""

    tries: int = 1
    retry: Retry = Retry()
    timeout: float | None = None


DEFAULT_OPTIONS = StepOptions()


class StepStore(Protocol):
    """Protocol of an object that stores steps for handlers."""

    clock: Clock
    result_limit: int
    has_codec: bool

    def open_span(self, name: str) -> AbstractContextManager[object]: ...

    def step_function(
        self, job: Job, name: str, function: Callable[..., Any], *, blocking: bool
    ) -> Callable[..., Any]: ...

    def outcome_if_over(self, lease: Lease) -> Outcome | None: ...

    async def read_steps(self, job_id: str) -> list[Step]: ...

    async def save_step(self, step: NewStep) -> bool: ...

    async def receive_signal(self, wait: SignalWait) -> SignalReceipt: ...

    async def start_children(
        self, lease: Lease, children: Sequence[NewJob], worker: str
    ) -> list[ChildStatus] | None: ...

    async def read_jobs(self, job_ids: Sequence[str]) -> list[Job | None]: ...

    async def server_time_us(self) -> int: ...

    def run_blocking(self, call: Coroutine[Any, Any, T]) -> T: ...


class TxStepStore(Protocol):
    """Protocol of an object that stores steps in their handlers' own transactions."""

    async def verify_connection(self, connection: Any) -> None: ...

    async def record_step(self, connection: Any, step: NewStep, previous: str | None) -> StepReceipt: ...


class CallerTransaction(NamedTuple):
    """The transaction of a handler's own connection, in which a step is recorded."""

    step_store: TxStepStore
    connection: Any


def started_children(record: Iterable[Step]) -> dict[str, int]:
    """Names and call numbers of the children that a job has started last, as far as they were saved."""
    text = next((step.result for step in record if step.name == CHILDREN), None)
    return {} if text is None else dict(decode_json(text))


def find_encrypted(results: Mapping[str, str | None]) -> Failed | None:
    """Returns the failure of an attempt that needs a result, by the name of its step, that could not be decrypted."""
    for name, result in results.items():
        text = None if result is None else step_value(result)
        if text is not None and is_encrypted(text):
            error = f"the result of step {name!r} is {describe_encrypted(text)}, which could not be decrypted here"
            return Failed(error=error, reason=Reason.ENCRYPTED, retryable=False)
    return None


class SavedValues:
    """The values of one attempt of a job."""

    def __init__(self, job: Job, step_store: StepStore, read_record: Callable[[], Awaitable[None]]) -> None:
        """``read_record``: calls ``load`` with what earlier attempts have stored, once."""
        self._job = job
        self._step_store = step_store
        self._read_record = read_record
        self._values: dict[str, str | None] = {}
        self._progress_at = -_PROGRESS_SECONDS
        self._loop: weakref.ref[AsyncGenerator[Any, None]] | None = None  # of ``iterate``

    def load(self, steps: Iterable[Step]) -> None:
        """Takes the values among what is stored."""
        self._values = {step.name: step.result for step in steps if not step.number}

    @property
    def is_iterating(self) -> bool:
        """Returns True inside a loop over ``iterate``."""
        return self._loop is not None and self._loop() is not None

    def describe_misfit(self, name: str, error: Exception) -> str:
        """Text for a step whose result does not fit its annotation; with a codec it quotes nothing of the result."""
        cause = type(error).__name__ if self._step_store.has_codec else error
        return f"step {name!r}: its result does not fit the function's return annotation: {cause}"

    async def read(self, name: str) -> Any:
        """A value of the job; None if it was never saved."""
        await self._read_record()
        text = self._values.get(name)
        return None if text is None else decode_json(text)

    async def save(self, name: str, value: Any) -> None:
        """Saves a value of the job under its lease, in place of an earlier one of this name."""
        await self._read_record()
        text = encode_result(value, MAX_RESULTS if name == CHILDREN else self._step_store.result_limit)
        step = NewStep(self._job.lease, name, 0, False, text, self._job.worker)
        if not await self._step_store.save_step(step):
            raise LeaseLost(f"{name[1:]} of job {self._job.id} was not saved: the lease is lost")
        self._values[name] = text

    async def save_progress(self, progress: Progress) -> None:
        """Saves how far the job is: once a second at most, and always at the end."""
        _check_progress(progress.done, 0 if progress.total is None else progress.total, progress.message)
        now = self._step_store.clock.monotonic()
        if progress.done == progress.total or now >= self._progress_at + _PROGRESS_SECONDS:
            self._progress_at = now
            await self.save(PROGRESS, msgspec.to_builtins(progress))

    def iterate(
        self, source: Callable[[Any], AsyncIterable[T] | Iterable[T]], cursor: Callable[[T], Any], name: str, every: int
    ) -> AsyncGenerator[T, None]:
        """Yields the rows of a source behind the saved cursor, and saves the cursor of those that are done."""
        if self.is_iterating:
            raise Invalid("iterate", name[1:], "end the loop that is open first")
        rows = self._iterate(source, cursor, name, every)
        self._loop = weakref.ref(rows)  # gone with the loop, also after a break
        return rows

    async def _iterate(
        self, source: Callable[[Any], AsyncIterable[T] | Iterable[T]], cursor: Callable[[T], Any], name: str, every: int
    ) -> AsyncGenerator[T, None]:
        place = await self.read(name) or {"after": None, "is_done": False}
        if not place["is_done"]:
            number, last = 0, place["after"]
            async for row in _each(source(last)):
                yield row
                number, last = number + 1, cursor(row)
                if number % every == 0:
                    await self.save(name, {"after": last, "is_done": False})
            await self.save(name, {"after": last, "is_done": True})
        self._loop = None


class SavedState:
    """A value that a handler keeps with its job, in place of an earlier one."""

    __slots__ = ("_values",)

    def __init__(self, values: SavedValues) -> None:
        self._values = values

    @requires_loop
    async def read(self) -> Any:
        """Returns the saved value, as JSON values; None if nothing was saved."""
        return await self._values.read(STATE)

    @requires_loop
    async def save(self, value: Any) -> None:
        """Saves a value under the lease of the job. When this returns, it is stored."""
        await self._values.save(STATE, value)


def _check_progress(done: object, total: object, message: object) -> None:
    for number in (done, total):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= _MAX_PROGRESS:
            raise Invalid("progress", number, "give numbers from 0 to 1e300: progress(done, total)")
    if not isinstance(message, str) or len(message) > MAX_NAME:
        raise Invalid("message", message, f"give text of up to {MAX_NAME} characters")


async def _each(rows: AsyncIterable[T] | Iterable[T]) -> AsyncIterator[T]:
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield row
    else:
        for row in rows:
            yield row
