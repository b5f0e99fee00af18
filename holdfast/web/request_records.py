"""Records of one API about its own requests: metrics, and the tasks it does not know, logged once for each name."""

from __future__ import annotations

import time
from collections.abc import Iterable

from holdfast.app import Holdfast
from holdfast.core.events import TaskUnknown
from holdfast.core.metric_events import RequestAnswered
from holdfast.core.models import NewJob
from holdfast.core.validation import did_you_mean
from holdfast.tasks.command_policy import COMMAND
from holdfast.telemetry.metric_types import OTHER
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.queue_metrics import QueueFigures
from holdfast.web.messages import ApiRequest

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_GONE = 499
"""HTTP 499: the client closed the request."""


class RequestMetrics:
    """Its figures belong to the application whose events it hears."""

    def __init__(self, app: Holdfast) -> None:
        labels = app.settings.metrics_labels
        self.metrics = Metrics(
            app.events, labels=labels, tasks=app.registry.task_names, task_field=app.settings.task_field
        )
        self.queues = QueueFigures(app.open_store, labels=labels)
        self._events = app.events
        self._in_flight = 0
        self.metrics.set_gauge("http_requests_in_flight", lambda: self._in_flight)

    def request_started(self) -> float:
        """A request has come."""
        self._in_flight += 1
        return time.perf_counter()

    def request_answered(self, request: ApiRequest, started: float, status: int = _GONE) -> None:
        """Its answer is known."""
        method = request.method if request.method in _METHODS else OTHER
        seconds = time.perf_counter() - started
        path = request.template or OTHER
        self._events.emit(RequestAnswered(method=method, path=path, status=status, seconds=seconds))

    def request_ended(self) -> None:
        """Its answer has been taken away."""
        self._in_flight -= 1


_MAX_LOGGED = 100  # limit of logged names: clients may invent any number


class UnknownTaskLog:
    """Log of unknown tasks, one for each ``Api``. Another application may have the task: nothing is refused."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._logged: set[str] = set()
        self._suggestions: dict[str, str] = {}
        self._known = 0

    def record_jobs(self, jobs: Iterable[NewJob]) -> None:
        """Records submitted jobs."""
        known = self._app.registry
        for job in jobs if len(known) else ():
            if job.task in known or job.task in self._logged or job.task == COMMAND:
                continue
            if len(self._logged) < _MAX_LOGGED:
                self._logged.add(job.task)
                close = self._suggestion(job.task)
                remedy = f"see that a worker has it: the application of this API does not{close}"
                error = f"no task {job.task!r} is registered in the application of this API"
                self._app.events.emit(
                    TaskUnknown(job_id=job.id, task=job.task, queue=job.queue, error=error, remedy=remedy)
                )

    def warning_for(self, task: str, *, suggests: bool) -> str | None:
        """Returns the warning for a submitter of an unknown task. ``suggests``: which one may have been meant, too."""
        known = self._app.registry
        if not len(known) or task in known or task == COMMAND:
            return None
        return f"the application of this API has no task {task}{self._suggestion(task) if suggests else ''}"

    def _suggestion(self, task: str) -> str:
        """Looked up once for each name: it compares the name with every task."""
        known = self._app.registry
        if len(known) != self._known:
            self._suggestions.clear()
            self._known = len(known)
        found = self._suggestions.get(task)
        if found is None:
            if len(self._suggestions) == _MAX_LOGGED:
                return ""
            found = self._suggestions[task] = did_you_mean(task, known.task_names())
        return found
