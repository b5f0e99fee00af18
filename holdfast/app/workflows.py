"""Workflows from outside: the steps of jobs, what they wait for, and signals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from holdfast.app.batches import Batch, Callbacks, draft_batch
from holdfast.app.handle import JobHandle, canonical_id
from holdfast.core.batches import BatchProgress
from holdfast.core.dependencies import Condition, Dependency, find_cycle
from holdfast.core.errors import Invalid, NotFound
from holdfast.core.ids import new_id, parse_id
from holdfast.core.models import Job, NewJob, Step
from holdfast.core.portal import requires_loop
from holdfast.core.steps import PROGRESS, STATE, Progress, check_step_name
from holdfast.core.validation import is_printable_line, parse_count
from holdfast.core.waits import MAX_SIGNAL_ID, JobWaits, KeptSignal, SentSignal, Signal
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.tasks.codec import decode_json, encode_result

MAX_DEPENDENCIES = 100_000
"""Dependencies of one job."""


class RecordedValues(msgspec.Struct, frozen=True):
    """Values that the handler of a job has saved; None: nothing."""

    state: Any = None
    progress: Progress | None = None


class _Application(Protocol):
    """The application that the methods belong to."""

    settings: Settings

    async def open_store(self) -> Store: ...

    async def _get(self, job_id: str) -> Job: ...

    async def _read_record(self, job_id: str) -> list[Step]: ...

    async def _submit_together(self, jobs: Sequence[NewJob], connection: Any) -> list[JobHandle[Any]]: ...


class WorkflowMethods:
    """Methods of an application for workflows."""

    @requires_loop
    async def steps(self: _Application, job_id: str) -> list[Step]:
        """The steps of a job that have ended, by ``context.step``, in the order of their calls."""
        return [step for step in await self._read_record(job_id) if step.number]

    async def _read_record(self: _Application, job_id: str) -> list[Step]:
        return await (await self.open_store()).workflow.read_steps((await self._get(job_id)).id)

    @requires_loop
    async def saved_values(self: _Application, job_id: str) -> RecordedValues:
        """Values that a job's handler has saved by ``context.state`` and ``context.progress``."""
        return saved_values(await self._read_record(job_id))

    @requires_loop
    async def read_waits(self: _Application, job_id: str) -> JobWaits:
        """Waits of a job: for a signal, other jobs, its children; and the jobs that wait for it."""
        return await (await self.open_store()).workflow.read_waits((await self._get(job_id)).id)

    @requires_loop
    async def enqueue_batch(
        self: _Application,
        jobs: Iterable[NewJob],
        *,
        on_success: Callbacks = (),
        on_failure: Callbacks = (),
        on_end: Callbacks = (),
        id: str | None = None,
        batch: Batch | None = None,
        queue: str | None = None,
        tags: Sequence[str] = (),
        metadata: dict[str, object] | None = None,
        connection: Any = None,
    ) -> JobHandle[Any]:
        """Submits drafted jobs as a batch, in one transaction: a job that ends with the last of them.

        It has succeeded if all of them have; else it is dead. Callbacks are drafted jobs too: ``on_success`` and
        ``on_end`` start with its end, ``on_failure`` when its first job has failed; each at most once. A job of the
        batch may add others while it runs: ``options(batch=context.batch_id)``.

        ``id``: the same id again, with the same jobs, is harmless. ``batch``: another one, of which it is a member.
        ``queue``: by default that of its first job. Redis stores each 200 jobs at once; the batch ends when all are.
        """
        callbacks = ((Condition.SUCCESS, on_success), (Condition.FAILURE, on_failure), (Condition.END, on_end))
        drafted = draft_batch(jobs, callbacks, id=id, batch=batch, queue=queue, tags=tags, metadata=metadata)
        handles = await self._submit_together(drafted, connection)
        return handles[0]

    @requires_loop
    async def read_batch(self: _Application, job_id: str) -> BatchProgress:
        """Numbers of jobs in a batch: all of them, those that have ended, and those that have failed.

        The answer takes no longer for a large batch. NotFound for what is no batch.
        """
        progress = await (await self.open_store()).workflow.read_batch(canonical_id(job_id))
        if progress is None:
            raise NotFound(f"there is no batch {job_id}")
        return progress

    @requires_loop
    async def signal(self: _Application, topic: str, value: Any = None, *, id: str | None = None) -> SentSignal:
        """Sends a signal to the job that waits for this topic by ``context.wait_for``, or keeps it until one does.

        ``value``: what can be stored as JSON. ``id``: a signal is delivered once for each id, however often it is sent;
        without one each call is another signal. Returns what became of it: ``job_id`` is its receiver, if it has one.
        """
        text = encode_result(value, self.settings.payload_limit, "value") or "null"
        signal = Signal(new_id() if id is None else check_signal_id(id), check_step_name(topic, "topic"), text)
        return await (await self.open_store()).workflow.send_signal(signal)

    @requires_loop
    async def kept_signals(self: _Application, topic: str | None = None, *, limit: int = 100) -> list[KeptSignal]:
        """Signals that no job has received, of one topic or of all, the oldest first."""
        parse_count(limit, "limit", least=1, most=1000, text=False)
        asked = None if topic is None else check_step_name(topic, "topic")
        return await (await self.open_store()).workflow.read_signals(asked, limit=limit)


