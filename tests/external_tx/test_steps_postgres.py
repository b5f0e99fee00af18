"""Steps in their handlers' own transactions, on every kind of connection: the rows and the record are one commit."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from holdfast import Context, JobHandle, JobState
from holdfast.core.errors import Conflict, Invalid, LeaseLost
from holdfast.core.models import Lease
from holdfast.core.portal import drive_coroutine
from holdfast.core.steps import NewStep, StepReceipt
from holdfast.stores.base import ClaimRequest
from tests.external_tx.kinds import AWAITED, KINDS, Hold, by_asyncpg, plain
from tests.external_tx.support import Place, Undone
from tests.external_tx.test_tx_completion_postgres import EXPIRED, ROOT, kind, outcome, serve
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import until

__all__ = ["kind"]

VALUE = {"n": 2**70, "a": "xé\0␀"}
"""The result of the step, with characters that not every session can send."""

Body = Callable[[Context, Hold], Awaitable[object]]


async def nothing(_: Context, __: Hold) -> None: ...


class Charge:
    """A task with a step that writes a row, and returns its result; ``inside`` runs before the commit."""

    def __init__(self, place: Place, kind: str, inside: Body = nothing, url: str = "") -> None:
        self.place, self.kind, self.inside, self.url = place, kind, inside, url or place.url
        self.calls: list[int] = []
        """The attempts in which the step ran."""

        async def work(context: Context) -> Any:
            return await self.handle(context)

        def work_in_thread(context: Context) -> Any:
            return drive_coroutine(self.handle(context))

        handler: Callable[..., Any] = work if kind in AWAITED else work_in_thread
        self.task: Any = place.app.task("work", retry="immediate")(handler)

    async def handle(self, context: Context) -> Any:
        async with KINDS[self.kind](self.url) as held:
            receipt = await self.step(context, held)
            await self.inside(context, held)
        return [receipt, context.attempts]

    async def step(self, context: Context, held: Hold) -> Any:
        async def charge() -> Any:
            self.calls.append(context.attempts)
            await held.execute(self.place.insert)
            return VALUE

        if self.kind in AWAITED:
            return await context.step_in(held.connection, "charge", charge)
        return context.sync.step_in(held.connection, "charge", lambda: drive_coroutine(charge()))

    def steps(self) -> int:
        """Number of committed steps."""
        return int(self.place.execute("select count(*) from SCHEMA.step")[0][0])


def test_committed_step_is_found_by_the_next_attempt(place: Place, kind: str) -> None:
    class Fails(Charge):
        async def handle(self, context: Context) -> Any:
            answer = await super().handle(context)
            if context.attempts == 1:
                raise Undone
            return answer

    async def inside(context: Context, _: Hold) -> None:
        if context.attempts == 1:
            assert (place.rows(), work.steps()) == (0, 0), "seen before the commit"

    work = Fails(place, kind, inside)
    handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert handle.sync.result(timeout=0) == [VALUE, 2]
    assert (work.calls, work.steps()) == ([1], 1)


def test_rolled_back_step_runs_again_in_the_next_attempt(place: Place, kind: str) -> None:
    async def inside(context: Context, _: Hold) -> None:
        if context.attempts == 1:
            raise Undone

    work = Charge(place, kind, inside)
    handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (work.calls, work.steps()) == ([1, 2], 1)


def test_savepoint_that_is_rolled_back_takes_the_step_with_it(place: Place, kind: str) -> None:
    """The outer transaction commits, and the handler returns as if nothing was wrong."""

    class Hides(Charge):
        async def step(self, context: Context, held: Hold) -> Any:
            with suppress(Undone):
                async with held.savepoint():
                    receipt = await super().step(context, held)
                    if context.attempts == 1:
                        raise Undone
                return receipt
            return None

    work = Hides(place, kind)
    handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (work.calls, work.steps()) == ([1, 2], 1)
    (failed,) = place.app.sync.attempts(handle.id)
    assert (failed.error or "").startswith("step 'charge' is not committed")


def test_session_ended_by_the_server_before_commit_records_nothing(place: Place, kind: str) -> None:
    async def inside(context: Context, _: Hold) -> None:
        if context.attempts == 1:
            place.execute("select pg_terminate_backend(pid) from pg_locks where relation = 'TABLE'::regclass")

    work = Charge(place, kind, inside)
    handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (work.calls, work.steps()) == ([1, 2], 1)


@pytest.mark.parametrize(("is_received", "calls"), [(True, [1]), (False, [1, 2])], ids=["after", "before"])
def test_commit_without_an_answer_records_the_step_once(place: Place, is_received: bool, calls: list[int]) -> None:
    with FaultProxy(place.server.port) as proxy:
        if is_received:
            proxy.cut_after(b"COMMIT;", answer=b"COMMIT")
        else:
            proxy.cut_before(b"COMMIT;")
        url = place.url.replace(f":{place.server.port}/", f":{proxy.port}/")
        work = Charge(place, "asyncpg", url=url)
        handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (work.calls, work.steps()) == (calls, 1)


# ── what stands around it ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("behind", ["step", "step_in", "call", "gather"])
def test_step_behind_one_that_was_rolled_back_is_refused(place: Place, behind: str) -> None:
    """Recorded, it would look like changed code in the next attempt; so would a child that was started."""
    done: list[str] = []

    @place.app.task("ship")
    async def ship() -> None:
        done.append("ship")

    @place.app.task("work", retry="immediate")
    async def work(context: Context) -> None:
        async with by_asyncpg(place.url) as held:
            with suppress(Undone):
                async with held.savepoint():
                    await context.step_in(held.connection, "charge", do, "charge", held)
                    if context.attempts == 1:
                        raise Undone
            if behind == "step_in":
                await context.step_in(held.connection, "ship", do, "ship", held)
        if behind == "step":
            await context.step("ship", do, "ship", None)
        elif behind == "call":
            await context.call(ship)
        elif behind == "gather":
            await context.gather(context.call(ship))

    async def do(what: str, held: Hold | None) -> None:
        done.append(what)
        if held is not None:
            await held.execute(place.insert)

    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1 + (behind == "step_in"))
    assert done == ["charge", *["ship"] * (behind == "step_in"), "charge", "ship"]
    (failed,) = place.app.sync.attempts(handle.id)
    assert (failed.error or "").startswith("step 'charge' is not committed")


@pytest.mark.parametrize("behind", ["step", "call", "gather"])
def test_step_of_the_store_is_refused_before_the_commit(place: Place, behind: str) -> None:
    """A child would wait for the job's row, which the open transaction has locked."""
    refused: list[bool] = []

    async def inside(context: Context, _: Hold) -> None:
        if context.attempts == 1:
            try:
                if behind == "step":
                    await context.step("ship", str)
                elif behind == "call":
                    await context.call(ship)
                else:
                    await context.gather(context.call(ship))
            finally:
                refused.append(True)

    @place.app.task("ship")
    async def ship() -> None: ...

    work = Charge(place, "asyncpg", inside)
    handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (refused, work.calls, work.steps(), place.jobs()) == ([True], [1, 2], 1, 1)
    (failed,) = place.app.sync.attempts(handle.id)
    assert "step 'charge' is not committed" in (failed.error or "")


