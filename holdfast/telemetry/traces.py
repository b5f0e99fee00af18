"""Traces: the parts without OpenTelemetry, which ``spans.py`` alone imports."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from holdfast.core.errors import ConfigError
from holdfast.core.models import Job, NewJob

if TYPE_CHECKING:
    from holdfast.telemetry.spans import Spans

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?", re.S)


def open_traces(wanted: bool) -> Spans | None:
    """The maker of spans, if that is wanted. ConfigError where OpenTelemetry is not installed."""
    if not wanted:
        return None
    try:
        from holdfast.telemetry.spans import Spans
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError("traces: OpenTelemetry is not installed; pip install 'holdfast[otel]'") from error
    return Spans()


def submission(spans: Spans | None, jobs: Sequence[NewJob]) -> AbstractContextManager[Sequence[NewJob]]:
    """A span, if any, while these jobs are submitted; gives them as they are to be stored."""
    return nullcontext(jobs) if spans is None or not jobs else spans.submission_span(jobs)


def trace_id_of(job: Job) -> str | None:
    """The trace that a job was submitted in, if any; also None for text that is no traceparent."""
    said = None if job.options is None else job.options.traceparent
    found = None if said is None else _TRACEPARENT.fullmatch(said)
    return None if found is None else found[1]


def current_trace_id() -> str | None:
    """The trace of the span this code runs in, if this process uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None
