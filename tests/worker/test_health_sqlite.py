"""What a worker tells of its health is true, also while a handler blocks it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from holdfast import Holdfast
from holdfast.config import Settings
from holdfast.worker.overseen import Overseen
from holdfast.worker.worker import Worker
from tests.worker.watching import Watched, tells, until


async def test_a_running_job_is_seen_and_its_duration_is_its_handlers(app: Holdfast) -> None:
    @app.task("slow")
    async def slow() -> None:
        await asyncio.sleep(0.5)

    async with Watched(app) as watched:
        handle = await slow.enqueue()
        await until(lambda: watched.worker.shift.running)
        assert (await watched.samples())["worker_active_jobs", frozenset()] == 1
        await handle.result(timeout=20)
        await until(lambda: not watched.worker.shift.held)
        samples = await watched.samples()

    assert samples["worker_active_jobs", frozenset()] == 0
    labels = frozenset({"job_type": "slow", "outcome": "succeeded"}.items())
    assert 0.5 <= samples["job_duration_seconds_sum", labels] < 5


async def test_a_worker_is_well_from_its_first_fetch_until_it_stops(app: Holdfast) -> None:
    async with Watched(app, poll="30ms") as watched:
        await until(lambda: watched.worker.shift.fetched_at is not None)
        assert await watched.status("/health") == await watched.status("/health/ready") == (200, "ok")
        assert await watched.status("/health/live") == (200, "ok")
        watched.worker.stop()
        assert await watched.status("/health/ready") == (503, "stopping")
        assert await watched.status("/health/live") == (200, "ok")


async def test_a_worker_whose_hands_are_full_is_well(app: Holdfast) -> None:
    @app.task("forever")
    async def forever() -> None:
        await asyncio.Event().wait()

    async with Watched(app, concurrency=1, poll="10ms", health_within="1s", lease="3s", beat="50ms") as watched:
        await forever.enqueue()
        await until(lambda: watched.worker.shift.running)
        await asyncio.sleep(1.5)  # longer than a worker with free hands may go without fetching
        assert await watched.status("/health") == (200, "ok")


async def test_a_worker_that_cannot_fetch_is_not_well_and_lives(app: Holdfast) -> None:
    async with Watched(app, poll="10ms", health_within="1s") as watched:
        shift = watched.worker.shift
        await until(lambda: shift.fetched_at is not None)
        watched.worker.fetcher._patience.after = asyncio.Event().wait  # type: ignore[assignment]  # for ever
        watched.worker.fetcher._claim = _away  # type: ignore[method-assign]  # as a store that has gone
        await until(lambda: tells(watched, "/health/ready", 503, "store_away"))
        assert await watched.status("/health/live") == (200, "ok")
        assert (await watched.samples())["worker_healthy", frozenset()] == 0


async def _away(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_blocked_worker_still_answers_and_says_so(app: Holdfast) -> None:
    let_go = threading.Event()

    @app.task("block")
    async def block() -> None:
        await asyncio.to_thread(lambda: None)
        let_go.wait(30)

    seen: list[str] = []

    async with Watched(app, health_within="1s") as watched:

        def look() -> None:
            end = time.monotonic() + 25
            while time.monotonic() < end and (watched.fetch("/health/live")[0] != 503 or watched.lag() < 1):
                time.sleep(0.05)
            seen.extend((watched.fetch("/health/live")[1], watched.fetch("/health/ready")[1]))
            let_go.set()

        looking = threading.Thread(target=look)
        looking.start()  # not later: the handler blocks this very loop
        handle = await block.enqueue()
        await handle.result(timeout=30)
        await asyncio.to_thread(looking.join)
        assert [json.loads(each)["status"] for each in seen] == ["blocked", "blocked"]
        await until(lambda: tells(watched, "/health/live", 200, "ok"))


async def test_without_a_port_nothing_is_counted_or_served(app: Holdfast) -> None:
    worker = Worker(app, settings=Settings.load(url=app.settings.url))
    with Overseen(worker.shift):
        assert not any(thread.name == "holdfast-sidecar" for thread in threading.enumerate())
        assert app.events._subscribers == {}
