"""A handler's rows and its job's success are one commit, on every kind of connection, whatever dies and when."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, JobHandle, JobState, Retry
from holdfast.core.errors import Conflict, JobFailed
from holdfast.core.events import LeaseLostEvent
from holdfast.core.models import Lease, Settlement, TxOutcome
from holdfast.core.portal import drive_coroutine
from holdfast.stores.base import ClaimRequest
from holdfast.worker import Worker
from tests.external_tx.kinds import AWAITED, KINDS, Hold, by_asyncpg
from tests.external_tx.support import Place, Undone
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import until
from tests.worker.support import Recorder

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"heartbeat": "300ms", "sweep": "300ms", "poll": "300ms", "retry": "immediate"}
"""Beats that a test can outlast."""
SEEN = "select seen_at from SCHEMA.worker"
EXPIRED = """select lease_until < extract(epoch from statement_timestamp()) * 1000000 - 1000000
    from SCHEMA.job where task = 'work'"""
"""Whether its lease ended a second ago: the sweeper has been there since."""


def register(place: Place, kind: str, body: Callable[[Context, Hold], Any], **options: Any) -> Any:
    """A task whose handler runs ``await body(context, hold)`` in a transaction of that kind, after it wrote a row."""

    async def handle(context: Context) -> Any:
        async with KINDS[kind](place.url) as held:
            await held.execute(place.insert)
            return await body(context, held)

    if kind in AWAITED:

        async def work(context: Context) -> Any:
            return await handle(context)

        return place.app.task("work", **options)(work)

    def work_in_thread(context: Context) -> Any:
        return drive_coroutine(handle(context))

    return place.app.task("work", **options)(work_in_thread)


async def completes(kind: str, context: Context, held: Hold, result: Any) -> Any:
    if kind in AWAITED:
        return await context.complete(held.connection, result)
    return context.sync.complete(held.connection, result)


def serve(place: Place, job: Callable[[], Any], *, worker: Worker | None = None, **settings: Any) -> JobHandle[Any]:
    """Submit a job, and work until it has ended."""

    async def work() -> JobHandle[Any]:
        async with place.app:
            handle: JobHandle[Any] = await job()
            server = Worker(place.app, settings=place.app.settings.replace_values(**QUICK | settings))
            working = asyncio.create_task(server.run())
            with suppress(JobFailed):
                await handle.result(timeout=40)
            server.stop()
            await working
            return handle

    return asyncio.run(work())


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def outcome(place: Place, handle: JobHandle[Any]) -> tuple[str, int, int]:
    """What the job has come to, after how many attempts, and how many rows there are."""
    job = place.app.sync.get(handle.id)
    return job.state, job.attempts, place.rows()


def test_committed_the_rows_and_the_success_are_one(place: Place, kind: str) -> None:
    events = Recorder(place.app)

    async def body(context: Context, held: Hold) -> str:
        answer = await completes(kind, context, held, {"n": 2**70, "a": "x\0␀"})
        assert place.execute("select state from SCHEMA.job") == [(2,)], "seen before the commit"
        return f"not {answer}"

    work = register(place, kind, body)
    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 1, 1)
    assert handle.sync.result(timeout=0) == {"n": 2**70, "a": "x\0␀"}
    assert events.names(handle.id) == ["job_created", "lease_acquired", "handler_start", "job_succeeded"]


def test_rolled_back_the_attempt_has_failed(place: Place, kind: str) -> None:
    async def body(context: Context, held: Hold) -> str:
        answer = await completes(kind, context, held, context.attempts)
        if context.attempts == 1:
            raise Undone
        return str(answer)

    work = register(place, kind, body)
    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    (failed,) = place.app.sync.attempts(handle.id)
    assert (failed.claims, failed.state, failed.error) == (1, JobState.FAILED, "Undone")
    assert handle.sync.result(timeout=0) == 2


def test_session_ended_by_the_server_before_commit_completes_nothing(place: Place, kind: str) -> None:
    async def body(context: Context, held: Hold) -> None:
        await completes(kind, context, held, None)
        if context.attempts == 1:
            place.execute("select pg_terminate_backend(pid) from pg_locks where relation = 'TABLE'::regclass")

    work = register(place, kind, body)
    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)


# ── what handlers do around it ────────────────────────────────────────────────────────────────────────────────────
def test_handler_that_hides_its_rollback_has_failed(place: Place) -> None:
    @place.app.task("work", max_attempts=1)
    async def work(context: Context) -> str:
        with suppress(Undone):
            async with by_asyncpg(place.url) as held:
                await held.execute(place.insert)
                await context.complete(held.connection, "done")
                raise Undone
        return "all is well"

    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.DEAD, 1, 0)
    assert place.app.sync.get(handle.id).error == "the transaction in which it was completed was not committed"


def test_an_error_after_the_commit_changes_nothing(place: Place) -> None:
    events = Recorder(place.app)

    @place.app.task("work")
    async def work(context: Context) -> None:
        async with by_asyncpg(place.url) as held:
            await held.execute(place.insert)
            await context.complete(held.connection, "done")
        raise Undone

    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 1, 1)
    assert events.names(handle.id)[-1] == "job_succeeded"


def test_what_was_committed_cannot_be_completed_again(place: Place) -> None:
    """As by a handler that repeats a transaction whose commit was not answered."""
    refused: list[str] = []

    @place.app.task("work")
    async def work(context: Context) -> None:
        for _ in range(2):
            async with by_asyncpg(place.url) as held:
                await held.execute(place.insert)
                try:
                    await context.complete(held.connection, "done")
                except Conflict as error:
                    refused.append(str(error))
                    raise

    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 1, 1)
    assert refused == [f"job {handle.id} is not this attempt's to complete: it is succeeded now; roll back"]


def test_handler_that_continues_after_the_commit_is_not_interrupted(place: Place) -> None:
    """Though every beat finds its lease gone."""
    events = Recorder(place.app)
    ended: list[bool] = []

    @place.app.task("work")
    async def work(context: Context) -> None:
        async with by_asyncpg(place.url) as held:
            await held.execute(place.insert)
            await context.complete(held.connection)
        (begun,) = place.execute(SEEN)
        await asyncio.to_thread(until, lambda: place.execute(SEEN)[0][0] > begun[0] + 1_500_000, "some beats")
        ended.append(context.cancelled)

    handle = serve(place, work.enqueue)

    assert ended == [False]
    assert outcome(place, handle) == (JobState.SUCCEEDED, 1, 1)
    assert events.names(handle.id) == ["job_created", "lease_acquired", "handler_start", "job_succeeded"]


def test_a_transaction_that_outlasts_the_lease_keeps_its_job(place: Place) -> None:
    """No other worker can take the job, or waits for it: a job of a dead worker is found and run meanwhile."""
    others: list[JobState] = []
    outlasted: list[int] = []

    @place.app.task("other")
    async def other() -> None: ...

    @place.app.task("work")
    async def work(context: Context) -> str:
        async with by_asyncpg(place.url) as held:
            await held.execute(place.insert)
            await context.complete(held.connection, "done")
            await asyncio.to_thread(until, lambda: place.execute(EXPIRED)[0][0], "the lease to end")
            outlasted.append(context.attempts)
            handle = await other.options(delay=3600).enqueue()
            place.execute("update SCHEMA.job set state = 2, claims = 1, lease_until = 1 where task = 'other'")
            await handle.result(timeout=30)
            others.append(await handle.state())
        return "after"

    handle = serve(place, work.enqueue, concurrency=4, lease="3s")

    # On a machine that stands still for seconds a lease may also be lost before.
    assert outcome(place, handle) == (JobState.SUCCEEDED, *outlasted, 1)
    assert others == [JobState.SUCCEEDED]
    assert handle.sync.result(timeout=0) == "done"


def test_a_lease_that_is_lost_takes_the_rows_with_it(place: Place) -> None:
    errors: list[str] = []

    @place.app.task("work")
    def work(context: Context) -> str:
        if context.attempts == 1:
            place.execute("update SCHEMA.job set lease_until = 1")
            until(lambda: place.execute("select claims from SCHEMA.job") == [(2,)], "another to take it")
        try:
            return drive_coroutine(written(context))
        except Conflict as error:  # LeaseLost, or stopped before it tried
            errors.append(str(error))
            raise

    async def written(context: Context) -> str:
        async with KINDS["psycopg"](place.url) as held:
            await held.execute(place.insert)
            return str(context.sync.complete(held.connection, f"by {context.attempts}"))

    handle = serve(place, work.enqueue, concurrency=2)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert handle.sync.result(timeout=0) == "by 2"
    assert len(errors) == 1


def test_lease_that_is_lost_after_a_rollback_is_no_success(place: Place) -> None:
    events = Recorder(place.app)

    @place.app.task("work")
    async def work(context: Context) -> int:
        if context.attempts == 1:
            with suppress(Undone):
                async with by_asyncpg(place.url) as held:
                    await context.complete(held.connection, "done")
                    raise Undone
            place.execute("update SCHEMA.job set lease_until = 1")
            await asyncio.to_thread(
                until, lambda: place.execute("select claims from SCHEMA.job") == [(2,)], "another to take it"
            )
        return context.attempts

    handle = serve(place, work.enqueue, concurrency=2)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 0)
    assert handle.sync.result(timeout=0) == 2
    assert events.names(handle.id).count("job_succeeded") == 1


async def _claimed(place: Place) -> Lease:
    await place.app.enqueue("work")
    claim = await (await place.app.open_store()).queueing.claim(
        ClaimRequest("w", {"*": 1}, limit=1, lease_for=timedelta(minutes=1))
    )
    return claim.jobs[0].lease


def test_the_store_says_what_became_of_a_completion(place: Place) -> None:
    async def ask() -> None:
        async with place.app:
            store: Any = await place.app.open_store()
            lease = await _claimed(place)
            assert await store.external.tx_outcome(lease) is TxOutcome.ROLLED_BACK
            released = Settlement(job_id=lease.job_id, claims=lease.claims, state=JobState.QUEUED, refund=True)
            assert (await store.queueing.settle([released]))[0].accepted
            assert await store.external.tx_outcome(lease) is TxOutcome.LEASE_LOST
            (job,) = (
                await store.queueing.claim(ClaimRequest("w", {"*": 1}, limit=1, lease_for=timedelta(minutes=1)))
            ).jobs
            lease = job.lease
            with suppress(Undone):
                async with by_asyncpg(place.url) as held:
                    assert (await place.app.external_tx.complete(held.connection, lease, None)).accepted
                    assert await store.external.tx_outcome(lease) is TxOutcome.PENDING
                    raise Undone
            assert await store.external.tx_outcome(lease) is TxOutcome.ROLLED_BACK
            async with by_asyncpg(place.url) as held:
                assert (await place.app.external_tx.complete(held.connection, lease, '"r"')).accepted
            assert await store.external.tx_outcome(lease) is TxOutcome.COMMITTED
            assert await store.external.tx_outcome(Lease(lease.job_id, 7)) is TxOutcome.LEASE_LOST
            await place.app.delete([lease.job_id])
            assert await store.external.tx_outcome(lease) is TxOutcome.LEASE_LOST
            async with by_asyncpg(place.url) as held:
                answer = await place.app.external_tx.complete(held.connection, lease, None)
                assert (answer.accepted, answer.state) == (False, None)

    asyncio.run(ask())


def test_an_expired_lease_completes_nothing(place: Place) -> None:
    async def ask() -> None:
        async with place.app:
            lease = await _claimed(place)
            place.execute("update SCHEMA.job set lease_until = 1")
            async with by_asyncpg(place.url) as held:
                answer = await place.app.external_tx.complete(held.connection, lease, None)
            assert (answer.accepted, answer.state) == (False, JobState.RUNNING)

    asyncio.run(ask())


def test_superseded_lease_completes_nothing(place: Place) -> None:
    async def ask() -> None:
        async with place.app:
            store: Any = await place.app.open_store()
            superseded = await _claimed(place)
            await store.queueing.settle(
                [Settlement(job_id=superseded.job_id, claims=superseded.claims, state=JobState.QUEUED)]
            )
            claim = await store.queueing.claim(ClaimRequest("other", {"*": 1}, limit=1, lease_for=timedelta(minutes=1)))
            async with by_asyncpg(place.url) as held:
                answer = await place.app.external_tx.complete(held.connection, superseded, '"late"')
            assert (answer.accepted, answer.state) == (False, JobState.RUNNING)
            async with by_asyncpg(place.url) as held:
                assert (await place.app.external_tx.complete(held.connection, claim.jobs[0].lease, '"mine"')).accepted
            assert (await place.app.get(superseded.job_id)).result == '"mine"'

    asyncio.run(ask())


def test_lease_number_of_another_worker_completes_nothing(place: Place) -> None:
    async def ask() -> None:
        async with place.app:
            lease = await _claimed(place)  # a failover forgot an earlier claim of the same number, by "other"
            async with by_asyncpg(place.url) as held:
                answer = await place.app.external_tx.complete(held.connection, lease, '"late"', "other")
            assert (answer.accepted, answer.state) == (False, JobState.RUNNING)
            async with by_asyncpg(place.url) as held:
                assert (await place.app.external_tx.complete(held.connection, lease, '"mine"', "w")).accepted

    asyncio.run(ask())


def test_handler_that_timed_out_completes_nothing(place: Place) -> None:
    """A thread cannot be killed: what timed out may not end the job behind its worker's back."""
    refused: list[str] = []

    @place.app.task("work", timeout=0.2, max_attempts=1)
    def work(context: Context) -> None:
        until(lambda: context.cancelled, "the timeout")
        try:
            drive_coroutine(written(context))
        except Conflict as error:
            refused.append(str(error))
            raise

    async def written(context: Context) -> None:
        async with KINDS["psycopg"](place.url) as held:
            await held.execute(place.insert)
            context.sync.complete(held.connection)

    handle = serve(place, work.enqueue)
    until(lambda: refused, "the thread to end")

    assert outcome(place, handle) == (JobState.DEAD, 1, 0)
    assert refused == [f"job {handle.id} was asked to stop, and cannot be completed any more; roll back"]


