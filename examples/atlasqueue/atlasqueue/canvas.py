"""Chains of jobs, and groups with a job that follows them: AtlasQueue plans them for its second version.

What follows a job stands in its ``metadata``, so that clients of the HTTP API can say it, too:
``{"type": "a", "payload": {}, "metadata": {"then": [{"type": "b", "payload": {}}]}}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import Context, Dead, Holdfast, Invalid, JobFilter, JobHandle, JobState, Snooze
from holdfast.core.models import NewJob
from holdfast.core.validation import MAX_TAG_LENGTH, check_key

Step = tuple[str, Mapping[str, Any]]
"""A job to be: its type and its payload."""

THEN = "then"
MAX_STEPS = 100
"""Steps of one chain, its first job not included."""
JOIN = "canvas.join"
LOOK = 1.0
"""Seconds between two looks at the members of a group."""
_TAG = "group:"
"""Before the key of a group: the tag of its members."""


async def chain(app: Holdfast, *steps: Step, key: str, queue: str = "default") -> JobHandle[Any]:
    """Submit the first of these; each of the others is submitted when the one before it has succeeded."""
    if not steps:
        raise ValueError("a chain needs a step: give (type, payload)")
    (job_type, payload), *rest = steps
    then = {THEN: [_as_document(step) for step in rest]}
    return await app.enqueue(job_type, payload, key=key, queue=queue, metadata=then)


async def group(
    app: Holdfast, members: Sequence[Step], callback: Step, *, key: str, queue: str = "default"
) -> JobHandle[Any]:
    """Submit all of these at once, and ``callback`` once every one of them has succeeded; what waits for that."""
    tag = _TAG + check_key(key, limit=MAX_TAG_LENGTH - len(_TAG))
    jobs = [app.draft_job(*step, key=f"{key}/{number}", tags=[tag], queue=queue) for number, step in enumerate(members)]
    waiting = {"tag": tag, "members": len(jobs)}
    then = {THEN: [_as_document(callback)]}
    handles = await app.enqueue_many([*jobs, app.draft_job(JOIN, waiting, key=key, queue=queue, metadata=then)])
    return handles[-1]


def read_steps(metadata: Mapping[str, Any]) -> list[Step]:
    """Returns the steps that follow a job with this metadata; Invalid names the one that is wrong."""
    steps = metadata.get(THEN, [])
    if not isinstance(steps, list):
        raise Invalid(f"metadata.{THEN}", steps, 'give a list of steps: [{"type": …, "payload": {…}}]')
    if len(steps) > MAX_STEPS:
        raise Invalid(f"metadata.{THEN}", f"{len(steps)} steps", f"give at most {MAX_STEPS}")
    return [_read_step(number, step) for number, step in enumerate(steps)]


def step_field(number: int, field: str) -> str:
    """Returns the name of a field of one step, as errors name it."""
    return f"metadata.{THEN}[{number}].{field}"


def next_job(app: Holdfast, job: Context) -> NewJob | None:
    """Returns the job to be submitted to the queue of this one when it succeeds, if there is one.

    Dead: it could not be submitted.
    """
    try:
        steps = read_steps(job.metadata)
        if not steps:
            return None
        rest = [_as_document(step) for step in steps[1:]]
        return app.draft_job(*steps[0], key=f"{job.id}/then", queue=job.job.queue, metadata={THEN: rest})
    except Invalid as error:
        raise Dead(f"{error}; the handler was not run") from None


async def wait_for_group(app: Holdfast, payload: Mapping[str, Any]) -> None:
    """Returns when every member of a group has succeeded. Until then it holds no worker: Snooze."""
    tag = payload["tag"]
    if await app.count(JobFilter(tag=tag, states=(JobState.DEAD, JobState.CANCELLED))):
        raise Dead(f"not every job with the tag {tag} can succeed: replay those that are dead, then this one")
    if await app.count(JobFilter(tag=tag, states=(JobState.SUCCEEDED,))) < payload["members"]:
        if await app.count(JobFilter(tag=tag)) < payload["members"]:
            raise Dead(f"jobs with the tag {tag} are missing: removed, or their keys stood for other jobs before")
        raise Snooze(LOOK)


def _read_step(number: int, step: object) -> Step:
    if not isinstance(step, dict):
        raise Invalid(f"metadata.{THEN}[{number}]", step, 'give an object: {"type": …, "payload": {…}}')
    for name in ("type", "payload"):
        if name not in step:
            raise Invalid(step_field(number, name), None, "give one", "is missing")
    unknown = sorted(step.keys() - {"type", "payload"})
    if unknown:
        raise Invalid(step_field(number, unknown[0]), step[unknown[0]], "a step has type and payload", "is not known")
    if not isinstance(step["payload"], dict):
        raise Invalid(step_field(number, "payload"), step["payload"], "give an object: the arguments by name")
    return step["type"], step["payload"]


def _as_document(step: Step) -> dict[str, Any]:
    return {"type": step[0], "payload": dict(step[1])}
