"""Schedules: a list, one schedule with its next runs, its definition, and the runs of a past range."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace

from holdfast.core.errors import Invalid
from holdfast.core.models import NewJob
from holdfast.core.schedule import Overlap, Schedule, find_zone
from holdfast.core.validation import parse_count, parse_duration
from holdfast.tasks.codec import decode_object
from holdfast.views.formatting import format_span
from holdfast.web.console import ROOT
from holdfast.web.console.actions import simple_action
from holdfast.web.console.job_pages import shows_payload
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.messages import ApiResponse
from holdfast.web.routing import RequestContext

_SHOWN_RUNS = "20"
_MAX_NUMBER = 2**31
_NEW: Mapping[str, Any] = {"payload": {}, "queue": "default", "priority": 0, "zone": "UTC", "overlap": Overlap.ALLOW}
"""Values of the form for a new schedule; the others are empty."""


async def show_schedules(visit: Visit) -> ApiResponse:
    """Returns a page of schedules by name."""
    found = await visit.read_named_page("list_schedules", "schedules")
    return visit.render_page("schedules.html", timing=describe_timing, values=_NEW, overlaps=[*Overlap], **found)


def describe_timing(schedule: Mapping[str, Any]) -> str:
    """Text for the times of a schedule: "0 3 * * * Europe/Zurich", "every 5m"."""
    if schedule["cron"]:
        return f"{schedule['cron']} {schedule['zone']}"
    return f"every {format_span(schedule['every'])}" if schedule["every"] else f"once, at {schedule['at']}"


async def show_schedule(visit: Visit) -> ApiResponse:
    """Returns the page of one schedule."""
    name = visit.path["schedule"]
    schedule = await visit.call_operation("show_schedule", schedule=name)
    runs = await visit.call_operation("list_next_runs", [("count", _SHOWN_RUNS)], schedule=name)
    call = visit.make_context("show_schedule", {})
    stored = await call.app.schedules.get(name)
    is_whole = shows_payload(visit, schedule) and _has_form_values_only(call, stored)
    return visit.render_page(
        "schedule.html",
        schedule=schedule,
        runs=runs["runs"],
        timing=describe_timing(schedule),
        values=_form_values(schedule, stored.job),
        overlaps=[*Overlap],
        can_edit=schedule["owner"] is None and is_whole,
    )


def _form_values(schedule: Mapping[str, Any], job: NewJob) -> dict[str, Any]:
    """Returns the values of the form for a schedule, of which ``job`` is the first."""
    every = schedule["every"]
    return {
        **schedule,
        "priority": job.priority,
        "tags": ", ".join(job.options.tags) if job.options else "",
        "every": int(every) if every and every.is_integer() else every,
        "jitter": schedule["jitter"] or None,
    }


def _has_form_values_only(call: RequestContext, schedule: Schedule) -> bool:
    """Returns True if the form has each option of the jobs, so that saving it loses none."""
    job = schedule.job
    tags = job.options.tags if job.options else ()
    try:
        draft = call.app.draft_job(job.task, job.payload, queue=job.queue, priority=job.priority, tags=tags)
    except Invalid:
        return False
    return replace(draft, id="") == replace(job, id="")


# ── definitions ───────────────────────────────────────────────────────────────────────────────────────────────────────
async def save_schedule(visit: Visit) -> ApiResponse:
    """Adds the schedule of the form, or replaces the one that the form was for, if it is as the form showed it."""
    visit.make_context("add_schedule", {})  # its scope comes first
    body = _form_body(visit)
    if is_edit := bool(visit.form_value("replace")):
        body["replace"] = True
        found = await visit.call_operation("show_schedule", schedule=body["name"])
        visit.check_shown(_form_values(found, (await visit.console.app.schedules.get(body["name"])).job))
    schedule = await visit.call_operation("add_schedule", body=body)
    notice = "schedule_changed" if is_edit else "schedule_added"
    return visit.redirect_to(f"schedules/{quote(schedule['name'])}", notice)


def _form_body(visit: Visit) -> dict[str, Any]:
    """Returns the fields of the form as the operation takes them; an empty one is left out."""
    limit = visit.console.app.settings.payload_limit
    body: dict[str, Any] = {name: visit.form_value(name) for name in ("name", "task")}
    body["payload"] = decode_object(visit.form_value("payload") or "{}", limit, "payload")
    for name in ("queue", "cron", "zone", "at", "overlap"):
        if text := visit.form_value(name):
            body[name] = text
    for name in ("every", "jitter"):
        if text := visit.form_value(name):
            body[name] = parse_duration(text, name).total_seconds()
    for name, least in (("priority", -100), ("catch_up", 0), ("max_runs", 1)):
        if text := visit.form_value(name):
            body[name] = parse_count(text, name, least=least, most=_MAX_NUMBER)
    if tags := [each.strip() for each in visit.form_value("tags").split(",") if each.strip()]:
        body["tags"] = tags
    return body


async def delete_schedule(visit: Visit) -> ApiResponse:
    """Removes a schedule; its jobs stay."""
    await visit.call_operation("remove_schedule", schedule=visit.path["schedule"])
    return visit.redirect_to("schedules", "schedule_removed")


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def run_schedule(visit: Visit) -> ApiResponse:
    """Submits a job of a schedule now, and shows it, or the one that holds its unique key."""
    job = await visit.call_operation("run_schedule", body={}, schedule=visit.path["schedule"])
    return visit.redirect_to(f"jobs/{job['id']}", "submitted" if visit.answered == 201 else "unsubmitted")


async def preview_backfill(visit: Visit) -> ApiResponse:
    """Counts the runs of a past range, and asks for confirmation. Submits nothing."""
    body, schedule = await _backfill_body(visit, dict(read_pairs(visit.request)))
    found = await visit.call_operation("backfill_schedule", body={**body, "dry_run": True}, schedule=schedule["name"])
    created, existing = len(found["created"]), len(found["existing"])
    start, end = body["start"], body["end"]
    return visit.render_page(
        "backfill.html", schedule=schedule, created=created, existing=existing, start=start, end=end
    )


async def run_backfill(visit: Visit) -> ApiResponse:
    """Submits the jobs of a past range of runs."""
    body, schedule = await _backfill_body(visit, dict(visit.form))
    await visit.call_operation("backfill_schedule", body=body, schedule=schedule["name"])
    return visit.redirect_to(f"schedules/{quote(schedule['name'])}", "backfilled")


async def _backfill_body(visit: Visit, given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the range that is given, and the schedule. A time without an offset is in the zone of the schedule."""
    visit.make_context("backfill_schedule", {})  # its scope comes first
    schedule: dict[str, Any] = await visit.call_operation("show_schedule", schedule=visit.path["schedule"])
    return {field: _instant(given.get(field, "").strip(), schedule["zone"]) for field in ("start", "end")}, schedule


def _instant(text: str, zone: str) -> str:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text  # the operation says what is wrong with it
    return (found if found.tzinfo else found.replace(tzinfo=find_zone(zone))).isoformat()


_ONE = f"{ROOT}/schedules/{{schedule}}"
ROUTES = (
    PageRoute("GET", f"{ROOT}/schedules", show_schedules),
    PageRoute("POST", f"{ROOT}/schedules", save_schedule),
    PageRoute("GET", _ONE, show_schedule),
    PageRoute("POST", f"{_ONE}/delete", delete_schedule),
    PageRoute("POST", f"{_ONE}/run", run_schedule),
    PageRoute("POST", f"{_ONE}/pause", simple_action("pause_schedule", "schedule", "schedules", "schedule_paused")),
    PageRoute("POST", f"{_ONE}/resume", simple_action("resume_schedule", "schedule", "schedules", "schedule_resumed")),
    PageRoute("GET", f"{_ONE}/backfill", preview_backfill),
    PageRoute("POST", f"{_ONE}/backfill/run", run_backfill),
)
