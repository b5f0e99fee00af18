"""Changes of a job that waits: what may be changed, in which states, and what an expiry needs. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.core.errors import Conflict, Invalid
from holdfast.core.models import MICROSECOND, NOT_STARTED, Job, JobState, NewJob, Options, to_datetime, to_microseconds
from holdfast.core.validation import check_span, parse_instant

EDITABLE = NOT_STARTED
"""States of a job that may be edited: it waits."""
NEVER = "never"
"""Text for no expiry, where a value cannot be left out."""


class JobChanges(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Changes of a job that waits, already validated. None leaves a value as it is."""

    queue: str | None = None
    priority: int | None = None
    payload: str | None = None
    delay: timedelta | None = None  # from the store's now; or
    run_at_us: int | None = None
    options: Options | None = None  # all of them, as they will be
    expires_in: timedelta | None = None  # from the store's now; or
    expires_at_us: int | UnsetType | None = UNSET  # None: never

    @property
    def has_time(self) -> bool:
        """Returns True if they change ``run_at``."""
        return self.delay is not None or self.run_at_us is not None

    @property
    def has_expiry(self) -> bool:
        """Returns True if they say when the job expires, or that it never does."""
        return self.expires_in is not None or self.expires_at_us is not UNSET

    @property
    def will_expire(self) -> bool:
        """Returns True if they give the job an expiry, which it can only have until a worker has taken it."""
        return self.expires_in is not None or isinstance(self.expires_at_us, int)


def parse_expiry(value: float | timedelta | datetime | str) -> timedelta | datetime:
    """A span from now or an instant, from a value or its text. Raises `Invalid` for a span of 0, naming ``expires``."""
    if isinstance(value, datetime) or (isinstance(value, str) and value.strip()[4:5] == "-"):
        return parse_instant(value, "expires")
    span = check_span(value, "expires")
    if span <= timedelta(0):
        raise Invalid("expires", value, 'give a span above 0, such as "10m", or an instant')
    return span


def parse_expiry_span(value: float | timedelta | str) -> timedelta:
    """The span of jobs that are still to be submitted. Raises `Invalid` for an instant."""
    span = parse_expiry(value)
    if isinstance(span, datetime):
        raise Invalid("expires", value, 'give a span, such as "10m": it counts from the submission of each job')
    return span


def with_expiry(job: NewJob, value: float | timedelta | datetime | str) -> NewJob:
    """The job with its expiry. Raises `Invalid` if it would expire before it may begin."""
    if value == NEVER:
        return job
    expiry = parse_expiry(value)
    if isinstance(expiry, datetime):
        expiring = msgspec.structs.replace(job, expires_at_us=to_microseconds(expiry))
    else:
        expiring = msgspec.structs.replace(job, expires_in=expiry)
    if not needs_clock(expiring):
        check_expiry(expiring, 0)
    return expiring


def needs_clock(job: NewJob) -> bool:
    """Returns True if of its start and its expiry one is a span from its submission, and the other an instant."""
    return bool(job.expires and (job.run_at_us if job.expires_in else job.delay))


def check_expiry(timed: NewJob | JobChanges, now_us: int, job: Job | None = None) -> None:
    """Raises `Invalid` if a job would expire before it may begin. ``job``: what the changes are for."""
    expires_us, expires = _instant(timed.expires_in, timed.expires_at_us or None, now_us)
    start_us, start = _instant(timed.delay, timed.run_at_us, now_us)
    field, value = "expires", expires
    if job is not None and isinstance(timed, JobChanges):
        if not timed.has_expiry:
            expires_us, expires = _instant(None, job.expires_at_us, now_us)
            field, value = "run_at" if timed.delay is None else "delay", start
        if not timed.has_time:
            start_us, start = _instant(None, job.run_at_us, now_us)
    elif expires_us <= now_us:
        return  # a submission that comes too late is stored, and ends at once
    if expires_us and now_us < start_us and expires_us <= start_us:
        remedy = f"give a later expiry or an earlier start: the job starts {start}, and would expire {expires}"
        raise Invalid(field, value, remedy)


def _instant(span: timedelta | None, instant_us: int | None, now_us: int) -> tuple[int, str]:
    """Returns the instant in microseconds, 0 for none, and its text."""
    if span is not None:
        return now_us + span // MICROSECOND, f"in {span.total_seconds():g} s"
    return instant_us or 0, f"at {to_datetime(instant_us or 0).isoformat()}"


def check_edit(job_id: str, state: JobState) -> None:
    """Raise Conflict, saying what to do instead, where ``state`` does not allow an edit."""
    if state in EDITABLE:
        return
    advice = {
        JobState.RUNNING: "it is running; cancel it, then replay it with other arguments",
        JobState.SUCCEEDED: "it has succeeded; submit another job",
    }.get(state, f"it is {state}; replay it, with other arguments if need be")
    raise Conflict(f"job {job_id} cannot be edited: {advice}")


def check_changes(job: Job, changes: JobChanges) -> None:
    """Raise Conflict where the job cannot be changed in this way, whatever its state."""
    if job.options_or_default.unique is not None and (changes.payload is not None or changes.queue is not None):
        remedy = "cancel it, and submit another"
        raise Conflict(f"job {job.id} has a unique key, made of what it does: its payload and queue stay; {remedy}")
    if job.started_at_us is not None and changes.will_expire:
        raise Conflict(f"job {job.id} has begun, and cannot expire any more; to end it: holdfast cancel {job.id}")
