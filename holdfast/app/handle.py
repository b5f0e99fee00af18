"""Handles of submitted jobs, and checks of the references that name jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from holdfast.app.sync import Blocker, BlockingMethod, BlockingView
from holdfast.core.clock import Clock
from holdfast.core.encryption import Codec, decrypt_text, result_context
from holdfast.core.errors import Invalid, InvalidId, ResultTimeout, missing_job
from holdfast.core.ids import parse_id
from holdfast.core.lifecycle import describe_outlook, failure_of
from holdfast.core.models import BulkResult, Job, JobFilter, JobState, NewJob, Submitted
from holdfast.core.portal import requires_loop
from holdfast.core.validation import check_span, explain_attribute, parse_count
from holdfast.stores.base import Store
from holdfast.tasks import Registry, Task
from holdfast.tasks.codec import decode_json

R = TypeVar("R")

_POLL_SECONDS = 5.0  # seconds between looks at the job while waiting: what a lost wake-up costs at most

_SEE_STATE = "to see its state: await handle.state(), or handle.sync.state()"
_ELSEWHERE = {
    **dict.fromkeys(
        ("get", "wait", "return_value", "latest_result", "get_result"),
        "to wait for its result: await handle.result(timeout=30), or handle.sync.result(…)",
    ),
    **dict.fromkeys(("status", "ready", "successful", "failed"), _SEE_STATE),
    **dict.fromkeys(("get_status", "is_finished", "is_failed", "is_queued", "is_started"), _SEE_STATE),
    "info": "to see how far it is: (await app.saved_values(handle.id)).progress; its result: await handle.result()",
    "revoke": "to cancel the job: await handle.cancel(), or handle.sync.cancel()",
    "meta": "to read what was submitted with it: (await handle.job()).options_or_default.metadata",
    "requeue": "to run the job again: await handle.replay(), or handle.sync.replay()",
    "forget": "leave it out: a result is kept as long as its job",
}
"""Methods of results in Celery, RQ and Dramatiq, with what to write here."""


class JobOwner(Blocker, Protocol):
    """The application that a handle belongs to."""

    @property
    def clock(self) -> Clock: ...

    @property
    def registry(self) -> Registry: ...

    @property
    def codec(self) -> Codec | None: ...

    @property
    def is_inline(self) -> bool: ...

    async def open_store(self) -> Store: ...

    async def cancel_one(self, job_id: str) -> JobState: ...

    async def replay_one(self, job_id: str, *, force: bool = False, from_step: str | None = None) -> None: ...


class JobHandle(Generic[R]):
    """A job by its id, and what its submission answered."""

    __slots__ = ("_answer", "_app", "id")

    def __init__(self, app: JobOwner, answer: Submitted) -> None:
        self._app = app
        self._answer = answer
        self.id = answer.job_id

    if not TYPE_CHECKING:  # to a type checker, other attributes are errors as ever

        def __getattr__(self, name: str) -> Any:
            """Explains the name here of a method that results have in other queues."""
            raise explain_attribute(self, name, _ELSEWHERE)

    @property
    def created(self) -> bool:
        """Returns True if its submission stored the job; False where the key or id had one, and of ``app.handle``."""
        return self._answer.created

    @property
    def changed(self) -> bool:
        """Returns True if by the policy of its unique key that job was replaced or rescheduled."""
        return self._answer.changed

    @property
    def wake_up_delayed(self) -> bool:
        """Returns True if the transport could not be notified: a worker's next sweep or poll finds the job."""
        return self._answer.wake_up_delayed

    @property
    def stored_at_us(self) -> int | None:
        """Returns when it was created, in microseconds since 1970 by the store's clock; None where that is unknown."""
        return self._answer.stored_at_us

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"

    @property
    def sync(self) -> BlockingHandle[R]:
        """The same methods for blocking callers: ``handle.sync.result(timeout=30)``."""
        return BlockingHandle(self._app, self)

    @requires_loop
    async def job(self) -> Job:
        """The job as it stands now; NotFound if it is gone."""
        return await self._job()

    @requires_loop
    async def state(self) -> JobState:
        """Returns the job's present state."""
        return (await self._job()).state

    @requires_loop
    async def result(self, timeout: float | timedelta | str | None = None) -> R:
        """Returns the task's result, read by its return annotation (as JSON values, where the task is not registered
        here). Waits for ``timeout``: seconds, a timedelta or text like ``30s`` (None: for ever).

        Raises JobFailed if the job is dead, JobCancelled if it was cancelled, ResultTimeout if it goes on;
        DecryptionFailed if the result is encrypted, and this program lacks the key.
        """
        store = await self._app.open_store()
        clock = self._app.clock
        span = None if timeout is None else check_span(timeout, "timeout")
        deadline = None if span is None else clock.monotonic() + span.total_seconds()
        while True:
            job = await self._job()
            if job.state is JobState.SUCCEEDED:
                return self._read_result(job)
            failure = failure_of(job.id, job)
            if failure is not None:
                raise failure
            if self._app.is_inline and job.state is not JobState.RUNNING:
                remedy = "in inline mode nothing runs it on; a test of that takes testing.Harness"
                raise ResultTimeout(job.id, f"job {job.id} is {job.state}; {remedy}")
            left = _POLL_SECONDS if deadline is None else deadline - clock.monotonic()
            if span is not None and left <= 0:
                chances = await self._describe_chances(job)
                raise ResultTimeout(job.id, f"job {job.id} is {job.state} after {span.total_seconds():g} s; {chances}")
            await store.queueing.wait([f"job:{self.id}"], timeout=min(left, _POLL_SECONDS))

    @requires_loop
    async def cancel(self) -> JobState:
        """Cancel the job; its state then: ``running`` means it was asked to stop. Conflict if it has ended."""
        return await self._app.cancel_one(self.id)

    @requires_loop
    async def replay(self, *, force: bool = False, from_step: str | None = None) -> None:
        """Queue the job again with all attempts; Conflict where its state does not allow it.

        ``from_step``: the job forgets this step and those behind it, and takes them again.
        """
        await self._app.replay_one(self.id, force=force, from_step=from_step)

    async def _describe_chances(self, job: Job) -> str:
        """Describes the chances of an unfinished job, for the message of a timeout."""
        if job.state in (JobState.QUEUED, JobState.SCHEDULED):
            store = await self._app.open_store()
            if not any(worker.alive for worker in await store.query.workers()):
                return "no living worker is registered; start one: holdfast worker start"
        return describe_outlook(job)

    def _read_result(self, job: Job) -> R:
        """Returns the result that a job has stored, read by its task's return annotation."""
        text = job.result
        if text is not None:  # the store returns what it could not decrypt as it is
            text = decrypt_text(self._app.codec, text, result_context(job.id), f"the result of job {job.id}")
        task = self._app.registry.get(job.task)
        value: Any = None
        if task is not None:
            value = task.decode_result(text)
        elif text is not None:
            value = decode_json(text)
        result: R = value
        return result

    async def _job(self) -> Job:
        store = await self._app.open_store()
        job = await store.query.get(self.id)
        if job is None:
            raise missing_job(self.id)
        return job


