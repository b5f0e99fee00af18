"""Schedules and limits: their pages, and the changes made there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from holdfast.core.errors import Invalid
from holdfast.core.validation import parse_count
from holdfast.views.formatting import format_span
from holdfast.web.console import ROOT
from holdfast.web.console.actions import simple_action
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.messages import ApiResponse

_PAGE = 100
_MAX_NUMBER = 2**31


async def _read_page(visit: Visit, operation: str, kind: str) -> dict[str, Any]:
    """Returns a page of named things, and the name that the next page follows.

    A key that is limited to queues may see fewer than a page has: the next one is offered by the number asked for.
    """
    after = dict(read_pairs(visit.request)).get("after", "")
    query = [("limit", str(_PAGE)), *([("after", after)] if after else [])]
    found = (await visit.call_operation(operation, query))[kind]
    following = found[-1]["name"] if found and (len(found) == _PAGE or visit.caller.limited) else None
    return {kind: found, "after": after, "following": following}


async def show_schedules(visit: Visit) -> ApiResponse:
    """Returns a page of schedules by name."""
    found = await _read_page(visit, "list_schedules", "schedules")
    return visit.render_page("schedules.html", timing=describe_timing, **found)


def describe_timing(schedule: Mapping[str, Any]) -> str:
    """Text for the times of a schedule: "0 3 * * * Europe/Zurich", "every 5m"."""
    if schedule["cron"]:
        return f"{schedule['cron']} {schedule['zone']}"
    return f"every {format_span(schedule['every'])}" if schedule["every"] else f"once, at {schedule['at']}"


async def show_limits(visit: Visit) -> ApiResponse:
    """Returns a page of limits by name, with the use of each without a key."""
    return visit.render_page("limits.html", **await _read_page(visit, "list_limits", "limits"))


async def show_limit(visit: Visit) -> ApiResponse:
    """Returns the page of one limit, where its values are changed."""
    name, value = visit.path["limit"], dict(read_pairs(visit.request)).get("value", "")
    query = [("value", value)] if value else []
    limit = await visit.call_operation("show_limit", query, limit=name)
    return visit.render_page("limit.html", limit=limit, value=value)


async def run_schedule(visit: Visit) -> ApiResponse:
    """Submits a job of a schedule now, and shows it."""
    job = await visit.call_operation("run_schedule", body={}, schedule=visit.path["schedule"])
    return visit.redirect_to(f"jobs/{job['id']}", "submitted")


async def change_limit(visit: Visit) -> ApiResponse:
    """Changes the values of a limit: an empty field takes a value away."""
    name = visit.path["limit"]
    limit = await visit.call_operation("show_limit", limit=name)
    wanted = {
        "concurrency": _number(visit, "concurrency"),
        "rate": visit.form_value("rate") or None,
        "burst": _number(visit, "burst"),
        "depth": _number(visit, "depth"),
    }
    body: Mapping[str, Any] = {field: value for field, value in wanted.items() if value != limit[field]}
    if body:
        await visit.call_operation("change_limit", body=body, limit=name)
    return visit.redirect_to(f"limits/{quote(name)}", "limit_changed")


def _number(visit: Visit, field: str) -> int | None:
    text = visit.form_value(field)
    return parse_count(text, field, least=1, most=_MAX_NUMBER) if text else None


async def pause_limit(visit: Visit) -> ApiResponse:
    """Starts no job under a limit for the span of the form."""
    name, span = visit.path["limit"], visit.form_value("for")
    if not span:
        raise Invalid("for", span, 'give a span, such as "10m"')
    await visit.call_operation("pause_limit", body={"for": span}, limit=name)
    return visit.redirect_to(f"limits/{quote(name)}", "limit_paused")


ROUTES = (
    PageRoute("GET", f"{ROOT}/schedules", show_schedules),
    PageRoute("GET", f"{ROOT}/limits", show_limits),
    PageRoute("GET", f"{ROOT}/limits/{{limit}}", show_limit),
    PageRoute("POST", f"{ROOT}/schedules/{{schedule}}/run", run_schedule),
    PageRoute(
        "POST",
        f"{ROOT}/schedules/{{schedule}}/pause",
        simple_action("pause_schedule", "schedule", "schedules", "schedule_paused"),
    ),
    PageRoute(
        "POST",
        f"{ROOT}/schedules/{{schedule}}/resume",
        simple_action("resume_schedule", "schedule", "schedules", "schedule_resumed"),
    ),
    PageRoute("POST", f"{ROOT}/limits/{{limit}}/change", change_limit),
    PageRoute("POST", f"{ROOT}/limits/{{limit}}/pause", pause_limit),
    PageRoute(
        "POST", f"{ROOT}/limits/{{limit}}/reset", simple_action("reset_limit", "limit", "limits/{}", "limit_reset")
    ),
    PageRoute(
        "POST", f"{ROOT}/limits/{{limit}}/resume", simple_action("resume_limit", "limit", "limits/{}", "limit_resumed")
    ),
)
