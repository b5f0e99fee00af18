"""Logs: a line for each event, and for each log record of the application.

A command writes the lines itself (``configure_logs``). A worker in the application's process sends its events to the
logger ``holdfast`` (``forward_events``), and leaves handlers and output to that process.

Only events whose level is written have a subscriber, so no others are built. Records of ``logging``, and of structlog
if the application has imported but not configured it, go to the same writer; inside a handler they have the job's id,
task, queue, attempt and trace (``trace_context.py``).
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO

from msgspec.structs import replace

from holdfast.core.events import KINDS, Event, Events, JobDead, JobFailedEvent, JobUnstartable, PayloadUnfit
from holdfast.core.redaction import REDACTED
from holdfast.settings.settings import Settings
from holdfast.telemetry.log_output import (
    JsonRenderer,
    LineWriter,
    PrettyRenderer,
    Renderer,
    event_fields,
    exception_text,
    safe_fields,
    traceback_pointer,
)
from holdfast.telemetry.trace_context import job_fields

_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
_ERRORS_OF_JOBS = (JobFailedEvent, JobDead, JobUnstartable, PayloadUnfit)
_BOUND = "structlog_fields"
"""Attribute of a record with the values bound to its structlog logger."""
_LOGGER = logging.getLogger("holdfast")
_written: weakref.WeakSet[Events] = weakref.WeakSet()  # have log lines by ``configure_logs``
_forwarded: weakref.WeakKeyDictionary[Events, _Forwarding] = weakref.WeakKeyDictionary()


def configure_logs(settings: Settings, events: Events, *, stream: TextIO | None = None) -> Callable[[], None]:
    """Starts to write log lines to ``stream`` (standard output); the returned function stops that and flushes."""
    stream = sys.stdout if stream is None else stream
    renderer = _renderer(settings, events.program, stream)
    writer = LineWriter(
        stream, lambda count: renderer.render_line(time.time(), "warning", "log_lines_dropped", {"count": count})
    )
    undo = [
        *(
            _write_events(kind, level, settings, events, renderer, writer)
            for kind, level in written_kinds(settings).items()
        ),
        _write_records(settings, renderer, writer),
        _write_structlog(),
        writer.close,
    ]
    _written.add(events)

    def stop() -> None:
        _written.discard(events)
        for each in undo:
            each()

    return stop


def forward_events(settings: Settings, events: Events) -> Callable[[], None]:
    """Sends events to the logger ``holdfast``; the returned function stops that.

    Each event is one record, however many callers forward it: the settings of the first apply. Nothing is sent where
    ``configure_logs`` writes lines.
    """
    if events in _written:
        return lambda: None
    forwarding = _forwarded.get(events)
    if forwarding is None:
        kinds = written_kinds(settings).items()
        undo = [events.subscribe(_forward(kind, level, settings, events.program), kind) for kind, level in kinds]
        forwarding = _forwarded[events] = _Forwarding(undo)
    forwarding.users += 1

    def stop() -> None:
        forwarding.users -= 1
        if not forwarding.users:
            del _forwarded[events]
            for each in forwarding.undo:
                each()

    return stop


@dataclass
class _Forwarding:
    """Subscriptions of the logger to the events of one application."""

    undo: list[Callable[[], None]]
    users: int = 0


def _forward(kind: type[Event], level: str, settings: Settings, program: str) -> Callable[[Event], None]:
    number, task_field = _number(level), settings.task_field
    hides_error = _hides_error(kind, settings)

    def send_record(event: Event) -> None:
        if not _LOGGER.isEnabledFor(number):
            return
        shown = replace(event, error=REDACTED) if hides_error else event
        fields = safe_fields(event_fields(shown, task_field) | traceback_pointer(event, program))
        text = " ".join(f"{name}={value!r}" for name, value in fields.items())
        _LOGGER.log(number, "%s %s", kind.name, text, extra={"holdfast_event": kind.name, "holdfast_fields": fields})

    return send_record


def _hides_error(kind: type[Event], settings: Settings) -> bool:
    """Returns True if the error text of such events may quote what the setting ``redacted`` hides."""
    return bool(settings.redacted) and kind in _ERRORS_OF_JOBS


def written_kinds(settings: Settings) -> dict[type[Event], str]:
    """Returns the events that are written, with their levels: events of one job have ``job_log_level``."""
    least = _number(settings.log_level)
    levels = {kind: settings.job_log_level.lower() if kind.level == "debug" else kind.level for kind in KINDS}
    return {kind: level for kind, level in levels.items() if _number(level) >= least}


def _renderer(settings: Settings, program: str, stream: TextIO) -> Renderer:
    terminal = stream.isatty()
    if settings.log_format == "json" or (settings.log_format == "auto" and not terminal):
        return JsonRenderer(settings.task_field)
    colors = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return PrettyRenderer(settings.task_field, program=program, colors=colors)


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _level(number: int) -> str:
    """Returns the name of a level; a custom level gets that of the standard level below it."""
    names = (name for name in ("critical", "error", "warning", "info") if number >= _number(name))
    return next(names, "debug")


def _write_events(
    kind: type[Event], level: str, settings: Settings, events: Events, renderer: Renderer, writer: LineWriter
) -> Callable[[], None]:
    # Lines of single jobs are buffered, even if the settings raise them to warnings.
    urgent = _number(kind.level) >= logging.WARNING
    line, write = renderer.renderer_for(kind, level), writer.write
    if _hides_error(kind, settings):
        return events.subscribe(lambda event: write(line(replace(event, error=REDACTED)), urgent=urgent), kind)
    return events.subscribe(lambda event: write(line(event), urgent=urgent), kind)


def _write_records(settings: Settings, renderer: Renderer, writer: LineWriter) -> Callable[[], None]:
    root, handler = logging.getLogger(), _RecordHandler(renderer, writer, settings.task_field)
    level = root.level
    root.addHandler(handler)
    root.setLevel(settings.log_level)

    def remove_handlers() -> None:
        root.removeHandler(handler)
        root.setLevel(level)

    return remove_handlers


def _write_structlog() -> Callable[[], None]:
    """Routes structlog's loggers to ``logging``, if the application has imported but not configured structlog."""
    if "structlog" not in sys.modules:
        return lambda: None
    import structlog

    if structlog.is_configured():
        return lambda: None
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    return structlog.reset_defaults


def _to_record(_logger: object, _method: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of the call to ``logging``."""
    arguments = {name: fields.pop(name) for name in ("exc_info", "stack_info", "stacklevel") if name in fields}
    return {"msg": str(fields.pop("event", "")), "extra": {_BOUND: dict(fields)}, **arguments}


class _RecordHandler(logging.Handler):
    """Renders records as lines."""

    def __init__(self, renderer: Renderer, writer: LineWriter, task_field: str) -> None:
        super().__init__()
        self._task_field = task_field
        self._renderer = renderer
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._renderer.render_line(
                record.created, _level(record.levelno), record.getMessage(), _record_fields(record, self._task_field)
            )
        except Exception:  # As in any handler of logging: a record that cannot be rendered is its author's error.
            self.handleError(record)
            return
        self._writer.write(line, urgent=record.levelno >= logging.WARNING)


def _record_fields(record: logging.LogRecord, task_field: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"logger": record.name, **job_fields(task_field)}
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    bound = extra.pop(_BOUND, {})
    given = extra | bound
    fields |= {name: value for name, value in given.items() if name not in fields}
    if record.exc_info:
        fields["exception"] = exception_text(record.exc_info)
    if record.stack_info:
        fields["stack"] = record.stack_info
    return fields