class BlockingHandle(BlockingView, Generic[R]):
    """``handle.sync``: the methods of a handle for blocking callers."""

    __slots__ = ()

    job = BlockingMethod(JobHandle.job)
    state = BlockingMethod(JobHandle.state)
    cancel = BlockingMethod(JobHandle.cancel)
    replay = BlockingMethod(JobHandle.replay)
    _result = BlockingMethod(JobHandle.result)

    def result(self, timeout: float | timedelta | str | None = None) -> R:
        """Returns the task's result, as ``JobHandle.result`` does."""
        result: R = self._result(timeout)
        return result


# ── references to jobs, and limits ────────────────────────────────────────────────────────────────────────────────────
_KEYS_AT_ONCE = 10  # keys whose jobs are read together: each may have a large payload
_YEAR_OF_MINUTES = 525_600
_MAX_AT_ONCE = 1_000_000  # jobs one operation may take in its one transaction
_FILTER = 'a JobFilter, such as JobFilter(queue="mail", states=("dead",))'


def canonical_id(job_id: object) -> str:
    """The id in the store's spelling. Raises `InvalidId`, which is also a `NotFound`, for text that is no id."""
    canonical = parse_id(str(job_id))
    if canonical is None:
        remedy = "give a job's id (a UUID or ULID), or key: and its idempotency key"
        if str(job_id).startswith("key:"):  # here the id itself is needed
            remedy = f"give a job's id: (await app.get({job_id!r})).id"
        raise InvalidId("id", job_id, remedy)
    return canonical


