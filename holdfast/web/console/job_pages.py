"""Pages of jobs: a filtered list, and one job with everything about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from holdfast.core.batches import BATCH_TASK
from holdfast.core.encryption import MARKER
from holdfast.core.errors import Invalid, NotFound
from holdfast.core.faults import FAULTS_TASK
from holdfast.core.job_changes import EDITABLE
from holdfast.core.models import JobState, Reason
from holdfast.views.documents import find_replays
from holdfast.views.formatting import format_decimal
from holdfast.web.console import ROOT
from holdfast.web.console.rendering import MAX_SHOWN, pretty_json
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.console.wording import describe_reason
from holdfast.web.fields import FILTERS, REFERENCE_PATTERN
from holdfast.web.jobs import MAX_LINES
from holdfast.web.messages import ApiResponse

PAGE_SIZE = 50
_FILTERS = tuple(field.name for field in FILTERS)
_REFERENCE = re.compile(REFERENCE_PATTERN)
_MAX_LINES = 200


def check_filters(pairs: Sequence[tuple[str, str]], others: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the filters of a form that changes jobs. Invalid: it has none, unknown names, or one twice."""
    filters = chosen_filters(pairs)
    names = [name for name, _ in pairs]
    for name in names:
        if name not in (*_FILTERS, *others):
            raise Invalid("filter", name, "choose among the filters of the page", "is not known")
        if names.count(name) > 1 and name not in ("state", "task"):
            raise Invalid(name, [value for field, value in pairs if field == name], "give one value")
    if not filters:
        raise Invalid("filter", None, "choose at least one filter", "is missing")
    return filters