def saved_values(record: Iterable[Step]) -> RecordedValues:
    """Returns the values among what is stored of a job."""
    values = {step.name: step.result for step in record if not step.number}
    state, progress = values.get(STATE), values.get(PROGRESS)
    return RecordedValues(
        state=None if state is None else decode_json(state),
        progress=None if progress is None else msgspec.convert(decode_json(progress), Progress),
    )


def check_signal_id(signal_id: object) -> str:
    """Returns the id of a signal. Raises Invalid for anything but one line of text."""
    if not isinstance(signal_id, str) or not is_printable_line(signal_id) or len(signal_id) > MAX_SIGNAL_ID:
        raise Invalid("id", signal_id, f"give one line of text of up to {MAX_SIGNAL_ID} characters")
    return signal_id


After = str | Dependency | NewJob | JobHandle[Any]
"""A job to wait for: its id or handle, a drafted job, or a `Dependency` that says which end is awaited."""


def parse_dependencies(after: After | Iterable[After]) -> tuple[Dependency, ...]:
    """Returns the dependencies of a job. Raises Invalid for what names no job."""
    if isinstance(after, str | Dependency | NewJob | JobHandle):
        return (_parse_dependency(after),)
    given: object = after
    if not isinstance(given, Iterable):
        raise Invalid("after", after, "give jobs: their ids or handles, drafted jobs, or a Dependency of each")
    found = tuple(_parse_dependency(each, f"after[{index}]") for index, each in enumerate(given))
    if len(found) > MAX_DEPENDENCIES:
        raise Invalid("after", len(found), f"give up to {MAX_DEPENDENCIES:,} jobs")
    return found


def _parse_dependency(after: object, field: str = "after") -> Dependency:
    reference, on = after, str(Condition.SUCCESS)
    if isinstance(after, Dependency):
        reference, on = after.job_id, after.on
    elif isinstance(after, NewJob | JobHandle):
        reference = after.id
    job_id = parse_id(reference) if isinstance(reference, str) else None
    if job_id is None:
        raise Invalid(field, reference, "give a job: its id or handle, a drafted job, or a Dependency")
    if on not in list(Condition):
        raise Invalid(f"{field}.on", on, f"give one of {', '.join(Condition)}")
    return Dependency(job_id, Condition(str(on)))


def read_dependency(value: object, field: str = "after") -> object:
    """Returns a dependency given as a JSON object, ``{"job_id": …, "on": …}``; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    if not {"job_id"} <= set(value) <= {"job_id", "on"}:
        raise Invalid(field, dict(value), 'give an id, or {"job_id": …, "on": "success"}')
    return Dependency(value["job_id"], value.get("on", Condition.SUCCESS))


def check_circles(jobs: Iterable[NewJob]) -> None:
    """Raises Invalid, naming them, if jobs of one submission wait for each other."""
    graph = {job.id: [each.job_id for each in job.after] for job in jobs if job.after}
    circle = find_cycle(graph)
    if circle:
        shown = " → ".join(circle if len(circle) <= 10 else [*circle[:5], f"({len(circle) - 6} more)", circle[-1]])
        remedy = f"let no job wait for itself, nor for one that waits for it, as here: {shown}"
        raise Invalid("after", circle[1], remedy)


def chain_jobs(*jobs: NewJob, on: str = Condition.SUCCESS) -> list[NewJob]:
    """Drafted jobs, each of which waits for the one before: ``await app.enqueue_many(chain_jobs(a, b, c))``.

    ``on``: the end of the one before that is awaited.
    """
    linked = list(jobs[:1])
    for job in jobs[1:]:
        dependency = _parse_dependency(Dependency(linked[-1].id, on))
        linked.append(replace(job, after=(*job.after, dependency)))
    return linked
