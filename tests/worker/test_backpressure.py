"""Back-pressure: a queue refuses submissions beyond its depth, on every store."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast, JobFilter, QueueFull
from tests.worker.support import harness


async def test_full_queue_refuses_until_there_is_room(app: Holdfast) -> None:
    @app.task("work", queue="mail")
    async def work(number: int) -> None: ...

    async with harness(app) as harnessed:
        await app.limits.add("mail", queue="mail", depth=5)
        for number in range(5):
            await work.enqueue(number)
        with pytest.raises(QueueFull, match=r"queue mail is full: 5 of 5 jobs wait"):
            await work.enqueue(5)
        assert await app.count(JobFilter()) == 5
        await app.enqueue("work", {"number": 1}, queue="other")
        await harnessed.start()
        await harnessed.advance(1)
        await work.enqueue(6)


async def test_batch_that_does_not_fit_is_refused_whole(app: Holdfast) -> None:
    @app.task("work")
    async def work(number: int) -> None: ...

    async with harness(app):
        await app.limits.add("depth", queue="default", depth=5)
        await app.enqueue_many([work.new_job(number) for number in range(3)])
        with pytest.raises(QueueFull, match=r"3 of 5 jobs wait and 3 are too many"):
            await app.enqueue_many([work.new_job(number) for number in range(3)])
        assert await app.count(JobFilter()) == 3
        await app.enqueue_many([work.new_job(number) for number in range(2)])


async def test_delayed_jobs_count_and_changes_hold_at_once(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app):
        await app.limits.add("depth", queue="default", depth=2)
        await asyncio.gather(*[work.options(delay=60).enqueue() for _ in range(2)])
        with pytest.raises(QueueFull):
            await work.enqueue()
        await app.limits.change("depth", depth=3)
        await work.enqueue()
        await app.limits.remove("depth")
        await work.enqueue()


async def test_depth_alone_does_not_slow_claims(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app):
        await app.limits.add("depth", queue="default", depth=10)
        handle = await work.enqueue()
        assert (await app.get(handle.id)).partition is None
