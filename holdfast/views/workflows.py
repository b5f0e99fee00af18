"""Documents of what jobs wait for, of signals, and of whole workflows as trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from holdfast.core.batches import BATCH_TASK, BatchProgress
from holdfast.core.dependencies import Condition, DependencyInfo, DependencyState
from holdfast.core.models import Job, JobState
from holdfast.core.redaction import Redaction
from holdfast.core.waits import JobWaits, KeptSignal
from holdfast.stores.base import Store
from holdfast.views.documents import ID, Instant, JobId, QueueName, StepDocument, TaskName, raw_json, step_document
from holdfast.views.formatting import format_timestamp

MAX_TREE = 200
"""Jobs of a tree that are shown."""

_MAX_STEPS_SHOWN = 100
_MAX_RESULTS = 4 * 1024 * 1024  # characters of the results of steps in one tree

Topic = Annotated[str, Meta(description="What the signal is about.", examples=["approved:42"])]


class ReceiverDocument(msgspec.Struct, frozen=True):
    """A job waits for a signal."""

    topic: Topic
    step: Annotated[str, Meta(description="The step whose result the signal will be.")]
    since: Instant
    until: Annotated[Instant, Meta(description="Its deadline: then the handler gets a TimeoutError.")]


class DependencyDocument(msgspec.Struct, frozen=True):
    """A job that another one waits for, or has waited for."""

    job_id: JobId
    on: Annotated[Condition, Meta(description="The end that is awaited.")]
    state: Annotated[DependencyState, Meta(description="open: it has not ended. failed: it ended otherwise.")]
    child: Annotated[bool, Meta(description="The waiting job has started it.")]


class BatchDocument(msgspec.Struct, frozen=True):
    """Numbers of jobs in a batch."""

    members: Annotated[int, Meta(description="All of its jobs so far.")]
    ended: Annotated[int, Meta(description="Those that have ended, in any way.")]
    failed: Annotated[int, Meta(description="Those that are dead, cancelled or deleted.")]


class WaitsDocument(msgspec.Struct, frozen=True):
    """Waits of a job, and the jobs that wait for it."""

    batch: Annotated[BatchDocument | None, Meta(description="Progress of a batch; null: the job is none.")]

    receiver: Annotated[ReceiverDocument | None, Meta(description="null: it waits for no signal.")]
    dependencies: Annotated[list[DependencyDocument], Meta(description="Jobs that it waits for, or waited for.")]
    dependents: Annotated[list[DependencyDocument], Meta(description="Jobs that wait for it, or waited for it.")]


class SignalDocument(msgspec.Struct, frozen=True):
    """A signal that no job has received."""

    id: str
    topic: Topic
    value: Raw
    sent_at: Instant


class SentSignalDocument(msgspec.Struct, frozen=True):
    """Answer to a signal that was sent."""

    id: str
    is_new: Annotated[bool, Meta(description="false: a signal with this id was sent before; this one is ignored.")]
    job_id: Annotated[str | None, Meta(description="The job that received it; null: it is kept until one waits.")]


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a workflow."""

    id: JobId
    parent: Annotated[str | None, Meta(description="The job under which it is drawn; null: the root.")]
    child: Annotated[
        bool, Meta(description="Its parent has started it, and waits for it. Else it waits for its parent.")
    ]
    task: TaskName
    queue: QueueName
    state: JobState
    reason: str | None
    attempts: int
    created_at: Instant
    started_at: Instant | None
    ended_at: Instant | None
    receiver: ReceiverDocument | None
    dependencies: list[DependencyDocument]
    steps: list[StepDocument]


class Tree(msgspec.Struct, frozen=True):
    """A job with its children and the jobs that wait for it, and so on."""

    jobs: Annotated[list[TreeNode], Meta(description="The root first; each behind its parent.")]
    complete: Annotated[
        bool, Meta(description="false: there are more jobs than are shown, or results of steps are left out, as null.")
    ]


def waits_document(waits: JobWaits, batch: BatchProgress | None) -> WaitsDocument:
    """Returns the document of what a job waits for. ``batch``: its progress, if it is one."""
    return WaitsDocument(
        None if batch is None else BatchDocument(batch.members, batch.ended, batch.failed),
        _receiver_document(waits),
        [*map(_dependency_document, waits.dependencies)],
        [*map(_dependency_document, waits.dependents)],
    )


def _receiver_document(waits: JobWaits) -> ReceiverDocument | None:
    found = waits.receiver
    if found is None:
        return None
    times = format_timestamp(found.since_us), format_timestamp(found.until_us)
    return ReceiverDocument(found.topic, found.step, *times)