def chosen_filters(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the filters among the fields of a query or a form, without empty ones."""
    return [(name, value.strip()) for name, value in pairs if name in _FILTERS and value.strip()]


async def show_jobs(visit: Visit) -> ApiResponse:
    """Returns a page of jobs, newest first; or goes to the job that an id or a key names."""
    pairs = read_pairs(visit.request)
    given = dict(pairs)
    if named := given.get("job", "").strip():
        is_reference = named.startswith("key:") or (_REFERENCE.match(named) and await _exists(visit, named))
        reference = named if is_reference else f"key:{named}"
        return visit.redirect_to(f"jobs/{quote(reference, safe=':')}", is_change=False)
    filters = chosen_filters(pairs)
    queues = [each.name for each in await visit.visible_queues()]
    cursor = given.get("cursor", "")
    paging = [("limit", str(PAGE_SIZE)), *([("cursor", cursor)] if cursor else [])]
    page = await read_jobs(visit, filters, queues, paging)
    states = [value for name, value in filters if name == "state"]
    return visit.render_page(
        "jobs.html",
        jobs=page["jobs"],
        following=page["cursor"],
        unread=page["unread"],
        cursor=cursor,
        filters=filters,
        values={name: value for name, value in filters if name != "state"},
        states=states,
        every_state=[state.value for state in JobState],
        every_reason=[reason.value for reason in Reason],
        queues=queues,
    )


async def _exists(visit: Visit, job_id: str) -> bool:
    """Returns False for an id without a job: the text may be a key that looks like one."""
    try:
        return bool(await visit.call_operation("show_job", job_id=job_id))
    except NotFound:
        return False


async def read_jobs(
    visit: Visit, filters: list[tuple[str, str]], queues: Sequence[str], others: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Returns a page of jobs. A key for several queues names one: without a filter, the first is added to them, and
    the page has the others."""
    unread: Sequence[str] = ()
    if visit.caller.is_restricted and not any(name == "queue" for name, _ in filters):
        if not queues:
            return {"jobs": [], "cursor": None, "unread": ()}
        filters.append(("queue", queues[0]))
        unread = queues[1:]
    page: dict[str, Any] = await visit.call_operation("list_jobs", [*filters, *others])
    return {**page, "unread": unread}


async def show_job(visit: Visit) -> ApiResponse:
    """Returns the page of one job."""
    job_id = check_reference(visit.path["job"])
    lines_after = dict(read_pairs(visit.request)).get("lines", "")
    job = await visit.call_operation("show_job", job_id=job_id)
    job_id = job["id"]
    why = await visit.call_operation("explain_job", job_id=job_id)
    if lines_after == "latest":
        lines = {"lines": await _read_latest_lines(visit, job), "cursor": None}
    else:
        paging = [("limit", str(_MAX_LINES)), *([("cursor", lines_after)] if lines_after else [])]
        lines = await visit.call_operation("list_log_lines", paging, job_id=job_id)
    steps = await visit.call_operation("list_steps", job_id=job_id)
    waits = await visit.call_operation("show_waits", job_id=job_id)
    return visit.render_page(
        "job.html",
        job=job,
        reasons=why["reasons"],
        lines=lines["lines"],
        lines_after=lines_after,
        more_lines=lines["cursor"],
        steps=steps,
        waits=waits,
        timeline=list_events(job),
        can_cancel=job["state"] in CANCELLABLE and not job["cancelling"],
        can_replay=job["state"] in _REPLAYABLE,
        can_delete=job["state"] != "running",
        can_change=shows_payload(visit, job) and job["state"] in _REPLAYABLE,
        can_edit=visit.caller.has_scope("operate") and job["state"] in _EDITABLE and job["task"] not in _BUILT_IN,
        can_edit_payload=shows_payload(visit, job),
        can_copy=job["state"] in _ENDED,
    )


async def _read_latest_lines(visit: Visit, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the last lines of the latest two attempts, or of as many more as it takes to find any."""
    lines: list[dict[str, Any]] = []
    attempts, cursor = 1, f"{max(job['claims'] - 1, 0)}-0"
    while cursor:
        paging = [("limit", str(MAX_LINES)), ("cursor", cursor)]
        page = await visit.call_operation("list_log_lines", paging, job_id=job["id"])
        lines, cursor = [*lines, *page["lines"]][-_MAX_LINES:], page["cursor"]
        if not lines and attempts < job["claims"]:
            attempts *= 2
            cursor = f"{max(job['claims'] - attempts, 0)}-0"
    return lines


_ENDED = ("succeeded", "dead", "cancelled")
CANCELLABLE = ("scheduled", "waiting", "queued", "running", "failed")
_REPLAYABLE = ("dead", "failed", "cancelled", "succeeded")
_EDITABLE = tuple(state.value for state in EDITABLE)
_BUILT_IN = (BATCH_TASK, FAULTS_TASK)


def shows_payload(visit: Visit, job: Mapping[str, Any]) -> bool:
    """Returns True if a form may show the payload: not hidden in part, not encrypted, and not too long."""
    is_whole = not visit.console.app.settings.redacted and len(pretty_json(job["payload"])) <= MAX_SHOWN
    is_whole = is_whole and MARKER not in job["payload"]
    return is_whole and visit.caller.has_scope("operate")


def check_reference(text: str) -> str:
    """Returns the id or the key of a path. Anything else names no job, like the id of a job that is not there."""
    if not _REFERENCE.match(text):
        raise NotFound("there is no such job")
    return text


def list_events(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the timeline of a job, oldest first: submission, attempts, replays, and its end."""
    history = [(JobState(each["state"]), each["attempt"]) for each in job["history"]]
    replays = find_replays(JobState(job["state"]), job["attempts"], history)
    events = [{"at": job["created_at"], "state": "queued", "text": "Submitted", "note": f"to queue {job['queue']}"}]
    for each, is_replayed in zip(job["history"], replays, strict=True):
        events.append(_attempt_event(each))
        if is_replayed:
            events.append(_REPLAYED)
    return [*events, *_latest_event(job)]


_REPLAYED = {"at": None, "state": "queued", "text": "Replayed", "note": "attempts are counted from 1 again"}
"""The store keeps no time of a replay: it lies between the attempts around it."""


def _attempt_event(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the event of an attempt that did not succeed."""
    took = "" if attempt["seconds"] is None else f"after {format_decimal(attempt['seconds'])} s"
    note = " ".join(part for part in (took, f"on {attempt['worker']}" if attempt["worker"] else "") if part)
    text = f"Attempt {attempt['attempt']}: {describe_reason(attempt['reason']) or attempt['state']}"
    return {"at": attempt["ended_at"], "state": attempt["state"], "text": text, "note": note}


def _latest_event(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what a job does now, or how it ended."""
    state, run_at, history = job["state"], job["run_at"], job["history"]
    if state == "running":
        text = f"Attempt {job['attempts']} started"
        yield {"at": job["started_at"], "state": state, "text": text, "note": f"on {job['worker']}"}
    elif state == "succeeded":
        yield {"at": job["ended_at"], "state": state, "text": "Succeeded", "note": f"on {job['worker']}"}
    elif state in ("dead", "cancelled"):
        note = describe_reason(job["reason"])
        yield {"at": job["ended_at"], "state": state, "text": state.capitalize(), "note": note}
    elif run_at is not None and state in ("scheduled", "failed"):
        yield {"at": run_at, "state": state, "text": "Next attempt" if state == "failed" else "Due", "note": ""}
    elif state == "queued" and history and run_at >= history[-1]["ended_at"]:
        yield {"at": run_at, "state": state, "text": "Queued", "note": "ready for a worker since then"}


ROUTES = (PageRoute("GET", f"{ROOT}/jobs", show_jobs), PageRoute("GET", f"{ROOT}/jobs/{{job}}", show_job))
