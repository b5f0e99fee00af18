"""Figures of the queues: what is predicted, what is added up, and that the store is asked once for many readers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Holdfast
from holdfast.core.errors import NotFound, Unavailable
from holdfast.core.events import Event
from holdfast.core.limits import Limit, LimitValues
from holdfast.core.metric_events import StoreAnswered
from holdfast.core.models import NewJob, QueueInfo
from holdfast.core.schedule import Schedule
from holdfast.core.workers import WorkerCommand, WorkerHeartbeat, WorkerInfo
from holdfast.stores.base import ClaimRequest, Store
from holdfast.stores.sqlite.limits import SqliteLimits
from holdfast.telemetry import queue_metrics
from holdfast.telemetry.metric_types import LabelLimiter, Reading
from holdfast.telemetry.queue_metrics import (
    MAX_PREDICTION,
    WINDOW,
    LimitSnapshot,
    QueueFigures,
    QueueSnapshot,
    SettleRate,
    gauge_readings,
    lifetime_rate,
    predicted_drain,
)


def worker(name: str, ended: int, *, alive: bool = True, seconds: float = 100.0) -> WorkerInfo:
    heartbeat = WorkerHeartbeat(
        worker=name, host="h", pid=1, queues="*", concurrency=1, running=0, succeeded=ended - 1, failed=1
    )
    return WorkerInfo(
        heartbeat=heartbeat, started_at_us=0, seen_at_us=round(seconds * 1e6), alive=alive, command=WorkerCommand.NONE
    )


def shown(figures: Any) -> dict[str, Any]:
    return {reading.family.name: dict(reading.series) for reading in figures}


@pytest.mark.parametrize(
    ("waiting", "rate", "seconds"),
    [(0, 0.0, 0.0), (0, 5.0, 0.0), (100, 5.0, 20.0), (1, 0.0, MAX_PREDICTION), (10**9, 1.0, MAX_PREDICTION)],
)
def test_what_waits_is_run_at_the_rate_of_now(waiting: int, rate: float, seconds: float) -> None:
    assert predicted_drain(waiting, rate) == seconds


def test_the_rate_is_what_the_workers_ended_between_two_looks() -> None:
    pace = SettleRate()
    pace.record_counts(0.0, {"a": 1000, "b": 5})
    assert pace.settle_rate() is None

    pace.record_counts(10.0, {"a": 1100, "b": 5})
    assert pace.settle_rate() == 10.0

    pace.record_counts(20.0, {"b": 105, "c": 200})  # a has gone, c is new
    assert pace.settle_rate() == 20.0

    pace.record_counts(30.0, {"a": 1130, "b": 105, "c": 200})  # a is back
    assert pace.settle_rate() == (100 + 300 + 30) / 30


def test_the_rate_forgets_what_is_longer_ago_than_its_window() -> None:
    pace = SettleRate()
    pace.record_counts(0.0, {"a": 0})
    pace.record_counts(10.0, {"a": 10_000})
    for look in range(1, 5):
        pace.record_counts(10.0 + look * WINDOW / 2, {"a": 10_000})

    assert pace.settle_rate() == 0.0


def test_a_worker_that_counts_anew_takes_nothing_away() -> None:
    pace = SettleRate()
    pace.record_counts(0.0, {"a": 1000})
    pace.record_counts(10.0, {"a": 3})

    assert pace.settle_rate() == 0.0


def test_first_rate_is_the_lifetime_rate_of_workers() -> None:
    assert lifetime_rate([worker("a", 500), worker("b", 100), worker("gone", 9000, alive=False)]) == 6.0


def test_queues_beyond_the_cap_are_summed() -> None:
    queues = [
        QueueInfo(
            name=name,
            paused=paused,
            states={"queued": queued, "waiting": 3, "dead": 1},
            oldest_ready=timedelta(seconds=age),
        )
        for name, queued, age, paused in (("a", 5, 1, False), ("b", 7, 9, False), ("c", 70, 3, True))
    ]
    readings = shown(gauge_readings(QueueSnapshot(queues, [worker("a", 5)], 2.0, [], 0), LabelLimiter(1)))

    assert readings["store_up"] == {(): 1.0}
    assert readings["queue_jobs"]["a", "queued"] == 5
    assert readings["queue_jobs"]["other", "queued"] == 77
    assert readings["queue_jobs"]["other", "dead"] == 2
    assert readings["queue_jobs"]["a", "waiting"] == 3
    assert readings["queue_oldest_seconds"] == {("a",): 1.0, ("other",): 9.0}
    assert readings["queue_paused"] == {("a",): 0.0, ("other",): 1.0}
    assert readings["workers"] == {(): 1.0}
    assert readings["predicted_drain_seconds"] == {(): 6.0}


def test_schedule_gauges_tell_lateness_and_last_run() -> None:
    draft = NewJob(id="", task="send", payload="{}")
    on_time = Schedule(id="1", name="on-time", job=draft, every_us=60_000_000, next_us=130_000_000, last_us=70_000_000)
    late = Schedule(id="2", name="late", job=draft, every_us=60_000_000, next_us=90_000_000)
    snapshot = QueueSnapshot([], [], 0.0, [on_time, late, replace(late, name="paused", paused=True)], 100_000_000)

    figures = shown(gauge_readings(snapshot, LabelLimiter(10)))

    assert figures["schedule_late_seconds"] == {("on-time",): 0.0, ("late",): 10.0, ("paused",): 0.0}
    assert figures["schedule_last_run_timestamp_seconds"] == {("on-time",): 70.0, ("late",): 0.0, ("paused",): 0.0}


def test_limit_gauges_tell_use_and_bounds() -> None:
    limits = [
        Limit(name="mail", queue="mail", values=LimitValues(concurrency=5)),
        Limit(name="crm", task="crm", by="args.tenant", values=LimitValues(concurrency=2)),
        Limit(name="slow", queue="slow", values=LimitValues(rate=1)),
    ]
    used = {"mail": 4, "crm=a": 1, "crm=b": 2}
    queues = [QueueInfo(name="mail", paused=False, states={"queued": 7}, oldest_ready=None)]
    snapshot = QueueSnapshot(queues, [], 0.0, [], 0, LimitSnapshot(limits, used))

    figures = shown(gauge_readings(snapshot, LabelLimiter(10)))

    assert figures["limit_used"] == {("mail",): 4.0, ("crm",): 2.0}
    assert figures["limit_max"] == {("mail",): 5.0, ("crm",): 2.0}
    assert figures["limit_buckets"] == {("crm",): 2.0}
    assert figures["limit_unstarted_jobs"] == {("mail",): 7.0, ("slow",): 0.0}


def test_use_of_limits_is_read_from_running_jobs(tmp_path: Path) -> None:
    async def read() -> dict[str, Any]:
        app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
        asked: list[Event] = []
        app.events.subscribe(asked.append, StoreAnswered)
        async with app:
            figures = await QueueFigures(app.open_store, labels=10).read()
            assert shown(figures)["limit_used"] == {}
            assert [each.verb for each in asked if isinstance(each, StoreAnswered)].count("find") == 0
            await app.limits.add("all", queue="default", concurrency=9)
            await app.limits.add("tenant", queue="default", by="args.tenant", concurrency=4, weight="args.n")
            for tenant, number in (("a", 1), ("b", 2), ("b", 1), ("c", 9)):
                await app.enqueue("work", {"tenant": tenant, "n": number})
            request = ClaimRequest("w", {"*": 9}, limit=3, lease_for=timedelta(minutes=1))
            await (await app.open_store()).queueing.claim(request)
            return shown(await QueueFigures(app.open_store, labels=10).read())

    figures = asyncio.run(read())
    assert figures["limit_used"] == {("all",): 3.0, ("tenant",): 9.0}
    assert figures["limit_buckets"] == {("tenant",): 3.0}
    assert figures["limit_unstarted_jobs"] == {("all",): 1.0, ("tenant",): 1.0}


def test_only_a_store_that_is_away_or_broken_fails_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(error: BaseException) -> bool:
        app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
        heard: list[Event] = []
        app.events.subscribe(heard.append, StoreAnswered)

        async def read_limits(_: object) -> list[Limit]:
            raise error

        async with app:
            monkeypatch.setattr(SqliteLimits, "read_limits", read_limits)
            with pytest.raises(type(error)):
                await (await app.open_store()).limits.read_limits()
            monkeypatch.undo()
        [answered] = [each for each in heard if isinstance(each, StoreAnswered) and each.verb == "read_limits"]
        return answered.failed

    errors = (asyncio.CancelledError(), NotFound("no job"), Unavailable("away"), OSError("broken"))
    assert [asyncio.run(end(error)) for error in errors] == [False, False, True, True]


def test_many_readers_ask_the_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_metrics, "CACHE_SECONDS", 3600.0)  # this machine may be slow

    async def read() -> tuple[list[list[Reading]], list[str]]:
        app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
        asked: list[Event] = []
        app.events.subscribe(asked.append, StoreAnswered)
        async with app:
            await app.enqueue("work")
            figures = QueueFigures(app.open_store, labels=10)
            readings = [*await asyncio.gather(*(figures.read() for _ in range(20))), await figures.read()]
        return readings, [event.verb for event in asked if isinstance(event, StoreAnswered)]

    readings, verbs = asyncio.run(read())
    assert (verbs.count("queue_depths"), verbs.count("workers"), "queues" in verbs) == (1, 1, False)
    assert {shown(each)["queue_jobs"]["default", "queued"] for each in readings} == {1.0}


def test_unavailable_store_is_reported_without_failing_the_reader() -> None:
    silent = asyncio.Event()

    async def away() -> Store:
        raise Unavailable("it is away")

    async def never() -> Store:
        await silent.wait()
        raise AssertionError

    async def read(opened: Any) -> list[Reading]:
        return await QueueFigures(opened, labels=10).read()

    for opened in (away, never):
        assert shown(asyncio.run(read(opened))) == {"store_up": {(): 0.0}}


def test_figures_of_a_slow_store_are_the_last_ones_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_metrics, "CACHE_SECONDS", 0.0)

    async def read() -> list[list[Reading]]:
        app, silent = Holdfast(f"sqlite:///{tmp_path}/jobs.db"), asyncio.Event()
        silent.set()

        async def open_slowly() -> Store:
            await silent.wait()
            return await app.open_store()

        async with app:
            await app.enqueue("work")
            figures = QueueFigures(open_slowly, labels=10)
            readings = []
            while not readings or len(shown(readings[0])) == 1:  # until this machine was quick enough
                readings = [await figures.read()]
            silent.clear()
            monkeypatch.setattr(queue_metrics, "WAIT_SECONDS", 0.01)
            monkeypatch.setattr(queue_metrics, "STALE_SECONDS", 3600.0)
            readings.append(await figures.read())
            monkeypatch.setattr(queue_metrics, "STALE_SECONDS", 0.0)
            readings.append(await figures.read())
            silent.set()
        return readings

    first, slow, stale = (shown(each) for each in asyncio.run(read()))
    assert (first["queue_jobs"]["default", "queued"], slow) == (1.0, first)
    assert stale == {"store_up": {(): 0.0}}
