"""Chains of jobs, and groups with a job that follows them: AtlasQueue plans them for its second version.

What follows a job stands in its ``metadata``, so that clients of the HTTP API can say it, too:
``{"type": "a", "payload": {}, "metadata": {"then": [{"type": "b", "payload": {}}]}}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import Context, Dead, Holdfast, JobFilter, JobHandle, JobState, Snooze

Step = tuple[str, Mapping[str, Any]]
"""A job to be: its type and its payload."""

THEN = "then"
JOIN = "canvas.join"
LOOK = 1.0
"""Seconds between two looks at the members of a group."""


async def chain(app: Holdfast, *steps: Step, key: str) -> JobHandle[Any]:
    """Submit the first of these; each of the others is submitted when the one before it has succeeded."""
    (job_type, payload), *rest = steps
    return await app.enqueue(job_type, payload, key=key, metadata={THEN: [_said(step) for step in rest]})


async def group(app: Holdfast, members: Sequence[Step], callback: Step, *, key: str) -> JobHandle[Any]:
    """Submit all of these at once, and ``callback`` once every one of them has succeeded; what waits for that."""
    tag = f"group:{key}"
    jobs = [app.draft(*step, key=f"{key}/{number}", tags=[tag]) for number, step in enumerate(members)]
    waiting = {"tag": tag, "members": len(jobs), "callback": _said(callback)}
    handles = await app.enqueue_many([*jobs, app.draft(JOIN, waiting, key=key)])
    return handles[-1]


async def follow(app: Holdfast, job: Context) -> None:
    """Submit what a job that has just done its work is followed by. Done twice, it is one job all the same."""
    then: Sequence[Mapping[str, Any]] = job.metadata.get(THEN, ())
    if then:
        await _submit(app, then[0], key=f"{job.id}/then", metadata={THEN: list(then[1:])})


async def join(app: Holdfast, payload: Mapping[str, Any], job: Context) -> None:
    """Wait for the members of a group without holding a worker, then submit what follows them."""
    tag = payload["tag"]
    if await app.count(JobFilter(tag=tag, states=(JobState.DEAD, JobState.CANCELLED))):
        raise Dead(f"not every job with the tag {tag} can succeed: replay those that are dead, then this one")
    if await app.count(JobFilter(tag=tag, states=(JobState.SUCCEEDED,))) < payload["members"]:
        raise Snooze(LOOK)
    await _submit(app, payload["callback"], key=f"{job.id}/callback")


async def _submit(app: Holdfast, step: Mapping[str, Any], **options: Any) -> None:
    await app.enqueue(step["type"], step["payload"], **options)


def _said(step: Step) -> dict[str, Any]:
    return {"type": step[0], "payload": dict(step[1])}
