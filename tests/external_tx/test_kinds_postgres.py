"""Submitting inside the caller's transaction, on every kind of connection: jobs and rows come together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, JobState, Unique
from holdfast.core.errors import Conflict, Invalid
from tests.external_tx.kinds import BLOCKING, KINDS, does
from tests.external_tx.support import Place, Undone
from tests.support.postgres import shared
from tests.support.servers import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_committed_both_are_there_and_not_before(place: Place, kind: str) -> None:
    async def body(held: Any) -> None:
        options = {"key": "k", "delay": 60, "priority": 3, "tags": ["t"], "metadata": {"m": "\0"}, "max_attempts": None}
        handle = await does(
            place.app, "enqueue", "work", {"n": 2**70, "a": "x\0␀"}, connection=held.connection, **options
        )
        again = await does(place.app, "enqueue", "work", {}, connection=held.connection, key="k")
        assert (handle.created, again.created, again.id) == (True, False, handle.id)
        assert place.both() == (0, 0)

    place.holding(kind, body)

    assert place.both() == (1, 1)
    job = place.app.sync.get("key:k")
    assert (
        job.state,
        job.payload,
        job.priority,
        job.max_attempts,
        job.options_or_default.tags,
        job.options_or_default.metadata,
    ) == (JobState.SCHEDULED, '{"n":1180591620717411303424,"a":"x\\u0000␀"}', 3, None, ("t",), {"m": "\0"})
    assert job.run_at - job.created_at == timedelta(seconds=60)


def test_same_work_is_stored_once_inside_a_transaction(place: Place, kind: str) -> None:
    policy = Unique("active", by=["task", "queue"], on_conflict="replace")
    first = place.app.sync.enqueue("work", {"n": 1}, delay=600, unique=policy)

    async def body(held: Any) -> None:
        for task, n in (("work", 2), ("other", 3), ("other", 4)):
            handle = await does(place.app, "enqueue", task, {"n": n}, connection=held.connection, unique=policy)
            handles.append(handle)

    handles: list[Any] = []
    place.holding(kind, body)

    assert [(each.created, each.changed) for each in handles] == [(False, True), (True, False), (False, True)]
    assert handles[0].id == first.id
    assert [place.app.sync.get(handles[number].id).payload for number in (0, 1)] == ['{"n":2}', '{"n":4}']
    assert place.app.sync.get(first.id).state is JobState.QUEUED


def test_expiry_is_stored_inside_a_transaction(place: Place, kind: str) -> None:
    policy = Unique("active", by=["task", "queue"], on_conflict="reschedule")
    first = place.app.sync.enqueue("work", {}, delay=600, expires="1h", unique=policy)

    async def body(held: Any) -> None:
        for options in (
            {"expires": "10m"},
            {"expires": "2035-01-31T08:00:00Z"},
            {},
            {"task": "work", "unique": policy},
        ):
            task = options.pop("task", "other")
            handle = await does(place.app, "enqueue", task, {}, connection=held.connection, **options)
            handles.append(handle)

    handles: list[Any] = []
    place.holding(kind, body)

    span, instant, plain, renewed = [place.app.sync.get(each.id) for each in handles]
    assert span.expires_at is not None
    assert span.expires_at - span.created_at == timedelta(minutes=10)
    assert instant.expires_at_us == 2053843200000000
    assert (plain.expires_at, renewed.id, renewed.expires_at) == (None, first.id, None)


def test_rolled_back_neither_ever_was(place: Place, kind: str) -> None:
    async def body(held: Any) -> None:
        await does(place.app, "enqueue", "work", {}, connection=held.connection, key="k")
        raise Undone

    with pytest.raises(Undone):
        place.holding(kind, body)

    assert place.both() == (0, 0)
    assert place.app.sync.enqueue("work", key="k").created


def test_many_jobs_and_a_savepoint_that_is_rolled_back(place: Place, kind: str) -> None:
    async def body(held: Any) -> None:
        drafts = [place.app.draft_job("work", {"n": n}) for n in range(250)]
        handles = await does(place.app, "enqueue_many", drafts, batch_size=100, connection=held.connection)
        assert [handle.id for handle in handles] == [draft.id for draft in drafts]
        with contextlib.suppress(Undone):
            async with held.savepoint():
                await held.execute(place.insert)
                await does(place.app, "enqueue", "work", {}, connection=held.connection)
                raise Undone

    place.holding(kind, body)

    assert place.both() == (1, 250)


def test_session_ended_by_the_server_before_commit_stores_nothing(place: Place, kind: str) -> None:
    async def body(held: Any) -> None:
        await does(place.app, "enqueue", "work", {}, connection=held.connection)
        ((killed,),) = place.execute(
            "select count(pg_terminate_backend(pid)) from pg_locks where relation = 'TABLE'::regclass"
        )
        assert killed == 1

    with pytest.raises(Exception, match=r"terminat|clos|lost|connection"):  # in the words of each driver
        place.holding(kind, body)

    assert place.both() == (0, 0)


def test_a_process_that_is_killed_before_the_commit_leaves_nothing(place: Place) -> None:
    """A process for each kind, all at once."""
    program = [sys.executable, "-m", "tests.external_tx.kinds", place.url, *KINDS]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        pids = [int(held.stdout.readline()) for _ in KINDS]
        assert place.transactions() == len(KINDS)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    until(lambda: not place.is_held(), "the server to notice")
    assert place.both() == (0, 0)


def test_a_failed_transaction_is_refused_with_what_to_do(place: Place, kind: str) -> None:
    async def body(held: Any) -> None:
        with pytest.raises(Exception, match="by zero"):
            await held.execute("select 1/0")
        with pytest.raises(Conflict, match="rolled back"):
            await does(place.app, "enqueue", "work", {}, connection=held.connection)
        raise Undone

    with pytest.raises(Undone):
        place.holding(kind, body)
    assert place.both() == (0, 0)


@pytest.fixture(scope="module")
def elsewhere() -> str:
    """Another database, of all kinds: schemas that were made there stay."""
    return shared().create_database()


def test_another_database_is_refused_and_the_transaction_goes_on(
    place: Place, kind: str, elsewhere: str, tmp_path: Path
) -> None:
    """A schema of another name elsewhere, one of the same name, and another store; nothing is spoiled."""
    foreign_apps = [
        Holdfast(place.server.url(elsewhere, schema="nothing")),
        Holdfast(place.server.url(elsewhere, schema=place.schema)),
        Holdfast(f"sqlite:///{tmp_path}/jobs.db"),
    ]
    for foreign_app in foreign_apps[:2]:
        foreign_app.sync.count()

    async def body(held: Any) -> None:
        for foreign_app in foreign_apps:
            with pytest.raises(Invalid, match="another database"):
                await does(foreign_app, "enqueue", "work", {}, connection=held.connection)
            await does(foreign_app, "close")
        await does(place.app, "enqueue", "work", {}, connection=held.connection)

    place.holding(kind, body)
    assert place.both() == (1, 1)


def test_search_path_does_not_matter(place: Place, kind: str) -> None:
    async def body(held: Any) -> None:
        await held.execute("set local search_path = nowhere")
        await held.execute("set local standard_conforming_strings = off")
        await does(place.app, "enqueue", "work", {"a": "\\ '"}, connection=held.connection, tags=["a"])

    place.holding(kind, body)
    assert place.both() == (1, 1)


@pytest.mark.parametrize("kind", list(BLOCKING))
def test_nothing_leaves_the_thread_of_a_blocking_connection(place: Place, kind: str) -> None:
    """The application has an event loop in a thread of its own, and several threads submit at once."""
    trouble: list[BaseException] = []

    def caller() -> None:
        async def body(held: Any) -> None:
            await does(place.app, "enqueue", "work", {}, connection=held.connection)

        try:
            place.holding(kind, body)
        except BaseException as error:
            trouble.append(error)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (trouble, place.both()) == ([], (4, 4))