# ── processes that die ────────────────────────────────────────────────────────────────────────────────────────────
PROGRAM = """
import asyncio, os, sys
from holdfast import Context, Holdfast
from holdfast.worker import Worker
from tests.external_tx.kinds import INSERT, by_asyncpg

url, when = sys.argv[1:]
app = Holdfast(url)

def wait_to_die():
    print("now", flush=True)
    sys.stdin.read()

@app.task("work")
async def work(context: Context) -> str:
    async with by_asyncpg(url) as held:
        await held.execute(INSERT.replace("SCHEMA", url.rpartition("=")[2]))
        await context.complete(held.connection, "first")
        if when == "before":
            wait_to_die()
    wait_to_die()

settings = app.settings.replace_values(lease="3s", heartbeat="300ms", sweep="300ms", poll="300ms")
asyncio.run(Worker(app, settings=settings).run())
"""


@contextmanager
def _worker(place: Place, when: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", PROGRAM, place.url, when]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("when", "expected"), [("before", "second"), ("after", "first")])
def test_a_worker_that_is_killed_around_the_commit(place: Place, when: str, expected: str) -> None:
    """Before it the job runs again; after it never does, though no answer came. The rows are there once."""
    handle = place.app.sync.enqueue("work")
    with _worker(place, when) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
        process.wait()

    @place.app.task("work", retry=Retry.immediate())
    async def work(context: Context) -> str:
        async with by_asyncpg(place.url) as held:
            await held.execute(place.insert)
            return str(await context.complete(held.connection, "second"))

    async def known() -> JobHandle[Any]:
        return handle

    serve(place, known)

    assert place.both() == (1, 1)
    assert handle.sync.result(timeout=0) == expected


@pytest.mark.parametrize(("heard", "attempts"), [(True, 1), (False, 2)], ids=["after", "before"])
def test_a_commit_that_is_not_answered(place: Place, heard: bool, attempts: int) -> None:
    """The connection is cut after the server heard of the commit, or before; the handler cannot tell, the store can."""
    events = Recorder(place.app)
    with FaultProxy(place.server.port) as proxy:
        through = place.url.replace(f":{place.server.port}/", f":{proxy.port}/")
        if heard:
            proxy.cut_after(b"COMMIT;", answer=b"COMMIT")
        else:
            proxy.cut_before(b"COMMIT;")

        @place.app.task("work")
        async def work(context: Context) -> int:
            async with by_asyncpg(through) as held:
                await held.execute(place.insert)
                return int(await context.complete(held.connection, context.attempts))

        handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, attempts, 1)
    assert events.names(handle.id).count("job_succeeded") == 1
    assert events.of(LeaseLostEvent) == []
