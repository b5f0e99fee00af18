"""What a worker has in hand at one instant: a crash charges an attempt for each of those jobs."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast
from holdfast.testing import Harness
from tests.worker.support import forever, harness

JOBS = 40


def record_maximum(app: Holdfast, harnessed: list[Harness], most: list[int]) -> None:
    """Registers a short task that notes how many jobs its worker holds, each time it starts."""

    @app.task("short")
    async def short() -> None:
        most.append(len(harnessed[0].workers[0].shared.claimed))
        await harnessed[0].clock.sleep(0.001)


async def drained(app: Holdfast, most: list[int], *, max_attempts: int, **settings: object) -> float:
    """Runs short jobs to their end; the seconds that took."""
    opened: list[Harness] = []
    record_maximum(app, opened, most)
    async with harness(app, poll="1h", **settings) as harnessed:
        opened.append(harnessed)
        began = harnessed.now
        jobs = [app.draft_job("short", {}, max_attempts=max_attempts) for _ in range(JOBS)]
        handles = await app.enqueue_many(jobs)
        await harnessed.run_until_idle()
        assert {await each.state() for each in handles} == {"succeeded"}
        return (harnessed.now - began).total_seconds()


async def test_usual_worker_holds_more_jobs_than_it_runs(app: Holdfast) -> None:
    """Else the tests below would show nothing."""
    most: list[int] = []
    await drained(app, most, max_attempts=5, concurrency=2)
    assert max(most) > 2


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_worker_holds_only_last_attempts_it_can_run(app: Holdfast, concurrency: int) -> None:
    most: list[int] = []
    took = await drained(app, most, max_attempts=1, concurrency=concurrency)
    assert max(most) <= concurrency
    assert took < 1  # it waited for no poll


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_worker_without_prefetch_holds_only_what_it_runs(app: Holdfast, concurrency: int) -> None:
    most: list[int] = []
    took = await drained(app, most, max_attempts=5, concurrency=concurrency, prefetch=False)
    assert max(most) <= concurrency
    assert took < 1


@pytest.mark.parametrize(("max_attempts", "prefetch"), [(1, True), (5, False)])
async def test_outcome_is_stored_at_once_beside_long_jobs(app: Holdfast, max_attempts: int, prefetch: bool) -> None:
    app.task("long", max_attempts=1)(forever)

    @app.task("short")
    async def short() -> None: ...

    async with harness(app, concurrency=2, prefetch=prefetch) as harnessed:
        await app.enqueue("long")
        await harnessed.advance(0)
        job = await app.enqueue("short", max_attempts=max_attempts)
        await harnessed.advance(0)
        assert await job.state() == "succeeded"


async def test_last_attempts_start_in_the_order_of_claims(app: Holdfast) -> None:
    order: list[int] = []

    @app.task("work")
    async def work(number: int) -> None:
        order.append(number)

    async with harness(app, concurrency=1, poll="1h") as harnessed:
        for number in range(JOBS):
            await work.options(max_attempts=1 if number % 3 else 5).enqueue(number)
        await harnessed.run_until_idle()
    assert order == list(range(JOBS))


async def test_draining_worker_leaves_no_last_attempt(app: Holdfast) -> None:
    @app.task("work", max_attempts=1)
    async def work(number: int) -> None: ...

    async with harness(app, concurrency=2, poll="1h", queues="a,b") as harnessed:
        handles = [await work.options(queue="ab"[number % 2]).enqueue(number) for number in range(JOBS)]
        worker = await harnessed.start(drain=True)
        await harnessed.run_until_idle()
        assert worker.running.done()
        assert {await each.state() for each in handles} == {"succeeded"}


async def test_lowered_concurrency_holds_though_jobs_keep_coming(app: Holdfast) -> None:
    """Busy runners are never idle: those beyond the new number end with their job. A raised number holds, too."""
    running, most = set(), {}

    @app.task("short")
    async def short(number: int) -> None:
        running.add(number)
        most[phase] = max(most.get(phase, 0), len(running))
        await harnessed.clock.sleep(0.02)
        running.discard(number)

    async with harness(app, concurrency=20, poll="1h") as harnessed:
        phase = "before"
        await app.enqueue_many([short.new_job(number=number) for number in range(3000)])
        worker = (await harnessed.start()).worker
        for concurrency in (20, 2, 5):
            phase = "between"
            worker.shared.apply_settings(Holdfast(concurrency=concurrency, poll="1h").settings)
            worker.runner.resize(concurrency)
            await harnessed.advance(0.1)
            phase = f"with {concurrency}"
            await harnessed.advance(0.5)
    assert most == {"before": 20, "between": 20, "with 20": 20, "with 2": 2, "with 5": 5}


async def test_lowered_concurrency_of_an_idle_worker_holds_at_once(app: Holdfast) -> None:
    running, most = set(), [0]

    @app.task("short")
    async def short(number: int) -> None:
        running.add(number)
        most.append(len(running))
        await harnessed.clock.sleep(0.02)
        running.discard(number)

    async with harness(app, concurrency=20, poll="1h") as harnessed:
        worker = (await harnessed.start()).worker
        await harnessed.run_until_idle()
        worker.shared.apply_settings(Holdfast(concurrency=2, poll="1h").settings)
        worker.runner.resize(2)
        await app.enqueue_many([short.new_job(number=number) for number in range(100)])
        await harnessed.run_until_idle()
    assert max(most) == 2


async def test_runners_that_stay_are_not_replaced(app: Holdfast) -> None:
    @app.task("short")
    async def short() -> None:
        await harnessed.clock.sleep(0.02)

    def runners() -> set[asyncio.Task[object]]:
        return {task for task in asyncio.all_tasks() if task.get_name() == "holdfast-runner"}

    async with harness(app, concurrency=4, poll="1h") as harnessed:
        await app.enqueue_many([short.new_job() for _ in range(4)])
        worker = (await harnessed.start()).worker
        await harnessed.advance(0.01)
        worker.shared.apply_settings(Holdfast(app.settings.url, concurrency=2, poll="1h").settings)
        worker.runner.resize(2)
        await harnessed.run_until_idle()
        left = runners()
        await harnessed.advance(0.1)
        assert (len(left), runners()) == (2, left)
