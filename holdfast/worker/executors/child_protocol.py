"""Protocol between a worker and the children of its process executor: frames of msgpack, never code.

A frame is four bytes of length, big-endian, and that many bytes. The worker begins: the import path as JSON, because it
is read before anything of ours can be imported, then ``Setup``, then one ``ChildRequest`` a job. The child answers with
an empty frame when it is ready, and with one ``ChildReply`` a request; ``Logged`` frames may come before it.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from holdfast.core.lifecycle import Failed, Outcome, Released, Snoozed, Succeeded
from holdfast.core.models import Job, Reason
from holdfast.tasks import Limits, LogEntry

HEADER = 4


class Setup(msgspec.Struct, array_like=True):
    """Initial settings of a child."""

    app: str | None  # module:attribute of the application
    modules: list[str]  # worth importing before the first job
    recycle_jobs: int | None
    recycle_memory: int | None  # bytes
    result_limit: int  # bytes a result may take
    log: Limits


class ChildRequest(msgspec.Struct, array_like=True):
    """A job. ``reference`` (module:qualname): where its function stands; ``carrier``: the trace context to run in."""

    reference: str
    job: Job
    carrier: dict[str, str] | None = None


class Logged(msgspec.Struct, array_like=True, tag="logged"):
    """A line that the handler logged, or how many more there were than an attempt may keep."""

    line: LogEntry | None = None
    dropped: int = 0


class ChildReply(msgspec.Struct, array_like=True, tag="reply"):
    """An outcome, flat. ``retiring``: the child ends now and takes no further job."""

    kind: str
    retiring: bool = False
    result: str | None = None
    error: str = ""
    reason: str = ""
    traceback: str | None = None
    retryable: bool = True
    delay: timedelta | None = None


def encode_frame(data: bytes) -> bytes:
    """``data`` with its length before it."""
    return len(data).to_bytes(HEADER) + data


def decode_frame(buffer: bytearray) -> bytes | None:
    """Take the first frame out of ``buffer``; None while it is incomplete."""
    if len(buffer) < HEADER:
        return None
    end = HEADER + int.from_bytes(buffer[:HEADER])
    if len(buffer) < end:
        return None
    data = bytes(buffer[HEADER:end])
    del buffer[:end]
    return data


def reply_of(outcome: Outcome) -> ChildReply:
    """The reply that says ``outcome``."""
    match outcome:
        case Succeeded(result=result):
            return ChildReply("succeeded", result=result)
        case Failed():
            return ChildReply(
                "failed",
                error=outcome.error,
                reason=outcome.reason,
                traceback=outcome.traceback,
                retryable=outcome.retryable,
                delay=outcome.delay,
            )
        case Snoozed(delay=delay):
            return ChildReply("snoozed", delay=delay)
        case _:
            return ChildReply("released")


def outcome_in(reply: ChildReply) -> Outcome:
    """The outcome that ``reply`` says."""
    match reply.kind:
        case "succeeded":
            return Succeeded(reply.result)
        case "failed":
            return Failed(
                error=reply.error,
                reason=Reason(reply.reason),
                traceback=reply.traceback,
                retryable=reply.retryable,
                delay=reply.delay,
            )
        case "snoozed":
            return Snoozed(reply.delay or timedelta(0))
        case _:
            return Released()
