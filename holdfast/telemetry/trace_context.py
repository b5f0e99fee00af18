"""Trace context and job fields of the running code: for submissions, and for a logging set-up of the application.

Only ``spans.py`` imports OpenTelemetry. Log lines of a worker have the job's fields without this module.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError
from holdfast.core.models import Job, NewJob
from holdfast.tasks import CURRENT

if TYPE_CHECKING:
    from holdfast.telemetry.spans import Spans

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?", re.S)


def open_traces(wanted: bool, *, hides_errors: bool = False, hides_refused: bool = False) -> Spans | None:
    """Returns ``Spans`` if traces are on, else None. ConfigError if OpenTelemetry is not installed."""
    if not wanted:
        return None
    try:
        from holdfast.telemetry.spans import Spans
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError("traces: OpenTelemetry is not installed; pip install 'holdfast[otel]'") from error
    return Spans(hides_errors=hides_errors, hides_refused=hides_refused)


def submission(spans: Spans | None, jobs: Sequence[NewJob]) -> AbstractContextManager[Sequence[NewJob]]:
    """Opens a span around a submission if traces are on; yields the jobs to store."""
    return nullcontext(jobs) if spans is None or not jobs else spans.submission_span(jobs)


def trace_id_of(job: Job) -> str | None:
    """Returns the trace id of a job's submission; None if there is none, or it is malformed."""
    given = None if job.options is None else job.options.traceparent
    found = None if given is None else _TRACEPARENT.fullmatch(given)
    return None if found is None else found[1]


def current_trace_id() -> str | None:
    """Returns the trace id of the current span, if this process uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None


FIELDS = ("job_id", "task", "queue", "attempt", "trace_id")


def job_fields(task_field: str = "task") -> dict[str, Any]:
    """Returns the id, task, queue, attempt and trace of the running job. Outside a handler: the trace only.

    ``task_field`` names the task's field.
    """
    context = CURRENT.get(None)
    trace_id = current_trace_id()
    if context is None:
        return {} if trace_id is None else {"trace_id": trace_id}
    job = context.job
    fields = {"job_id": job.id, task_field: job.task, "queue": job.queue, "attempt": job.attempts}
    trace_id = trace_id or trace_id_of(job)
    return fields if trace_id is None else {**fields, "trace_id": trace_id}


class JobFields(logging.Filter):
    """Filter for a ``logging`` handler: adds the attributes of ``FIELDS`` to each record, ``"-"`` for a missing one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the attributes."""
        fields = job_fields()
        for name in FIELDS:
            setattr(record, name, fields.get(name, "-"))
        return True


def add_job_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Processor of structlog that adds job fields. Fields of the event take precedence."""
    for name, value in job_fields().items():
        event.setdefault(name, value)
    return event
