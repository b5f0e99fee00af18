"""Events, as records: components emit; logs, metrics and traces subscribe. Events without subscribers cost nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that happened. In log lines its ``name`` is that of its class: ``job_created``."""

    name: ClassVar[str]
    level: ClassVar[str] = "info"  # that a user expects it at

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()


class TaskEvent(Event, frozen=True, kw_only=True):
    """Something that happened to a job of a task."""

    job_id: str
    task: str


class JobCreated(TaskEvent, frozen=True, kw_only=True):
    """A job was stored."""

    level: ClassVar[str] = "debug"
    queue: str


class JobDuplicate(TaskEvent, frozen=True, kw_only=True):
    """A submission whose key or id already stood for a job."""

    level: ClassVar[str] = "debug"
    queue: str


class LeaseAcquired(TaskEvent, frozen=True, kw_only=True):
    """A worker took a job."""

    level: ClassVar[str] = "debug"
    attempt: int
    worker_id: str
    locked_until: datetime | None


class LeaseRejected(Event, frozen=True, kw_only=True):
    """Delivered ids that could not be claimed."""

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


class JobFailed(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
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
    dlq_key: str | None = None  # where the transport lists it, if there is one
    trace_id: str | None = None


class JobCancelled(TaskEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A running job has stopped because an operator asked."""

    attempt: int
    trace_id: str | None = None


class JobExpired(TaskEvent, frozen=True, kw_only=True):
    """A job ended as cancelled: no worker took it by its ``expires``."""

    queue: str


class JobReleased(TaskEvent, frozen=True, kw_only=True):
    """Given back without an attempt being counted: a stopping worker, or a snooze."""

    level: ClassVar[str] = "debug"
    reason: str


class RetryUnreadable(TaskEvent, frozen=True, kw_only=True):
    """A job's own retry policy cannot be read; its task's or the settings' is used."""

    level: ClassVar[str] = "warning"
    error: str


class TaskUnknown(TaskEvent, frozen=True, kw_only=True):
    """The application of this worker, or of this API, lacks the task of a job it took: emitted once for each name."""

    level: ClassVar[str] = "warning"
    queue: str
    error: str
    remedy: str
    deferred_until: datetime | None = None


class PayloadUnfit(TaskEvent, frozen=True, kw_only=True):
    """The payload of a job does not fit the task as this worker has it: logged once for each task."""

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


class LeaseLost(TaskEvent, frozen=True, kw_only=True):
    """This worker's write came too late: another worker settled the job."""

    level: ClassVar[str] = "warning"
    worker_id: str


class SweepComplete(Event, frozen=True, kw_only=True):
    """A round of maintenance that found something to do. ``reannounced``: ready jobs that the transport had lost."""

    requeued: int
    recovered: int
    pruned: int
    reannounced: int = 0
    expired: int = 0


class ScheduleFired(Event, frozen=True, kw_only=True):
    """A tick of a schedule has come, and its job is stored, unless a policy left it out. ``late``: seconds."""

    schedule: str
    task: str
    tick: datetime
    job_ids: list[str]
    late: float
    missed: int  # earlier ticks that are not run
    skipped: int  # by the policy for overlaps, or by a unique key


class DeclarationKept(Event, frozen=True, kw_only=True):
    """A schedule or limit in the store contradicts the code of this application, and stays as it is."""

    level: ClassVar[str] = "warning"
    declared: str  # "schedule NAME" or "limit NAME"
    problem: str
    remedy: str


class LoopBlocked(Event, frozen=True, kw_only=True):
    """A handler keeps the event loop from running anything else; ``stack`` is where."""

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
    """A store call failed; the loop that made it goes on trying. In the API: the client that asked may."""

    level: ClassVar[str] = "error"
    service: str
    error: str
    retry_in: float
    request_id: str | None = None


class TransportAway(Event, frozen=True, kw_only=True):
    """The transport cannot be used: until it is back, workers ask the store itself. Emitted once for each absence."""

    level: ClassVar[str] = "warning"
    place: str
    error: str


class MalformedMessage(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A message in a transport that holds no job id. It was removed; at most ten a minute are reported."""

    level: ClassVar[str] = "warning"
    place: str
    queue: str
    size: int  # characters
    text: str  # its beginning, escaped
    entry: str = ""  # its id in a stream
    kept_in: str = ""  # the stream that it was moved to
    unreported: int = 0  # since the last report


class TransportBack(Event, frozen=True, kw_only=True):
    """The transport is back, and carries ready jobs."""

    place: str
    seconds: float  # it was away


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker process serves its queues."""

    worker_id: str
    store: str  # its URL, without a password
    queues: str
    concurrency: int


class WorkerStopping(Event, frozen=True, kw_only=True):
    """A worker process takes no more jobs."""

    worker_id: str
    reason: str
    running: int = 0  # jobs it lets finish,
    grace: float = 0.0  # for at most so many seconds; a second signal gives them back at once


class WorkerStopped(Event, frozen=True, kw_only=True):
    """A worker process has ended."""

    worker_id: str
    succeeded: int
    failed: int
    released: int


class HandlersLeft(Event, frozen=True, kw_only=True):
    """A worker process ends while handlers of released jobs still run; they end with it, wherever they are."""

    level: ClassVar[str] = "warning"
    worker_id: str
    threads: int
    coroutines: int


class SupervisorStopping(Event, frozen=True, kw_only=True):
    """A supervisor of worker processes tells them to stop; each of them gives ``supervisor`` as its reason."""

    reason: str
    processes: int


class ChildEnded(Event, frozen=True, kw_only=True):
    """A worker process (or a child of the process executor) ended."""

    level: ClassVar[str] = "warning"
    pid: int
    cause: str
    restart_in: float | None


class SettingsChanged(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A worker follows changed settings, or an API is to be restarted for them: new value by name."""

    changed: dict[str, str]
    remedy: str | None = None


class SettingsRefused(Event, frozen=True, kw_only=True):
    """A setting that cannot be followed: the file is unusable, or no supervisor would start the next worker."""

    level: ClassVar[str] = "warning"
    problem: str


class MetricsServed(Event, frozen=True, kw_only=True):
    """A worker process tells its metrics and health at this address."""

    address: str
    worker_id: str


class ApiStarted(Event, frozen=True, kw_only=True):
    """The HTTP API listens."""

    address: str
    store: str  # its URL, without a password
    keys: bool  # whether it asks for keys


class ApiStopping(Event, frozen=True, kw_only=True):
    """The HTTP API takes no more requests."""

    reason: str


class ApiChange(Event, frozen=True, kw_only=True):
    """A call over HTTP changed something, or was to: which operation, who asked, what came of it."""

    operation: str
    who: str  # the id of a key, or local
    address: str
    request_id: str
    target: str
    status: int
    count: int
    ids: list[str]


class ApiSubmission(ApiChange, frozen=True, kw_only=True):
    """The same for what comes by the thousand: submissions, claims and settlements."""

    level: ClassVar[str] = "debug"


class AuditFailed(Event, frozen=True, kw_only=True):
    """The audit file could not be written; until it can, calls that would change something are refused."""

    level: ClassVar[str] = "error"
    problem: str


class KeyRefused(Event, frozen=True, kw_only=True):
    """A caller without a good key, or whose key does not allow what it asked for."""

    level: ClassVar[str] = "warning"
    who: str  # the id of the key, or none
    address: str
    request_id: str
    problem: str


class KeysRead(Event, frozen=True, kw_only=True):
    """The file of API keys was read again: so many keys."""

    keys: int


class KeysUnreadable(Event, frozen=True, kw_only=True):
    """The file of API keys changed, and cannot be used as it is; the last good keys stay in force."""

    level: ClassVar[str] = "error"
    problem: str
    kept: int


class RequestFailed(Event, frozen=True, kw_only=True):
    """A request over HTTP ended in an error of ours; its answer was 500 and contained only this id."""

    level: ClassVar[str] = "error"
    request_id: str
    method: str
    path: str
    error: str


Subscriber = Callable[[Event], None]


class Events:
    """Registry of the subscribers of events. ``has_subscriber`` is cheap enough to ask once a batch on the hot path."""

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
        """Returns True if events of this kind have a subscriber: ask before building many."""
        return bool(self._subscribers.get(kind))

    def emit(self, event: Event) -> None:
        """Hands the event to its subscribers in order. An exception of one is logged and reaches no other."""
        for subscriber in self._subscribers.get(type(event), ()):
            try:
                subscriber(event)
            except Exception:
                logging.getLogger(__name__).exception("a subscriber to %s raised", event.name)


KINDS: tuple[type[Event], ...] = tuple(  # that a log line can tell
    kind for base in (Event, TaskEvent, ApiChange) for kind in base.__subclasses__() if kind is not TaskEvent
)


# ── observations for metrics alone, one a batch ───────────────────────────────────────────────────────────────────────
class BatchMetric(Event, frozen=True, kw_only=True):
    """An observation of a whole batch. Emitters ask ``has_subscriber`` first."""

    level: ClassVar[str] = "debug"


class JobsSubmitted(BatchMetric, frozen=True, kw_only=True):
    """A submission was answered. By task: how many jobs are new, and how many stood already."""

    created: Mapping[str, int]
    deduplicated: Mapping[str, int]


class JobsClaimed(BatchMetric, frozen=True, kw_only=True):
    """A claim was answered. ``retried``: jobs with an earlier attempt; ``late``: by queue, seconds each job waited."""

    retried: int
    refused: int
    late: Mapping[str, Sequence[float]]


class MalformedReceived(BatchMetric, frozen=True, kw_only=True):
    """Messages without a job id that a transport delivered."""

    count: int


class BatchSettled(BatchMetric, frozen=True, kw_only=True):
    """A batch of settlements was answered. ``succeeded``: by task, the seconds of each job that ended well."""

    size: int
    succeeded: Mapping[str, Sequence[float]]


class StoreAnswered(BatchMetric, frozen=True, kw_only=True):
    """A call of the store has ended; ``failed``: with an error that is not the caller's."""

    verb: str
    seconds: float
    failed: bool


class LoopHeard(BatchMetric, frozen=True, kw_only=True):
    """The event loop was asked to answer: how long that took, or has taken so far."""

    seconds: float


class RequestAnswered(BatchMetric, frozen=True, kw_only=True):
    """A request over HTTP was answered. ``path`` is its operation's, with the names of its places."""

    method: str
    path: str
    status: int
    seconds: float