def test_steps_and_the_success_are_one_transaction(place: Place) -> None:
    calls: list[str] = []

    @place.app.task("work", retry="immediate")
    async def work(context: Context) -> None:
        async with by_asyncpg(place.url) as held:
            for name in ("charge", "charge", "book"):
                await context.step_in(held.connection, name, do, name, held)
            await context.complete(held.connection, context.attempts)
            if context.attempts == 1:
                raise Undone

    async def do(what: str, held: Hold) -> None:
        calls.append(what)
        await held.execute(place.insert)

    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 3)
    assert calls == ["charge", "charge", "book"] * 2
    assert place.execute("select name from SCHEMA.step order by number") == [("charge",), ("charge#2",), ("book",)]


def test_steps_side_by_side_have_transactions_of_their_own(place: Place) -> None:
    calls: list[str] = []

    @place.app.task("work", retry="immediate")
    async def work(context: Context) -> int:
        await asyncio.gather(*[charge(context, f"charge-{n}", fails=n == 2) for n in range(4)], return_exceptions=True)
        return context.attempts

    async def charge(context: Context, name: str, *, fails: bool) -> None:
        async with by_asyncpg(place.url) as held:
            await context.step_in(held.connection, name, do, name, held)
            await asyncio.sleep(0.1)
            if fails and context.attempts == 1:
                raise Undone

    async def do(what: str, held: Hold) -> None:
        calls.append(what)
        await held.execute(place.insert)

    handle = serve(place, work.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 4)
    assert sorted(calls) == ["charge-0", "charge-1", "charge-2", "charge-2", "charge-3"]


