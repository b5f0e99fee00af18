"""Changes of many jobs: a dry run counts them, one confirmation starts, and each call changes at most a thousand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.errors import Invalid
from holdfast.core.validation import parse_count
from holdfast.web.console import ROOT
from holdfast.web.console.job_pages import check_filters
from holdfast.web.console.visit import PageRoute, Visit
from holdfast.web.messages import ApiResponse

_OPERATIONS = {"replay": "replay_jobs", "cancel": "cancel_jobs", "delete": "delete_jobs"}
_OTHER_FIELDS = ("token", "action", "changed", "rate", "after")
_DONE = {"replay": "queued again", "cancel": "cancelled or asked to stop", "delete": "deleted"}


def _selection(filters: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the filters as the body of a bulk operation has them."""
    names = {name for name, _ in filters}
    given: dict[str, Any] = {}
    for name in names:
        values = [value for field, value in filters if field == name]
        given[name] = values if name in ("state", "task") else values[-1]
    return {"filter": given}


def _context(visit: Visit) -> tuple[str, list[tuple[str, str]], dict[str, Any]]:
    """Returns the action, the filters, and the body that both calls have."""
    action = visit.form_value("action")
    if action not in _OPERATIONS:
        raise Invalid("action", action, f"give one of {', '.join(_OPERATIONS)}")
    filters = check_filters(visit.form, _OTHER_FIELDS)
    return action, filters, _selection(filters)


async def preview_bulk(visit: Visit, problem: str = "") -> ApiResponse:
    """Counts the jobs that an action would change, and asks for confirmation. Changes nothing."""
    action, filters, body = _context(visit)
    counted = await visit.call_operation(_OPERATIONS[action], body={**body, "dry_run": True})
    return visit.render_page(
        "bulk.html",
        status=422 if problem else 200,
        problem=problem,
        action=action,
        filters=filters,
        count=counted["count"],
        is_more=counted["more"],
        is_done=False,
        changed=0,
        rate=visit.form_value("rate"),
        after="",
        done=_DONE[action],
    )


async def run_bulk(visit: Visit) -> ApiResponse:
    """Changes the next thousand jobs at most, and shows the progress."""
    action, filters, body = _context(visit)
    rate, after = visit.form_value("rate"), visit.form_value("after")
    if action == "replay" and rate:
        body |= {"rate": rate, "after": _read_seconds(after)}
    before = parse_count(visit.form_value("changed") or "0", "changed", least=0, most=10**12)
    try:
        answer = await visit.call_operation(_OPERATIONS[action], body=body)
    except Invalid as error:
        if error.field != "rate":
            raise
        return await preview_bulk(visit, str(error))
    visit.console.forget_values()
    return visit.render_page(
        "bulk.html",
        problem="",
        action=action,
        filters=filters,
        count=answer["count"],
        is_more=answer["more"] and answer["count"] > 0,
        is_done=True,
        changed=before + answer["count"],
        rate=rate,
        after=f"{answer['seconds']:.6f}",
        done=_DONE[action],
    )


def _read_seconds(text: str) -> float:
    """Returns the seconds that a page before this one has planned."""
    try:
        return float(text or "0")
    except ValueError:
        raise Invalid("after", text, "give a number of seconds") from None


ROUTES = (PageRoute("POST", f"{ROOT}/bulk/preview", preview_bulk), PageRoute("POST", f"{ROOT}/bulk/run", run_bulk))
