"""The nouns, frozen: what a job is and what crosses the store boundary.

Instants are kept as whole microseconds since 1970 UTC (``…_us``) and read as aware datetimes through the property
without the suffix: a claim decodes hundreds of jobs in one pass, and four datetimes a job would cost more than the
rest of the decoding (docs/adr/0003). Payloads and results are JSON *text*, never decoded by a store.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.validation import DEPTH_LIMIT, did_you_mean, is_too_deep

MICROSECOND = timedelta(microseconds=1)


class JobState(StrEnum):
    """The states of a job."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


_STATES = tuple(JobState)
TERMINAL = frozenset({JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED})
NOT_STARTED = frozenset({JobState.SCHEDULED, JobState.WAITING, JobState.QUEUED, JobState.FAILED})
"""States of a job that waits for its first attempt, or for its next."""


class Reason(StrEnum):
    """Why a job is dead or an attempt did not succeed: a field, not a state."""

    BUDGET = "budget"  # the last allowed attempt failed
    NON_RETRYABLE = "non_retryable"  # the handler or the task's policy says trying again is pointless
    NO_HANDLER = "no_handler"  # no task of that name is registered here
    PAYLOAD = "payload"  # the payload does not fit the task's signature
    RESULT = "result"  # the returned value cannot be stored
    CRASHED = "crashed"  # its process died (or lost its lease) under it
    TIMEOUT = "timeout"  # it ran longer than it may
    RESOURCE = "resource"  # it used more memory, CPU time, files or processes than it may
    SANDBOX = "sandbox"  # this host cannot give it the sandbox that it has to run in
    ERROR = "error"  # the handler raised
    CANCELLED = "cancelled"  # an operator asked
    RELEASED = "released"  # given back by a stopping worker
    SNOOZED = "snoozed"  # given back by the handler
    EXPIRED = "expired"  # it had not begun by its ``expires``


