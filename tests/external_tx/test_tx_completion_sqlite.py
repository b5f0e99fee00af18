"""The same in a SQLite file: one writer at a time, so everybody waits for the handler's transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobState
from holdfast.core.errors import HoldfastError, Invalid, LeaseLost
from holdfast.core.models import Job, Lease, Settlement, TxOutcome
from holdfast.stores.base import ClaimRequest
from holdfast.worker import Worker
from tests.external_tx.support import Undone
from tests.support import redis


@contextmanager
def begun(app: Holdfast) -> Iterator[sqlite3.Connection]:
    """A transaction of the caller's that wrote a row; committed in the end, rolled back by an error."""
    with closing(sqlite3.connect(app.settings.url.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute("insert into invoice values (1)")
        yield connection


def rows(app: Holdfast) -> int:
    with closing(sqlite3.connect(app.settings.url.removeprefix("sqlite:///"))) as connection:
        return int(connection.execute("select count(*) from invoice").fetchone()[0])


@pytest.mark.parametrize("executor", ["async", "thread"])
def test_rollback_fails_the_attempt_and_commit_ends_the_job(app: Holdfast, executor: str) -> None:
    def write(context: Context, complete: Any) -> Any:
        with begun(app) as connection:
            done = complete(connection, context.attempts)
            if context.attempts == 1:
                raise Undone
            return done

    async def work(context: Context) -> Any:
        with begun(app) as connection:
            done = await context.complete(connection, context.attempts)
            if context.attempts == 1:
                raise Undone
            return done

    def work_in_thread(context: Context) -> Any:
        return write(context, context.sync.complete)

    task: Any = app.task("work", retry="immediate")(work if executor == "async" else work_in_thread)

    async def serve() -> Any:
        async with app:
            handle = await task.enqueue()
            worker = Worker(app)
            working = asyncio.create_task(worker.run())
            assert await handle.result(timeout=40) == 2
            worker.stop()
            await working
            return await handle.job()

    job = asyncio.run(serve())
    assert (job.state, job.attempts, rows(app)) == (JobState.SUCCEEDED, 2, 1)


async def _claimed(app: Holdfast) -> Lease:
    await app.enqueue("work")
    claim = await (await app.open_store()).queueing.claim(
        ClaimRequest("w", {"*": 1}, limit=1, lease_for=timedelta(minutes=1))
    )
    return claim.jobs[0].lease


def test_the_store_says_what_became_of_a_completion(app: Holdfast) -> None:
    async def ask() -> None:
        async with app:
            store: Any = await app.open_store()
            lease = await _claimed(app)
            assert await store.external.tx_outcome(lease) is TxOutcome.ROLLED_BACK
            released = Settlement(job_id=lease.job_id, claims=lease.claims, state=JobState.QUEUED, refund=True)
            assert (await store.queueing.settle([released]))[0].accepted
            assert await store.external.tx_outcome(lease) is TxOutcome.LEASE_LOST
            (job,) = (
                await store.queueing.claim(ClaimRequest("w", {"*": 1}, limit=1, lease_for=timedelta(minutes=1)))
            ).jobs
            lease = job.lease
            with suppress(Undone), begun(app) as connection:
                assert (await app.external_tx.complete(connection, lease, None)).accepted
                raise Undone
            assert await store.external.tx_outcome(lease) is TxOutcome.ROLLED_BACK
            with begun(app) as connection:
                assert (await app.external_tx.complete(connection, lease, '"r"')).accepted
            assert await store.external.tx_outcome(lease) is TxOutcome.COMMITTED
            assert (await app.get(lease.job_id)).result == '"r"'
            assert await store.external.tx_outcome(Lease(lease.job_id, 7)) is TxOutcome.LEASE_LOST
            with begun(app) as connection:
                answer = await app.external_tx.complete(connection, lease, None)
            assert (answer.accepted, answer.state) == (False, JobState.SUCCEEDED)

    asyncio.run(ask())


def test_lease_number_of_another_worker_completes_nothing(app: Holdfast) -> None:
    async def ask() -> None:
        async with app:
            lease = await _claimed(app)  # a restored backup forgot an earlier claim of the same number, by "other"
            with begun(app) as connection:
                answer = await app.external_tx.complete(connection, lease, '"late"', "other")
            assert (answer.accepted, answer.state) == (False, JobState.RUNNING)
            with begun(app) as connection:
                assert (await app.external_tx.complete(connection, lease, '"mine"', "w")).accepted

    asyncio.run(ask())


def test_handler_completes_nothing_while_another_worker_has_its_job(app: Holdfast) -> None:
    accepted: list[bool] = []

    @app.task("work", retry="immediate")
    async def work(context: Context) -> None:
        with begun(app) as connection:
            if context.attempts == 1:
                connection.execute("update holdfast_job set worker = 'other'")
            try:
                await context.complete(connection, None)
            except LeaseLost as error:
                accepted.append(False)
                raise Undone from error
            accepted.append(True)

    async def serve() -> None:
        async with app:
            handle = await work.enqueue()
            worker = Worker(app)
            working = asyncio.create_task(worker.run())
            await handle.result(timeout=40)
            worker.stop()
            await working

    asyncio.run(serve())
    assert accepted == [False, True]


def test_superseded_lease_completes_nothing(app: Holdfast) -> None:
    async def ask() -> None:
        async with app:
            store = await app.open_store()
            superseded = await _claimed(app)
            await store.queueing.settle(
                [Settlement(job_id=superseded.job_id, claims=superseded.claims, state=JobState.QUEUED)]
            )
            claim = await store.queueing.claim(ClaimRequest("other", {"*": 1}, limit=1, lease_for=timedelta(minutes=1)))
            with begun(app) as connection:
                answer = await app.external_tx.complete(connection, superseded, '"late"')
            assert (answer.accepted, answer.state) == (False, JobState.RUNNING)
            with begun(app) as connection:
                assert (await app.external_tx.complete(connection, claim.jobs[0].lease, '"mine"')).accepted
            assert (await app.get(superseded.job_id)).result == '"mine"'

    asyncio.run(ask())


def test_a_context_without_a_store_says_what_to_do() -> None:
    context = Context(Job("id", "t", "q", "{}", 1, 1, None, 0, 0, 0, 0))
    with pytest.raises(HoldfastError, match='executor="async" or "thread"'):
        context.sync.complete(None)


def test_redis_store_refuses_a_caller_s_transaction() -> None:
    """The attempt fails, and the worker goes on."""
    server = redis.shared()
    with server.fresh_namespace() as namespace, closing(sqlite3.connect(":memory:")) as connection:
        app = Holdfast(server.url(namespace=namespace))

        @app.task("work", max_attempts=1)
        async def work(context: Context) -> None:
            await context.complete(connection)

        async def serve() -> str:
            async with app:
                with pytest.raises(Invalid, match="shares no transaction with a caller"):
                    await work.options(connection=connection).enqueue()
                handle = await work.enqueue()
                await Worker(app, drain=True).run()
                return (await handle.job()).error or ""

        assert "which shares no transaction with a caller" in asyncio.run(serve())
