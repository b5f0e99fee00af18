"""Logs, metrics and traces: subscribers of ``holdfast.core.events``.

logs.py         one line for each event, and for each log record of the user's own code
log_output.py   rendering as JSON or for people, and the writer, which never blocks work
metrics.py      metrics of events and store calls; queue_metrics.py metrics of queues
metric_types.py counters and histograms, and their exposition
spans.py        spans of OpenTelemetry; trace_context.py the parts that need no OpenTelemetry
audit_file.py   the chained record of changes made over the HTTP API
"""
