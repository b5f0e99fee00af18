"""The state transitions of jobs, and the settlement of an attempt. Pure: no clock, no store, no I/O.

    submit ──▶ scheduled ──due──▶ queued ──claim──▶ running ──┬─▶ succeeded
       └─▶ waiting ──met──▲         ▲                 │       ├─▶ dead
               failed ──due────────▶┘◀──released──────┘       ├─▶ cancelled
                  ▲                                           └─▶ failed (retryable, attempts left)
                  └───────────────────────────────────────────────┘

A suspended job waits again, a snoozed or deferred one is scheduled again, and one that lost its lease is queued again.
Every store guards its writes by state itself; ``tests/model`` compares that with ``TRANSITIONS``. ``CANCELLABLE``,
``REPLAYABLE`` and ``DELETABLE`` restrict the jobs of a bulk operation. ``decide`` turns the outcome of an attempt into
the ``Settlement`` that a store writes if its guard holds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Protocol

import msgspec
from msgspec.structs import replace

from holdfast.core.errors import Conflict, Invalid, JobCancelled, JobFailed, JobOutcome
from holdfast.core.models import Job, JobState, Reason, Settlement
from holdfast.core.validation import check_span

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.SCHEDULED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.WAITING: frozenset({JobState.QUEUED, JobState.SCHEDULED, JobState.CANCELLED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.SCHEDULED}),
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.SCHEDULED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.DEAD,
            JobState.CANCELLED,
            JobState.QUEUED,
            JobState.SCHEDULED,
            JobState.WAITING,
        }
    ),
    JobState.SUCCEEDED: frozenset({JobState.QUEUED, JobState.SCHEDULED}),
    JobState.DEAD: frozenset({JobState.QUEUED, JobState.SCHEDULED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING}),
}
"""The states that a job may enter from each state. Only a replay, of the job or of one that it waits for, leaves a
terminal state. An edit, or a submission with the same unique key, leads from queued to scheduled. A batch is not in
this table: it waits, ends and waits again with its jobs (``core/batches.py``)."""

CANCELLABLE = frozenset(state for state, to in TRANSITIONS.items() if JobState.CANCELLED in to)
REPLAYABLE = frozenset({JobState.DEAD, JobState.FAILED, JobState.CANCELLED})
"""States replay accepts; ``succeeded`` too, when forced."""
DELETABLE = frozenset(JobState) - {JobState.RUNNING}

DEFERRALS = frozenset({Reason.NO_HANDLER, Reason.PAYLOAD, Reason.ENCRYPTED})
"""Reasons of a deferral: this worker cannot run the job, one with newer or older code, or with the key, may."""

_KILLED = frozenset({Reason.CRASHED, Reason.RESOURCE})
"""Reasons that ``max_attempts`` does not replace when the last attempt fails."""

MAX_ERROR_LENGTH = 4096
"""Maximum length of a stored error text in characters."""


class Succeeded(msgspec.Struct, frozen=True, gc=False):
    """The handler returned. ``result``: JSON text; None if it returned None."""

    result: str | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The attempt failed. ``delay`` overrides the policy; ``pause``: the scope that ``RetryAfter`` pauses."""

    error: str
    reason: Reason = Reason.ERROR
    traceback: str | None = None
    retryable: bool = True
    delay: timedelta | None = None
    pause: str | None = None


class Snoozed(msgspec.Struct, frozen=True, gc=False):
    """The handler asked to run again later."""

    delay: timedelta


class Suspended(msgspec.Struct, frozen=True, gc=False):
    """The handler waits for what ``reason`` says, until the ``delay`` is over (None: without a deadline)."""

    reason: Reason
    delay: timedelta | None = None


class Released(msgspec.Struct, frozen=True, gc=False):
    """A worker gives the job back: it stops, cannot start the job, or cannot run it (a deferral).

    ``error``: the cause, if it could not start it. ``delay``: time until the next try. ``reason``: of a deferral.
    """

    error: str | None = None
    delay: timedelta | None = None
    reason: Reason = Reason.RELEASED


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """An operator's cancellation has stopped the handler."""


class Lost(msgspec.Struct, frozen=True, gc=False):
    """The lease ran out: the process died, froze or was cut off."""


