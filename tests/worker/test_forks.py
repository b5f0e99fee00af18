"""Forks: copies of ended jobs that keep the first steps, run by whole workers in virtual time."""

from __future__ import annotations

import pytest

from holdfast import Conflict, Context, Holdfast, Invalid, JobState
from holdfast.core.errors import NotFound
from holdfast.core.ids import new_id
from tests.worker.stepping import Ledger, steps_of
from tests.worker.support import harness


async def test_fork_takes_the_steps_from_the_chosen_one_on(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order", queue="mail", priority=5)
    async def order(context: Context, number: int) -> str:
        await context.step("reserve", ledger.do, f"reserve {number}")
        await context.step("charge", ledger.do, f"charge {number}")
        return str(await context.step("ship", ledger.do, f"ship {number}"))

    async with harness(app, queues="mail") as harnessed:
        await harnessed.start()
        first = await order.options(key="order-1", tags=["spring"], metadata={"by": "Ada"}).enqueue(1)
        await harnessed.run_until_idle()
        fork = await app.fork_job(first.id, from_step="charge", payload={"number": 2})
        await harnessed.run_until_idle()
        assert ledger.done == ["reserve 1", "charge 1", "ship 1", "charge 2", "ship 2"]
        steps = await steps_of(app, fork.id)
        assert [(step.name, step.number) for step in steps] == [("reserve", 1), ("charge", 2), ("ship", 3)]
        job, options = await fork.job(), (await fork.job()).options_or_default
        assert (job.state, job.queue, job.priority, job.key) == (JobState.SUCCEEDED, "mail", 5, None)
        assert (options.forks, options.tags, options.metadata) == (first.id, ("spring",), {"by": "Ada"})
        assert (await first.result(timeout=0), await fork.result(timeout=0)) == ("SHIP 1", "SHIP 2")
        assert [step.name for step in await steps_of(app, first.id)] == ["reserve", "charge", "ship"]


async def test_fork_from_before_a_signal_waits_anew_and_from_behind_keeps_it(app: Holdfast) -> None:
    @app.task("order")
    async def order(context: Context) -> str:
        await context.step("reserve", str)
        approval = await context.wait_for("approved", timeout=60)
        await context.step("ship", str)
        return str(approval)

    async with harness(app) as harnessed:
        await harnessed.start()
        await app.signal("approved", "first")
        first = await order.enqueue()
        await harnessed.run_until_idle()
        behind = await app.fork_job(first.id, from_step="ship")
        before = await app.fork_job(first.id, from_step="wait_for approved")
        await harnessed.advance(1)
        assert (await behind.result(timeout=0), await before.state()) == ("first", JobState.WAITING)
        await app.signal("approved", "second")
        await harnessed.run_until_idle()
        assert await before.result(timeout=0) == "second"


async def test_fork_without_a_step_takes_all_of_them(app: Holdfast) -> None:
    ledger = Ledger()

    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("charge", ledger.do, "charge")

    async with harness(app) as harnessed:
        await harnessed.start()
        first = await order.enqueue()
        await harnessed.run_until_idle()
        fork_id = new_id()
        for number in range(2):
            fork = await app.fork_job(first.id, id=fork_id)
            assert (fork.id, fork.created) == (fork_id, number == 0)
        await harnessed.run_until_idle()
        assert ledger.done == ["charge", "charge"]


async def test_fork_has_no_unique_key(app: Holdfast) -> None:
    @app.task("order", unique="active")
    async def order() -> None: ...

    async with harness(app) as harnessed:
        first = await order.enqueue()
        await app.cancel_one(first.id)
        waiting = await order.enqueue()
        fork = await app.fork_job(first.id)
        assert fork.created
        assert (await app.get(fork.id)).options_or_default.unique is None
        assert (await order.enqueue()).id == waiting.id  # the key is still that of the other
        await harnessed.start()
        await harnessed.run_until_idle()
        assert await app.count() == 3


async def test_fork_keeps_what_the_handler_has_saved(app: Holdfast) -> None:
    @app.task("import")
    async def load(context: Context) -> object:
        await context.step("open", str)
        seen = await context.state.read()
        await context.state.save("seen")
        await context.step("close", str)
        return seen

    async with harness(app) as harnessed:
        await harnessed.start()
        first = await load.enqueue()
        await harnessed.run_until_idle()
        fork = await app.fork_job(first.id, from_step="close")
        await harnessed.run_until_idle()
        assert [await each.result(timeout=0) for each in (first, fork)] == [None, "seen"]


async def test_job_that_cannot_be_forked_is_refused(app: Holdfast) -> None:
    @app.task("order")
    async def order(context: Context) -> None:
        await context.step("charge", str)

    async with harness(app) as harnessed:
        waiting = await order.enqueue()
        with pytest.raises(Conflict, match="it is queued; wait for its end"):
            await app.fork_job(waiting.id)
        await harnessed.start()
        await harnessed.run_until_idle()
        with pytest.raises(Invalid, match="recorded are charge; a step that has failed runs again without from_step"):
            await app.fork_job(waiting.id, from_step="ship")
        with pytest.raises(Invalid, match="give a UUID"):
            await app.fork_job(waiting.id, id="mine")
        with pytest.raises(Invalid):
            await app.fork_job(waiting.id, payload={"unknown": 1})
        batch = await app.enqueue_batch([order.new_job()])
        await harnessed.run_until_idle()
        with pytest.raises(Conflict, match="it is a batch"):
            await app.fork_job(batch.id)
        with pytest.raises(NotFound):
            await app.fork_job(new_id())
        assert await app.count() == 3