def _dependency_document(found: DependencyInfo) -> DependencyDocument:
    return DependencyDocument(found.job_id, found.on, found.state, found.is_child)


def signal_document(signal: KeptSignal) -> SignalDocument:
    """Returns the document of a signal."""
    return SignalDocument(signal.id, signal.topic, raw_json(signal.value), format_timestamp(signal.sent_at_us))


async def read_visible_waits(
    store: Store, job_id: str, is_visible: Callable[[Job], bool]
) -> tuple[JobWaits, dict[str, Job]]:
    """Reads the waits of a job, without jobs that are not visible, and its visible related jobs by id."""
    waits = await store.workflow.read_waits(job_id)
    jobs = await store.query.summaries(list({each.job_id for each in (*waits.dependencies, *waits.dependents)}))
    found = {job.id: job for job in jobs if job is not None}
    hidden = {job.id for job in found.values() if not is_visible(job)}
    dependencies, dependents = (
        [each for each in related if each.job_id not in hidden] for related in (waits.dependencies, waits.dependents)
    )
    visible = {job_id: job for job_id, job in found.items() if job_id not in hidden}
    return JobWaits(waits.receiver, dependencies, dependents), visible


async def read_tree(
    store: Store, job: Job, redaction: Redaction, is_visible: Callable[[Job], bool] = lambda _: True
) -> Tree:
    """Reads the tree under a job, by levels: its children, and the jobs that wait for it."""
    nodes: list[TreeNode] = []
    seen = {job.id}
    pending: deque[tuple[Job, str | None, bool]] = deque([(job, None, False)])
    room = _MAX_RESULTS
    while pending and len(nodes) < MAX_TREE:
        each, parent, is_child = pending.popleft()
        waits, related = await read_visible_waits(store, each.id, is_visible)
        steps, room = await _read_steps(store, each, redaction, room)
        nodes.append(_node(each, parent, is_child, waits, steps))
        is_batch = each.task == BATCH_TASK
        below = [(found.job_id, True) for found in waits.dependencies if found.is_child or is_batch]
        below += [(found.job_id, False) for found in waits.dependents if not found.is_child]
        fresh = [pair for pair in below if pair[0] not in seen][: MAX_TREE + 1]
        seen.update(job_id for job_id, _ in fresh)
        pending += [(related[job_id], each.id, child) for job_id, child in fresh if job_id in related]
    return Tree(nodes, room >= 0 and not pending)


async def _read_steps(store: Store, job: Job, redaction: Redaction, room: int) -> tuple[list[StepDocument], int]:
    """Returns the first steps of a job, and the characters left for further results; negative: some are left out."""
    record = redaction.redact_steps(await store.workflow.read_steps(job.id)) if job.claims else []
    shown: list[StepDocument] = []
    for step in [each for each in record if each.number][:_MAX_STEPS_SHOWN]:
        room -= len(step.result or "")
        shown.append(step_document(step if room >= 0 else msgspec.structs.replace(step, result=None)))
    return shown, room


def _node(job: Job, parent: str | None, is_child: bool, waits: JobWaits, steps: list[StepDocument]) -> TreeNode:
    return TreeNode(
        id=job.id,
        parent=parent,
        child=is_child,
        task=job.task,
        queue=job.queue,
        state=job.state,
        reason=job.reason,
        attempts=job.attempts,
        created_at=format_timestamp(job.created_at_us),
        started_at=None if job.started_at_us is None else format_timestamp(job.started_at_us),
        ended_at=None if job.ended_at_us is None else format_timestamp(job.ended_at_us),
        receiver=_receiver_document(waits),
        dependencies=[*map(_dependency_document, waits.dependencies)],
        steps=steps,
    )


_AT = "2030-01-31T08:00:00.000000Z"
WAITS = {
    "batch": None,
    "receiver": {"topic": "approved:42", "step": "wait_for approved:42", "since": _AT, "until": _AT},
    "dependencies": [],
    "dependents": [{"job_id": ID, "on": "success", "state": "open", "child": False}],
}
"""Example."""
SIGNAL = {"id": ID, "topic": "approved:42", "value": {"by": "Ada"}, "sent_at": _AT}
"""Example."""
TREE = {
    "jobs": [
        {
            "id": ID,
            "parent": None,
            "child": False,
            "task": "order",
            "queue": "default",
            "state": "waiting",
            "reason": "signal",
            "attempts": 1,
            "created_at": _AT,
            "started_at": _AT,
            "ended_at": None,
            "receiver": WAITS["receiver"],
            "dependencies": [],
            "steps": [{"name": "reserve", "number": 1, "claims": 1, "ended_at": _AT, "result": "shelf-7"}],
        }
    ],
    "complete": True,
}
"""Example."""
