"""Pages of errors: groups of failed jobs with the same cause, and one of them with its latest traceback."""

from __future__ import annotations

from typing import Any

from holdfast.core.error_groups import MAX_READ, check_error_group
from holdfast.core.errors import Invalid, NotFound
from holdfast.core.validation import parse_count
from holdfast.views.documents import to_builtins
from holdfast.views.error_groups import describe_group, describe_groups
from holdfast.web.console import ROOT
from holdfast.web.console.charts import draw_hours
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.messages import ApiResponse

_SHOWN = 50
_DAY, _WEEK = 24, 7 * 24


async def show_errors(visit: Visit) -> ApiResponse:
    """Returns a page of groups: the latest failure first, or the most jobs."""
    given = dict(read_pairs(visit.request))
    call = visit.make_context("list_error_groups", {})
    groups = (await visit.console.failed.read_value()).find_groups(call.caller)
    if (order := given.get("order", "")) == "most":
        groups = sorted(groups, key=lambda each: each.dead + each.retrying, reverse=True)
    skipped = parse_count(given.get("skip", "0"), "skip", least=0, most=2 * MAX_READ)
    shown = groups[skipped : skipped + _SHOWN]
    store = await call.app.open_store()
    now_us = await store.health.server_time_us()
    documents: list[dict[str, Any]] = to_builtins(await describe_groups(store, shown, call.redaction))
    views = [
        {**document, "chart": draw_hours(group.hours, now_us, _DAY)}
        for group, document in zip(shown, documents, strict=True)
    ]
    return visit.render_page(
        "errors.html",
        groups=views,
        count=len(groups),
        order=order,
        skipped=skipped,
        following=skipped + _SHOWN if skipped + _SHOWN < len(groups) else None,
        dead=sum(each.dead for each in groups),
        retrying=sum(each.retrying for each in groups),
    )


async def show_error(visit: Visit) -> ApiResponse:
    """Returns the page of one group."""
    call = visit.make_context("show_error_group", {})
    groups = (await visit.console.failed.read_value()).find_groups(call.caller)
    store = await call.app.open_store()
    found = next((each for each in groups if each.id == _read_id(visit.path["group"])), None)
    if found is None:
        return visit.render_page("error.html", group=None)
    now_us = await store.health.server_time_us()
    document: dict[str, Any] = to_builtins(await describe_group(store, found, call.redaction))
    # a key for some queues changes jobs of one queue at a time
    queues = found.queues if visit.caller.is_restricted else [None]
    return visit.render_page(
        "error.html",
        group=document,
        chart=draw_hours(found.hours, now_us, _WEEK),
        choices=[
            (queue, [("error_group", found.id), *([] if queue is None else [("queue", queue)])]) for queue in queues
        ],
    )


def _read_id(text: str) -> str:
    try:
        return check_error_group(text)
    except Invalid:
        raise NotFound("there is no such group of errors") from None


ROUTES = (PageRoute("GET", f"{ROOT}/errors", show_errors), PageRoute("GET", f"{ROOT}/errors/{{group}}", show_error))
