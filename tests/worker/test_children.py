"""Children of handlers and their durable waits, run by whole workers in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobCancelled, JobFailed, JobFilter, JobState, Retry
from tests.worker.stepping import Ledger, Receipt, steps_of
from tests.worker.support import harness


async def test_handler_calls_another_task_without_a_runner(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("charge")
    async def charge(order: int, *, cents: int) -> Receipt:
        await ledger.do("charge")
        return Receipt(order + cents, ("a",))

    @app.task("order")
    async def order(context: Context, number: int) -> list[Any]:
        first = await context.call(charge, number, cents=100)
        second = await context.call(charge.options(priority=7, queue="slow"), number, cents=200)
        return [first, second]

    async with harness(app, concurrency=1) as harnessed:
        await harnessed.start()
        handle = await order.enqueue(1)
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == [{"number": 101, "lines": ["a"]}, {"number": 201, "lines": ["a"]}]
        assert ledger.done == ["charge", "charge"]
        job = await handle.job()
        assert (job.attempts, job.claims) == (1, 3)
        waits = await app.read_waits(handle.id)
        children = [await app.get(each.job_id) for each in waits.dependencies]
        assert sorted((each.priority, each.queue) for each in children) == [(0, "default"), (7, "slow")]
        assert [step.name for step in await steps_of(app, handle.id) if step.number] == ["charge", "charge#2"]
        assert {each.id[:13] for each in children} == {handle.id[:13]}


async def test_handler_gathers_many_children(app: Holdfast) -> None:
    @app.task("square")
    async def square(n: int) -> int:
        return n * n

    @app.task("sum")
    async def add(context: Context, n: int) -> int:
        return sum(await context.gather(*[context.call(square, each) for each in range(n)]))

    async with harness(app, concurrency=3) as harnessed:
        await harnessed.start()
        handle = await add.enqueue(100)
        empty = await add.enqueue(0)
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == sum(n * n for n in range(100))
        assert await empty.result(timeout=0) == 0
        assert (await handle.job()).claims == 2


async def test_failed_child_fails_its_parent_until_it_is_replayed(app: Holdfast) -> None:
    broken = [True]

    @app.task("charge", max_attempts=1)
    async def charge() -> str:
        if broken[0]:
            raise ValueError("declined")
        return "paid"

    @app.task("order", max_attempts=2, retry=Retry.fixed(3600))
    async def order(context: Context) -> str:
        return await context.call(charge)

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.advance(1)
        job = await handle.job()
        assert job.state is JobState.FAILED
        assert "JobFailed" in str(job.error)
        assert "declined" in str(job.error)
        broken[0] = False
        [child] = (await app.read_waits(handle.id)).dependencies
        await app.replay([child.job_id])
        await harnessed.advance(15)
        await harnessed.advance(3600)
        assert await handle.result(timeout=0) == "paid"


async def test_errors_of_children_are_kept_when_they_are_asked_for(app: Holdfast) -> None:
    seen: list[list[Any]] = []

    @app.task("child", max_attempts=1)
    async def child(how: str) -> str:
        if how == "fail":
            raise ValueError("declined")
        return how

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> None:
        calls = [context.call(child, how) for how in ("well", "fail")]
        calls.append(context.call(child.options(queue="nowhere"), "cancelled"))
        seen.append(await context.gather(*calls, return_exceptions=True))
        await context.step("after", str, 1)
        if len(seen) == 1:
            raise RuntimeError

    async with harness(app, queues="default") as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        *_, third = [each for each in (await app.read_waits(handle.id)).dependencies if each.state == "open"]
        await app.cancel([third.job_id])
        await harnessed.advance(15)  # a worker hears of it
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
    for values in seen:
        assert values[0] == "well"
        assert isinstance(values[1], JobFailed)
        assert "declined" in str(values[1])
        assert isinstance(values[2], JobCancelled)
    assert len(seen) == 2


async def test_child_that_was_deleted_is_a_failure(app: Holdfast) -> None:
    @app.task("child")
    async def child() -> None: ...

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.call(child.options(queue="nowhere"))

    async with harness(app, queues="default") as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        [dependency] = (await app.read_waits(handle.id)).dependencies
        await app.delete([dependency.job_id])
        await harnessed.advance(15)
        await harnessed.run_until_idle()
        job = await handle.job()
        assert job.state is JobState.DEAD
        assert "was deleted" in str(job.error)


async def test_child_with_a_time_of_its_own_is_refused(app: Holdfast) -> None:
    @app.task("child")
    async def child() -> None: ...

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await context.call(child.options(delay=5))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "delay" in str((await handle.job()).error)


async def test_children_beside_each_other_need_gather_of_the_context(app: Holdfast) -> None:
    @app.task("child")
    async def child() -> None: ...

    @app.task("order", max_attempts=1)
    async def order(context: Context) -> None:
        await asyncio.gather(context.call(child), context.call(child))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert "call it in the handler itself" in str((await handle.job()).error)


@pytest.mark.parametrize("change", ["another child", "no child", "another step", "another gather"])
async def test_started_child_that_the_code_does_not_call_any_more_is_no_guess(app: Holdfast, change: str) -> None:
    ledger, deployed = Ledger(), [False]

    @app.task("ship")
    async def ship() -> str:
        deployed[0] = True
        return await ledger.do("ship")

    @app.task("dispatch")
    async def dispatch() -> str:
        return await ledger.do("dispatch")

    @app.task("order")
    async def order(context: Context) -> object:
        await context.step("charge", ledger.do, "charge")
        if not deployed[0]:
            return await context.call(ship)
        match change:
            case "another child":
                return await context.call(dispatch)
            case "another gather":
                return await context.gather(context.call(dispatch), context.call(dispatch))
            case "another step":
                return await context.step("dispatch", ledger.do, "dispatch")
        return None

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
        assert (job.state, job.reason) == (JobState.DEAD, "steps_changed")
        assert "child 'ship' was started" in str(job.error)
        assert ledger.done == ["charge", "ship"]
        await handle.replay(from_step="ship")
        await harnessed.run_until_idle()
        assert await handle.state() is JobState.SUCCEEDED
        assert ledger.done[:2] == ["charge", "ship"]
        assert "charge" not in ledger.done[2:]


async def test_killed_parent_takes_up_its_children_again(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("child")
    async def child(n: int) -> int:
        await ledger.do(f"child {n}")
        return n

    @app.task("order", retry=Retry.fixed(1))
    async def order(context: Context) -> list[int]:
        values = await context.gather(*[context.call(child, n) for n in range(3)])
        await ledger.do("again")
        if ledger.done.count("again") == 1:
            raise RuntimeError
        return values

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        await harnessed.advance(1)
        assert await handle.result(timeout=0) == [0, 1, 2]
        assert sorted(ledger.done) == ["again", "again", "child 0", "child 1", "child 2"]


@pytest.mark.parametrize("unique", ["unstarted", "active"])
async def test_unique_child_of_several_calls_runs_once(app: Holdfast, unique: Any) -> None:
    paid: list[int] = []

    @app.task("pay", queue="pay", unique=unique)
    async def pay(order: int) -> int:
        paid.append(order)
        return order * 10

    @app.task("order")
    async def place(context: Context, order: int, name: str) -> int:
        return await context.call(pay, order)

    @app.task("twice")
    async def twice(context: Context, order: int) -> list[int]:
        return await context.gather(*[context.call(pay, order) for _ in range(2)])

    @app.task("in-turn")
    async def in_turn(context: Context, order: int) -> list[int]:
        return [await context.call(pay, order) for _ in range(2)]

    async with harness(app) as harnessed:
        await pay.enqueue(2)
        handles = [await place.enqueue(order, name) for order in (1, 2) for name in "ab"]
        gathered, sequential = await twice.enqueue(3), await in_turn.enqueue(4)
        await app.pause("pay")
        await harnessed.start()
        await harnessed.run_until_idle()  # all of them wait
        await app.resume("pay")
        await harnessed.run_until_idle()
        assert [await each.result(timeout=0) for each in handles] == [10, 10, 20, 20]
        assert await gathered.result(timeout=0) == [30, 30]
        assert await sequential.result(timeout=0) == [40, 40]
        assert sorted(paid) == [1, 2, 3, 4, 4]  # a call after the end of the first is other work


async def test_child_with_the_key_of_its_parent_is_refused(app: Holdfast) -> None:
    @app.task("order")
    async def order(context: Context) -> None:
        await context.call(order.options(key="one"))

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.options(key="one").enqueue()
        await harnessed.run_until_idle()
        job = await handle.job()
        assert job.state is JobState.DEAD
        assert "cannot wait for itself" in str(job.error)


async def test_child_that_failed_does_not_bind_a_retry(app: Holdfast) -> None:
    is_rerouted: list[bool] = []

    @app.task("ship", max_attempts=1)
    async def ship() -> str:
        raise ValueError("no carrier")

    @app.task("dispatch")
    async def dispatch() -> str:
        return "by hand"

    @app.task("order")
    async def order(context: Context) -> str:
        if is_rerouted:
            return await context.call(dispatch)
        try:
            return await context.call(ship)
        except JobFailed:
            is_rerouted.append(True)
            raise

    async with harness(app) as harnessed:
        await harnessed.start()
        handle = await order.enqueue()
        await harnessed.run_until_idle()
        assert await handle.result(timeout=0) == "by hand"


async def test_parent_that_failed_is_repaired_after_the_retention_of_its_children(app: Holdfast) -> None:
    broken, ran = [True], list[str]()

    @app.task("part", max_attempts=1)
    async def part(context: Context, name: str) -> str:
        if name == "bad":
            await context.sleep("4d")
        ran.append(name)
        if name == "bad" and broken[0]:
            raise ValueError(name)
        return name

    @app.task("whole", max_attempts=1)
    async def whole(context: Context) -> list[str]:
        await context.step("begin", str)
        return await context.gather(context.call(part, "good"), context.call(part, "bad"))

    async with harness(app) as harnessed:
        await harnessed.start()
        parent, other = await whole.enqueue(), await part.enqueue("other")
        await harnessed.run_until_idle()
        (bad,) = (await app.find(JobFilter(tasks=("part",), states=(JobState.DEAD,)))).jobs
        await harnessed.advance("5d")  # the workers of the harness prune
        assert await app.count(JobFilter(tasks=("part",))) == 2, f"{other.id} is beyond its retention"
        broken[0] = False
        await app.replay_one(bad.id)
        await harnessed.run_until_idle()
        await app.replay_one(parent.id, from_step="begin")
        await harnessed.run_until_idle()
        assert await parent.result(timeout=0) == ["good", "bad"]
        assert sorted(ran) == ["bad", "bad", "good", "other"]
