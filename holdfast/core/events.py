"""Observable events, as records: components emit, logs, metrics and traces subscribe. Rooms emit; logs, metrics and
traces subscribe. Without subscribers an event costs nothing.

An event's ``name`` is its name in log lines; ``level`` is the level a user expects it at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that happened."""

    name: ClassVar[str]
    level: ClassVar[str] = "info"


class JobCreated(Event, frozen=True, kw_only=True, gc=False):
    """A job was stored."""

    name: ClassVar[str] = "job_created"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    queue: str


class JobDuplicate(Event, frozen=True, kw_only=True, gc=False):
    """A submission whose key or id already stood for a job."""

    name: ClassVar[str] = "job_duplicate"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    queue: str


class LeaseAcquired(Event, frozen=True, kw_only=True, gc=False):
    """A worker took a job."""

    name: ClassVar[str] = "lease_acquired"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    attempt: int
    worker_id: str
    locked_until: datetime | None


class LeaseRejected(Event, frozen=True, kw_only=True, gc=False):
    """Delivered ids that could not be claimed."""

    name: ClassVar[str] = "lease_rejected"
    level: ClassVar[str] = "debug"
    count: int
    worker_id: str


class HandlerStart(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A job's handler is about to be called."""

    name: ClassVar[str] = "handler_start"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    attempt: int
    trace_id: str | None = None


class JobSucceeded(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A job ended in success, and that is stored."""

    name: ClassVar[str] = "job_succeeded"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    attempt: int
    seconds: float
    trace_id: str | None = None


class JobFailed(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """An attempt failed and will be retried."""

    name: ClassVar[str] = "job_failed"
    level: ClassVar[str] = "warning"
    job_id: str
    task: str
    attempt: int
    reason: str
    error: str
    retry_at: datetime | None
    seconds: float
    trace_id: str | None = None


class JobDead(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A job is dead: its last attempt failed, or no further one makes sense."""

    name: ClassVar[str] = "job_dead"
    level: ClassVar[str] = "error"
    job_id: str
    task: str
    attempt: int
    reason: str
    error: str
    seconds: float
    dlq_key: str | None = None
    """Where the transport lists it, if there is one."""
    trace_id: str | None = None


class JobCancelled(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A running job has stopped because an operator asked."""

    name: ClassVar[str] = "job_cancelled"
    job_id: str
    task: str
    attempt: int
    trace_id: str | None = None


class JobReleased(Event, frozen=True, kw_only=True, gc=False):
    """Given back without an attempt being counted: a stopping worker, or a snooze."""

    name: ClassVar[str] = "job_released"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    reason: str


class RetryUnreadable(Event, frozen=True, kw_only=True, gc=False):
    """A job's own retry policy cannot be read; its task's or the settings' is used."""

    name: ClassVar[str] = "retry_unreadable"
    level: ClassVar[str] = "warning"
    job_id: str
    task: str
    error: str


class TaskUnknown(Event, frozen=True, kw_only=True, gc=False):
    """The application of this worker, or of this API, lacks the task of a job it took: emitted once for each name."""

    name: ClassVar[str] = "task_unknown"
    level: ClassVar[str] = "warning"
    job_id: str
    task: str
    queue: str
    error: str
    remedy: str
    deferred_until: datetime | None = None


class PayloadUnfit(Event, frozen=True, kw_only=True, gc=False):
    """The payload of a job does not fit the task as this worker has it: logged once for each task."""

    name: ClassVar[str] = "payload_unfit"
    level: ClassVar[str] = "warning"
    job_id: str
    task: str
    queue: str
    error: str
    deferred_until: datetime | None
    remedy: str


class JobDeferred(Event, frozen=True, kw_only=True, gc=False):
    """This worker cannot run the job and gave it back for another one that can."""

    name: ClassVar[str] = "job_deferred"
    level: ClassVar[str] = "debug"
    job_id: str
    task: str
    reason: str
    retry_at: datetime | None


class JobUnstartable(Event, frozen=True, kw_only=True, gc=False):
    """This worker could not even start the job (no descriptors, no memory) and gave it back."""

    name: ClassVar[str] = "job_unstartable"
    level: ClassVar[str] = "error"
    job_id: str
    task: str
    error: str


class LeaseLost(Event, frozen=True, kw_only=True, gc=False):
    """This worker's write came too late: another worker settled the job."""

    name: ClassVar[str] = "lease_lost"
    level: ClassVar[str] = "warning"
    job_id: str
    task: str
    worker_id: str


class SweepComplete(Event, frozen=True, kw_only=True, gc=False):
    """A round of maintenance that found something to do. ``reminded``: ready jobs that the transport had lost."""

    name: ClassVar[str] = "sweep_complete"
    requeued: int
    recovered: int
    pruned: int
    reminded: int = 0


class LoopBlocked(Event, frozen=True, kw_only=True, gc=False):
    """A handler keeps the event loop from running anything else; ``stack`` is where."""

    name: ClassVar[str] = "loop_blocked"
    level: ClassVar[str] = "warning"
    seconds: float
    job_id: str | None
    task: str | None
    stack: str


class LinesLost(Event, frozen=True, kw_only=True, gc=False):
    """Log lines of jobs could not be stored."""

    name: ClassVar[str] = "lines_lost"
    level: ClassVar[str] = "warning"
    count: int
    error: str


class StoreTrouble(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A store call failed; the loop that made it goes on trying. In the API: the client that asked may."""

    name: ClassVar[str] = "store_trouble"
    level: ClassVar[str] = "error"
    service: str
    error: str
    retry_in: float
    request_id: str | None = None


class TransportAway(Event, frozen=True, kw_only=True, gc=False):
    """The transport cannot be used: until it is back, workers ask the store itself. Emitted once for each absence."""

    name: ClassVar[str] = "transport_away"
    level: ClassVar[str] = "warning"
    place: str
    error: str


class MalformedMessage(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A message in a transport that holds no job id. It was removed; at most ten a minute are reported."""

    name: ClassVar[str] = "malformed_message"
    level: ClassVar[str] = "warning"
    place: str
    queue: str
    size: int  # characters
    text: str  # its beginning, escaped
    entry: str = ""  # its id in a stream
    kept_in: str = ""  # the stream that it was moved to
    unreported: int = 0  # since the last report


class TransportBack(Event, frozen=True, kw_only=True, gc=False):
    """The transport is back, and carries ready jobs."""

    name: ClassVar[str] = "transport_back"
    place: str
    seconds: float  # it was away


class WorkerStarted(Event, frozen=True, kw_only=True, gc=False):
    """A worker process serves its queues."""

    name: ClassVar[str] = "worker_started"
    worker_id: str
    store: str  # its URL, without a password
    queues: str
    concurrency: int


class WorkerStopping(Event, frozen=True, kw_only=True, gc=False):
    """A worker process takes no more jobs."""

    name: ClassVar[str] = "worker_stopping"
    worker_id: str
    reason: str
    running: int = 0
    """Jobs it lets finish,"""
    grace: float = 0.0
    """for at most so many seconds; a second signal gives them back at once."""


class WorkerStopped(Event, frozen=True, kw_only=True, gc=False):
    """A worker process has ended."""

    name: ClassVar[str] = "worker_stopped"
    worker_id: str
    succeeded: int
    failed: int
    released: int


class HandlersLeft(Event, frozen=True, kw_only=True, gc=False):
    """A worker process ends though handlers of jobs it gave back still run: threads that do not end, and coroutines
    that swallow their cancellation. They end with the process, wherever they are."""

    name: ClassVar[str] = "handlers_left"
    level: ClassVar[str] = "warning"
    worker_id: str
    threads: int
    coroutines: int


class SupervisorStopping(Event, frozen=True, kw_only=True, gc=False):
    """A supervisor of worker processes tells them to stop; each of them gives ``supervisor`` as its reason."""

    name: ClassVar[str] = "supervisor_stopping"
    reason: str
    processes: int


class ChildEnded(Event, frozen=True, kw_only=True, gc=False):
    """A worker process (or a child of the process executor) ended."""

    name: ClassVar[str] = "child_ended"
    level: ClassVar[str] = "warning"
    pid: int
    cause: str
    restart_in: float | None


class SettingsChanged(Event, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A worker follows changed settings, or an API is to be restarted for them: new value by name."""

    name: ClassVar[str] = "settings_changed"
    changed: dict[str, str]
    remedy: str | None = None


class SettingsRefused(Event, frozen=True, kw_only=True, gc=False):
    """A setting that cannot be followed: the file was changed to what cannot be used, and the settings that were valid
    stay; or no supervisor would start the worker that is to come after this one. Emitted once."""

    name: ClassVar[str] = "settings_refused"
    level: ClassVar[str] = "warning"
    problem: str


class MetricsServed(Event, frozen=True, kw_only=True, gc=False):
    """A worker process tells its metrics and health at this address."""

    name: ClassVar[str] = "metrics_served"
    address: str
    worker_id: str


class ApiStarted(Event, frozen=True, kw_only=True, gc=False):
    """The HTTP API listens."""

    name: ClassVar[str] = "api_started"
    address: str
    store: str  # its URL, without a password
    keys: bool  # whether it asks for keys


class ApiStopping(Event, frozen=True, kw_only=True, gc=False):
    """The HTTP API takes no more requests."""

    name: ClassVar[str] = "api_stopping"
    reason: str


class ApiChange(Event, frozen=True, kw_only=True, gc=False):
    """A call over HTTP changed something, or was to: which operation, who asked, what came of it."""

    name: ClassVar[str] = "api_change"
    operation: str
    who: str  # the id of a key, or local
    address: str
    request_id: str
    target: str
    status: int
    count: int
    ids: list[str]


class ApiSubmission(Event, frozen=True, kw_only=True, gc=False):
    """The same for what comes by the thousand: submissions, claims and settlements."""

    name: ClassVar[str] = "api_submission"
    level: ClassVar[str] = "debug"
    operation: str
    who: str
    address: str
    request_id: str
    target: str
    status: int
    count: int
    ids: list[str]


class AuditFailed(Event, frozen=True, kw_only=True, gc=False):
    """The audit file could not be written; until it can, calls that would change something are refused."""

    name: ClassVar[str] = "audit_failed"
    level: ClassVar[str] = "error"
    problem: str


class KeyRefused(Event, frozen=True, kw_only=True, gc=False):
    """A caller without a good key, or whose key does not allow what it asked for."""

    name: ClassVar[str] = "key_refused"
    level: ClassVar[str] = "warning"
    who: str  # the id of the key, or none
    address: str
    request_id: str
    problem: str


class KeysRead(Event, frozen=True, kw_only=True, gc=False):
    """The file of API keys was read again: so many keys."""

    name: ClassVar[str] = "keys_read"
    keys: int


class KeysUnreadable(Event, frozen=True, kw_only=True, gc=False):
    """The file of API keys changed, and cannot be used as it is; the last good keys stay in force."""

    name: ClassVar[str] = "keys_unreadable"
    level: ClassVar[str] = "error"
    problem: str
    kept: int


class RequestFailed(Event, frozen=True, kw_only=True, gc=False):
    """A request over HTTP ended in an error of ours; its answer was 500 and contained only this id."""

    name: ClassVar[str] = "request_failed"
    level: ClassVar[str] = "error"
    request_id: str
    method: str
    path: str
    error: str


Subscriber = Callable[[Event], None]


class Events:
    """Registry of the subscribers of events. ``listens`` is cheap enough to ask once a batch on the hot path."""

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


KINDS: tuple[type[Event], ...] = tuple(Event.__subclasses__())
"""Every kind of event there is that a log line can tell."""
