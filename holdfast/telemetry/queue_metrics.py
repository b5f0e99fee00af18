"""Queue metrics from the store: read at a bounded cost and cached; concurrent scrapes share one read.

The rate of ended jobs is computed from the workers' counters, read with each scrape.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from holdfast.core.errors import Busy, HoldfastError, TooBroad
from holdfast.core.limits import Limit, LimitTable, split_bucket
from holdfast.core.models import Job, JobFilter, JobState, QueueInfo
from holdfast.core.schedule import Schedule, without_alerts
from holdfast.core.workers import WorkerInfo
from holdfast.stores.base import Store
from holdfast.telemetry.metric_definitions import GAUGES
from holdfast.telemetry.metric_types import LabelLimiter, Reading, Values

MAX_COUNTED = 100_000
"""Maximum number of jobs of one queue and state that are counted."""

MAX_SCHEDULES = 100
"""Maximum number of schedules that are read, in the order of names."""

MAX_LIMITS = 100
"""Maximum number of limits that are read, in the order of names."""

MAX_RUNNING = 1000
"""Maximum number of running jobs that are read for the use of limits with a key, the latest first."""

_PAGE = 200  # running jobs per page

CACHE_SECONDS = 5.0
"""Seconds for which readings are cached."""

WAIT_SECONDS = 2.0
"""Seconds for which a scrape waits for the store."""

STALE_SECONDS = 60.0
"""Seconds past the cache for which readings stand in for those of a store that answers slowly."""

_MAX_GONE = 10_000  # workers that have gone, whose last counts are kept

WINDOW = 300.0
"""Window of the rate in seconds."""

MAX_PREDICTION = 3600.0
"""Longest prediction in seconds; autoscalers cannot use an infinite one."""


# ── pure functions ────────────────────────────────────────────────────────────────────────────────────────────────────
class SettleRate:
    """Rate of ended attempts of all workers, from each worker's count since its start."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        self._steps: deque[tuple[float, int]] = deque()

    def record_counts(self, now: float, ended: Mapping[str, int]) -> None:
        """Records the current counts. A removed worker keeps its last count, a new one counts from its start."""
        grown = 0 if not self._steps else sum(max(0, n - self._ended.get(who, 0)) for who, n in ended.items())
        gone = [(who, n) for who, n in self._ended.items() if who not in ended]
        self._ended = dict(gone[-_MAX_GONE:]) | dict(ended)
        self._steps.append((now, grown))
        while len(self._steps) > 2 and now - self._steps[1][0] >= WINDOW:
            self._steps.popleft()

    def settle_rate(self) -> float | None:
        """Returns attempts a second over the window; None after a single reading."""
        span = self._steps[-1][0] - self._steps[0][0] if self._steps else 0.0
        return sum(grown for _, grown in list(self._steps)[1:]) / span if span > 0 else None


def lifetime_rate(workers: Sequence[WorkerInfo]) -> float:
    """Returns the fallback rate: the jobs of each living worker divided by its uptime, added up."""
    return sum(
        (each.heartbeat.succeeded + each.heartbeat.failed) * 1e6 / max(1, each.seen_at_us - each.started_at_us)
        for each in workers
        if each.alive
    )


def predicted_drain(queued: int, rate: float) -> float:
    """Returns the seconds until all queued jobs have run; at most ``MAX_PREDICTION``."""
    if not queued:
        return 0.0
    return min(MAX_PREDICTION, queued / rate) if rate > 0 else MAX_PREDICTION


class LimitSnapshot(NamedTuple):
    """Limits, and the use of their buckets that have running jobs."""

    limits: Sequence[Limit] = ()
    used: Mapping[str, int] = {}


class QueueSnapshot(NamedTuple):
    """State of queues, workers, schedules and limits at ``now_us`` of the store's clock."""

    queues: Sequence[QueueInfo]
    workers: Sequence[WorkerInfo]
    rate: float
    schedules: Sequence[Schedule]
    now_us: int
    limits: LimitSnapshot = LimitSnapshot()


# ── reading the store ─────────────────────────────────────────────────────────────────────────────────────────────────
class QueueFigures:
    """The store's metrics, cached for one process."""

    def __init__(self, opened: Callable[[], Awaitable[Store]], *, labels: int) -> None:
        self._opened = opened
        self._queue = LabelLimiter(labels)
        self._pace = SettleRate()
        self._looking: asyncio.Task[None] | None = None
        self._snapshot: QueueSnapshot | None = None
        self._until = 0.0

    async def read(self) -> list[Reading]:
        """Returns the readings; if the store is unavailable, only ``store_up`` 0."""
        if time.monotonic() >= self._until:
            looking = self._looking
            if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
                looking = self._looking = asyncio.create_task(self._look(), name="holdfast-queue-figures")
            await asyncio.wait([looking], timeout=WAIT_SECONDS)
            if not looking.done() and time.monotonic() >= self._until + STALE_SECONDS:
                return list(gauge_readings(None, self._queue))
        return list(gauge_readings(self._snapshot, self._queue))

    async def _look(self) -> None:
        try:
            store = await self._opened()
            queues = await store.query.queue_depths(max_count=MAX_COUNTED)
            workers = await store.query.workers()
            schedules = without_alerts(await store.schedules.read_schedules(limit=MAX_SCHEDULES))
            now_us = await store.health.server_time_us()
            limits = await read_limit_snapshot(store)
        except HoldfastError:
            self._snapshot = None
        else:
            ended = {each.heartbeat.worker: each.heartbeat.succeeded + each.heartbeat.failed for each in workers}
            self._pace.record_counts(time.monotonic(), ended)
            rate = self._pace.settle_rate()
            rate = lifetime_rate(workers) if rate is None else rate
            self._snapshot = QueueSnapshot(queues, workers, rate, schedules, now_us, limits)
        self._until = time.monotonic() + CACHE_SECONDS


