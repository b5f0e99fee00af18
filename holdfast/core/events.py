"""Events: components emit them; logs, metrics and traces subscribe. Events without subscribers cost nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import datetime
from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that happened. In log lines its ``name`` is that of its class, without ``Event``: ``job_created``."""

    name: ClassVar[str]
    level: ClassVar[str] = "info"  # the level of its log line

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"\B(?=[A-Z])", "_", cls.__name__.removesuffix("Event")).lower()


class TaskEvent(Event, frozen=True, kw_only=True):
    """Something that happened to a job of a task."""

    job_id: str
    task: str


class JobCreated(TaskEvent, frozen=True, kw_only=True):
    """A job was stored."""

    level: ClassVar[str] = "debug"
    queue: str


class JobDuplicate(TaskEvent, frozen=True, kw_only=True):
    """A submission returned an existing job that has the same key or id."""

    level: ClassVar[str] = "debug"
    queue: str


class LeaseAcquired(TaskEvent, frozen=True, kw_only=True):
    """A worker claimed a job."""

    level: ClassVar[str] = "debug"
    attempt: int
    worker_id: str
    locked_until: datetime | None


class LeaseRejected(Event, frozen=True, kw_only=True):
    """Delivered ids of no job that is ready in that queue. No lease is involved: the log line has that fixed name."""

    level: ClassVar[str] = "debug"
    count: int
    worker_id: str


