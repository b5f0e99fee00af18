"""Logs, metrics and traces: each module subscribes to ``holdfast.core.events`` and to nothing else.

fields.py     which job a log record is of, for log pipelines of one's own
logs.py       one line for each event, and for each log record of the user's own code
renderers.py  how a line looks: JSON for programs, pretty for people
writer.py     output of lines; a slow reader of the log never blocks work
"""