def test_connection_that_cannot_take_a_step_is_refused_before_it_runs(place: Place) -> None:
    database = place.server.create_database()
    calls: list[int] = []
    refused: list[Exception] = []

    @place.app.task("work", max_attempts=1)
    def work(context: Context, which: str) -> None:
        url = plain(place.server.url(database)) if which == "elsewhere" else plain(place.url)
        with psycopg.connect(url, autocommit=which == "alone") as connection:
            if which == "closed":
                connection.close()
            try:
                context.sync.step_in(connection, "charge", calls.append, 1)
            except Exception as error:
                refused.append(error)
                raise

    for which in ("alone", "closed", "elsewhere"):
        handle = serve(place, lambda which=which: work.enqueue(which))
        assert place.app.sync.get(handle.id).state == JobState.DEAD

    assert [type(error) for error in refused] == [Conflict, Conflict, Invalid]
    texts = ("would commit by itself", "closed", "another database")
    assert [text in str(error) for text, error in zip(texts, refused, strict=True)] == [True] * 3
    assert calls == []


def test_step_works_with_the_rights_of_a_submitting_role(place: Place) -> None:
    role = f"submits_{place.schema}"
    place.execute(f"create role {role} login")
    place.execute(f"grant usage on schema SCHEMA to {role}")
    place.execute(f"grant usage on all sequences in schema SCHEMA to {role}")
    place.execute(f"grant select, insert, update on all tables in schema SCHEMA to {role}")
    place.execute(f"grant insert on TABLE to {role}")
    try:
        work = Charge(place, "asyncpg", url=place.server.url(user=role, schema=place.schema))
        handle = serve(place, work.task.enqueue)
        assert outcome(place, handle) == (JobState.SUCCEEDED, 1, 1)
    finally:
        place.execute(f"drop owned by {role}")
        place.execute(f"drop role {role}")


@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii"])
def test_step_does_not_depend_on_the_encoding_of_the_session(place: Place, encoding: str) -> None:
    class Encoded(Charge):
        async def step(self, context: Context, held: Hold) -> Any:
            await held.execute(f"set client_encoding = {encoding}")
            return await super().step(context, held)

    work = Encoded(place, "psycopg")
    handle = serve(place, work.task.enqueue)

    assert outcome(place, handle) == (JobState.SUCCEEDED, 1, 1)
    assert handle.sync.result(timeout=0) == [VALUE, 1]


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_lost_lease_rolls_back_the_rows_of_a_step(place: Place) -> None:
    errors: list[Exception] = []

    class Late(Charge):
        async def step(self, context: Context, held: Hold) -> Any:
            if context.attempts == 1:
                place.execute("update SCHEMA.job set lease_until = 1")
                until(lambda: place.execute("select claims from SCHEMA.job") == [(2,)], "another to take it")
            try:
                return await super().step(context, held)
            except LeaseLost as error:
                errors.append(error)
                raise

    work = Late(place, "psycopg")
    # No heartbeat learns of the loss before the step.
    handle = serve(place, work.task.enqueue, concurrency=2, lease="10m", heartbeat="3m")

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (sorted(work.calls), work.steps(), len(errors)) == ([1, 2], 1, 1)


