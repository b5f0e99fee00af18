"""Models, frozen: jobs, and the values that cross the store boundary.

Instants are whole microseconds since 1970 UTC (``…_us``); the property without the suffix returns an aware datetime. A
claim decodes hundreds of jobs, and four datetimes per job would cost more than the rest (docs/adr/0003). Payloads and
results are JSON *text*, never decoded by a store.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.core.dependencies import Dependency
from holdfast.core.encryption import require_decrypted
from holdfast.core.error_groups import identify_group
from holdfast.core.validation import MAX_NESTING, check_offset, check_texts, is_too_deep

MICROSECOND = timedelta(microseconds=1)


class JobState(StrEnum):
    """The states of a job."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"  # for other jobs, for a signal, or for its children
    QUEUED = "queued"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


_STATES = tuple(JobState)
States = Collection[JobState] | None
"""States that a write may find a job in; None: any that the operation accepts."""
TERMINAL = frozenset({JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED})
NOT_STARTED = frozenset({JobState.SCHEDULED, JobState.WAITING, JobState.QUEUED, JobState.FAILED})
"""States of a job that waits for its first or its next attempt."""


class Reason(StrEnum):
    """Reason of the state of a job or of the end of an attempt: a field, not a state."""

    MAX_ATTEMPTS = "max_attempts"  # its last allowed attempt failed
    NON_RETRYABLE = "non_retryable"  # the handler or the task's policy rules out a retry
    NO_HANDLER = "no_handler"  # no task of that name is registered here
    PAYLOAD = "payload"  # the payload does not fit the task's signature
    ENCRYPTED = "encrypted"  # this worker cannot decrypt its payload or one of its steps
    RESULT = "result"  # the returned value cannot be stored
    CRASHED = "crashed"  # its process died (or lost its lease) under it
    TIMEOUT = "timeout"  # it exceeded its timeout
    RESOURCE = "resource"  # it exceeded a limit of memory, CPU time, files or processes
    SANDBOX = "sandbox"  # this host cannot provide the required sandbox
    ERROR = "error"  # the handler raised
    CANCELLED = "cancelled"  # an operator cancelled it
    RELEASED = "released"  # given back by a stopping worker
    SNOOZED = "snoozed"  # given back by the handler
    EXPIRED = "expired"  # it had not begun by its ``expires``
    STEPS_CHANGED = "steps_changed"  # the code does not match the steps that are recorded
    SIGNAL = "signal"  # it waits for a signal
    CHILDREN = "children"  # it waits for jobs that it has started
    DEPENDENCY = "dependency"  # it waits for other jobs, or was cancelled because one of them ended otherwise


