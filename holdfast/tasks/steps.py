"""The steps of a running job: each runs once, and its stored result stands for it in every later attempt."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from holdfast.core.errors import Invalid, LeaseLost
from holdfast.core.ids import derive_id
from holdfast.core.lifecycle import (
    AttemptEnd,
    Dead,
    Failed,
    Outcome,
    Snoozed,
    StepsChanged,
    Succeeded,
    Suspended,
    Suspension,
    failure_of,
)
from holdfast.core.models import MICROSECOND, TERMINAL, Job, NewJob, Reason, Step
from holdfast.core.portal import drive_coroutine
from holdfast.core.steps import CHILDREN, MAX_RESULTS, MAX_STEPS, NewStep, check_step_name
from holdfast.core.waits import SIGNAL_STEP, SignalWait
from holdfast.tasks.children import Child, child_record
from holdfast.tasks.codec import decode_json, decoder_of, encode_result
from holdfast.tasks.saved_values import (
    CallerTransaction,
    SavedValues,
    StepOptions,
    StepStore,
    find_encrypted,
    started_children,
)

_rng = random.Random()
_MAX_RECORDED_CHILDREN = 100  # of those a job waits for; by them a later attempt sees that its code has changed


class JobSteps:
    """The steps of one attempt of a job.

    What ends the attempt (a sleep, changed code, a result that cannot be stored) is remembered: the handler may catch
    the exception that says so, and every later step raises it again.
    """

    def __init__(self, job: Job, step_store: StepStore, runner: asyncio.Task[Any] | None) -> None:
        """``runner``: the task in which the handler runs, if it is async."""
        self._job = job
        self._step_store = step_store
        self._own_task = runner
        self._calls: Counter[str] = Counter()
        self._number = 0
        self._size = 0  # of the recorded results
        self.values = SavedValues(job, step_store, self._read)
        self._unreplayed: dict[str, Step] = {}  # recorded, and not called yet in this attempt
        self._awaited_children: dict[str, int] = {}  # names and numbers of the children that were started last
        self._started_children: set[str] = set()  # by earlier attempts, not recorded, and not called yet
        self._reading = asyncio.Lock()
        # No attempt before can have recorded any.
        self._is_read = job.claims == 1 and job.options_or_default.forks is None
        self._uncommitted: dict[str, bool] = {}  # steps of transactions not known to be committed, and whether ordered
        self._last_uncommitted: str | None = None  # the last of them that the handler itself called
        self._failed: dict[object, str] = {}  # the step that failed last, by the task or thread that called it
        self._failed_children: set[str] = set()
        self._under_way: dict[asyncio.Future[None], asyncio.Task[Any]] = {}  # steps in tasks that the handler began
        self._end: tuple[BaseException, Outcome] | None = None

    async def final_outcome(self, outcome: Outcome) -> Outcome:
        """The outcome of the attempt, from that of the handler, once steps in tasks have ended; no other follows."""
        try:
            while self._under_way:
                await asyncio.wait(self._under_way)
        except asyncio.CancelledError:
            for task in self._under_way.values():
                task.cancel()
            raise
        if self._end is None and self._uncommitted and isinstance(outcome, Succeeded):
            await self._check_commits(is_ordered=False)
        if self._end is None and self._unreplayed and isinstance(outcome, Succeeded):
            first = min(self._unreplayed.values(), key=attrgetter("number"))
            self._end_by(_changed(f"step {first.name!r} is recorded, and the code does not call it any more"))
        if self._end is None and self._started_children and isinstance(outcome, Succeeded):
            first_child = min(self._started_children)
            self._end_by(_changed(f"child {first_child!r} was started, and the code does not call it any more"))
        self._end = self._end or (AttemptEnd("the attempt has ended"), outcome)
        return self._end[1]

    def call(
        self,
        name: str,
        options: StepOptions,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        transaction: CallerTransaction | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Counts a call of a step at once, and returns the coroutine that runs it."""
        _check_function(function)
        decode = decoder_of(function)
        unique, number = self._count_call(name)
        called = self._step_store.step_function(self._job, unique, function, blocking=False)
        return self._run(unique, number, options, lambda: called(*args, **kwargs), decode, transaction)

    def run_blocking(
        self,
        name: str,
        options: StepOptions,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        transaction: CallerTransaction | None = None,
        *,
        is_ordered: bool,
    ) -> Any:
        """Runs a step in this thread, which waits. ``is_ordered``: the handler itself calls."""
        _check_function(function)
        if inspect.iscoroutinefunction(function):
            remedy = f"give one that is not async to sync.{'step' if transaction is None else 'step_in'}"
            raise Invalid("function", getattr(function, "__name__", function), remedy)
        unique, number = self._count_call(name)
        run, decode, caller = self._step_store.run_blocking, decoder_of(function), threading.get_ident()
        recorded = run(self._find(unique, caller, is_ordered=is_ordered, transaction=transaction))
        if recorded is not None:
            return self._decode(unique, recorded.result, decode)
        with self._step_store.open_span(unique), self._track_step(caller, unique):
            if transaction is not None:
                drive_coroutine(transaction.step_store.verify_connection(transaction.connection))
            called = self._step_store.step_function(self._job, unique, function, blocking=True)
            value = self._try_often_blocking(unique, options, lambda: called(*args, **kwargs))
            saving = self._save(unique, number, decode, is_ordered=is_ordered, value=value, transaction=transaction)
            return run(saving) if transaction is None else drive_coroutine(saving)

    def _try_often_blocking(self, name: str, options: StepOptions, call: Callable[[], Any]) -> Any:
        tried = 0
        while True:
            tried += 1
            self._check_held(name)
            try:
                with _inside_step():
                    return call()
            except Exception as error:
                if tried == options.tries or isinstance(error, AttemptEnd):
                    raise
            pause = options.retry.delay_after(tried, _rng).total_seconds()
            self._step_store.run_blocking(self._step_store.clock.sleep(pause))

    async def sleep(self, span: timedelta) -> None:
        """Ends the attempt by `Suspension`, and returns in the one that begins when the time is over."""
        self._check_caller("sleep", str(span))
        name, number = self._count_call("sleep")
        recorded = await self._find(name, self._own_task, is_ordered=True)
        if recorded is None:
            await self._save(name, number, decode_json, is_ordered=True, value=span // MICROSECOND)
            raise self._end_by((Suspension(), Snoozed(span)))
        until_us = recorded.ended_at_us + int(recorded.result or 0)
        if self._job.run_at_us < until_us:  # it was interrupted before its sleep, or an operator runs it earlier
            left = (until_us - await self._step_store.server_time_us()) * MICROSECOND
            if left > timedelta(0):
                raise self._end_by((Suspension(), Snoozed(left)))

    async def wait_for(self, topic: str, timeout: timedelta) -> Any:
        """Returns the value of a signal, or ends the attempt by `Suspension` until there is one."""
        self._check_caller("wait_for", topic)
        name, number = self._count_call(topic, kind=SIGNAL_STEP)
        recorded = await self._find(name, self._own_task, is_ordered=True)
        if recorded is not None:
            result = recorded.result
        else:
            step = NewStep(self._job.lease, name, number, True, None, self._job.worker)
            receipt = await self._step_store.receive_signal(SignalWait(step, topic, timeout))
            if not receipt.has_lease:
                raise self._lease_lost(name)
            if receipt.time_left is not None:
                raise self._end_by((Suspension(), Suspended(Reason.SIGNAL, receipt.time_left)))
            result = receipt.result
            self._check_encrypted({name: result})
            self._add_size(name, result)
        received = self._decode(name, result, decode_json)
        if "signal" not in received:
            raise TimeoutError(f"no signal {topic!r} came within {timeout}")
        return received["signal"]

    def make_child(self, job: NewJob, decode: Callable[[str | None], Any]) -> Child[Any]:
        """Counts a call of another task at once, and returns the child."""
        name, number = self._count_call(job.task)
        return Child(self, name, number, replace(job, id=derive_id(self._job.id, name), has_client_id=True), decode)

    async def gather(self, children: Sequence[Child[Any]], *, is_ordered: bool, return_exceptions: bool) -> list[Any]:
        """Returns the results of children, or ends the attempt by `Suspension` until they have ended."""
        self._check_caller("call", ", ".join(child.name for child in children[:3]))
        recorded = {each.name: await self._find(each.name, self._own_task, is_ordered=is_ordered) for each in children}
        open_ones = [child for child in children if recorded[child.name] is None]
        results = {name: step.result for name, step in recorded.items() if step is not None}
        self._started_children.difference_update(child.name for child in children)
        if open_ones:
            self._check_started(open_ones[0].name)
            await self._save_calls({child.name: child.number for child in open_ones[:_MAX_RECORDED_CHILDREN]})
            results |= await self._results_of(open_ones, keep_failures=return_exceptions)
            steps = [(child, results[child.name]) for child in open_ones]
            await asyncio.gather(*[self._write(each.name, each.number, is_ordered, text) for each, text in steps])
        return [self._decode(child.name, results[child.name], child.decode_outcome) for child in children]

    async def _save_calls(self, calls: dict[str, int]) -> None:
        if calls != self._awaited_children:
            await self.values.save(CHILDREN, calls)
            self._awaited_children = calls

    def _check_started(self, name: str) -> None:
        """Ends the attempt if an earlier one has started a child that the code does not call before this step."""
        if self._started_children:
            first = min(self._started_children)
            raise self._end_by(_changed(f"child {first!r} was started at this place, and the code calls step {name!r}"))

    async def _results_of(self, children: Sequence[Child[Any]], *, keep_failures: bool) -> dict[str, str]:
        """Starts children, and returns what they have come to, as it is recorded. Raises what the first failed with."""
        jobs = [child.job for child in children]
        statuses = await self._step_store.start_children(self._job.lease, jobs, self._job.worker or "")
        if statuses is None:
            raise self._lease_lost(children[0].name)
        if any(status.job_id == self._job.id for status in statuses):
            raise self._end_by(_final("a job cannot wait for itself: a child has its key; give the child another one"))
        if any(status.state is not None and status.state not in TERMINAL for status in statuses):
            raise self._end_by((Suspension(), Suspended(Reason.CHILDREN)))
        ended = await self._step_store.read_jobs([status.job_id for status in statuses])
        self._check_encrypted({job.task: job.result for job in ended if job is not None})
        results: dict[str, str] = {}
        for child, status, job in zip(children, statuses, ended, strict=True):
            failure = failure_of(status.job_id, job)
            if failure is not None and not keep_failures:
                self._failed[self._own_task] = child.name
                self._failed_children.add(child.name)
                # They have ended: a retry may go another way, as after a step that has failed.
                await self._save_calls({})
                raise failure
            results[child.name] = child_record(status.job_id, job, failure)
        return results

    def _check_caller(self, name: str, value: str) -> None:
        if asyncio.current_task() is not self._own_task or self._own_task is None:
            remedy = "call it in the handler itself; a task or thread that the handler started cannot end the attempt"
            remedy += "; several children together: context.gather(…)" if name == "call" else ""
            raise Invalid(name, value, remedy)

    def _count_call(self, name: Any, kind: str = "") -> tuple[str, int]:
        """The name of the step among all of its job, which begins with ``kind``, and the number of the call."""
        if _inside.get():
            raise Invalid("step", name, "a step takes no steps itself; call it in the handler")
        if self.values.is_iterating:
            remedy = "call it before or behind the loop: the cursor is the record, and rows are run again from there"
            raise Invalid("step", name, remedy)
        name = f"{kind}{check_step_name(name)}"
        self._calls[name] += 1
        self._number += 1
        if self._number > MAX_STEPS:
            raise self._end_by(_final(f"a job has at most {MAX_STEPS:,} steps; start further jobs for the rest"))
        number = self._calls[name]
        return name if number == 1 else f"{name}#{number}", self._number

    async def _run(
        self,
        name: str,
        number: int,
        options: StepOptions,
        call: Callable[[], Any],
        decode: Callable[[str], Any],
        transaction: CallerTransaction | None,
    ) -> Any:
        caller = asyncio.current_task()
        is_ordered = caller is self._own_task
        recorded = await self._find(name, caller, is_ordered=is_ordered, transaction=transaction)
        if recorded is not None:
            return self._decode(name, recorded.result, decode)
        with self._step_store.open_span(name), self._track_step(caller, name):
            if transaction is not None:
                await transaction.step_store.verify_connection(transaction.connection)
            value = await self._try_often(name, options, call)
            return await self._save(name, number, decode, is_ordered=is_ordered, value=value, transaction=transaction)

    @contextmanager
    def _track_step(self, caller: object, name: str) -> Iterator[None]:
        """Remembers that a step is under way, and that it failed: its caller takes no further one in this attempt."""
        ended = None
        if isinstance(caller, asyncio.Task) and caller is not self._own_task:
            ended = caller.get_loop().create_future()
            self._under_way[ended] = caller
        try:
            yield
        except Exception as error:
            if not isinstance(error, AttemptEnd):
                self._failed[caller] = name
            raise
        finally:
            if ended is not None:
                del self._under_way[ended]
                ended.set_result(None)

    async def _try_often(self, name: str, options: StepOptions, call: Callable[[], Any]) -> Any:
        tried = 0
        while True:
            tried += 1
            self._check_held(name)
            try:
                return await self._try_once(name, options.timeout, call)
            except Exception as error:
                if tried == options.tries or isinstance(error, AttemptEnd):
                    raise
            await self._step_store.clock.sleep(options.retry.delay_after(tried, _rng).total_seconds())

    async def _try_once(self, name: str, timeout: float | None, call: Callable[[], Any]) -> Any:
        with _inside_step():
            value = call()
            if not inspect.isawaitable(value):
                return value
            if timeout is None:
                return await value
            results: list[Any] = []
            await self._step_store.clock.run_bounded(_collect(value, results), timeout)
            if not results:
                raise TimeoutError(f"step {name!r}: still running after {timeout:g} s")
            return results[0]

    async def _find(
        self, name: str, caller: object, *, is_ordered: bool, transaction: CallerTransaction | None = None
    ) -> Step | None:
        """The record of a step; None if it is to run. Raises what ends the attempt."""
        await self._read()
        self._check_held(name)
        failed = next(iter(self._failed.values()), None) if is_ordered else self._failed.get(caller)
        if self._end is None and failed is not None:
            self._end_by(_end_after_failed_step(failed, name, is_child=failed in self._failed_children))
        if (is_ordered or caller is self._own_task) and self._last_uncommitted is not None and transaction is None:
            await self._check_commits(is_ordered=True)
        if self._end is None and is_ordered and name not in self._unreplayed and name not in self._started_children:
            self._check_started(name)
            skipped = [step for step in self._unreplayed.values() if step.is_ordered]
            if skipped:
                first = min(skipped, key=attrgetter("number"))
                text = f"step {first.name!r} is recorded at this place, and the code calls step {name!r}"
                self._end_by(_changed(text))
        if self._end is not None:
            raise self._end[0]
        return self._unreplayed.pop(name, None)

    async def _read(self) -> None:
        async with self._reading:
            if not self._is_read:
                steps = await self._step_store.read_steps(self._job.id)
                self._check_encrypted({step.name: step.result for step in steps})
                self._unreplayed = {step.name: step for step in steps if step.number}
                self.values.load(steps)
                self._awaited_children = started_children(steps)
                self._started_children = set(self._awaited_children).difference(self._unreplayed)
                self._size = sum(len(step.result or "") for step in steps if step.number)
                self._is_read = True

    async def _check_commits(self, *, is_ordered: bool) -> None:
        """Ends the attempt unless its steps in handlers' transactions are committed; ``is_ordered``: those alone."""
        recorded = {step.name for step in await self._step_store.read_steps(self._job.id)}
        for name in recorded.intersection(list(self._uncommitted)):
            del self._uncommitted[name]
        missing = next((name for name, each in list(self._uncommitted.items()) if each or not is_ordered), None)
        if missing is not None:
            self._end_by(_rolled_back(missing))
        self._last_uncommitted = None

    async def _save(
        self,
        name: str,
        number: int,
        decode: Callable[[str], Any],
        *,
        is_ordered: bool,
        value: Any,
        transaction: CallerTransaction | None = None,
    ) -> Any:
        """Stores the result of a step, and returns it as later attempts read it."""
        try:
            result = encode_result(value, self._step_store.result_limit)
        except Invalid as error:
            raise self._end_by(_final(f"step {name!r}: {error}", Reason.RESULT)) from error
        found = self._decode(name, result, decode)
        await self._write(name, number, is_ordered, result, transaction)
        return found

    async def _write(
        self, name: str, number: int, is_ordered: bool, result: str | None, transaction: CallerTransaction | None = None
    ) -> None:
        self._add_size(name, result)
        step = NewStep(self._job.lease, name, number, is_ordered, result, self._job.worker)
        if transaction is not None:
            await self._record(step, transaction)
        elif not await self._step_store.save_step(step):
            raise self._lease_lost(name)

    async def _record(self, step: NewStep, transaction: CallerTransaction) -> None:
        previous = self._last_uncommitted if step.is_ordered else None
        self._uncommitted[step.name] = step.is_ordered
        if step.is_ordered:
            self._last_uncommitted = step.name
        receipt = await transaction.step_store.record_step(transaction.connection, step, previous)
        if not receipt.has_lease:
            raise self._lease_lost(step.name)
        if not receipt.is_recorded:
            raise self._end_by(_rolled_back(previous or step.name))

    def _add_size(self, name: str, result: str | None) -> None:
        """Counts a result of this attempt among those of the job."""
        self._size += len(result or "")
        if self._size > MAX_RESULTS:
            remedy = "keep large data elsewhere, and return where it is"
            text = f"step {name!r}: the results of all steps exceed {MAX_RESULTS:,} characters; {remedy}"
            raise self._end_by(_final(text, Reason.RESULT))

    def _check_held(self, name: str) -> None:
        """Ends the attempt if its time is over, or its lease may be: no function of a step may run."""
        end = self._step_store.outcome_if_over(self._job.lease)
        if end is not None:
            words = "the attempt is over, or its lease was not renewed in time"
            raise self._end_by((LeaseLost(f"step {name!r} of job {self._job.id} is not begun: {words}"), end))

    def _lease_lost(self, name: str) -> LeaseLost:
        return LeaseLost(f"step {name!r} of job {self._job.id} was not recorded: the lease is lost")

    def _check_encrypted(self, results: Mapping[str, str | None]) -> None:
        if failed := find_encrypted(results):
            raise self._end_by((AttemptEnd(failed.error), failed))

    def _decode(self, name: str, result: str | None, decode: Callable[[str], Any]) -> Any:
        try:
            return None if result is None else decode(result)
        except Exception as error:
            text = self.values.describe_misfit(name, error)
            raise self._end_by(_final(text, Reason.RESULT)) from error

    def _end_by(self, end: tuple[BaseException, Outcome]) -> BaseException:
        """Remembers what ends the attempt, unless it has ended already; returns the exception to raise."""
        self._end = self._end or end
        return self._end[0]


def _changed(text: str) -> tuple[BaseException, Outcome]:
    return StepsChanged(text), Failed(error=text, reason=Reason.STEPS_CHANGED, retryable=False)


def _final(text: str, reason: Reason = Reason.NON_RETRYABLE) -> tuple[BaseException, Outcome]:
    return Dead(text), Failed(error=text, reason=reason, retryable=False)


def _check_function(function: object) -> None:
    if not callable(function):
        raise Invalid("function", function, "give the function itself, not its result: context.step(name, function, …)")


def _end_after_failed_step(failed: str, name: str, *, is_child: bool) -> tuple[BaseException, Outcome]:
    """Its end after a failed step: no other may follow, since a retry could take a different branch."""
    remedy = "catch the exception inside the function of the step, and return what became of it"
    if is_child:
        remedy = "[outcome] = await context.gather(context.call(…), return_exceptions=True) returns its error"
    text = f"step {name!r} cannot be taken after step {failed!r} has failed: {remedy}"
    return AttemptEnd(text), Failed(error=text)


def _rolled_back(name: str) -> tuple[BaseException, Outcome]:
    remedy = "commit its transaction before the next step and the end of the handler; let its errors end the attempt"
    text = f"step {name!r} is not committed: {remedy}"
    return AttemptEnd(text), Failed(error=text)


_inside: ContextVar[bool] = ContextVar("holdfast_inside_step", default=False)


@contextmanager
def _inside_step() -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


async def _collect(value: Awaitable[Any], results: list[Any]) -> None:
    results.append(await value)