Outcome = Succeeded | Failed | Snoozed | Suspended | Released | Cancelled | Lost


class Backoff(Protocol):
    """Protocol of a retry policy; ``retry.Retry`` is the implementation."""

    @property
    def priority(self) -> int | None: ...

    def delay_after(self, failures: int, rng: random.Random) -> timedelta: ...


def decide(job: Job, outcome: Outcome, backoff: Backoff, rng: random.Random) -> Settlement:
    """Returns the settlement of ``job``'s running attempt. ``backoff`` is used only for ``Failed``."""
    if isinstance(outcome, Succeeded):  # most are: a match statement takes twice as long
        return Settlement(
            job_id=job.id, claims=job.claims, state=JobState.SUCCEEDED, result=outcome.result, worker=job.worker
        )
    match outcome:
        case Failed():
            return _after_failure(job, outcome, backoff, rng)
        case Snoozed(delay=delay):
            return _refund_attempt(job, Reason.SNOOZED, delay)
        case Suspended(reason=reason, delay=delay):
            return replace(_refund_attempt(job, reason, delay), state=JobState.WAITING)
        case Released(error=error, delay=delay, reason=reason):
            return _refund_attempt(job, reason, delay, error)
        case Cancelled():
            return Settlement(
                job_id=job.id,
                claims=job.claims,
                state=JobState.CANCELLED,
                reason=Reason.CANCELLED,
                error="cancelled",
                worker=job.worker,
            )
        case Lost():
            return _after_loss(job)


def _after_failure(job: Job, failed: Failed, backoff: Backoff, rng: random.Random) -> Settlement:
    is_last = is_last_attempt(job)
    will_retry = failed.retryable and not is_last
    delay = None
    if will_retry:
        delay = failed.delay if failed.delay is not None else backoff.delay_after(job.attempts, rng)
    return Settlement(
        job_id=job.id,
        claims=job.claims,
        state=JobState.FAILED if will_retry else JobState.DEAD,
        # The reason of death is the last attempt, unless this failure was final by itself or killed the process.
        reason=Reason.MAX_ATTEMPTS if failed.retryable and is_last and failed.reason not in _KILLED else failed.reason,
        error=clip_error(failed.error),
        traceback=failed.traceback,
        delay=delay,
        priority=backoff.priority if will_retry and backoff.priority != job.priority else None,
        worker=job.worker,
    )


def _refund_attempt(job: Job, reason: Reason, delay: timedelta | None, error: str | None = None) -> Settlement:
    return Settlement(
        job_id=job.id,
        claims=job.claims,
        state=JobState.SCHEDULED if delay else JobState.QUEUED,
        reason=reason,
        error=None if error is None else clip_error(error),
        delay=delay,
        refund=True,
        worker=job.worker,
    )


def _after_loss(job: Job) -> Settlement:
    """A lost lease counts as a failed attempt, so a job that kills its process ends dead. Others are queued at once."""
    who = f"worker {job.worker}" if job.worker else "its worker"
    message = f"lease expired: {who} died, froze or was cut off during attempt {job.attempts} of {job.task}"
    if job.cancelling:
        state = JobState.CANCELLED
    elif is_last_attempt(job):
        state = JobState.DEAD
    else:
        state = JobState.QUEUED
    return Settlement(
        job_id=job.id,
        claims=job.claims,
        state=state,
        reason=Reason.CANCELLED if state is JobState.CANCELLED else Reason.CRASHED,
        error=message,
        lease_expired=True,
        worker=job.worker,
    )


def is_last_attempt(job: Job) -> bool:
    """Returns True if the attempt now running is the last one allowed."""
    return job.max_attempts is not None and job.attempts >= job.max_attempts


def must_start_now(job: Job) -> bool:
    """Returns True if a claimed job needs a free runner: its last lease was lost, or this is its last attempt."""
    return job.lost_leases > 0 or is_last_attempt(job)


def clip_error(error: str) -> str:
    """Returns the stored form of an error text: at most ``MAX_ERROR_LENGTH`` characters, lone surrogates escaped."""
    return error[:MAX_ERROR_LENGTH].encode("utf-8", "backslashreplace").decode()[:MAX_ERROR_LENGTH]


