"""OpenTelemetry spans: one per submission, attempt and step, linked across processes by W3C Trace Context.

Imported only if the setting ``traces`` is on. The application's OpenTelemetry SDK decides about sampling and export;
without one the spans are discarded at little cost. Names and attributes follow the semantic conventions for messaging
(docs/adr/0024).
"""

from __future__ import annotations

import contextvars
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from holdfast.core.errors import Invalid
from holdfast.core.lifecycle import Failed, Outcome, Snooze
from holdfast.core.models import NO_OPTIONS, Job, NewJob, Settlement
from holdfast.telemetry.log_output import mask_secrets

_MAX_STATE = 512
"""Characters of a tracestate that every party has to propagate."""


class Spans:
    """Creates spans. Callable from any thread. ``hides_errors``: an error is shown by its type alone.

    ``hides_refused``: so is the refusal of a value, in a step or submission; of another error there its stack leaves
    out the causes, which may be refusals. An attempt's outcome has a refusal without the value.
    """

    def __init__(self, *, hides_errors: bool, hides_refused: bool) -> None:
        self._hidden: type[Exception] | tuple[()] = Exception if hides_errors else Invalid if hides_refused else ()
        self._tracer = trace.get_tracer("holdfast")
        self._propagator = TraceContextTextMapPropagator()

    # ── submitting ────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def submission_span(self, jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
        """Opens a span around a submission; yields the jobs with its context."""
        with self._open_span(
            f"submit {jobs[0].task}" if _is_alike([job.task for job in jobs]) else "submit",
            kind=trace.SpanKind.PRODUCER,
            attributes=_submission_attributes(jobs),
        ):
            carrier = self.trace_context()
            yield [_with_context(job, carrier) for job in jobs]

    def trace_context(self) -> dict[str, str]:
        """Returns the current context as headers for another process."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────
    def start_execution(self, job: Job, worker_id: str) -> Execution:
        """Starts the span of an attempt: a child of the submission's span, and linked to it."""
        parent = self._propagator.extract(_parent_headers(job))
        submitted = trace.get_current_span(parent).get_span_context()
        span = self._tracer.start_span(
            f"run {job.task}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            links=[trace.Link(submitted)] if submitted.is_valid else None,
            attributes=_execution_attributes(job, worker_id),
        )
        return Execution(span, hides_errors=self._hidden is Exception)

    def step_span(self, name: str) -> AbstractContextManager[object]:
        """Opens a span around the function of a step, in that of its attempt."""
        shown = name.partition("#")[0]  # without the number of its call
        return self._open_span(f"step {shown}", attributes={"holdfast.step": name})

    @contextmanager
    def _open_span(self, name: str, **options: Any) -> Iterator[None]:
        """Opens a span; an exception that ends it is recorded as the error of an attempt is."""
        options |= {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(name, **options) as span:
            try:
                yield
            except Exception as error:
                if not isinstance(error, Snooze):
                    kind, stack = type(error).__name__, traceback.format_exception(error, chain=not self._hidden)
                    _record_error(span, kind, f"{kind}: {error}", "".join(stack), hides=isinstance(error, self._hidden))
                raise

    def attach(self, carrier: Mapping[str, str]) -> None:
        """Makes another process's context the current one."""
        otel.attach(self._propagator.extract(carrier))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def request_span(self, method: str, headers: Mapping[bytes, bytes]) -> Iterator[Callable[[str | None, int], None]]:
        """Opens a span around a request, in the trace of its headers; none if a middleware has opened one.
        Yields a function that records the operation's path and the response status."""
        if trace.get_current_span().get_span_context().is_valid:
            yield lambda path, status: None
            return
        carrier = {name: headers[name.encode()].decode("latin-1") for name in _HEADERS if name.encode() in headers}
        with self._tracer.start_as_current_span(
            method,
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method},
            record_exception=False,  # a disconnected client is no error
            set_status_on_exception=False,
        ) as span:
            yield functools.partial(_answered, span, method)


class Execution:
    """The span of one attempt."""

    def __init__(self, span: trace.Span, *, hides_errors: bool) -> None:
        self._span = span
        self._hides_errors = hides_errors
        self._ended = False

    def enter_context(self, variables: contextvars.Context) -> None:
        """Makes the span the current one of code that runs in this context."""
        variables.run(lambda: otel.attach(trace.set_span_in_context(self._span)))

    def record_settlement(self, settlement: Settlement, outcome: Outcome) -> None:
        """Ends the span with the outcome of the attempt."""
        span = self._span
        if isinstance(outcome, Failed) and span.is_recording():
            kind = outcome.error.partition(": ")[0] if outcome.traceback else str(outcome.reason)
            _record_error(span, kind, outcome.error, outcome.traceback, hides=self._hides_errors)
        if settlement.delay is not None:
            span.set_attribute("holdfast.retry_in", settlement.delay.total_seconds())
        self.end_span(settlement.state)

    def end_span(self, state: str) -> None:
        """Ends the span. ``state``: that of the job after the attempt, or ``lost``."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attribute("holdfast.state", str(state))
        if state == "lost":
            self._span.set_attribute("error.type", "lease_lost")
            self._span.set_status(trace.StatusCode.ERROR, "the lease was lost")
        self._span.end()


_HEADERS = ("traceparent", "tracestate")


def _record_error(span: trace.Span, kind: str, error: str, stack: str | None, *, hides: bool) -> None:
    """Records ``TypeName: message`` and a traceback, masked as in log lines; only the kind if ``hides``."""
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR, None if hides else mask_secrets(error)[:200])
    if not hides:
        name, _, message = mask_secrets(error).partition(": ")
        exception = {"exception.type": name, "exception.message": message or name}
        span.add_event("exception", exception | ({"exception.stacktrace": mask_secrets(stack)} if stack else {}))


def _answered(span: trace.Span, method: str, path: str | None, status: int) -> None:
    if path is not None:
        span.update_name(f"{method} {path}")
        span.set_attribute("http.route", path)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)


def _parent_headers(job: Job) -> dict[str, str]:
    options = job.options_or_default
    return {name: value for name in _HEADERS if (value := getattr(options, name)) is not None}


def _with_context(job: NewJob, carrier: Mapping[str, str]) -> NewJob:
    parent, state = carrier.get("traceparent"), carrier.get("tracestate")
    if parent is None:
        return job
    kept = state if state is not None and len(state) <= _MAX_STATE else None
    options = msgspec.structs.replace(job.options or NO_OPTIONS, traceparent=parent, tracestate=kept)
    return msgspec.structs.replace(job, options=options)


def _is_alike(values: Sequence[str]) -> bool:
    return len(set(values)) == 1


def _submission_attributes(jobs: Sequence[NewJob]) -> dict[str, str | int]:
    given: dict[str, str | int] = {
        "messaging.system": "holdfast",
        "messaging.operation.name": "submit",
        "messaging.operation.type": "send",
    }
    if _is_alike([job.queue for job in jobs]):
        given["messaging.destination.name"] = jobs[0].queue
    if _is_alike([job.task for job in jobs]):
        given["holdfast.task"] = jobs[0].task
    if len(jobs) == 1:
        given["messaging.message.id"] = jobs[0].id
    else:
        given["messaging.batch.message_count"] = len(jobs)
    return given


def _execution_attributes(job: Job, worker_id: str) -> dict[str, str | int]:
    return {
        "messaging.system": "holdfast",
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "messaging.destination.name": job.queue,
        "messaging.message.id": job.id,
        "messaging.client.id": worker_id,
        "holdfast.task": job.task,
        "holdfast.attempt": job.attempts,
        "holdfast.claims": job.claims,
    }
