"""Logs, metrics and traces: each module subscribes to ``holdfast.core.events`` and to nothing else.

logs.py         one line for each event, and for each log record of the user's own code
renderers.py    format of a line: JSON for programs, pretty for people
log_output.py   output of lines; a slow reader of the log never blocks work
log_context.py  the job's fields for a log pipeline of one's own
metrics.py      counts and durations of events; queue_metrics.py counts of jobs; exposition.py the page of them
spans.py        spans of OpenTelemetry; traces.py the parts that need no OpenTelemetry
timing.py       timing of store calls and of the event loop
audit_file.py   the chained record of changes made over the HTTP API
"""
