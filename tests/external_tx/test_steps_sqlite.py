"""Steps in their handlers' transactions on a SQLite file, and refused where a store has none."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, suppress
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobState
from holdfast.core.errors import Conflict, HoldfastError, JobFailed
from holdfast.core.models import Job, Lease
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.stores.base import Store
from holdfast.worker import Worker
from tests.external_tx.support import Undone
from tests.external_tx.test_tx_completion_sqlite import _claimed, begun, rows
from tests.support import redis


def serve(app: Holdfast, task: Any) -> Job:
    """Submits a job, works until it has ended, and returns it."""

    async def work() -> Job:
        async with app:
            handle = await task.enqueue()
            worker = Worker(app)
            working = asyncio.create_task(worker.run())
            with suppress(JobFailed):
                await handle.result(timeout=40)
            worker.stop()
            await working
            return await handle.job()

    return asyncio.run(work())


def steps(app: Holdfast, job: Job) -> list[str]:
    return [step.name for step in app.sync.steps(job.id)]


@pytest.mark.parametrize("executor", ["async", "thread"])
def test_step_is_written_with_its_rows_once(app: Holdfast, executor: str) -> None:
    """Its first attempt rolls back, the second commits, the third finds the step."""
    calls: list[int] = []

    def charge(connection: sqlite3.Connection, attempt: int) -> int:
        calls.append(attempt)
        connection.execute("insert into invoice values (2)")
        return attempt

    async def work(context: Context) -> int:
        with begun(app) as connection:
            receipt = await context.step_in(connection, "charge", charge, connection, context.attempts)
            if context.attempts == 1:
                raise Undone
        if context.attempts == 2:
            raise Undone
        return receipt

    def work_in_thread(context: Context) -> int:
        with begun(app) as connection:
            receipt = context.sync.step_in(connection, "charge", charge, connection, context.attempts)
            if context.attempts == 1:
                raise Undone
        if context.attempts == 2:
            raise Undone
        return receipt

    handler: Any = work if executor == "async" else work_in_thread
    job = serve(app, app.task("work", retry="immediate")(handler))

    assert (job.state, job.attempts, job.return_value()) == (JobState.SUCCEEDED, 3, 2)
    assert (calls, rows(app), steps(app, job)) == ([1, 2], 3, ["charge"])  # each commit has a row of the test too


def test_transaction_that_is_left_open_fails_the_attempt(app: Holdfast) -> None:
    """As with a forgotten commit."""
    url = app.settings.url.removeprefix("sqlite:///")

    @app.task("work", max_attempts=1)
    async def work(context: Context) -> str:
        with closing(sqlite3.connect(url)) as connection:
            await context.step_in(connection, "charge", connection.execute, "insert into invoice values (1)")
            return "all is well"

    job = serve(app, work)

    assert (job.state, rows(app), steps(app, job)) == (JobState.DEAD, 0, [])
    assert (job.error or "").startswith("step 'charge'")


@pytest.mark.parametrize("behind", ["step", "call", "gather"])
def test_step_of_the_store_does_not_wait_for_an_open_transaction(app: Holdfast, behind: str) -> None:
    """It would wait for the commit, and the commit for it."""

    @app.task("ship")
    async def ship() -> None: ...

    @app.task("work", max_attempts=1)
    async def work(context: Context) -> None:
        with begun(app) as connection:
            await context.step_in(connection, "charge", str)
            await take(context)

    async def take(context: Context) -> None:
        if behind == "step":
            await context.step("ship", str)
        elif behind == "call":
            await context.call(ship)
        else:
            await context.gather(context.call(ship))

    job = serve(app, work)

    assert (job.state, rows(app), steps(app, job), app.sync.count()) == (JobState.DEAD, 0, [], 1)
    assert (job.error or "").endswith(
        "step 'charge' is not committed: commit its transaction before the next step and the end of the handler; "
        "let its errors end the attempt"
    )


@pytest.mark.parametrize("behind", ["step", "call", "gather"])
def test_step_behind_one_that_was_rolled_back_is_refused(app: Holdfast, behind: str) -> None:
    """Recorded, it would look like changed code in the next attempt; so would a child that was started."""

    @app.task("ship")
    async def ship() -> None: ...

    @app.task("work", retry="immediate")
    async def work(context: Context) -> int:
        with suppress(Undone), begun(app) as connection:
            await context.step_in(connection, "charge", str)
            if context.attempts == 1:
                raise Undone
        if behind == "step":
            await context.step("ship", str)
        elif behind == "call":
            await context.call(ship)
        else:
            await context.gather(context.call(ship))
        return context.attempts

    job = serve(app, work)

    assert (job.state, job.return_value(), steps(app, job)) == (JobState.SUCCEEDED, 2, ["charge", "ship"])
    (failed,) = app.sync.attempts(job.id)
    assert (failed.error or "").startswith("step 'charge' is not committed")


def test_store_records_a_step_under_its_lease_alone(app: Holdfast) -> None:
    async def ask() -> None:
        async with app:
            store: Store = await app.open_store()
            lease = await _claimed(app)
            with begun(app) as connection:
                answers = [
                    await app.external_tx.record_step(connection, NewStep(asked, name, 1, True, "1", worker), previous)
                    for asked, name, worker, previous in (
                        (lease, "charge", "w", None),
                        (lease, "charge", "w", None),
                        (lease, "ship", "w", "lost"),
                        (lease, "ship", "w", "charge"),
                        (lease, "late", "other", None),
                        (Lease(lease.job_id, 7), "late", "w", None),
                    )
                ]
                assert await store.workflow.read_steps(lease.job_id) == []
                connection.execute("update holdfast_job set lease_until = 1")
                answers.append(
                    await app.external_tx.record_step(connection, NewStep(lease, "late", 1, True, "1", "w"), None)
                )
            recorded, held_alone, lost = StepReceipt(True, True), StepReceipt(True, False), StepReceipt(False, False)
            assert answers == [recorded, held_alone, held_alone, recorded, lost, lost, lost]
            assert [step.name for step in await store.workflow.read_steps(lease.job_id)] == ["charge", "ship"]

    asyncio.run(ask())


def test_connection_without_a_transaction_is_refused(app: Holdfast) -> None:
    calls: list[int] = []
    refused: list[str] = []
    url = app.settings.url.removeprefix("sqlite:///")

    @app.task("work", max_attempts=1)
    def work(context: Context) -> None:
        with closing(sqlite3.connect(url, isolation_level=None)) as connection:
            try:
                context.sync.step_in(connection, "charge", calls.append, 1)
            except Conflict as error:
                refused.append(str(error))
                raise

    assert serve(app, work).state is JobState.DEAD
    assert (calls, ["would commit by itself" in text for text in refused]) == ([], [True])


def test_thread_takes_no_async_function_into_a_transaction(app: Holdfast) -> None:
    async def charge() -> None: ...

    @app.task("work", max_attempts=1)
    def work(context: Context) -> None:
        with begun(app) as connection:
            context.sync.step_in(connection, "charge", charge)

    assert "give one that is not async to sync.step_in" in (serve(app, work).error or "")


def test_redis_store_refuses_a_step_in_a_transaction() -> None:
    server = redis.shared()
    calls: list[int] = []
    with server.fresh_namespace() as namespace, closing(sqlite3.connect(":memory:")) as connection:
        app = Holdfast(server.url(namespace=namespace))

        @app.task("work", max_attempts=1)
        async def work(context: Context) -> None:
            await context.step_in(connection, "charge", calls.append, 1)

        assert "which shares no transaction with a caller" in (serve(app, work).error or "")
        assert calls == []


def test_context_without_a_store_refuses_a_step_in_a_transaction() -> None:
    context = Context(Job("id", "t", "q", "{}", 1, 1, None, 0, 0, 0, 0))
    refused = pytest.raises(HoldfastError, match=r'context\.step_in\(\): .* executor="async" or "thread"')
    with refused:
        context.sync.step_in(None, "charge", str)

    async def charge() -> None:
        await context.step_in(None, "charge", str)

    with refused:
        asyncio.run(charge())
