"""Pages about the whole system: overview, queues, workers and faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from holdfast.core.models import Finding, JobState, QueueInfo
from holdfast.core.schedule import without_alerts
from holdfast.core.workers import WorkerInfo
from holdfast.views.documents import plan_document, state_totals, to_builtins, worker_document
from holdfast.views.findings import about_alerts, about_dead, about_faults, about_limits, about_pauses, about_workers
from holdfast.views.formatting import format_timestamp
from holdfast.views.schedules import schedule_document, schedule_state
from holdfast.web.console import ROOT
from holdfast.web.console.charts import SPANS, chosen_span, queue_view
from holdfast.web.console.visit import PageRoute, Visit, read_pairs
from holdfast.web.limits import allows_limit
from holdfast.web.messages import ApiResponse

_SHOWN_QUEUES = 12
_QUEUES_ON_PAGE = 100
_SHOWN_RUNS = 6
_SHOWN_WORKERS = 8
_READ_SCHEDULES = 1000
_PLACES: Mapping[str, tuple[str, str]] = {
    "alerts": ("queues", "Queues"),
    "queues": ("queues", "Queues"),
    "workers": ("workers", "Workers"),
    "limits": ("limits", "Limits"),
    "faults": ("faults", "Faults"),
    "dead letters": ("errors", "Errors"),
}
"""Page, and its name, for the subjects of findings."""


async def show_overview(visit: Visit) -> ApiResponse:
    """Returns the overview: numbers, findings, queues, workers, next runs."""
    call = visit.make_context("list_queues", {})
    queues, store = await visit.visible_queues(), await call.app.open_store()
    workers, is_restricted = await call.app.workers(), visit.caller.is_restricted
    limits = [each for each in await call.app.limits.find_all() if allows_limit(call, each)]
    names = {each.name for each in limits}
    pauses = [each for each in await call.app.limits.find_paused() if each.bucket in names]
    alerts = [each for each in await call.app.alerts.find_active() if call.caller.allows_queue(each.queue)]
    findings = [
        await store.health.durability(),
        *about_alerts(alerts),
        *(each for each in about_workers(queues, workers) if not (is_restricted and each.name == "workers")),
        *about_dead(queues),
        *(() if is_restricted else about_faults(await call.app.faults.read(), is_allowed=False)),
        *about_limits(limits, queues, workers, frozenset()),
        *about_pauses(pauses, await store.health.server_time_us()),
    ]
    workers = [] if is_restricted else workers
    span = chosen_span(dict(read_pairs(visit.request)).get("span", ""))
    charts = await visit.console.charts[span].read_value()
    return visit.render_page(
        "overview.html",
        chart=charts.find_chart(visit.make_context("show_history", {}).caller),
        spans=SPANS,
        totals=state_totals(queues),
        partial={state for each in queues for state in each.at_least},
        per_second=sum(each.ended_per_second for each in queues),
        oldest=max((each.oldest_ready.total_seconds() for each in queues if each.oldest_ready), default=0),
        findings=list_problems(visit, findings),
        queues=[queue_view(each) for each in sorted(queues, key=_backlog_first)[:_SHOWN_QUEUES]],
        hidden_queues=max(0, len(queues) - _SHOWN_QUEUES),
        workers=worker_views(workers)[:_SHOWN_WORKERS],
        worker_count=sum(each.alive for each in workers),
        lost_count=sum(not each.alive for each in workers),
        runs=await _next_runs(visit),
        sees_workers=not is_restricted,
    )


def list_problems(visit: Visit, findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Returns the findings that need attention, errors first, each with its page, and the path that ends its pause."""
    problems = sorted((each for each in findings if each.level != "ok"), key=lambda each: each.level != "error")
    shown = []
    for each in problems:
        place, label = _PLACES.get(each.name, ("", ""))
        shown.append(
            {
                "level": each.level,
                "text": each.text,
                "remedy": each.remedy or "",
                "address": visit.link_to(place) if place else "",
                "label": label,
                "resume": f"{place}/{quote(each.paused, safe='')}/resume" if each.paused else "",
                "paused": f"{place.removesuffix('s')} {each.paused}",
            }
        )
    return shown


def _backlog_first(queue: QueueInfo) -> tuple[int, str]:
    """Sort key of queues: the most ready and running jobs first."""
    return -sum(queue.states.get(state, 0) for state in (JobState.QUEUED, JobState.RUNNING)), queue.name


def worker_views(workers: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """Returns the documents of workers, lost ones first, then by host."""
    documents: list[dict[str, Any]] = [to_builtins(worker_document(each)) for each in workers]
    return sorted(documents, key=lambda each: (each["state"] != "lost", each["host"], each["id"]))


async def _next_runs(visit: Visit) -> list[dict[str, Any]]:
    """Returns the schedules that run next. Only for these are further runs computed."""
    call = visit.make_context("list_schedules", {})
    found = await (await call.app.open_store()).schedules.read_schedules(limit=_READ_SCHEDULES)
    own = [each for each in without_alerts(found) if call.caller.allows_queue(each.job.queue)]
    due = sorted((each for each in own if schedule_state(each) == "active"), key=lambda each: each.next_us or 0)
    return [to_builtins(schedule_document(each, call.redaction)) for each in due[:_SHOWN_RUNS]]


async def show_queues(visit: Visit) -> ApiResponse:
    """Returns a page of queues by name."""
    after = dict(read_pairs(visit.request)).get("after", "")
    queues = [each for each in await visit.visible_queues() if each.name > after]
    following = queues[_QUEUES_ON_PAGE - 1].name if len(queues) > _QUEUES_ON_PAGE else None
    views = [queue_view(each) for each in queues[:_QUEUES_ON_PAGE]]
    return visit.render_page("queues.html", queues=views, after=after, following=following)


async def show_workers(visit: Visit) -> ApiResponse:
    """Returns the page of all workers with the jobs that they run."""
    found = await visit.call_operation("list_workers")
    workers = sorted(found["workers"], key=lambda each: (each["state"] != "lost", each["host"], each["id"]))
    running: dict[str, list[dict[str, str]]] = {}
    is_complete = True
    if any(each["running"] for each in workers):
        found = await visit.console.running.read_value()
        is_complete = found.is_complete
        for job in found.jobs:
            started = format_timestamp(job.started_at_us or job.created_at_us)
            shown = {"id": job.id, "task": job.task, "started_at": started}
            running.setdefault(job.worker or "", []).append(shown)
    views = [{**each, "jobs": running.get(each["id"], [])} for each in workers]
    return visit.render_page("workers.html", workers=views, is_complete=is_complete)


async def show_faults(visit: Visit) -> ApiResponse:
    """Returns the page of injected faults."""
    call = visit.make_context("show_faults", {})
    call.caller.check_unlimited()
    plan: dict[str, Any] = to_builtins(plan_document(await call.app.faults.read()))
    return visit.render_page("faults.html", plan=plan, is_allowed=call.app.settings.allow_faults)


ROUTES = (
    PageRoute("GET", ROOT, show_overview),
    PageRoute("GET", f"{ROOT}/queues", show_queues),
    PageRoute("GET", f"{ROOT}/workers", show_workers),
    PageRoute("GET", f"{ROOT}/faults", show_faults),
)
