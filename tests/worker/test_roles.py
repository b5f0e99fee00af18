"""Leaders and followers beside each other."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from holdfast import Holdfast
from tests.worker.support import harness


@pytest.mark.parametrize("queues", ["*", "default", "other"])
async def test_follower_starts_due_jobs_while_the_leader_is_busy(app: Holdfast, queues: str) -> None:
    """A leader with every runner occupied claims nothing; it makes due jobs ready for others all the same."""
    started: list[datetime] = []

    @app.task("long")
    async def long() -> None:
        await harnessed.clock.sleep(10_000)

    @app.task("short")
    async def short() -> None:
        started.append(harnessed.now)

    async with harness(app, concurrency=1) as harnessed:
        await long.options(queue="default" if queues == "*" else queues).enqueue()
        leader = await harnessed.start(role="leader", queues=queues)
        await harnessed.advance(1)
        assert len(leader.running_jobs) == 1
        await harnessed.start(role="follower")
        due = harnessed.now + timedelta(seconds=10)
        await short.options(delay=10).enqueue()
        await harnessed.advance(9.9)
        assert started == []
        await harnessed.advance(30)
        assert len(leader.running_jobs) == 1
    (instant,) = started
    sweep = app.settings.sweep * 1.2
    assert timedelta(0) <= instant - due <= sweep


async def test_an_idle_leader_makes_it_ready_at_its_very_instant(app: Holdfast) -> None:
    started: list[datetime] = []

    @app.task("short")
    async def short() -> None:
        started.append(harnessed.now)

    async with harness(app) as harnessed:
        await harnessed.start(role="leader")
        await harnessed.start(role="follower")
        due = harnessed.now + timedelta(seconds=10)
        await short.options(delay=10).enqueue()
        await harnessed.advance(60)
    assert started == [due]