class HandlerStart(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A job's handler is about to be called."""

    level: ClassVar[str] = "debug"
    attempt: int
    trace_id: str | None = None


class JobSucceeded(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A job ended in success, and that is stored."""

    level: ClassVar[str] = "debug"
    attempt: int
    seconds: float
    trace_id: str | None = None


class JobFailedEvent(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt failed and will be retried."""

    level: ClassVar[str] = "warning"
    attempt: int
    reason: str
    error: str
    retry_at: datetime | None
    seconds: float
    trace_id: str | None = None


class JobDead(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A job is dead: its last attempt failed, or no further one makes sense."""

    level: ClassVar[str] = "error"
    attempt: int
    reason: str
    error: str
    seconds: float
    dlq_key: str | None = None  # the key of the transport's list of dead letters
    trace_id: str | None = None


class JobCancelledEvent(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A running job has stopped because an operator asked."""

    attempt: int
    trace_id: str | None = None


class JobExpired(TaskEvent, frozen=True, kw_only=True):
    """A job ended as cancelled: no worker took it by its ``expires``."""

    queue: str


class JobReleased(TaskEvent, frozen=True, kw_only=True):
    """A job was given back and its attempt is not counted: the worker stops, or the handler snoozed."""

    level: ClassVar[str] = "debug"
    reason: str


class JobSuspended(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A job waits without a runner, for a signal or its children. ``until``: its deadline; None: it has none."""

    level: ClassVar[str] = "debug"
    reason: str
    until: datetime | None = None
    trace_id: str | None = None


class RetryUnreadable(TaskEvent, frozen=True, kw_only=True):
    """A job's own retry policy cannot be read; its task's or the settings' is used."""

    level: ClassVar[str] = "warning"
    error: str


class TaskUnknown(TaskEvent, frozen=True, kw_only=True):
    """The application of this worker or API has no task of a job's name. Emitted once per name."""

    level: ClassVar[str] = "warning"
    queue: str
    error: str
    remedy: str
    deferred_until: datetime | None = None


class PayloadUnfit(TaskEvent, frozen=True, kw_only=True):
    """The payload of a job does not fit this worker's task, or cannot be decrypted here. Emitted once per task."""

    level: ClassVar[str] = "warning"
    queue: str
    error: str
    deferred_until: datetime | None
    remedy: str


class JobDeferred(TaskEvent, frozen=True, kw_only=True):
    """This worker cannot run the job and gave it back for another one that can."""

    level: ClassVar[str] = "debug"
    reason: str
    retry_at: datetime | None


class JobUnstartable(TaskEvent, frozen=True, kw_only=True):
    """This worker could not even start the job (no descriptors, no memory) and gave it back."""

    level: ClassVar[str] = "error"
    error: str


class LeaseLostEvent(TaskEvent, frozen=True, kw_only=True):
    """A worker lost the lease of a job that it ran: its outcome is not written, and another worker may have the job."""

    level: ClassVar[str] = "warning"
    worker_id: str


class SweepComplete(Event, frozen=True, kw_only=True):
    """A round of maintenance that found something to do. ``reannounced``: ready jobs that the transport had lost.
    ``requeued``: those, and the promoted ones, whose time had come."""

    promoted: int
    recovered: int
    pruned: int
    reannounced: int = 0
    expired: int = 0
    requeued: int = 0


class ScheduleFired(Event, frozen=True, kw_only=True):
    """A schedule's tick was due and its job was stored, unless a policy skipped it. ``late``: seconds."""

    schedule: str
    task: str
    tick: datetime
    job_ids: list[str]
    late: float
    missed: int  # earlier ticks that do not run
    skipped: int  # by the overlap policy, or by a unique key


class DeclarationIgnored(Event, frozen=True, kw_only=True):
    """A schedule or limit that this application declares has no effect: it is invalid, or the store keeps another."""

    level: ClassVar[str] = "warning"
    declared: str  # "schedule NAME" or "limit NAME"
    problem: str
    remedy: str


class AlertFired(Event, frozen=True, kw_only=True):
    """A rule is breached by a queue, and this process sends the alert."""

    level: ClassVar[str] = "warning"
    rule: str
    queue: str
    text: str


class AlertCleared(Event, frozen=True, kw_only=True):
    """A rule is breached no more by a queue, and this process sends that."""

    rule: str
    queue: str


class AlertNotSent(Event, frozen=True, kw_only=True):
    """The receiver of alerts did not take one. It is sent again later."""

    level: ClassVar[str] = "error"
    rule: str
    queue: str
    problem: str


class LoopBlocked(Event, frozen=True, kw_only=True):
    """A handler blocks the event loop; ``stack`` shows the blocking code."""

    level: ClassVar[str] = "warning"
    seconds: float
    job_id: str | None
    task: str | None
    stack: str


class LinesLost(Event, frozen=True, kw_only=True):
    """Log lines of jobs could not be stored."""

    level: ClassVar[str] = "warning"
    count: int
    error: str


class StoreTrouble(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A store call failed. A worker's loop retries it; in the API the client may."""

    level: ClassVar[str] = "error"
    service: str
    error: str
    retry_in: float
    request_id: str | None = None


class FaultsChanged(Event, frozen=True, kw_only=True):
    """Faults were switched on or off in a worker that allows them. ``active``: how many are on."""

    level: ClassVar[str] = "warning"
    active: int
    until: datetime | None


class FaultInjected(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A fault was injected into a handler, a step or a call of the store."""

    level: ClassVar[str] = "warning"
    kind: str
    job_id: str | None = None
    task: str | None = None
    step: str | None = None


class TransportAway(Event, frozen=True, kw_only=True):
    """The transport is unavailable: until it is back, workers poll the store. Emitted once per outage."""

    level: ClassVar[str] = "warning"
    place: str
    error: str


class MalformedMessage(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A message without a job id was removed from a transport. At most ten a minute are reported."""

    level: ClassVar[str] = "warning"
    place: str
    queue: str
    size: int  # characters
    text: str  # the first characters, escaped
    entry: str = ""  # its id in a stream
    kept_in: str = ""  # the stream that it was moved to
    unreported: int = 0  # further messages since the last report


class TransportBack(Event, frozen=True, kw_only=True):
    """The transport is available again and announces ready jobs."""

    place: str
    seconds: float  # length of the outage


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker process has started and claims jobs of its queues."""

    worker_id: str
    store: str  # its URL, without a password
    queues: str
    concurrency: int


class WorkerStopping(Event, frozen=True, kw_only=True):
    """A worker process stops claiming jobs."""

    worker_id: str
    reason: str
    running: int = 0  # jobs that may finish
    grace: float = 0.0  # seconds they have; a second signal ends it


class WorkerStopped(Event, frozen=True, kw_only=True):
    """A worker process has ended."""

    worker_id: str
    succeeded: int
    failed: int
    released: int


class HandlersLeft(Event, frozen=True, kw_only=True):
    """A worker process ends while handlers of released jobs still run; the exit interrupts them."""

    level: ClassVar[str] = "warning"
    worker_id: str
    threads: int
    coroutines: int


class SupervisorStopping(Event, frozen=True, kw_only=True):
    """A supervisor asks its worker processes to stop; each of them gives ``supervisor`` as its reason."""

    reason: str
    processes: int


class ChildEnded(Event, frozen=True, kw_only=True):
    """A worker process (or a child of the process executor) ended."""

    level: ClassVar[str] = "warning"
    pid: int
    cause: str
    restart_in: float | None


class SettingsChanged(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A worker applies changed settings, or an API needs a restart to apply them. ``changed``: new value by name."""

    changed: dict[str, str]
    remedy: str | None = None


class SettingsRefused(Event, frozen=True, kw_only=True):
    """A changed setting cannot be applied: the file is unusable, or no supervisor would start the next worker."""

    level: ClassVar[str] = "warning"
    problem: str


class MetricsServed(Event, frozen=True, kw_only=True):
    """A worker process serves metrics and health checks at this address."""

    address: str
    worker_id: str


class ApiStarted(Event, frozen=True, kw_only=True):
    """The HTTP API listens."""

    address: str
    store: str  # its URL, without a password
    keys: bool  # True if callers need a key


class ApiStopping(Event, frozen=True, kw_only=True):
    """The HTTP API accepts no more requests."""

    reason: str


class ApiChange(Event, frozen=True, kw_only=True):
    """An HTTP call changed the store, or failed to: its operation, its caller and its status."""

    operation: str
    who: str  # the id of a key, or local
    address: str
    request_id: str
    target: str
    status: int
    count: int
    ids: list[str]


class ApiSubmission(ApiChange, frozen=True, kw_only=True):
    """An ``ApiChange`` of a frequent operation: submission, claim or settlement."""

    level: ClassVar[str] = "debug"


class AuditFailed(Event, frozen=True, kw_only=True):
    """The audit file could not be written. Calls that would change the store are refused until it can."""

    level: ClassVar[str] = "error"
    problem: str


class KeyRefused(Event, frozen=True, kw_only=True):
    """A caller without a valid key, or with a key that does not allow the call."""

    level: ClassVar[str] = "warning"
    who: str  # the id of the key, or none
    address: str
    request_id: str
    problem: str


class KeysRead(Event, frozen=True, kw_only=True):
    """The file of API keys was reloaded."""

    keys: int


class KeysUnreadable(Event, frozen=True, kw_only=True):
    """The file of API keys changed and is invalid; the keys of the last valid version stay in force."""

    level: ClassVar[str] = "error"
    problem: str
    kept: int


class RequestFailed(Event, frozen=True, kw_only=True):
    """An HTTP request failed with an unexpected error; the response was a 500 with this request id only."""

    level: ClassVar[str] = "error"
    request_id: str
    method: str
    path: str
    error: str


Subscriber = Callable[[Event], None]


class Events:
    """Registry of the subscribers of events. ``has_subscriber`` is cheap enough to ask once a batch on the hot path."""

    program = "holdfast"
    """The command line of the application, as log lines name it."""

    def __init__(self) -> None:
        self._subscribers: dict[type[Event], tuple[Subscriber, ...]] = {}

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> Callable[[], None]:
        """Call ``subscriber`` for each event of these kinds; the returned function ends that."""
        for kind in kinds:
            self._subscribers[kind] = (*self._subscribers.get(kind, ()), subscriber)

        def unsubscribe() -> None:
            for kind in kinds:
                left = tuple(each for each in self._subscribers.get(kind, ()) if each is not subscriber)
                self._subscribers[kind] = left

        return unsubscribe

    def has_subscriber(self, kind: type[Event]) -> bool:
        """Returns True if events of this kind have a subscriber: check before building many."""
        return bool(self._subscribers.get(kind))

    def emit(self, event: Event) -> None:
        """Hands the event to its subscribers in order. An exception of one is logged and reaches no other."""
        for subscriber in self._subscribers.get(type(event), ()):
            try:
                subscriber(event)
            except Exception:
                logging.getLogger(__name__).exception("a subscriber to %s raised", event.name)


KINDS: tuple[type[Event], ...] = tuple(  # events that can become a log line
    kind for base in (Event, TaskEvent, ApiChange) for kind in base.__subclasses__() if kind is not TaskEvent
)
