"""The spans of this process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@functools.cache
def _exporter() -> InMemorySpanExporter:
    """OpenTelemetry takes one provider a process. Only applications with ``traces`` make spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


class Spans:
    """What ended while it was looked at."""

    def __init__(self) -> None:
        _exporter().clear()

    @property
    def ended(self) -> list[ReadableSpan]:
        return list(_exporter().get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.ended if span.name == name]


@contextmanager
def inside(name: str) -> Iterator[trace.SpanContext]:
    """A span of the caller's own."""
    with trace.get_tracer("test").start_as_current_span(name) as span:
        yield span.get_span_context()


def identity(span: ReadableSpan) -> tuple[int, int]:
    """Trace and span id."""
    return span.context.trace_id, span.context.span_id
