"""Jobs in Django's admin: a list, a page of each job, and operations on jobs and queues. Nothing is edited.

Jobs are read by the application, whatever store holds them. Permissions are those of the model ``Job``: to view, to
change (replay and cancel jobs, pause and resume queues) and to delete.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext_lazy

from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.job_logs import LogPage
from holdfast.core.lifecycle import CANCELLABLE, DELETABLE, REPLAYABLE
from holdfast.core.models import JobFilter, JobState, to_datetime
from holdfast.core.redaction import Redaction
from holdfast.integrations.django import app
from holdfast.integrations.django.models import Job
from holdfast.views.documents import job_document, to_builtins
from holdfast.views.formatting import count_noun

_LINES = 200  # log lines of a job that its page shows
_OPERATIONS = {"replay": ("change", REPLAYABLE), "cancel": ("change", CANCELLABLE), "delete": ("delete", DELETABLE)}
"""Permission and states of jobs for each operation. ``app.sync`` has a method of its name."""
_QUEUE_OPERATIONS = {"pause": "paused", "resume": "resumed"}
"""Methods of ``app.sync`` for queues, each with the state that it leaves. They need the permission to change jobs."""
_LIST = "admin:holdfast_job_changelist"
_NOTHING_SELECTED = gettext_lazy(
    "Items must be selected in order to perform actions on them. No items have been changed."
)
"""Django's own sentence, which it translates."""


@admin.register(Job)
class JobAdmin(admin.ModelAdmin):  # type: ignore[misc]  # Django has no types
    """Jobs of the application."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Returns False: code enqueues jobs."""
        return False

    @transaction.non_atomic_requests  # type: ignore[untyped-decorator]  # Django has no types
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Shows a page of jobs; runs an operation on the selected ones."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._operate_on_queue(request) if "queue" in request.POST else self._operate(request)
        given = {name: request.GET[name] for name in ("state", "queue", "task") if request.GET.get(name)}
        jobs, cursor = [], None
        try:
            page = app.sync.find(_filter_of(given), limit=self.list_per_page, cursor=request.GET.get("cursor"))
            jobs, cursor = [_redaction().redact_job(job) for job in page.jobs], page.cursor
        except HoldfastError as error:
            messages.error(request, str(error))
        context = {
            "title": "Jobs",
            "jobs": jobs,
            "given": given,
            "states": list(JobState),
            "queues": app.sync.queues(),
            "operations": self._allowed_operations(request, JobState),
            "queue_operations": list(_QUEUE_OPERATIONS) if self.has_change_permission(request) else [],
            "next": None if cursor is None else urlencode({**given, "cursor": cursor}),
        }
        return self._render(request, "list", context | (extra_context or {}))

    @transaction.non_atomic_requests  # type: ignore[untyped-decorator]  # Django has no types
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Shows a job with its failed attempts and log lines."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            job = app.sync.get(object_id)
            attempts = app.sync.attempts(job.id)
            page: LogPage = app.sync.logs(job.id, limit=_LINES)
        except NotFound as error:
            raise Http404(str(error)) from error
        redaction = _redaction()
        context = {
            "title": f"Job {job.id}",
            "job": job,
            "fields": _known_fields(to_builtins(job_document(redaction.redact_job(job)))),
            "attempts": redaction.redact_attempts(job, attempts),
            "lines": [(to_datetime(each.at_us), each) for each in redaction.redact_logs(job, page.lines)],
            "operations": self._allowed_operations(request, [job.state]),
        }
        return self._render(request, "job", context | (extra_context or {}))

    def _operate(self, request: HttpRequest) -> HttpResponse:
        """Runs an operation on the selected jobs, says how many changed, and returns to the list or the job.

        Asks before it deletes.
        """
        operation, ids = request.POST.get("operation", ""), request.POST.getlist("id")
        _check_operation(operation, _OPERATIONS)
        if operation not in self._allowed_operations(request, JobState):
            raise PermissionDenied
        if not ids:
            messages.warning(request, _NOTHING_SELECTED)
            return HttpResponseRedirect(reverse(_LIST))
        if operation == "delete" and "confirmed" not in request.POST:
            context = {"title": gettext_lazy("Are you sure?"), "ids": ids, "back": request.POST.get("job")}
            return self._render(request, "confirm", context)
        try:
            result = getattr(app.sync, operation)(ids)
        except HoldfastError as error:
            messages.error(request, str(error))
        else:
            refused = [f"{job_id} is {state or 'gone'}" for job_id, state in result.refused]
            level = messages.WARNING if refused else messages.SUCCESS
            text = "; ".join([f"{operation}: {count_noun(len(result.changed), 'job')} changed", *refused])
            messages.add_message(request, level, text)
        back = request.POST.get("job") if operation != "delete" else None
        return HttpResponseRedirect(reverse(_LIST) if not back else reverse("admin:holdfast_job_change", args=[back]))

    def _operate_on_queue(self, request: HttpRequest) -> HttpResponse:
        """Pauses or resumes a queue, says so, and returns to the list."""
        operation, queue = request.POST.get("operation", ""), request.POST["queue"]
        _check_operation(operation, _QUEUE_OPERATIONS)
        if not self.has_change_permission(request):
            raise PermissionDenied
        try:
            getattr(app.sync, operation)(queue)
        except HoldfastError as error:
            messages.error(request, str(error))
        else:
            messages.success(request, f"Queue {queue} is {_QUEUE_OPERATIONS[operation]}.")
        return HttpResponseRedirect(reverse(_LIST))

    def _allowed_operations(self, request: HttpRequest, states: Iterable[JobState]) -> list[str]:
        """Returns the operations that the user may run on jobs of one of these states."""
        given = {"change": self.has_change_permission(request), "delete": self.has_delete_permission(request)}
        operations = _OPERATIONS.items()
        return [name for name, (permission, allowed) in operations if given[permission] and allowed & {*states}]

    def _render(self, request: HttpRequest, name: str, context: dict[str, Any]) -> HttpResponse:
        shared = {**self.admin_site.each_context(request), "opts": self.opts}
        return TemplateResponse(request, f"admin/holdfast/{name}.html", shared | context)


def _filter_of(given: dict[str, str]) -> JobFilter:
    return JobFilter(
        states=(JobState(given["state"]),) if given.get("state") in set(JobState) else (),
        queue=given.get("queue"),
        tasks=(given["task"],) if "task" in given else (),
    )


def _known_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that have a value: objects and lists as JSON, instants as datetimes."""
    known = {name: value for name, value in document.items() if value not in (None, [], "")}
    for name, value in known.items():
        if name.endswith(("_at", "_until")):
            known[name] = datetime.fromisoformat(value)
        elif isinstance(value, dict | list):
            known[name] = json.dumps(value)
    return known


def _redaction() -> Redaction:
    return Redaction(app.settings.redacted)


def _check_operation(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise BadRequest(f"operation: {name!r}; give one of {', '.join(known)}")