class UniqueKey(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A job's key under a policy of uniqueness (``core.unique``), and until when it holds it."""

    key: str
    during: str | None = None  # "waiting": until it is started, "active": until it has ended; None: for the window
    window_us: int | None = None  # from its submission, whatever becomes of it
    on_conflict: str = "keep"

    @property
    def states(self) -> frozenset[JobState]:
        """States in which a job holds the key."""
        match self.during:
            case None:
                return frozenset()
            case "waiting":
                return NOT_STARTED
        return NOT_STARTED | {JobState.RUNNING}


class Options(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Options of a job; a plain job stores none."""

    timeout: float | None = None  # seconds one attempt may take
    retry: dict[str, Any] | None = None  # retry.Retry as builtins: overrides the task's policy
    metadata: dict[str, Any] | None = None  # the submitter's own, shown and kept, never read by the engine
    tags: tuple[str, ...] = ()
    traceparent: str | None = None  # W3C Trace Context of the submission, as it came: who reads it checks it
    tracestate: str | None = None
    unique: UniqueKey | None = None

    def __post_init__(self) -> None:
        # Another program may have written them. What is read here must be writable again, by any interpreter.
        if is_too_deep(self.metadata) or is_too_deep(self.retry):
            raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")


PLAIN = Options()


class Lease(msgspec.Struct, frozen=True, gc=False):
    """Time-limited ownership of a claimed job. ``claims`` only ever grows: it is the fencing token."""

    job_id: str
    claims: int


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job as its store knew it. A claim delivers the first fields; the rest come with a read."""

    id: str
    task: str
    queue: str
    payload: str  # JSON text of an object: the arguments by name
    claims: int
    attempts: int
    max_attempts: int | None  # None: unlimited
    priority: int
    lost_leases: int  # leases lost in a row: a suspect for killing its process
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

    def __repr__(self) -> str:
        """Returns the known fields, with instants in readable form."""
        known = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return f"Job({', '.join(_field(name, value) for name, value in known if value is not None)})"

    @property
    def lease(self) -> Lease:
        return Lease(self.id, self.claims)

    def decode_arguments(self) -> dict[str, Any]:
        """The payload's JSON values by name: the handler's arguments, before they are read by annotations."""
        arguments: dict[str, Any] = msgspec.json.decode(self.payload)
        return arguments

    def return_value(self) -> Any:
        """The result's JSON value; None before the job has succeeded. ``JobHandle.result`` gives the annotated type."""
        return None if self.result is None else msgspec.json.decode(self.result)

    @property
    def failures(self) -> int:
        """Executions that failed: every counted attempt but one that is running or succeeded."""
        unfailed = self.state in (JobState.RUNNING, JobState.SUCCEEDED)
        return max(0, self.attempts - (1 if unfailed else 0))

    @property
    def options_or_default(self) -> Options:
        """The job's options, defaults where it carries none."""
        return self.options or PLAIN

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


class NewJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job as it is submitted. Already validated: a store only refuses a job beyond its own limits."""

    id: str
    task: str
    payload: str
    has_client_id: bool = False  # its client chose the id, which may return after deletion: claims begin at the clock
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

    @property
    def unique(self) -> UniqueKey | None:
        """Its key under a policy of uniqueness."""
        return None if self.options is None else self.options.unique

    @property
    def expires(self) -> bool:
        """Returns True if it ends by itself unless it has begun by some instant."""
        return self.expires_in is not None or self.expires_at_us is not None


class ExpiredJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job that has ended because it had not begun by its ``expires``."""

    job_id: str
    task: str
    queue: str


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """``created`` is False where the key or the id already stood for a job: that job is the answer.

    ``changed``: that job waits, and was replaced or rescheduled by the policy of its unique key.
    ``wake_up_delayed``: the job is stored, but the transport could not be notified; the next sweep or poll finds it.
    """

    job_id: str
    created: bool
    wake_up_delayed: bool = False
    changed: bool = False


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The one way a running job stops running. Made by ``lifecycle``, applied by a store if its guard holds.

    The guard: the job is running under exactly this lease, and the lease has not expired. ``expired=True`` turns
    the second half round: any worker that finds an expired lease may settle it, and only while it *is* run out.
    ``worker``, where it is said, must hold the job: a server may forget a claim and give its number again.
    """

    job_id: str
    claims: int
    state: JobState
    reason: Reason | None = None
    result: str | None = None
    error: str | None = None
    traceback: str | None = None
    delay: timedelta | None = None  # run_at becomes now + delay; None leaves it
    refund: bool = False  # gives the attempt back
    expired: bool = False
    worker: str | None = None  # whose lease it is


class Settled(msgspec.Struct, frozen=True, gc=False):
    """Answer to a settlement. Not accepted: the lease is lost, nothing changed, ``state`` is the present one."""

    job_id: str
    claims: int
    accepted: bool
    state: JobState | None  # None: the job is gone
    run_at_us: int | None = None
    locked: bool = False  # not accepted, but not lost either: another transaction holds the job; ask again


class TxOutcome(StrEnum):
    """Outcome of a job that its handler ended in a transaction of its own."""

    COMMITTED = "committed"  # the job has succeeded
    ROLLED_BACK = "rolled_back"  # or never sent: the job runs on under its lease
    PENDING = "pending"  # the transaction has not ended yet
    LEASE_LOST = "lease_lost"  # the worker no longer holds the lease


class Claim(msgspec.Struct, frozen=True):
    """Result of a claim."""

    jobs: list[Job]
    refused: int = 0  # delivered ids (``only=``) that were not claimable
    promoted: int = 0  # due jobs made ready
    next_due: timedelta | None = None  # when the next job of these queues falls due; None: none is scheduled
    quarantined: bool = False  # a job that lost two leases in a row waits to be run alone
    stopped_at_last_attempt: bool = (
        False  # a ready job on its last attempt was not taken: it was one too many to start at once
    )
    lease_until_us: int | None = None  # of all its jobs
    expired: tuple[ExpiredJob, ...] = ()  # jobs that this claim met too late, and ended


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """An id as a transport delivered it."""

    job_id: str  # text of any origin
    queue: str  # the one it was delivered for
    receipt: str = ""  # by which the transport knows this delivery; "" where it needs none


class DeliveredClaim(msgspec.Struct, frozen=True):
    """Result of a claim of delivered ids. ``claim.refused`` counts what cannot be claimed by its id any more."""

    claim: Claim
    left: dict[str, str]  # ready, and not taken: their queue, which it names, is paused, or they were too many
    paused: frozenset[str]  # every queue that is


class LeaseStatus(StrEnum):
    """Outcome of a lease at a beat."""

    HELD = "held"
    CANCEL = "cancel"
    LOST = "lost"


class WorkerCommand(StrEnum):
    """Commands that an operator sends to a worker."""

    NONE = "none"
    DRAIN = "drain"  # work until the queues are empty, then stop
    STOP = "stop"  # finish what runs within the grace, then stop


class WorkerHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """State of a worker process, sent with each heartbeat."""

    worker: str
    host: str
    pid: int
    queues: str
    concurrency: int
    running: int = 0
    succeeded: int = 0
    failed: int = 0


class HeartbeatReply(msgspec.Struct, frozen=True):
    """``held`` answers the leases in their order."""

    held: list[LeaseStatus]
    command: WorkerCommand = WorkerCommand.NONE


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """An attempt that did not succeed."""

    claims: int
    attempt: int
    worker: str | None
    started_at_us: int | None
    ended_at_us: int
    state: JobState  # where it left the job
    reason: str | None
    error: str | None
    traceback: str | None


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker process."""

    heartbeat: WorkerHeartbeat
    started_at_us: int
    seen_at_us: int
    alive: bool  # beaten within its last lease
    command: WorkerCommand


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: how many jobs in each state, and the age of the oldest ready one."""

    name: str
    paused: bool
    states: dict[str, int]
    oldest_ready: timedelta | None
    announced: int | None = None  # ids that its transport holds; None: it has none, or it is away
    at_least: frozenset[JobState] = frozenset()  # states of which it may have more jobs than were counted
    ended_per_second: float = 0.0  # of late


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs. Every given field must match; ``states`` and ``tasks`` match any of theirs."""

    states: tuple[JobState, ...] = ()
    queue: str | None = None
    tasks: tuple[str, ...] = ()
    tag: str | None = None
    reason: str | None = None
    worker: str | None = None
    error: str | None = None  # a piece of the error text
    created_after: datetime | None = None  # aware; the instant itself is left out
    created_before: datetime | None = None

    def __post_init__(self) -> None:
        listed: tuple[tuple[str, object], ...] = (("states", self.states), ("tasks", self.tasks))
        for field, texts in listed:
            if isinstance(texts, str):
                raise Invalid(field, texts, f"give a tuple: {field}=({texts!r},)")
        for state in self.states:
            if state not in _STATES:
                raise Invalid("states", state, f"name any of {', '.join(_STATES)}{did_you_mean(str(state), _STATES)}")


class Page(msgspec.Struct, frozen=True):
    """Newest first. ``cursor`` continues the listing; None: that was all."""

    jobs: list[Job]
    cursor: str | None


class ReplayRate(msgspec.Struct, frozen=True):
    """When the jobs of one replay fall due: the first ``after`` from now, each other one ``every`` after the one before
    it, in the order of the ids, or of submission where a filter chose them."""

    every: timedelta = timedelta(0)
    after: timedelta = timedelta(0)


class JobEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a job, or of a failed attempt after which the job goes on: ``state`` is the state after it."""

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
    """A page of the stream of job events, in about the order of their instants. ``mark``: the cursor of the next page.

    ``public_cursor``: a cursor that contains no job id, for readers who may not know of every job. It names an instant
    only, so the next page may repeat events of that instant.
    """

    endings: list[JobEvent]
    mark: str
    public_cursor: str
    more: bool = False  # there is a next piece already
    gap: bool = False  # what was asked for is too long ago, or of another store: this is what comes from now on


class BulkResult(msgspec.Struct, frozen=True):
    """Result of a bounded operation on many jobs. ``more``: call again, matching jobs are left."""

    changed: list[tuple[str, JobState]]  # id and the state it has now
    refused: list[tuple[str, JobState | None]]  # id and the state that does not allow it; None: no such job
    more: bool = False


class Overtaken(msgspec.Struct, frozen=True):
    """Ready jobs that others have passed by on their way to a worker. Who was announced before ``before_us`` stood in
    front of whatever comes next."""

    ids: list[str]
    before_us: int
    now_us: int


class Finding(msgspec.Struct, frozen=True):
    """A line of ``doctor``."""

    name: str
    level: str  # "ok", "warning", "error"
    text: str
    remedy: str = ""


def _field(name: str, value: Any) -> str:
    """A field as a repr shows it."""
    if name.endswith("_us"):
        try:
            return f"{name.removesuffix('_us')}={to_datetime(value).isoformat().replace('+00:00', 'Z')}"
        except OverflowError:  # another program's
            return f"{name}={value}"
    return f"{name}={str(value)!r}" if isinstance(value, StrEnum) else f"{name}={value!r}"


def to_datetime(us: int) -> datetime:
    """Microseconds since 1970 as an aware datetime."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)


def to_microseconds(when: datetime) -> int:
    """An aware datetime as microseconds since 1970."""
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND
