"""Metrics of a process. Subscribes to events; ``read`` returns the current readings.

Events that occur once per job come as one ``MetricEvent`` per batch, to keep their cost low.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from holdfast.core.errors import HoldfastError, Unavailable
from holdfast.core.events import (
    Event,
    Events,
    FaultInjected,
    JobDead,
    JobDeferred,
    JobExpired,
    JobFailedEvent,
    JobSuspended,
    LeaseLostEvent,
    ScheduleFired,
    Subscriber,
    SweepComplete,
)
from holdfast.core.lifecycle import DEFERRALS
from holdfast.core.metric_events import (
    JobsClaimed,
    JobsSubmitted,
    LoopDelayMeasured,
    MalformedReceived,
    RequestAnswered,
    SettlementsWritten,
    StepsRecorded,
    StoreAnswered,
)
from holdfast.stores.base import Store
from holdfast.stores.forwarding import ForwardingStore, Interceptor
from holdfast.telemetry.metric_definitions import COUNTED, GAUGES
from holdfast.telemetry.metric_types import Family, LabelLimiter, MetricRegistry, Reading

Gauge = Callable[[], float]
TaskNames = Callable[[], Iterable[str]]

_BY_TASK = tuple(each.name for each in COUNTED if each.kind == "counter" and each.labels == ("task",))


class Metrics:
    """The metrics of one process, from its application's events."""

    def __init__(self, events: Events, *, labels: int, tasks: TaskNames = tuple, task_field: str = "task") -> None:
        """``labels``: limit of distinct values of one label. ``tasks``: names whose counters start at zero.
        ``task_field``: the label that names the task."""
        self._registry = MetricRegistry([_with_task_label(each, task_field) for each in COUNTED])
        self._tasks = tasks
        self._counters = self._registry.counters
        self._histograms = self._registry.histograms
        self._task, self._queue, self._schedule = LabelLimiter(labels), LabelLimiter(labels), LabelLimiter(labels)
        self._gauges: dict[str, Gauge] = {}
        subscribers: dict[type[Event], Subscriber] = {
            JobsSubmitted: self._submitted,
            JobsClaimed: self._claimed,
            MalformedReceived: self._count_malformed,
            SettlementsWritten: self._settled,
            JobFailedEvent: self._failed,
            JobDead: self._dead,
            JobDeferred: self._deferred,
            JobSuspended: self._suspended,
            StepsRecorded: self._count_steps,
            JobExpired: self._expired,
            FaultInjected: self._count_faults,
            ScheduleFired: self._count_ticks,
            LeaseLostEvent: self._lost,
            SweepComplete: self._swept,
            LoopDelayMeasured: self._observe_loop_delay,
            StoreAnswered: self._answered,
            RequestAnswered: self._requested,
        }
        self._add_zeros()  # registered tasks come first where labels are capped
        self._undo = [events.subscribe(subscriber, kind) for kind, subscriber in subscribers.items()]

    def close(self) -> None:
        """Ends the subscriptions."""
        for each in self._undo:
            each()

    def set_gauge(self, name: str, read: Gauge) -> None:
        """Registers a callback that returns a gauge's value at each scrape."""
        self._gauges[name] = read

    def read(self) -> Iterator[Reading]:
        """Yields the current readings."""
        yield Reading(GAUGES["build_info"], {(package_version(),): 1.0})
        self._add_zeros()  # of tasks registered since
        yield from self._registry.read()
        for name, read in self._gauges.items():
            yield Reading(GAUGES[name], {(): read()})

    def _add_zeros(self) -> None:
        """Starts the counters of every registered task at 0: Prometheus needs a first value to compute an increase."""
        with self._registry.lock:
            for task in self._tasks():
                self._add_zeros_of(self._task(task))

    def _add_zeros_of(self, shown: str) -> None:
        for name in _BY_TASK:
            self._counters[name].add(0, shown)
        for reason in DEFERRALS:
            self._counters["jobs_deferred_total"].add(0, shown, reason)

    # ── subscribers ─────────────────────────────────────────────────────────────────────────────────────────
    def _submitted(self, event: Event) -> None:
        assert isinstance(event, JobsSubmitted)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            for name, numbers in (
                ("jobs_submitted_total", event.created),
                ("jobs_idempotent_total", event.deduplicated),
            ):
                for task, number in numbers.items():
                    self._counters[name].add(number, self._task(task))

    def _claimed(self, event: Event) -> None:
        assert isinstance(event, JobsClaimed)  # noqa: S101 - subscribed to nothing else
        counters = self._counters
        with self._registry.lock:
            counters["jobs_retried_total"].add(event.retried)
            counters["lease_rejected_total"].add(event.refused)
            for queue, seconds in event.queue_wait.items():
                counters["lease_acquired_total"].add(len(seconds))
                self._histograms["job_lateness_seconds"].add_many(seconds, self._queue(queue))

    def _count_malformed(self, event: Event) -> None:
        assert isinstance(event, MalformedReceived)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._counters["transport_malformed_total"].add(event.count)

    def _settled(self, event: Event) -> None:
        assert isinstance(event, SettlementsWritten)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._histograms["settle_batch_jobs"].add(event.size)
            for task, seconds in event.succeeded.items():
                shown = self._task(task)
                self._counters["jobs_succeeded_total"].add(len(seconds), shown)
                self._histograms["job_duration_seconds"].add_many(seconds, shown, "succeeded")

    def _failed(self, event: Event) -> None:
        assert isinstance(event, JobFailedEvent)  # noqa: S101 - subscribed to nothing else
        self._unsuccessful("failed", event.task, event.seconds)

    def _dead(self, event: Event) -> None:
        assert isinstance(event, JobDead)  # noqa: S101 - subscribed to nothing else
        self._unsuccessful("dead", event.task, event.seconds)

    def _unsuccessful(self, outcome: str, task: str, seconds: float) -> None:
        with self._registry.lock:
            shown = self._task(task)
            self._add_zeros_of(shown)  # an unregistered task: a failure rate needs all of its counters
            self._counters[f"jobs_{outcome}_total"].add(1, shown)
            if seconds:  # 0: the attempt was lost
                self._histograms["job_duration_seconds"].add(seconds, shown, outcome)

    def _deferred(self, event: Event) -> None:
        assert isinstance(event, JobDeferred)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            shown = self._task(event.task)
            self._add_zeros_of(shown)
            self._counters["jobs_deferred_total"].add(1, shown, event.reason)

    def _suspended(self, event: Event) -> None:
        assert isinstance(event, JobSuspended)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._counters["jobs_suspended_total"].add(1, self._task(event.task), event.reason)

    def _count_steps(self, event: Event) -> None:
        assert isinstance(event, StepsRecorded)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._counters["steps_recorded_total"].add(event.count)

    def _expired(self, event: Event) -> None:
        assert isinstance(event, JobExpired)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._counters["jobs_expired_total"].add(1, self._task(event.task))

    def _count_faults(self, event: Event) -> None:
        assert isinstance(event, FaultInjected)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._counters["faults_injected_total"].add(1, event.kind)

    def _count_ticks(self, event: Event) -> None:
        assert isinstance(event, ScheduleFired)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            shown = self._schedule(event.schedule)
            self._counters["schedule_runs_total"].add(len(event.job_ids), shown)
            self._counters["schedule_missed_total"].add(event.missed, shown)

    def _lost(self, _event: Event) -> None:
        with self._registry.lock:
            self._counters["lease_lost_total"].add()

    def _swept(self, event: Event) -> None:
        assert isinstance(event, SweepComplete)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._counters["jobs_recovered_total"].add(event.recovered)
            self._counters["jobs_pruned_total"].add(event.pruned)

    def _observe_loop_delay(self, event: Event) -> None:
        assert isinstance(event, LoopDelayMeasured)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._histograms["loop_lag_seconds"].add(event.seconds)

    def _answered(self, event: Event) -> None:
        assert isinstance(event, StoreAnswered)  # noqa: S101 - subscribed to nothing else
        with self._registry.lock:
            self._histograms["store_latency_seconds"].add(event.seconds, event.verb)
            if event.failed:
                self._counters["store_errors_total"].add(1, event.verb)

    def _requested(self, event: Event) -> None:
        assert isinstance(event, RequestAnswered)  # noqa: S101 - subscribed to nothing else
        labels = event.method, event.path, str(event.status)
        with self._registry.lock:
            self._counters["http_requests_total"].add(1, *labels)
            self._histograms["http_request_duration_seconds"].add(event.seconds, *labels)


def _with_task_label(family: Family, task_field: str) -> Family:
    labels = tuple(task_field if label == "task" else label for label in family.labels)
    return msgspec.structs.replace(family, labels=labels)


def package_version() -> str:
    """Returns the version of the installed Holdfast; 0 if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as a tenth of the package

    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "0"


T = TypeVar("T")

_UNTIMED = frozenset({"open", "close", "migrate", "backup", "wait", "doctor", "repair"})
"""Verbs that are not timed: they send no query, or wait by design."""


def time_calls(store: Store, events: Events) -> Store:
    """Wraps a store to emit the duration of each call; returns it unchanged without a subscriber."""
    return ForwardingStore(store, _timer(events)) if events.has_subscriber(StoreAnswered) else store


def _timer(events: Events) -> Interceptor:
    async def time_call(verb: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if verb in _UNTIMED:
            return await call()
        started, failed = time.perf_counter(), False
        try:
            return await call()
        except Exception as error:  # a cancelled call has not failed
            failed = isinstance(error, Unavailable) or not isinstance(error, HoldfastError)
            raise
        finally:
            events.emit(StoreAnswered(verb=verb, seconds=time.perf_counter() - started, failed=failed))

    return time_call


_INTERVAL = 1.0  # seconds between measurements of the loop's lag


@asynccontextmanager
async def watched_loop(events: Events) -> AsyncIterator[None]:
    """Measures the lag of the running event loop once a second while entered."""
    watching = asyncio.create_task(_watch(events), name="holdfast-lag")
    try:
        yield
    finally:
        watching.cancel()


async def _watch(events: Events) -> None:
    while True:
        due = time.monotonic() + _INTERVAL
        await asyncio.sleep(_INTERVAL)
        if events.has_subscriber(LoopDelayMeasured):
            events.emit(LoopDelayMeasured(seconds=max(0.0, time.monotonic() - due)))
