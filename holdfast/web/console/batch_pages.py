"""Batches: a list with the progress of each, and one batch with its jobs and callbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.batches import BATCH_TASK
from holdfast.core.errors import NotFound
from holdfast.core.models import JobState
from holdfast.core.waits import MAX_SHOWN
from holdfast.web.bulk import MAX_JOBS
from holdfast.web.console import ROOT
from holdfast.web.console.job_pages import CANCELLABLE, check_reference, chosen_filters, read_jobs
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.messages import ApiResponse

_BATCHES_ON_PAGE = 25
_MAX_ROWS = 200
_READ_BELOW = 10_000  # members of a batch; Redis reads those of a larger one too slowly for a page
_FILTERS = ("state", "queue", "tag")
_MEMBERS_ORDER = ("dead", "cancelled", "failed", "running", "queued", "scheduled", "waiting", "succeeded")
_REPLAYABLE = ("dead", "cancelled")


async def show_batches(visit: Visit) -> ApiResponse:
    """Returns a page of batches, newest first."""
    pairs = read_pairs(visit.request)
    filters = [each for each in chosen_filters(pairs) if each[0] in _FILTERS]
    queues = [each.name for each in await visit.visible_queues()]
    cursor = dict(pairs).get("cursor", "")
    paging = [("limit", str(_BATCHES_ON_PAGE)), *([("cursor", cursor)] if cursor else [])]
    page = await read_jobs(visit, filters, queues, [("task", BATCH_TASK), *paging])
    return visit.render_page(
        "batches.html",
        batches=[view for job in page["jobs"] if (view := await _read_batch(visit, job)) is not None],
        following=page["cursor"],
        unread=page["unread"],
        cursor=cursor,
        filters=filters,
        values=dict(filters),
        queues=queues,
        states=("waiting", "succeeded", "dead", "cancelled"),
    )


async def _read_batch(visit: Visit, job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a batch of the list with its progress; None if it was deleted meanwhile."""
    try:
        return {**job, "progress": progress_view(await visit.call_operation("show_batch", job_id=job["id"]))}
    except NotFound:
        return None


def progress_view(progress: Mapping[str, int]) -> dict[str, Any]:
    """Returns the numbers of a batch with the parts of its bar and the same as a sentence."""
    members, ended, failed = (progress[name] for name in ("members", "ended", "failed"))
    numbers = {"succeeded": ended - failed, "failed": failed, "open": members - ended}
    bar, at = [], 0.0
    for name, kind in (("succeeded", "succeeded"), ("failed", "dead")):
        width = 100 * numbers[name] / max(members, 1)
        if width:
            bar.append({"state": kind, "at": round(at, 2), "width": round(width, 2)})
        at += width
    text = f"{ended:,} of {members:,} ended" + (f", {failed:,} dead or cancelled" if failed else "")
    return {**numbers, "members": members, "ended": ended, "bar": bar, "text": text}


async def show_batch(visit: Visit) -> ApiResponse:
    """Returns the page of one batch."""
    job = await _find_batch(visit)
    progress = progress_view(await visit.call_operation("show_batch", job_id=job["id"]))
    wanted = dict(read_pairs(visit.request)).get("state", "")
    is_listed = progress["members"] <= _READ_BELOW
    members, callbacks = await _read_jobs(visit, job["id"]) if is_listed else ([], [])
    states = Counter(each["state"] for each in members)
    rows = [each for each in members if each["state"] == wanted or wanted not in states]
    return visit.render_page(
        "batch.html",
        job=job,
        progress=progress,
        rows=sorted(rows, key=lambda each: _MEMBERS_ORDER.index(each["state"]))[:_MAX_ROWS],
        row_count=len(rows),
        callbacks=callbacks,
        states=[(state, states[state]) for state in _MEMBERS_ORDER if states[state]],
        wanted=wanted if wanted in states else "",
        is_listed=is_listed,
        is_complete=progress["members"] <= MAX_SHOWN,
        can_cancel=job["state"] in CANCELLABLE,
        open_jobs=[each["id"] for each in members if each["state"] in CANCELLABLE],
        failed_jobs=[each["id"] for each in members if each["state"] in _REPLAYABLE],
    )


async def _find_batch(visit: Visit) -> dict[str, Any]:
    job: dict[str, Any] = await visit.call_operation("show_job", job_id=check_reference(visit.path["job"]))
    if job["task"] != BATCH_TASK:
        raise NotFound("there is no such batch; this is a job, and has a page among the jobs")
    return job


async def _read_jobs(visit: Visit, batch_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the members of a batch and its callbacks, without jobs of queues that the principal may not see."""
    waits = await visit.call_operation("show_waits", job_id=batch_id)
    return await _read_each(visit, waits["dependencies"]), await _read_each(visit, waits["dependents"])


async def _read_each(visit: Visit, related: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    call = visit.make_context("show_waits", {})
    store = await call.app.open_store()
    found = await store.query.summaries([each["job_id"] for each in related])
    return [
        {"id": job.id, "task": job.task, "queue": job.queue, "state": job.state.value, "reason": job.reason}
        | {"attempts": job.attempts, "on": each["on"]}
        for each, job in zip(related, found, strict=True)
        if job is not None and call.caller.allows_queue(job.queue)
    ]


async def cancel_members(visit: Visit) -> ApiResponse:
    """Cancels the jobs of a batch that have not ended, as many as its page lists."""
    return await _change_members(visit, "cancel_jobs", CANCELLABLE, "members_cancelled")


async def replay_members(visit: Visit) -> ApiResponse:
    """Queues the jobs of a batch again that are dead or cancelled, as many as its page lists."""
    return await _change_members(visit, "replay_jobs", _REPLAYABLE, "members_replayed")


async def _change_members(visit: Visit, operation: str, states: Sequence[str], notice: str) -> ApiResponse:
    visit.make_context(operation, {})  # its scope comes first
    job = await _find_batch(visit)
    members, _ = await _read_jobs(visit, job["id"])
    ids = [each["id"] for each in members if JobState(each["state"]) in states][:MAX_JOBS]
    answer = await visit.call_operation(operation, body={"ids": ids}) if ids else {"count": 0, "refused": []}
    if not answer["count"]:
        notice = "members_kept"
    elif answer["refused"]:
        notice = "members_refused"
    return visit.redirect_to(f"batches/{job['id']}", notice)


async def cancel_batch(visit: Visit) -> ApiResponse:
    """Cancels a batch; its jobs go on."""
    visit.make_context("cancel_job", {})  # its scope comes first
    job = await _find_batch(visit)
    await visit.call_operation("cancel_job", job_id=job["id"])
    return visit.redirect_to(f"batches/{job['id']}", "batch_cancelled")


ROUTES = (
    PageRoute("GET", f"{ROOT}/batches", show_batches),
    PageRoute("GET", f"{ROOT}/batches/{{job}}", show_batch),
    PageRoute("POST", f"{ROOT}/batches/{{job}}/cancel", cancel_batch),
    PageRoute("POST", f"{ROOT}/batches/{{job}}/cancel-jobs", cancel_members),
    PageRoute("POST", f"{ROOT}/batches/{{job}}/replay-jobs", replay_members),
)
