"""Queue metrics from the store: read at a bounded cost, by one reader for all, and cached.

The rate at which jobs end comes from the workers' own counts, read with each scrape.
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
from holdfast.core.models import Job, JobFilter, JobState, QueueInfo, WorkerInfo
from holdfast.core.schedule import Schedule
from holdfast.stores.base import Store
from holdfast.telemetry.metric_definitions import GAUGES
from holdfast.telemetry.metric_types import LabelLimiter, Reading, Values

COUNTED_MOST = 100_000
"""Jobs of one queue and state that are counted."""

MAX_SCHEDULES = 100
"""Schedules that are read, the first by name."""

MAX_LIMITS = 100
"""Limits that are read, the first by name."""

MAX_RUNNING = 1000
"""Running jobs that are read for the use of limits with a key, the latest."""

_PAGE = 200  # of these at a time

KEPT = 5.0
"""Seconds that figures are shown before the store is asked anew."""

PATIENCE = 2.0
"""Seconds a reader waits for the store."""

WINDOW = 300.0
"""Seconds over which the rate is taken."""

LONGEST = 3600.0
"""Seconds: the longest prediction. Scalers make no sense of an infinite one."""


# ── rules: pure ───────────────────────────────────────────────────────────────────────────────────────────────────
class SettleRate:
    """Attempts that all workers end a second, from each worker's count since its start."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        self._steps: deque[tuple[float, int]] = deque()

    def record_counts(self, now: float, ended: Mapping[str, int]) -> None:
        """Records the workers' present counts. A worker that is gone keeps its last count, a new one counts from its
        start.
        """
        grown = 0 if not self._steps else sum(max(0, n - self._ended.get(who, 0)) for who, n in ended.items())
        self._ended = dict(ended)
        self._steps.append((now, grown))
        while len(self._steps) > 2 and now - self._steps[1][0] >= WINDOW:
            self._steps.popleft()

    def settle_rate(self) -> float | None:
        """Attempts a second over the window; None while it was looked at only once."""
        span = self._steps[-1][0] - self._steps[0][0] if self._steps else 0.0
        return sum(grown for _, grown in list(self._steps)[1:]) / span if span > 0 else None


def lifetime_rate(workers: Sequence[WorkerInfo]) -> float:
    """The rate where nothing better is known: the jobs that the living workers ended, each over its life."""
    return sum(
        (each.heartbeat.succeeded + each.heartbeat.failed) * 1e6 / max(1, each.seen_at_us - each.started_at_us)
        for each in workers
        if each.alive
    )


def predicted_drain(waiting: int, rate: float) -> float:
    """Seconds until all jobs that wait now have run; at most ``LONGEST``."""
    if not waiting:
        return 0.0
    return min(LONGEST, waiting / rate) if rate > 0 else LONGEST


class LimitSnapshot(NamedTuple):
    """Limits, and the use of each of their buckets that has running jobs."""

    limits: Sequence[Limit] = ()
    used: Mapping[str, int] = {}


class QueueSnapshot(NamedTuple):
    """State of the queues, schedules and limits at one moment, ``now_us`` by the store's clock."""

    queues: Sequence[QueueInfo]
    workers: Sequence[WorkerInfo]
    rate: float
    schedules: Sequence[Schedule]
    now_us: int
    limits: LimitSnapshot = LimitSnapshot()


# ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────
class QueueFigures:
    """The store's figures for one process."""

    def __init__(self, opened: Callable[[], Awaitable[Store]], *, labels: int) -> None:
        self._opened = opened
        self._queue = LabelLimiter(labels)
        self._pace = SettleRate()
        self._looking: asyncio.Task[None] | None = None
        self._sight: QueueSnapshot | None = None
        self._until = 0.0

    async def read(self) -> list[Reading]:
        """The figures; only that the store is away, if it is."""
        if time.monotonic() >= self._until:
            looking = self._looking
            if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
                looking = self._looking = asyncio.create_task(self._look(), name="holdfast-queue-figures")
            await asyncio.wait([looking], timeout=PATIENCE)
            if not looking.done():
                return list(gauge_readings(None, self._queue))
        return list(gauge_readings(self._sight, self._queue))

    async def _look(self) -> None:
        try:
            store = await self._opened()
            queues = await store.query.queue_depths(most=COUNTED_MOST)
            workers = await store.query.workers()
            schedules = await store.schedules.read_schedules(limit=MAX_SCHEDULES)
            now_us = await store.health.server_time_us()
            limits = await read_limit_snapshot(store)
        except HoldfastError:
            self._sight = None
        else:
            ended = {each.heartbeat.worker: each.heartbeat.succeeded + each.heartbeat.failed for each in workers}
            self._pace.record_counts(time.monotonic(), ended)
            rate = self._pace.settle_rate()
            rate = lifetime_rate(workers) if rate is None else rate
            self._sight = QueueSnapshot(queues, workers, rate, schedules, now_us, limits)
        self._until = time.monotonic() + KEPT


async def read_limit_snapshot(store: Store) -> LimitSnapshot:
    """The limits with a concurrency, and those of queues, with their use. One read where there are none."""
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
    """The gauges of the counted queues; queues beyond the cap are added up."""
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
        for state in ("queued", "scheduled", "failed", "running", "dead"):
            jobs[name, state] = jobs.get((name, state), 0.0) + queue.states.get(state, 0)
    waiting = sum(queue.states.get("queued", 0) for queue in snapshot.queues if not queue.paused)
    yield Reading(GAUGES["queue_jobs"], jobs)
    yield Reading(GAUGES["queue_oldest_seconds"], oldest)
    yield Reading(GAUGES["queue_paused"], paused)
    yield from _schedule_readings(snapshot)
    yield from _limit_readings(snapshot)
    yield Reading(GAUGES["workers"], {(): float(sum(each.alive for each in snapshot.workers))})
    yield Reading(GAUGES["throughput_jobs_per_second"], {(): snapshot.rate})
    yield Reading(GAUGES["predicted_drain_seconds"], {(): predicted_drain(waiting, snapshot.rate)})


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
    waiting: dict[Values, float] = {
        (each.name,): float(ready.get(each.queue, 0)) for each in limits if each.queue is not None
    }
    yield Reading(GAUGES["limit_waiting_jobs"], waiting)
