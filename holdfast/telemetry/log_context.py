"""Job fields for log records in log pipelines of your own: a filter for ``logging``, a processor for structlog. (What a
worker writes itself has these fields anyway.)
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from holdfast.tasks import CURRENT
from holdfast.telemetry.traces import current_trace_id, trace_id_of

FIELDS = ("job_id", "task", "queue", "attempt", "trace_id")


def job_fields(task_field: str = "task") -> dict[str, Any]:
    """Returns the id, task, queue, attempt and trace of the job this code runs for. Outside a job: the trace only.

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
    """For a handler of ``logging``: each record gets the attributes of ``FIELDS``, ``"-"`` for a missing one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes."""
        fields = job_fields()
        for name in FIELDS:
            setattr(record, name, fields.get(name, "-"))
        return True


def add_job_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor for structlog. Fields that the event has itself stay."""
    for name, value in job_fields().items():
        event.setdefault(name, value)
    return event
