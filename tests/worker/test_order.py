"""When and in which order jobs run: delays, priorities, queues and their limits, pauses, buffers."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

import pytest

from holdfast import Holdfast, Retry
from holdfast.core.models import JobState
from holdfast.stores.base import ClaimRequest
from tests.worker.support import forever, harness, lose


async def test_delayed_jobs_start_exactly_at_their_instant(app: Holdfast) -> None:
    runs: dict[str, datetime] = {}

    @app.task("later")
    async def later(name: str) -> None:
        runs[name] = harnessed.now

    async with harness(app) as harnessed:
        began = harnessed.now
        wanted = {"soon": 0.001, "minute": 60, "odd": 61.234567, "week": 7 * 86_400}
        for name, delay in wanted.items():
            await later.options(delay=delay).enqueue(name)
        await later.options(run_at=began + timedelta(hours=1)).enqueue("hour")
        await harnessed.advance(59.999999)
        assert set(runs) == {"soon"}
        await harnessed.advance(0.000001)
        assert set(runs) == {"soon", "minute"}
        await harnessed.run_until_idle()
    assert {name: runs[name] - began for name in wanted} == {
        name: timedelta(seconds=delay) for name, delay in wanted.items()
    }
    assert runs["hour"] - began == timedelta(hours=1)


async def test_idle_worker_starts_a_new_job_before_its_poll(app: Holdfast) -> None:
    runs: list[datetime] = []

    @app.task("now")
    async def now() -> None:
        runs.append(harnessed.now)

    async with harness(app, poll="1h") as harnessed:
        await harnessed.advance(100)
        enqueued_at = harnessed.now
        await now.enqueue()
        await harnessed.advance(0)
    assert runs == [enqueued_at]


async def test_higher_priority_first_then_earlier(app: Holdfast) -> None:
    """A transport brings them in the order of their arrival."""
    order: list[str] = []

    @app.task("work")
    async def work(name: str) -> None:
        order.append(name)

    async with harness(app, concurrency=1) as harnessed:
        await work.options(priority=-5).enqueue("low")
        for number in range(3):
            await work.enqueue(f"plain {number}")
        await work.options(priority=5).enqueue("high")
        await work.options(priority=100).enqueue("highest")
        await harnessed.run_until_idle()
    plain = ["plain 0", "plain 1", "plain 2"]
    carried = app.settings.transport != "none"
    assert order == (["low", *plain, "high", "highest"] if carried else ["highest", "high", *plain, "low"])


async def test_priority_of_retries_puts_them_before_or_behind_fresh_jobs(app: Holdfast) -> None:
    """A transport brings them in the order of their arrival."""
    order: list[str] = []

    @app.task("work", retry=Retry.immediate(priority=5))
    async def work(name: str) -> None:
        order.append(name)
        if not name.startswith("fresh") and order.count(name) < 3:
            raise ValueError(name)

    async with harness(app, concurrency=1, prefetch=False) as harnessed:
        await work.enqueue("front")
        await work.options(retry="immediate:priority=-5").enqueue("back")
        await work.enqueue("fresh 1")
        await work.enqueue("fresh 2")
        await harnessed.run_until_idle()
    if app.settings.transport == "none":
        assert order == ["front"] * 3 + ["back", "fresh 1", "fresh 2", "back", "back"]
    else:
        assert order == ["front", "back", "fresh 1", "fresh 2", *["front", "back"] * 2]


async def test_a_queue_s_own_limit(app: Holdfast) -> None:
    most: Counter[str] = Counter()
    now_running: Counter[str] = Counter()

    @app.task("work")
    async def work(queue: str) -> None:
        now_running[queue] += 1
        most[queue] = max(most[queue], now_running[queue])
        await harnessed.clock.sleep(1)
        now_running[queue] -= 1

    async with harness(app, queues="mail:2,default:5", concurrency=10) as harnessed:
        began = harnessed.now
        for queue in ["mail"] * 8 + ["default"] * 20 + ["unserved"]:
            await work.options(queue=queue).enqueue(queue)
        await harnessed.run_until_idle()
        took = (harnessed.now - began).total_seconds()
        counts = {queue.name: queue.states for queue in await app.queues()}
    assert most == {"mail": 2, "default": 5}
    assert took < 4.5  # as many rounds of one second as the limits ask for, and no poll between them
    assert counts["mail"]["succeeded"] == 8
    assert counts["unserved"]["queued"] == 1


async def test_a_capped_queue_alone_does_not_wait_for_the_poll(app: Holdfast) -> None:
    @app.task("work", queue="mail")
    async def work() -> None:
        await harnessed.clock.sleep(0.01)

    async with harness(app, queues="mail:1", poll="1h") as harnessed:
        began = harnessed.now
        for _ in range(10):
            await work.enqueue()
        await harnessed.run_until_idle()
        assert (harnessed.now - began).total_seconds() < 0.5


async def test_suspect_starts_as_soon_as_a_last_attempt_has_ended(app: Holdfast) -> None:
    """While jobs on their last attempt hold all slots a claim passes over suspects: their end wakes the fetcher."""
    at: dict[str, datetime] = {}

    @app.task("short")
    async def short() -> None:
        return None

    @app.task("last", max_attempts=1, queue="slow", priority=50)
    async def last() -> None:
        await harnessed.clock.sleep(10)
        at["ended"] = harnessed.now

    @app.task("suspect", queue="slow")
    async def suspect() -> None:
        at["started"] = harnessed.now

    async with harness(app, concurrency=1, poll="1h") as harnessed:
        await lose(app, await suspect.enqueue(), harnessed.clock)
        await app.pause("slow")
        await last.enqueue()
        await harnessed.start()
        for _ in range(30):  # so quick that the worker claims ahead
            await app.enqueue_many([short.new_job() for _ in range(100)])
            await harnessed.advance(0.01)
        await app.resume("slow")
        await harnessed.advance(60)
    assert at["started"] - at["ended"] < timedelta(seconds=5)


async def test_long_jobs_are_not_hoarded(app: Holdfast) -> None:
    """Jobs claimed ahead for the rate of short ones are given back when long ones are in their way."""

    @app.task("short")
    async def short() -> None:
        return None

    @app.task("long")
    async def long() -> None:
        await forever()

    async with harness(app, concurrency=2) as harnessed:
        hand = await harnessed.start()
        for _ in range(30):
            await app.enqueue_many([short.new_job() for _ in range(100)])
            await harnessed.advance(0.01)
        await app.enqueue_many([long.new_job() for _ in range(300)])
        await harnessed.advance(0.1)
        await harnessed.advance(5)
        shared = hand.worker.shared
        assert (len(shared.running), len(shared.buffer)) == (2, 0)
        (queue,) = await app.queues()
        assert (queue.states["running"], queue.states["queued"]) == (2, 298)


async def test_a_paused_queue_rests_until_it_is_resumed(app: Holdfast) -> None:
    runs: list[str] = []

    @app.task("work")
    async def work(queue: str) -> None:
        runs.append(queue)

    async with harness(app) as harnessed:
        await app.pause("mail")
        for queue in ("mail", "default"):
            await work.options(queue=queue).enqueue(queue)
        await work.options(queue="mail", delay=60).enqueue("mail")
        await harnessed.advance(300)
        assert runs == ["default"]
        await app.resume("mail")
        await harnessed.advance(0)
        assert runs == ["default", "mail", "mail"]


async def test_a_follower_neither_promotes_nor_sweeps(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app, role="follower") as harnessed:
        plain, delayed = await work.enqueue(), await work.options(delay=60).enqueue()
        store = await app.open_store()
        lost = await work.options(queue="lost").enqueue()
        await store.queueing.claim(ClaimRequest("doomed", {"lost": 1}, limit=1, lease_for=timedelta(seconds=5)))
        await harnessed.advance(600)
        assert await plain.state() == "succeeded"
        assert await delayed.state() == "scheduled"
        assert await lost.state() == "running"
        await harnessed.start(role="leader")
        await harnessed.advance(60)
        assert {await delayed.state(), await lost.state()} == {"succeeded"}


async def test_due_jobs_of_unserved_queues_become_ready(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app, queues="default", sweep="5s") as harnessed:
        job = await work.options(queue="other", delay=60).enqueue()
        await harnessed.advance(59)
        assert await job.state() == "scheduled"
        await harnessed.advance(8)
        assert await job.state() == "queued"


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED])
async def test_ended_jobs_are_pruned_when_their_time_is_over(app: Holdfast, state: JobState) -> None:
    @app.task("work")
    async def work() -> None: ...

    async with harness(app, keep_succeeded="1d", keep_cancelled="1d") as harnessed:
        job = await work.options(delay=10).enqueue()
        if state is JobState.CANCELLED:
            await job.cancel()
        await harnessed.advance(timedelta(hours=23))
        assert await job.state() is state
        await harnessed.advance(timedelta(hours=2))
        assert await app.count() == 0