def check_replay(job_id: str, state: JobState, *, force: bool) -> None:
    """Raises Conflict, with a remedy, if ``state`` does not allow a replay."""
    if state in REPLAYABLE or (force and state is JobState.SUCCEEDED):
        return
    advice = {
        JobState.SUCCEEDED: "it has succeeded; force the replay if it must run again",
        JobState.RUNNING: "it is running; cancel it first",
    }.get(state, f"it is {state} and will run by itself")
    raise Conflict(f"job {job_id} cannot be replayed: {advice}")


def failure_of(job_id: str, job: Job | None) -> JobOutcome | None:
    """Returns the error for a job that has ended without a result, or that is gone; None for any other."""
    if job is None:
        return JobFailed(job_id, f"job {job_id} was deleted")
    match job.state:
        case JobState.DEAD:
            return JobFailed(job.id, f"job {job.id} is dead ({job.reason}): {job.error}")
        case JobState.CANCELLED:
            return JobCancelled(job.id, f"job {job.id} was cancelled")
    return None


def describe_holder(holder: Job) -> str:
    """Text for a job that has the unique key of another one."""
    return f"job {holder.id} has the same unique key, and is {holder.state}; replay it when that one gives it up"


# ── exceptions with which a handler ends its attempt ──────────────────────────────────────────────────────────────────
class AttemptEnd(Exception):
    """Base of the exceptions with which a handler ends its attempt: retry, snooze or death."""


RETRY_SCOPES = ("job", "key", "queue", "task")


class RetryAfter(AttemptEnd):
    """The attempt failed; try again after ``delay``: seconds, a timedelta or text such as ``5m``.

    The policy is not used. Attempts still count: on the last attempt the job is dead.
    ``scope``: "key", "queue" or "task" pauses the limits of that scope for as long, for every job they apply to.
    """

    def __init__(self, delay: float | timedelta | str, message: str = "", *, scope: str = "job") -> None:
        self.delay = check_span(delay, "delay")
        if scope not in RETRY_SCOPES:
            raise Invalid("scope", scope, f"give one of {', '.join(RETRY_SCOPES)}")
        self.scope = scope
        super().__init__(message or f"retry after {self.delay}")


class Snooze(AttemptEnd):
    """Runs the job again after ``delay``: seconds, a timedelta or text like ``5m``. The attempt does not count."""

    def __init__(self, delay: float | timedelta | str) -> None:
        self.delay = check_span(delay, "delay")
        super().__init__(f"snoozed for {self.delay}")


class Dead(AttemptEnd):
    """The job cannot succeed: it is dead at once, with this message, however many attempts are left."""


class StepsChanged(AttemptEnd):
    """The steps that the code takes are not those that were recorded with the job. It is dead at once."""


class Suspension(BaseException):
    """The handler sleeps or waits: its attempt ends, and another one goes on. No ``except Exception`` catches it."""


# ── deferral of a job that its worker cannot run ──────────────────────────────────────────────────────────────────────
_ERROR = re.compile(r"deferred since (\S+Z): (?:Invalid: )?(.*)", re.DOTALL)


class Deferral(msgspec.Struct, frozen=True):
    """A deferral: ``since`` its start, and the ``cause`` that the latest worker gave."""

    since: datetime
    cause: str


def deferral_error(since: datetime, error: str) -> str:
    """Returns the error text of a job that has been deferred since that instant."""
    return f"deferred since {since.isoformat().replace('+00:00', 'Z')}: {error}"


def deferral_of(job: Job) -> Deferral | None:
    """Returns the deferral of a job; None if its latest attempt ended otherwise."""
    found = _ERROR.match(job.error or "") if job.reason in DEFERRALS else None
    try:
        return found and Deferral(datetime.fromisoformat(found[1]), found[2])
    except ValueError:
        return None


def describe_outlook(job: Job) -> str:
    """Text for the outlook of a job that has not ended."""
    if deferral_of(job) is None:
        return "it goes on"
    return f"it is deferred, because its worker cannot run it; see: holdfast why {job.id}"


def correct_arguments(job_id: str, *, deferred: bool) -> str:
    """Returns the commands that run a job with corrected arguments. A deferred job has to be cancelled first."""
    first = f"holdfast cancel {job_id}, then " if deferred else ""
    return f"to correct its arguments: {first}holdfast replay {job_id} --payload '{{...}}'"