class UniqueKey(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A job's key under a policy of uniqueness (``core.unique``), and the time for which the job holds it."""

    key: str
    during: str | None = None  # "unstarted": until it starts, "active": until it ends; None: for the window
    window_us: int | None = None  # from its submission, in any state
    on_conflict: str = "keep"

    @property
    def states(self) -> frozenset[JobState]:
        """States in which a job holds the key."""
        match self.during:
            case None:
                return frozenset()
            case "unstarted":
                return NOT_STARTED
        return NOT_STARTED | {JobState.RUNNING}


class Options(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Options of a job; None is stored for a job without any."""

    timeout: float | None = None  # seconds one attempt may take
    retry: dict[str, Any] | None = None  # retry.Retry as builtins: overrides the task's policy
    metadata: dict[str, Any] | None = None  # the submitter's data: stored and shown, never interpreted
    tags: tuple[str, ...] = ()
    traceparent: str | None = None  # W3C Trace Context of the submission, unvalidated
    tracestate: str | None = None
    unique: UniqueKey | None = None
    batch: str | None = None  # id of the batch of which it is a member
    forks: str | None = None  # id of the job from which it has its first steps

    def __post_init__(self) -> None:
        # Another program may have written them; every interpreter must be able to write them again.
        if is_too_deep(self.metadata) or is_too_deep(self.retry):
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")


NO_OPTIONS = Options()


class Lease(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """Time-limited ownership of a claimed job. ``claims`` only ever grows: it is the fencing token."""

    job_id: str
    claims: int


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job as read from its store. A claim fills the fields up to ``worker``; a read fills the rest."""

    id: str
    task: str
    queue: str
    payload: str  # JSON text of an object: the arguments by name
    claims: int
    attempts: int
    max_attempts: int | None  # None: unlimited
    priority: int
    lost_leases: int  # in a row; such a job is a suspect for killing its process
    run_at_us: int
    created_at_us: int
    options: Options | None = None
    state: JobState = JobState.RUNNING
    worker: str | None = None
    lease_until_us: int | None = None
    started_at_us: int | None = None  # of the latest attempt
    ended_at_us: int | None = None
    reason: str | None = None
    error: str | None = None  # of the latest failed attempt, at most 4,096 characters
    result: str | None = None  # JSON text; None where the task returned None
    key: str | None = None
    cancelling: bool = False  # running, and asked to stop
    partition: str | None = None  # of a job under limits: the buckets it passes through (core.limits)
    expires_at_us: int | None = None  # ends as cancelled if no worker has taken it by then
    error_group: str | None = None  # id of the group of its error (core.error_groups)

    def __repr__(self) -> str:
        """Returns the known fields, with instants in readable form."""
        known = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return f"Job({', '.join(_field(name, value) for name, value in known if value is not None)})"

    @property
    def lease(self) -> Lease:
        return Lease(self.id, self.claims)

    def decode_arguments(self) -> dict[str, Any]:
        """Returns the payload's JSON values by name: the arguments before conversion to the annotated types."""
        return msgspec.json.decode(require_decrypted(self.payload, "the payload"), type=dict[str, Any])

    def return_value(self) -> Any:
        """Returns the result's JSON value; None before success. ``JobHandle.result`` returns the annotated type."""
        return None if self.result is None else msgspec.json.decode(require_decrypted(self.result, "the result"))

    @property
    def failures(self) -> int:
        """Executions that failed: every counted attempt but one that is running or succeeded."""
        return max(0, self.attempts - (self.state in (JobState.RUNNING, JobState.SUCCEEDED)))

    @property
    def options_or_default(self) -> Options:
        """Returns the job's options, or the defaults if it has none."""
        return self.options or NO_OPTIONS

    @property
    def run_at(self) -> datetime:
        return to_datetime(self.run_at_us)

    @property
    def created_at(self) -> datetime:
        return to_datetime(self.created_at_us)

    @property
    def started_at(self) -> datetime | None:
        return None if self.started_at_us is None else to_datetime(self.started_at_us)

    @property
    def ended_at(self) -> datetime | None:
        return None if self.ended_at_us is None else to_datetime(self.ended_at_us)

    @property
    def lease_until(self) -> datetime | None:
        return None if self.lease_until_us is None else to_datetime(self.lease_until_us)

    @property
    def expires_at(self) -> datetime | None:
        return None if self.expires_at_us is None else to_datetime(self.expires_at_us)


class Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stored step, or a value (number 0). ``claims``: of the lease under which it ended."""

    name: str
    number: int
    is_ordered: bool
    claims: int
    ended_at_us: int
    result: str | None = None


class NewJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job to submit. Already validated: a store refuses only a job beyond the store's own limits."""

    id: str
    task: str
    payload: str
    has_client_id: bool = False  # the id may be reused after deletion: claims then start from the clock
    queue: str = "default"
    priority: int = 0
    delay: timedelta | None = None  # from the store's now; or
    run_at_us: int | None = None  # an instant the user named
    max_attempts: int | None = 5
    key: str | None = None
    key_for: timedelta | None = None  # the key lives at least this long, and as long as the job's row
    options: Options | None = None
    partition: str | None = None  # of a job under limits; a store sets it
    weights: str | None = None  # JSON: its weight in each bucket of its partition; None: 1 in each
    expires_in: timedelta | None = None  # ends as cancelled if it has not begun so long after the store's now; or
    expires_at_us: int | None = None  # by an instant the user named
    after: tuple[Dependency, ...] = ()  # waits for these; then it has no time of its own
    is_batch: bool = False  # has no handler and ends with its members, of which one at least is in its submission
    first_steps: tuple[Step, ...] = ()  # steps and saved values of the job that it forks

    @property
    def has_extras(self) -> bool:
        """Returns True if it has a key, options, an expiry, dependencies, members or steps: most jobs have none."""
        is_plain = self.key is None and self.options is None and self.expires_in is None and self.expires_at_us is None
        return not is_plain or bool(self.after or self.is_batch or self.first_steps)

    @property
    def unique(self) -> UniqueKey | None:
        """Returns its key under a policy of uniqueness."""
        return None if self.options is None else self.options.unique

    @property
    def batch(self) -> str | None:
        """Returns the id of the batch of which it is a member."""
        return None if self.options is None else self.options.batch

    @property
    def waits(self) -> bool:
        """Returns True if it waits for other jobs before anything else."""
        return self.is_batch or bool(self.after)

    @property
    def has_relations(self) -> bool:
        """Returns True if it waits for others, belongs to a batch, or has steps from the beginning."""
        return self.waits or self.batch is not None or bool(self.first_steps)

    @property
    def expires(self) -> bool:
        """Returns True if it has an expiry: it is cancelled unless it has started by then."""
        return self.expires_in is not None or self.expires_at_us is not None


class ExpiredJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job that ended because it had not started by its ``expires``."""

    job_id: str
    task: str
    queue: str


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """Result of a submission. ``created`` is False if a job with the key or the id exists: ``job_id`` is then its id.

    ``changed``: that job had not started, and the policy of its unique key replaced or rescheduled it.
    ``wake_up_delayed``: the job is stored, but the transport could not be notified; the next sweep or poll finds it.
    """

    job_id: str
    created: bool
    wake_up_delayed: bool = False
    changed: bool = False
    stored_at_us: int | None = None  # by the store's clock; None for a known job, and where the store does not say


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of an attempt, as ``lifecycle`` decides it. A store applies it if its guard holds.

    The guard: the job runs under exactly this lease, which has not expired; with ``lease_expired=True`` it must have:
    any worker may settle it. A given ``worker`` must hold the job: after a failover that lost a commit a server may
    assign the number of its claim again.
    """

    job_id: str
    claims: int
    state: JobState
    reason: Reason | None = None
    result: str | None = None
    error: str | None = None
    traceback: str | None = None
    delay: timedelta | None = None  # run_at becomes now + delay; None leaves it
    priority: int | None = None  # of a job that failed, from now on; None leaves it
    refund: bool = False  # gives the attempt back
    lease_expired: bool = False
    worker: str | None = None  # whose lease it is

    @property
    def error_group(self) -> str | None:
        """Returns the id of the group of its error; None without an error."""
        return None if self.error is None else identify_group(self.error, self.traceback)


class Settled(msgspec.Struct, frozen=True, gc=False):
    """Result of a settlement. Not accepted: nothing changed, since the lease is lost or the job is ``locked``."""

    job_id: str
    claims: int
    accepted: bool
    state: JobState | None  # the current one; None: the job is gone
    run_at_us: int | None = None
    locked: bool = False  # another transaction has locked the job: retry, the lease may be live


class TxOutcome(StrEnum):
    """Outcome of a transaction in which a handler completed its job."""

    COMMITTED = "committed"  # the job has succeeded
    ROLLED_BACK = "rolled_back"  # or never sent: the job runs on under its lease
    PENDING = "pending"  # the transaction has not ended yet
    LEASE_LOST = "lease_lost"  # the worker no longer holds the lease


class Claim(msgspec.Struct, frozen=True):
    """Result of a claim."""

    jobs: list[Job]
    refused: int = 0  # ids (``ids=``) that were not claimable
    promoted: int = 0  # due jobs made ready
    next_due: timedelta | None = None  # time until the next job of these queues is due; None: none is scheduled
    has_quarantined: bool = False  # a quarantined job (two leases lost in a row) waits to run alone
    stopped_at_last_attempt: bool = False  # a ready job was left: its last attempt needs a free runner at once
    none_left: bool = False  # no ready job of these queues was left; a store that does not know says False
    lease_until_us: int | None = None  # end of its jobs' leases: the earliest, but on Redis that of its last script
    expired: tuple[ExpiredJob, ...] = ()  # jobs that this claim found expired, and cancelled


class ClaimByIds(msgspec.Struct, frozen=True):
    """Result of a claim of delivered ids. ``claim.refused`` counts ids that can no longer be claimed."""

    claim: Claim
    unclaimed: dict[str, str]  # ready jobs that were not claimed, and their queues: paused, or no capacity
    paused: frozenset[str]  # all paused queues


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """An attempt that did not succeed."""

    claims: int
    attempt: int
    worker: str | None
    started_at_us: int | None
    ended_at_us: int
    state: JobState  # of the job after it
    reason: str | None
    error: str | None
    traceback: str | None

    @property
    def started_at(self) -> datetime | None:
        return None if self.started_at_us is None else to_datetime(self.started_at_us)

    @property
    def ended_at(self) -> datetime:
        return to_datetime(self.ended_at_us)


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: its number of jobs by state, and the age of the oldest ready one."""

    name: str
    paused: bool
    states: dict[str, int]
    oldest_ready: timedelta | None
    announced: int | None = None  # ids in its transport; None: no transport, or it is unavailable
    at_least: frozenset[JobState] = frozenset()  # states that may have more jobs than were counted
    ended_per_second: float = 0.0  # recently


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter of jobs. Every given field must match; ``states`` and ``tasks`` match any of their values."""

    states: tuple[JobState, ...] = ()
    queue: str | None = None
    tasks: tuple[str, ...] = ()
    tag: str | None = None
    reason: str | None = None
    worker: str | None = None
    error: str | None = None  # substring of the error text
    error_group: str | None = None
    created_after: datetime | None = None  # aware; exclusive
    created_before: datetime | None = None
    not_started_after: datetime | None = None  # no run began after it: those replayed since then do not match again

    def __post_init__(self) -> None:
        check_texts("states", self.states, _STATES)
        check_texts("tasks", self.tasks)
        for field in ("created_after", "created_before", "not_started_after"):
            if (when := getattr(self, field)) is not None:
                check_offset(when, field)


class Page(msgspec.Struct, frozen=True):
    """A page of jobs, newest first. ``cursor``: of the next page; None: this is the last."""

    jobs: list[Job]
    cursor: str | None


class ReplayRate(msgspec.Struct, frozen=True):
    """The first job is due ``after`` from now, each next ``every`` later, in the order of the ids or of submission."""

    every: timedelta = timedelta(0)
    after: timedelta = timedelta(0)


class JobEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a job, or of a failed attempt that will be retried. ``state``: the job's state after it."""

    job_id: str
    task: str
    queue: str
    state: JobState
    claims: int
    attempt: int
    worker: str | None
    started_at_us: int | None
    ended_at_us: int
    reason: str | None
    error: str | None


class JobEvents(msgspec.Struct, frozen=True, kw_only=True):
    """A page of job events, in about the order of their instants. ``cursor``: where the next page begins.

    ``public_cursor``: an instant, for readers that may not see every job. The next page may repeat its events.
    """

    events: list[JobEvent]
    cursor: str
    public_cursor: str
    more: bool = False  # False: the page has all there was when it was read
    is_exact: bool = False  # pages after ``cursor`` repeat none of these events
    gap: bool = False  # the cursor is too old, or of another store: the stream restarts at the present


class BulkResult(msgspec.Struct, frozen=True):
    """Result of a bounded operation on many jobs. ``more``: call again, matching jobs are left."""

    changed: list[tuple[str, JobState]]  # id and the state it has now
    refused: list[tuple[str, JobState | None]]  # id and the state that forbids it; None: no such job
    more: bool = False


class Overtaken(msgspec.Struct, frozen=True):
    """Ready jobs overtaken in a transport; those announced before ``before_us`` were ahead of the next delivery."""

    ids: list[str]
    before_us: int
    now_us: int


class Finding(msgspec.Struct, frozen=True):
    """A line of ``doctor``."""

    name: str
    level: str  # "ok", "warning", "error"
    text: str
    remedy: str = ""
    paused: str = ""  # name of the queue or limit whose pause it reports


def _field(name: str, value: Any) -> str:
    """Formats a field for a repr."""
    if name.endswith("_us"):
        try:
            return f"{name.removesuffix('_us')}={to_datetime(value).isoformat().replace('+00:00', 'Z')}"
        except OverflowError:  # written by another program
            return f"{name}={value}"
    return f"{name}={str(value)!r}" if isinstance(value, StrEnum) else f"{name}={value!r}"


def to_datetime(us: int) -> datetime:
    """Converts microseconds since 1970 to an aware datetime."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)


def to_microseconds(when: datetime) -> int:
    """Converts an aware datetime to microseconds since 1970."""
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND
