"""What a worker answers_with of its health is true, also while a handler blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.events import Event, StoreTrouble
from holdfast.settings.settings import Settings
from holdfast.stores.sqlite.queueing import SqliteQueueing
from holdfast.worker.metrics_server import MetricsServer
from holdfast.worker.worker import Worker
from tests.worker.watching import Watched, answers_with, until


async def test_running_job_is_measured_by_its_handler_duration(app: Holdfast) -> None:
    enough = asyncio.Event()

    @app.task("slow")
    async def slow() -> None:
        await enough.wait()

    async with Watched(app) as watched:
        handle = await slow.enqueue()
        await until(lambda: watched.worker.shared.running)
        seen = time.monotonic()
        assert (await watched.samples())["worker_active_jobs", frozenset()] == 1
        least = time.monotonic() - seen
        enough.set()
        await handle.result(timeout=60)
        await until(lambda: not watched.worker.shared.claimed)
        samples = await watched.samples()

    assert samples["worker_active_jobs", frozenset()] == 0
    labels = frozenset({"task": "slow", "outcome": "succeeded"}.items())
    assert least <= samples["job_duration_seconds_sum", labels] < 25


async def test_worker_is_ready_from_first_fetch_until_stop(app: Holdfast) -> None:
    async with Watched(app, poll="30ms") as watched:
        await until(lambda: answers_with(watched, "/health/ready", 200, "ok"))
        assert await watched.status("/health") == await watched.status("/health/ready") == (200, "ok")
        assert await watched.status("/health/live") == (200, "ok")
        watched.worker.stop()
        assert await watched.status("/health/ready") == (503, "stopping")
        assert await watched.status("/health/live") == (200, "ok")


async def test_fully_busy_worker_is_ready_while_it_renews(app: Holdfast) -> None:
    @app.task("forever")
    async def forever() -> None:
        await asyncio.Event().wait()

    async with Watched(app, concurrency=1) as watched:
        shared = watched.worker.shared
        await forever.enqueue()
        await until(lambda: shared.is_at_capacity and shared.heartbeat_at)
        shared.fetched_at = shared.clock.monotonic() - 1000
        assert await watched.status("/health") == (200, "ok")
        shared.is_at_capacity = False  # as if there were room
        assert await watched.status("/health") == (503, "store_away")


async def test_a_worker_that_cannot_fetch_is_not_well_and_lives(app: Holdfast) -> None:
    asked = asyncio.Event()

    async def silence(*_: Any, **__: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with Watched(app, poll="10ms") as watched:
        shared = watched.worker.shared
        await until(lambda: answers_with(watched, "/health/ready", 200, "ok"))
        watched.worker.fetcher._claim = silence  # type: ignore[method-assign]  # as of a store that has gone
        await asked.wait()
        shared.fetched_at = shared.clock.monotonic() - 1000
        assert await watched.status("/health/ready") == (503, "store_away")
        assert await watched.status("/health/live") == (200, "ok")
        assert (await watched.samples())["worker_healthy", frozenset()] == 0


async def test_a_worker_whose_heartbeats_are_not_stored_is_not_well(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "the disk is full"
    troubles: list[Event] = []

    async def refuse(*_: Any, **__: Any) -> Any:
        raise Unavailable(full)

    app.events.subscribe(troubles.append, StoreTrouble)
    async with Watched(app, poll="10ms", heartbeat="30ms") as watched:
        shared = watched.worker.shared
        await until(lambda: answers_with(watched, "/health/ready", 200, "ok"))
        with monkeypatch.context() as patch:
            patch.setattr(SqliteQueueing, "heartbeat", refuse)
            await until(lambda: StoreTrouble(service="heartbeat", error=full, retry_in=0.03) in troubles)
            shared.heartbeat_at = shared.clock.monotonic() - 1000
            assert await watched.status("/health/ready") == (503, "store_away")
            assert (await watched.samples())["worker_healthy", frozenset()] == 0
            assert await watched.status("/health/live") == (200, "ok")
        await until(lambda: answers_with(watched, "/health/ready", 200, "ok"))


async def test_a_blocked_worker_still_answers_and_says_so(app: Holdfast) -> None:
    may_end = threading.Event()

    @app.task("block")
    async def block() -> None:
        await asyncio.to_thread(lambda: None)
        may_end.wait(120)

    seen: list[str] = []
    late: list[float] = []

    async with Watched(app, health_within="3s") as watched:

        def look() -> None:
            end = time.monotonic() + 90
            while time.monotonic() < end and (watched.fetch("/health/live")[0] != 503 or watched.lag() < 1):
                time.sleep(0.05)
            seen.extend((watched.fetch("/health/live")[1], watched.fetch("/health/ready")[1]))
            late.append(watched.lag())
            may_end.set()

        looking = threading.Thread(target=look)
        looking.start()  # not later: the handler blocks this very loop
        handle = await block.enqueue()
        await handle.result(timeout=120)
        await asyncio.to_thread(looking.join)
        assert [json.loads(each)["status"] for each in seen] == ["blocked", "blocked"]
        assert late[0] >= 1
        await until(lambda: answers_with(watched, "/health/live", 200, "ok"))


async def test_without_a_port_nothing_is_counted_or_served(app: Holdfast) -> None:
    worker = Worker(app, settings=Settings.load(url=app.settings.url))
    with MetricsServer(worker.shared):
        assert not any(thread.name == "holdfast-metrics" for thread in threading.enumerate())
        assert app.events._subscribers == {}


EVERYWHERE = "0.0.0.0"  # noqa: S104 - that it is refused is the test


@pytest.mark.parametrize(
    ("host", "is_open", "refused"), [(EVERYWHERE, False, True), (EVERYWHERE, True, False), ("localhost", False, False)]
)
async def test_reachable_metrics_port_needs_metrics_open(
    app: Holdfast, host: str, is_open: bool, refused: bool
) -> None:
    settings = app.settings.replace_values(metrics_port=0, metrics_host=host, metrics_open=is_open)
    overseen = MetricsServer(Worker(app, settings=settings).shared)
    with pytest.raises(ConfigError, match="set metrics_open") if refused else contextlib.nullcontext(), overseen:
        assert not refused