async def find_ids(store: Store, references: Sequence[str]) -> dict[str, str | None]:
    """Returns the id of each reference, even if no job has it; None for a key that no job has."""
    asked = [each if each.startswith("key:") else canonical_id(each) for each in references]
    ids: dict[str, str | None] = {each: None if each.startswith("key:") else each for each in asked}
    keys = [each for each, job_id in ids.items() if job_id is None]
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        piece = keys[start : start + _KEYS_AT_ONCE]
        found = await store.query.by_keys([each.removeprefix("key:") for each in piece])
        ids |= {each: job.id for each, job in zip(piece, found, strict=True) if job is not None}
    return ids


def checked_filter(where: object) -> JobFilter:
    """The filter, an empty one for None. Raises `Invalid` for anything else."""
    if where is None:
        return JobFilter()
    if not isinstance(where, JobFilter):
        raise Invalid("where", where, f"give {_FILTER}")
    return where


def check_selection(selection: object) -> None:
    """Raises `Invalid` for what selects no jobs; a mapping too, whose keys would pass for ids."""
    if isinstance(selection, Mapping) or not isinstance(selection, JobFilter | Iterable):
        raise Invalid("selection", selection, f"give an id, such as handle.id, a list of ids, or {_FILTER}")


def check_no_function(task: object) -> None:
    """Refuse a function or task, whose own ``enqueue`` takes the arguments, and a drafted job."""
    if isinstance(task, Task):
        call = f"{task.function.__name__}.enqueue(…)"
        raise Invalid("task", task, f"give its name, {task.name!r}, or call {call} with the arguments")
    if isinstance(task, NewJob):
        raise Invalid("task", task, "give a name; to submit drafted jobs: app.enqueue_many([job, …])")
    if callable(task):
        remedy = "register the function with @app.task() and call its enqueue(…), or give a task's name"
        raise Invalid("task", task, remedy)


def check_count_bounds(minutes: int, most: int) -> tuple[timedelta, int]:
    """Returns the span and the maximum of jobs that are counted."""
    recent = timedelta(minutes=parse_count(minutes, "minutes", least=1, most=_YEAR_OF_MINUTES, text=False))
    return recent, parse_count(most, "most", least=1, most=1_000_000, text=False)


def check_limit(limit: int) -> None:
    """Raises `Invalid` for a number of jobs that one operation cannot take."""
    parse_count(limit, "limit", least=1, most=_MAX_AT_ONCE, text=False)


def refused_state(operated: BulkResult) -> JobState:
    """The state that refused an operation on one job; raises `NotFound` where there is no job."""
    job_id, state = operated.refused[0]
    if state is None:
        raise missing_job(job_id)
    return state


def check_batch_size(size: int) -> int:
    """Jobs a transaction. Raises `Invalid` for too many, or none."""
    return parse_count(size, "batch_size", least=1, most=10_000, text=False)


def check_drafts(jobs: Iterable[object], field: str = "jobs") -> None:
    """Raises `Invalid` for what is no drafted job, such as a task or a handle."""
    for job in jobs:
        if not isinstance(job, NewJob):
            raise Invalid(field, job, "give drafted jobs: task.new_job(…)")
