"""Changes of many jobs: a dry run counts them, one confirmation starts, and each call changes at most a thousand.

The count and the result are pages of their own, so that the browser can go back to them; only the change is a form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.models import to_datetime, to_microseconds
from holdfast.core.validation import parse_count
from holdfast.views.formatting import Filters, format_timestamp
from holdfast.web.console import ROOT
from holdfast.web.console.job_pages import check_filters
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.messages import ApiResponse

_OPERATIONS = {"replay": "replay_jobs", "cancel": "cancel_jobs", "delete": "delete_jobs"}
_PREVIEW_FIELDS = ("action", "rate")
_RUN_FIELDS = ("token", "action", "changed", "rate", "after")
_RESULT_FIELDS = ("action", "rate", "result")
_DONE = {"replay": "queued again", "cancel": "cancelled or asked to stop", "delete": "deleted"}
_NEW_STATES: Mapping[str, tuple[str, ...]] = {"replay": ("queued",), "cancel": ("cancelled",), "delete": ()}
_NOT_STARTED_AFTER = "not_started_after"
_CHANGED_FILTERS = ("state", "reason", "error", "error_group", _NOT_STARTED_AFTER)  # changed jobs may not match these
_TIMES = ("since", "until", _NOT_STARTED_AFTER)

Pairs = Sequence[tuple[str, str]]


class BulkChange(msgspec.Struct, frozen=True):
    """A change of many jobs, as the fields of a query or a form describe it."""

    action: str
    filters: list[tuple[str, str]]
    rate: str

    @property
    def request_body(self) -> dict[str, Any]:
        """Returns the filters as the body of a bulk operation has them."""
        names = {name for name, _ in self.filters}
        given: dict[str, Any] = {}
        for name in names:
            values = [value for field, value in self.filters if field == name]
            given[name] = values if name in ("state", "task") else values[-1]
        return {"filter": given}

    @property
    def pace(self) -> dict[str, str]:
        """Returns the rate of a replay as a field of the body."""
        return {"rate": self.rate} if self.action == "replay" and self.rate else {}

    @property
    def query(self) -> list[tuple[str, str]]:
        """Returns the query of the pages about it."""
        return [("action", self.action), *self.filters, *self.pace.items()]

    @property
    def page_fields(self) -> dict[str, Any]:
        """Returns what each of its pages shows."""
        return {"action": self.action, "filters": self.filters, "rate": self.rate, "done": _DONE[self.action]}

    def changed_filters(self) -> list[tuple[str, str]]:
        """Returns the filters of the jobs after the change; none if there are no such jobs."""
        states = _NEW_STATES[self.action]
        states += ("scheduled",) if self.pace else ()
        kept = [pair for pair in self.filters if pair[0] not in _CHANGED_FILTERS]
        return [*[("state", state) for state in states], *kept] if states else []


def _read_change(pairs: Pairs, fields: Sequence[str]) -> BulkChange:
    """Reads the action and the filters. ``fields``: that the query or the form may have beside the filters."""
    given = {name: value.strip() for name, value in pairs}
    action = given.get("action", "")
    if action not in _OPERATIONS:
        raise Invalid("action", action, f"give one of {', '.join(_OPERATIONS)}")
    return BulkChange(action, check_filters(pairs, fields), given.get("rate", ""))


async def _fix_times(visit: Visit, change: BulkChange) -> BulkChange:
    """Returns the change with instants for its times. What is submitted later is neither deleted nor cancelled."""
    app = visit.console.app
    now = to_datetime(await (await app.open_store()).health.server_time_us())
    given = {name: text for name, text in change.filters if name in _TIMES}
    where = await msgspec.convert(given, Filters).build_filter(app)
    until = where.created_before if change.action == "replay" else min(where.created_before or now, now)
    times = zip(_TIMES, (where.created_after, until, where.not_started_after), strict=True)
    fixed = [(name, format_timestamp(to_microseconds(at))) for name, at in times if at is not None]
    kept = [pair for pair in change.filters if pair[0] not in _TIMES]
    return msgspec.structs.replace(change, filters=[*kept, *fixed])


async def preview_bulk(visit: Visit) -> ApiResponse:
    """Counts the jobs that an action would change, and asks for confirmation. Changes nothing."""
    change, problem = _read_change(read_pairs(visit.request), _PREVIEW_FIELDS), ""
    visit.make_context(operation := _OPERATIONS[change.action], {})  # its scope comes first
    change = await _fix_times(visit, change)
    body = {**change.request_body, "dry_run": True}
    try:
        counted = await visit.call_operation(operation, body={**body, **change.pace})
    except Invalid as error:
        if error.field != "rate":
            raise
        counted, problem = await visit.call_operation(operation, body=body), str(error)
    return visit.render_page(
        "bulk.html",
        status=422 if problem else 200,
        problem=problem,
        count=counted["count"],
        is_more=counted["more"],
        is_done=False,
        changed=0,
        after="",
        **change.page_fields,
    )


async def run_bulk(visit: Visit) -> ApiResponse:
    """Changes the next thousand jobs at most; shows the progress, or goes to the result."""
    change, after = _read_change(visit.form, _RUN_FIELDS), visit.form_value("after")
    body = change.request_body
    if change.pace:
        body |= {**change.pace, "after": _read_seconds(after)}
    now_us = await (await visit.console.app.open_store()).health.server_time_us()
    before = parse_count(visit.form_value("changed") or "0", "changed", least=0, most=10**12)
    try:
        answer = await visit.call_operation(_OPERATIONS[change.action], body=body)
    except Invalid as error:
        if error.field != "rate":
            raise
        return visit.redirect_to("bulk/preview", query=change.query, is_change=False)
    changed = before + answer["count"]
    if not answer["more"] or not answer["count"]:
        return _go_to_result(visit, change, changed)
    visit.console.forget_values()
    if change.action == "replay" and _NOT_STARTED_AFTER not in dict(change.filters):
        since = (_NOT_STARTED_AFTER, format_timestamp(now_us))  # of those replayed here, none is chosen again
        change = msgspec.structs.replace(change, filters=[*change.filters, since])
    return visit.render_page(
        "bulk.html",
        problem="",
        count=answer["count"],
        is_more=True,
        is_done=True,
        changed=changed,
        after=f"{answer['seconds']:.6f}",
        **change.page_fields,
    )


def _go_to_result(visit: Visit, change: BulkChange, changed: int) -> ApiResponse:
    """Redirects to the result. Its number is signed: no link of another site can make the page claim a change."""
    result = visit.console.sessions.sign_notice(visit.session, f"{change.action}-{changed}")
    return visit.redirect_to("bulk/result", query=[*change.query, ("result", result)])


async def show_result(visit: Visit) -> ApiResponse:
    """Returns the page with the result of a change; goes to the jobs if this session has not made it."""
    pairs = read_pairs(visit.request)
    change = _read_change(pairs, _RESULT_FIELDS)
    signed = visit.console.sessions.read_notice(visit.session, dict(pairs).get("result", ""))
    action, _, changed = signed.partition("-")
    if action != change.action:
        return visit.redirect_to("jobs", query=change.filters, is_change=False)
    return visit.render_page(
        "bulk_result.html", changed=int(changed), changed_filters=change.changed_filters(), **change.page_fields
    )


def _read_seconds(text: str) -> float:
    """Returns the seconds that a page before this one has planned."""
    try:
        return float(text or "0")
    except ValueError:
        raise Invalid("after", text, "give a number of seconds") from None


ROUTES = (
    PageRoute("GET", f"{ROOT}/bulk/preview", preview_bulk),
    PageRoute("POST", f"{ROOT}/bulk/run", run_bulk),
    PageRoute("GET", f"{ROOT}/bulk/result", show_result),
)
