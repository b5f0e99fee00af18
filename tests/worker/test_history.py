"""History of ended jobs, as sweeps of a worker count it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from holdfast import Holdfast, Invalid
from holdfast.core.history import HistoryInterval
from holdfast.testing import Harness
from tests.worker.support import harness, kept_store


async def test_worker_counts_what_has_ended_whatever_ended_it(app: Holdfast) -> None:
    @app.task("work", max_attempts=1)
    async def work(fails: bool = False, seconds: float = 0.0) -> None:
        await harnessed.clock.sleep(seconds)
        if fails:
            raise ValueError("no")

    async with harness(app, keep_succeeded=timedelta(seconds=100)) as harnessed:
        began = await (await app.open_store()).health.server_time_us()
        for seconds in (1.0, 3.0):
            await work.enqueue(seconds=seconds)
        await work.enqueue(fails=True)
        await app.cancel_one((await work.options(delay="1h").enqueue()).id)
        await harnessed.advance("6m")
        assert await app.count() == 2, "what succeeded is pruned, and counted all the same"
        for since, interval in (("1h", HistoryInterval.MINUTE), ("30d", HistoryInterval.HOUR)):
            history = await app.read_history(since)
            points = history.to_points()
            assert history.interval is interval
            assert [point.start_us for point in points] == list(
                range(points[0].start_us, points[-1].start_us + 1, interval.length_us)
            )
            assert sum(point.succeeded for point in points) == 2
            assert (sum(point.dead for point in points), sum(point.cancelled for point in points)) == (1, 1)
            (ended,) = [point for point in points if point.succeeded]
            assert ended.start_us == interval.floor_us(began)
            assert (ended.mean_seconds, ended.longest_seconds) == (pytest.approx(2, abs=0.1), pytest.approx(3, abs=0.1))
        assert sum(point.succeeded for point in history.to_points(lambda queue: queue == "other")) == 0


async def test_span_without_a_history_is_refused(app: Holdfast) -> None:
    async with app:
        for since in ("32d", "4m", 0):
            with pytest.raises(Invalid, match=r"since: .* is not valid; give a span from 5m to 31d"):
                await app.read_history(since)
        assert await asyncio.to_thread(lambda: app.sync.read_history(timedelta(hours=1)).rows) == []


async def test_follower_counts_nothing(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with Harness(app, url=kept_store(app.settings.url), role="follower") as harnessed:
        handle = await work.enqueue()
        await harnessed.advance("5m")
        assert await handle.state() == "succeeded"
        assert (await app.read_history()).rows == []
