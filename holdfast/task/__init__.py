"""Tasks: the functions behind jobs, the registry of them, and the way between a signature and a payload.

context.py     the running job as its handler sees it
log.py         what a handler logs with its job
codec.py       values to JSON text and back, strictly
signature.py   a function's parameters and the payloads that fit them
task.py        a registered function; the registry
"""

from holdfast.task.codec import PAYLOAD_LIMIT, RESULT_LIMIT, decode_payload, encode_payload, encode_result
from holdfast.task.context import CURRENT, Context, LogOpener, current_job
from holdfast.task.log import NOTHING, JobLog, Limits, Said
from holdfast.task.signature import Signature, provided
from holdfast.task.task import ErrorMatch, Executor, Registry, Task

__all__ = [
    "CURRENT",
    "Context",
    "ErrorMatch",
    "Executor",
    "JobLog",
    "Limits",
    "LogOpener",
    "NOTHING",
    "PAYLOAD_LIMIT",
    "RESULT_LIMIT",
    "Registry",
    "Said",
    "Signature",
    "Task",
    "current_job",
    "decode_payload",
    "encode_payload",
    "encode_result",
    "provided",
]
