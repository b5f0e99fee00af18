"""Metrics of the API's own requests and of the queues: one for each ``Api``."""

from __future__ import annotations

import time

from holdfast.app import Holdfast
from holdfast.core.metric_events import RequestAnswered
from holdfast.telemetry.metric_types import OTHER
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.queue_metrics import QueueFigures
from holdfast.web.responses import ApiRequest

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
