"""The steps of a running job: each runs once, and its stored result stands for it in every later attempt."""

from __future__ import annotations

import asyncio
import inspect
import random
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec

from holdfast.core.clock import Clock
from holdfast.core.errors import Invalid, LeaseLost
from holdfast.core.lifecycle import Dead, HandlerSignal, Parked, StepsChanged
from holdfast.core.models import MICROSECOND, Job
from holdfast.core.retry import Retry
from holdfast.core.steps import MAX_NAME, MAX_RESULTS, MAX_STEPS, NewStep, Step
from holdfast.core.validation import is_plain
from holdfast.tasks.codec import decode_json, encode_result, result_decoder

T = TypeVar("T")
P = ParamSpec("P")

_rng = random.Random()
_decoders: weakref.WeakKeyDictionary[Any, Callable[[str], Any]] = weakref.WeakKeyDictionary()


class StepKeeper(Protocol):
    """Protocol of an object that stores steps for handlers."""

    clock: Clock
    result_limit: int

    async def read_steps(self, job_id: str) -> list[Step]: ...

    async def save_step(self, step: NewStep) -> bool: ...

    async def server_time_us(self) -> int: ...

    def run_blocking(self, call: Coroutine[Any, Any, T]) -> T: ...


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How often a step is tried within one attempt of its job, with which delays, and its timeout in seconds."""

    tries: int = 1
    retry: Retry = Retry()
    timeout: float | None = None


PLAIN = StepOptions()


class JobSteps:
    """The steps of one attempt of a job, made in the handler's event loop or thread."""

    def __init__(self, job: Job, keeper: StepKeeper) -> None:
        self._job = job
        self._keeper = keeper
        self._handler = _running_task()
        self._calls: Counter[str] = Counter()
        self._number = 0
        self._size = 0  # of the recorded results
        self._left: dict[str, Step] = {}  # recorded, and not called yet in this attempt
        self._reading: asyncio.Future[None] | None = None
        self._is_read = job.claims == 1  # no attempt before can have recorded any
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Text about how the code differs from the record, once the handler has returned; None if it does not."""
        if self._problem is None and self._left:
            first = min(self._left.values(), key=_number_of)
            self._problem = f"step {first.name!r} is recorded, and the code does not call it any more"
        return self._problem

    def call(
        self,
        name: str,
        options: StepOptions,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """Counts a call of a step at once, and returns the coroutine that runs it."""
        return self._run(*self._count_call(name), options, lambda: function(*args, **kwargs), decoder_of(function))

    def run_blocking(
        self,
        name: str,
        options: StepOptions,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs a step in the handler's thread."""
        unique, number = self._count_call(name)
        run, delay = self._keeper.run_blocking, options.retry.delay_after
        recorded = run(self._find(unique, in_order=True))
        if recorded is not None:
            return _decode(recorded.result, decoder_of(function))
        tried = 0
        while True:
            tried += 1
            try:
                value = function(*args, **kwargs)
            except HandlerSignal:
                raise
            except Exception:
                if tried == options.tries:
                    raise
                run(self._keeper.clock.sleep(delay(tried, _rng).total_seconds()))
                continue
            return _decode(run(self._save(unique, number, in_order=True, value=value)), decoder_of(function))

    async def sleep(self, span: timedelta) -> None:
        """Ends the attempt by `Parked`, and returns in the one that begins when the time is over."""
        if _running_task() is not self._handler:
            raise Invalid(
                "sleep", str(span), "call it in the handler itself; a task that the handler started cannot end it"
            )
        name, number = self._count_call("sleep")
        recorded = await self._find(name, in_order=True)
        if recorded is None:
            await self._save(name, number, in_order=True, value=span // MICROSECOND)
            raise Parked(span)
        until_us = recorded.ended_at_us + int(recorded.result or 0)
        if self._job.run_at_us < until_us:  # it was interrupted before its sleep, or an operator runs it earlier
            left_us = until_us - await self._keeper.server_time_us()
            if left_us > 0:
                raise Parked(left_us * MICROSECOND)

    def _count_call(self, name: Any) -> tuple[str, int]:
        """The name of the step among all of its job, and the number of the call."""
        if not isinstance(name, str) or not is_plain(name) or len(name) > MAX_NAME or "#" in name:
            raise Invalid("step", name, f"give one line of text of up to {MAX_NAME} characters, without #")
        self._calls[name] += 1
        self._number += 1
        if self._number > MAX_STEPS:
            raise Dead(f"a job has at most {MAX_STEPS:,} steps; start further jobs for the rest")
        number = self._calls[name]
        return name if number == 1 else f"{name}#{number}", self._number

    async def _run(
        self, name: str, number: int, options: StepOptions, call: Callable[[], Any], decode: Callable[[str], Any]
    ) -> Any:
        in_order = _running_task() is self._handler
        recorded = await self._find(name, in_order=in_order)
        if recorded is not None:
            return _decode(recorded.result, decode)
        value = await self._try_often(name, options, call)
        return _decode(await self._save(name, number, in_order=in_order, value=value), decode)

    async def _try_often(self, name: str, options: StepOptions, call: Callable[[], Any]) -> Any:
        tried = 0
        while True:
            tried += 1
            try:
                return await self._try_once(name, options.timeout, call)
            except HandlerSignal:
                raise
            except Exception:
                if tried == options.tries:
                    raise
            await self._keeper.clock.sleep(options.retry.delay_after(tried, _rng).total_seconds())

    async def _try_once(self, name: str, timeout: float | None, call: Callable[[], Any]) -> Any:
        value = call()
        if not inspect.isawaitable(value):
            return value
        if timeout is None:
            return await value
        results: list[Any] = []
        await self._keeper.clock.run_bounded(_collect(value, results), timeout)
        if not results:
            raise TimeoutError(f"step {name!r}: still running after {timeout:g} s")
        return results[0]

    async def _find(self, name: str, *, in_order: bool) -> Step | None:
        """The record of a step; None if it is to run. Raises `StepsChanged` where the record has another one here."""
        if not self._is_read:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read())
            await asyncio.shield(self._reading)
        recorded = self._left.get(name)
        if recorded is None and in_order and self._problem is None:
            skipped = [step for step in self._left.values() if step.in_order]
            if skipped:
                first = min(skipped, key=_number_of)
                self._problem = f"step {first.name!r} is recorded at this place, and the code calls step {name!r}"
        if self._problem is not None:
            raise StepsChanged(self._problem)
        return self._left.pop(name, None)

    async def _read(self) -> None:
        self._left = {step.name: step for step in await self._keeper.read_steps(self._job.id)}
        self._size = sum(len(step.result or "") for step in self._left.values())
        self._is_read = True

    async def _save(self, name: str, number: int, *, in_order: bool, value: Any) -> str | None:
        try:
            result = encode_result(value, self._keeper.result_limit)
        except Invalid as error:
            raise Dead(f"step {name!r}: {error}") from error
        self._size += len(result or "")
        if self._size > MAX_RESULTS:
            remedy = "keep large data elsewhere, and return where it is"
            raise Dead(f"step {name!r}: the results of all steps exceed {MAX_RESULTS:,} characters; {remedy}")
        if not await self._keeper.save_step(NewStep(self._job.lease, name, number, in_order, result)):
            raise LeaseLost(f"step {name!r} of job {self._job.id} was not recorded: the lease is lost")
        return result


def decoder_of(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns the decoder of a function's results, made once."""
    function = getattr(function, "__func__", function)
    try:
        decoder = _decoders.get(function)
        if decoder is None:
            decoder = _decoders[function] = result_decoder(function)
    except TypeError:  # no weak reference, no hash: a partial, a callable object
        decoder = decode_json
    return decoder


def _decode(result: str | None, decode: Callable[[str], Any]) -> Any:
    return None if result is None else decode(result)


def _number_of(step: Step) -> int:
    return step.number


async def _collect(value: Awaitable[Any], results: list[Any]) -> None:
    results.append(await value)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