async def read_limit_snapshot(store: Store) -> LimitSnapshot:
    """Reads the limits of queues and tasks with their use. One read if there are no limits."""
    every = await store.limits.read_limits()
    limits = [limit for limit in every[:MAX_LIMITS] if limit.queue is not None or limit.task is not None]
    names = [limit.name for limit in limits if limit.by is None and limit.values.concurrency is not None]
    used = {use.bucket: use.used for use in await store.limits.bucket_use(names)} if names else {}
    if any(limit.by is not None for limit in limits):
        running = LimitTable(every).use_by_jobs(await _running_jobs(store))
        used |= {bucket: number for bucket, number in running.items() if split_bucket(bucket)[1] is not None}
    return LimitSnapshot(limits, used)


async def _running_jobs(store: Store) -> list[Job]:
    jobs: list[Job] = []
    cursor = None
    with suppress(TooBroad, Busy):
        while len(jobs) < MAX_RUNNING:
            page = await store.query.find(JobFilter(states=(JobState.RUNNING,)), limit=_PAGE, cursor=cursor)
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                break
    return jobs


def gauge_readings(snapshot: QueueSnapshot | None, cap: Callable[[str], str]) -> Iterator[Reading]:
    """Yields the gauges; queues beyond the cap are added up."""
    yield Reading(GAUGES["store_up"], {(): 0.0 if snapshot is None else 1.0})
    if snapshot is None:
        return
    jobs: dict[Values, float] = {}
    oldest: dict[Values, float] = {}
    paused: dict[Values, float] = {}
    for queue in snapshot.queues:
        name = cap(queue.name)
        age = 0.0 if queue.oldest_ready is None else queue.oldest_ready.total_seconds()
        oldest[name,] = max(oldest.get((name,), 0.0), age)
        paused[name,] = max(paused.get((name,), 0.0), float(queue.paused))
        for state in ("queued", "waiting", "scheduled", "failed", "running", "dead"):
            jobs[name, state] = jobs.get((name, state), 0.0) + queue.states.get(state, 0)
    queued = sum(queue.states.get("queued", 0) for queue in snapshot.queues if not queue.paused)
    yield Reading(GAUGES["queue_jobs"], jobs)
    yield Reading(GAUGES["queue_oldest_seconds"], oldest)
    yield Reading(GAUGES["queue_paused"], paused)
    yield from _schedule_readings(snapshot)
    yield from _limit_readings(snapshot)
    yield Reading(GAUGES["workers"], {(): float(sum(each.alive for each in snapshot.workers))})
    yield Reading(GAUGES["throughput_jobs_per_second"], {(): snapshot.rate})
    yield Reading(GAUGES["predicted_drain_seconds"], {(): predicted_drain(queued, snapshot.rate)})


def _schedule_readings(snapshot: QueueSnapshot) -> Iterator[Reading]:
    late: dict[Values, float] = {
        (each.name,): max(0.0, (snapshot.now_us - (each.due_us or snapshot.now_us)) / 1e6)
        for each in snapshot.schedules
    }
    yield Reading(GAUGES["schedule_late_seconds"], late)
    last: dict[Values, float] = {(each.name,): (each.last_us or 0) / 1e6 for each in snapshot.schedules}
    yield Reading(GAUGES["schedule_last_run_timestamp_seconds"], last)


def _limit_readings(snapshot: QueueSnapshot) -> Iterator[Reading]:
    limits, used = snapshot.limits
    of_limits: dict[str, list[int]] = {}
    for bucket, number in used.items():
        of_limits.setdefault(split_bucket(bucket)[0], []).append(number)
    ready = {queue.name: queue.states.get("queued", 0) for queue in snapshot.queues}
    bounded = [limit for limit in limits if limit.values.concurrency is not None]
    yield Reading(
        GAUGES["limit_used"], {(each.name,): float(max(of_limits.get(each.name, ()), default=0)) for each in bounded}
    )
    yield Reading(GAUGES["limit_max"], {(each.name,): float(each.values.concurrency or 0) for each in bounded})
    keyed = [limit for limit in limits if limit.by is not None]
    yield Reading(GAUGES["limit_buckets"], {(each.name,): float(len(of_limits.get(each.name, ()))) for each in keyed})
    unstarted: dict[Values, float] = {
        (each.name,): float(ready.get(each.queue, 0)) for each in limits if each.queue is not None
    }
    yield Reading(GAUGES["limit_unstarted_jobs"], unstarted)
