"""Tasks: registered functions, their registry, and the conversion between arguments and payloads.

context.py     the context of a running job, for its handler
job_logger.py  log lines of a handler, stored with its job
codec.py       values to JSON text and back, strictly
command_policy.py  the command jobs that are allowed to run
scopes.py      context managers around handlers, in their own thread or process
signature.py   a function's parameters and the payloads that fit them
task.py        a registered function; the registry
"""

from holdfast.tasks.codec import MAX_PAYLOAD_BYTES, MAX_RESULT_BYTES, decode_payload, encode_payload, encode_result
from holdfast.tasks.context import CURRENT, Context, LogOpener, current_job
from holdfast.tasks.job_logger import NOTHING, JobLog, LogEntry, LogLimits
from holdfast.tasks.scopes import HandlerScope, await_in_scopes, call_in_scopes
from holdfast.tasks.signature import Signature, provided
from holdfast.tasks.task import ErrorMatch, Executor, Registry, Task

__all__ = [
    "CURRENT",
    "NOTHING",
    "MAX_PAYLOAD_BYTES",
    "MAX_RESULT_BYTES",
    "Context",
    "ErrorMatch",
    "Executor",
    "HandlerScope",
    "JobLog",
    "LogLimits",
    "LogEntry",
    "LogOpener",
    "Registry",
    "Signature",
    "Task",
    "await_in_scopes",
    "call_in_scopes",
    "current_job",
    "decode_payload",
    "encode_payload",
    "encode_result",
    "provided",
]
