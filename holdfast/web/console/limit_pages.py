"""Limits: a list with their use, one limit, and the changes made there."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from holdfast.core.errors import Invalid
from holdfast.core.validation import parse_count
from holdfast.views.limits import parse_key_values
from holdfast.web.console import ROOT
from holdfast.web.console.actions import simple_action
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.messages import ApiResponse

_MAX_NUMBER = 2**31


async def show_limits(visit: Visit) -> ApiResponse:
    """Returns a page of limits by name, with the use of each without a key."""
    return visit.render_page("limits.html", **await visit.read_named_page("list_limits", "limits"))


async def show_limit(visit: Visit) -> ApiResponse:
    """Returns the page of one limit, where its values are changed."""
    name, value = visit.path["limit"], dict(read_pairs(visit.request)).get("value", "")
    query = [("value", value)] if value else []
    limit = await visit.call_operation("show_limit", query, limit=name)
    return visit.render_page("limit.html", limit=limit, value=value)


async def add_limit(visit: Visit) -> ApiResponse:
    """Adds the limit of the form."""
    visit.make_context("add_limit", {})  # its scope comes first
    body: dict[str, Any] = {"name": visit.form_value("name")}
    body |= {name: text for name in ("queue", "task", "by", "rate") if (text := visit.form_value(name))}
    body |= {name: value for name in ("concurrency", "burst", "depth") if (value := _number(visit, name))}
    limit = await visit.call_operation("add_limit", body=body)
    return visit.redirect_to(f"limits/{quote(limit['name'])}", "limit_added")


async def delete_limit(visit: Visit) -> ApiResponse:
    """Removes a limit; its jobs run without."""
    await visit.call_operation("remove_limit", limit=visit.path["limit"])
    return visit.redirect_to("limits", "limit_removed")


async def change_limit(visit: Visit) -> ApiResponse:
    """Changes the values of a limit that were changed in the form: an empty field takes a value away."""
    name = visit.path["limit"]
    limit = await visit.call_operation("show_limit", limit=name)
    wanted = {
        "concurrency": _number(visit, "concurrency"),
        "rate": visit.form_value("rate") or None,
        "burst": _number(visit, "burst"),
        "depth": _number(visit, "depth"),
    }
    if body := visit.changed_values(wanted, limit):
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


async def resume_limit(visit: Visit) -> ApiResponse:
    """Ends a pause of a limit, or of one value of its key; it goes back to the page of the form."""
    name, value = visit.path["limit"], visit.form_value("value")
    body: dict[str, Any] = {"values": parse_key_values([value])} if value else {}
    await visit.call_operation("resume_limit", (), body, limit=name)
    page = "" if visit.form_value("back") == "overview" else f"limits/{quote(name)}"
    return visit.redirect_to(page, "limit_resumed", [("value", value)] if value else [])


ROUTES = (
    PageRoute("GET", f"{ROOT}/limits", show_limits),
    PageRoute("GET", f"{ROOT}/limits/{{limit}}", show_limit),
    PageRoute("POST", f"{ROOT}/limits", add_limit),
    PageRoute("POST", f"{ROOT}/limits/{{limit}}/delete", delete_limit),
    PageRoute("POST", f"{ROOT}/limits/{{limit}}/change", change_limit),
    PageRoute("POST", f"{ROOT}/limits/{{limit}}/pause", pause_limit),
    PageRoute(
        "POST", f"{ROOT}/limits/{{limit}}/reset", simple_action("reset_limit", "limit", "limits/{}", "limit_reset")
    ),
    PageRoute("POST", f"{ROOT}/limits/{{limit}}/resume", resume_limit),
)