def test_transaction_that_outlasts_the_lease_keeps_its_step(place: Place) -> None:
    """No worker takes the job before the commit, and the one that takes it then finds the step."""
    taken: list[object] = []

    async def inside(context: Context, _: Hold) -> None:
        if context.attempts == 1:
            until(lambda: place.execute(EXPIRED)[0][0], "the lease to end")
            taken.extend(place.execute("select claims from SCHEMA.job"))

    work = Charge(place, "psycopg", inside)
    handle = serve(place, work.task.enqueue, concurrency=2, lease="3s")

    assert outcome(place, handle) == (JobState.SUCCEEDED, 2, 1)
    assert (taken, work.calls, work.steps()) == ([(1,)], [1], 1)


STEP_OF_OTHER = """insert into SCHEMA.step (job_id, ended_at, claims, number, is_ordered, name)
    select id, 1, 1, 1, true, 'lost' from SCHEMA.job where task = 'other'"""


def test_step_in_an_open_transaction_holds_its_job(place: Place) -> None:
    async def ask() -> None:
        async with place.app:
            store: Any = await place.app.open_store()
            await place.app.enqueue("work")
            first = ClaimRequest("w", {"*": 1}, limit=1, lease_for=timedelta(seconds=2))
            (job,) = (await store.queueing.claim(first)).jobs
            await place.app.enqueue("other")
            place.execute(STEP_OF_OTHER)
            async with by_asyncpg(place.url) as held:
                record = place.app.external_tx.record_step
                answers = [
                    await record(held.connection, NewStep(lease, name, 1, True, "1", worker), previous)
                    for lease, name, worker, previous in (
                        (job.lease, "charge", "w", None),
                        (job.lease, "charge", "w", None),
                        (job.lease, "ship", "w", "lost"),
                        (job.lease, "ship", "w", "charge"),
                        (job.lease, "late", "other", None),
                        (Lease(job.id, 7), "late", "w", None),
                        (Lease("no-id", 1), "late", "w", None),
                    )
                ]
                await asyncio.to_thread(until, lambda: place.execute(EXPIRED)[0][0], "the lease to end")
                answers.append(await record(held.connection, NewStep(job.lease, "late", 1, True, "1", "w"), None))
                assert await store.maintenance.find_expired_leases(limit=10) == []
                (other,) = (
                    await store.queueing.claim(ClaimRequest("x", {"*": 9}, limit=9, lease_for=first.lease_for))
                ).jobs
                assert other.task == "other"
            recorded, held_alone, lost = StepReceipt(True, True), StepReceipt(True, False), StepReceipt(False, False)
            assert answers == [recorded, held_alone, held_alone, recorded, lost, lost, lost, lost]
            assert [each.id for each in await store.maintenance.find_expired_leases(limit=10)] == [job.id]
            assert [step.name for step in await store.workflow.read_steps(job.id)] == ["charge", "ship"]

    asyncio.run(ask())


# ── processes that die ────────────────────────────────────────────────────────────────────────────────────────────
PROGRAM = """
import asyncio, sys
from holdfast import Context, Holdfast
from holdfast.worker import Worker
from tests.external_tx.kinds import INSERT, by_asyncpg

url, when = sys.argv[1:]
app = Holdfast(url)

async def charge(held) -> int:
    await held.execute(INSERT.replace("SCHEMA", url.rpartition("=")[2]))
    return 1

def wait_to_die():
    print("now", flush=True)
    sys.stdin.read()

@app.task("work")
async def work(context: Context) -> None:
    async with by_asyncpg(url) as held:
        await context.step_in(held.connection, "charge", charge, held)
        if when == "before":
            wait_to_die()
    wait_to_die()

settings = app.settings.replace_values(lease="3s", heartbeat="300ms", sweep="300ms", poll="300ms")
asyncio.run(Worker(app, settings=settings).run())
"""


@pytest.mark.parametrize(("when", "calls"), [("before", [2]), ("after", [])])
def test_worker_that_is_killed_around_the_commit_writes_once(place: Place, when: str, calls: list[int]) -> None:
    handle = place.app.sync.enqueue("work")
    argv = [sys.executable, "-c", PROGRAM, place.url, when]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGKILL)
            process.wait()
        finally:
            process.kill()

    work = Charge(place, "asyncpg")

    async def known() -> JobHandle[Any]:
        return handle

    serve(place, known)

    assert place.both() == (1, 1)
    assert (work.calls, work.steps()) == (calls, 1)
