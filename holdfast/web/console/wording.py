"""Words for readers: what a state means, and what a reason code says."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.models import JobState, Reason

_STATES: Mapping[str, str] = {
    JobState.SCHEDULED: "waits for its time",
    JobState.WAITING: "waits for other jobs or for a signal",
    JobState.QUEUED: "ready for a worker",
    JobState.RUNNING: "a worker runs it now",
    JobState.FAILED: "an attempt failed, and it waits for the next one",
    JobState.SUCCEEDED: "its handler returned",
    JobState.DEAD: "gets no further attempt unless it is replayed",
    JobState.CANCELLED: "ended by an operator, a caller, its expiry or another job",
}
_REASONS: Mapping[str, str] = {
    Reason.MAX_ATTEMPTS: "no attempts left",
    Reason.NON_RETRYABLE: "not to be tried again",
    Reason.NO_HANDLER: "no such task on the worker",
    Reason.PAYLOAD: "the payload does not fit the task",
    Reason.ENCRYPTED: "the worker lacks its key",
    Reason.RESULT: "the result cannot be stored",
    Reason.CRASHED: "the process died or lost its lease",
    Reason.TIMEOUT: "over its timeout",
    Reason.RESOURCE: "over a resource limit",
    Reason.SANDBOX: "no sandbox on the worker's host",
    Reason.ERROR: "the handler raised an error",
    Reason.CANCELLED: "cancelled",
    Reason.RELEASED: "given back by a stopping worker",
    Reason.SNOOZED: "put off by its handler",
    Reason.EXPIRED: "expired before it started",
    Reason.STEPS_CHANGED: "its recorded steps do not match the code",
    Reason.SIGNAL: "waits for a signal",
    Reason.CHILDREN: "waits for its children",
    Reason.DEPENDENCY: "depends on another job",
}


def describe_state(state: str) -> str:
    """Returns the meaning of a job's state; "" for any other word."""
    return _STATES.get(state, "")


def describe_reason(reason: str | None) -> str:
    """Returns the text for a reason code; an unknown code as it is."""
    return _REASONS.get(reason or "", reason or "")
