"""Logs, metrics and traces: each module subscribes to ``holdfast.core.events`` and to nothing else.

logs.py         one line for each event, and for each log record of the user's own code
log_output.py   lines as JSON or for people, and their output; a slow reader of the log never blocks work
metrics.py      counts and durations of events and of store calls; queue_metrics.py counts of jobs
metric_types.py counters and histograms, and the page of them
spans.py        spans of OpenTelemetry; trace_context.py the parts that need no OpenTelemetry
audit_file.py   the chained record of changes made over the HTTP API
"""
