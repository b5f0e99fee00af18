"""Rows that another transaction holds: a worker goes on with all others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

import psycopg
from psycopg import sql

from holdfast import Holdfast, JobState
from holdfast.core.events import Event, JobSucceeded, LeaseLostEvent, StoreTrouble
from holdfast.core.metric_events import SettlementsWritten
from holdfast.worker.worker import Worker
from tests.worker.support import Recorder, forever, harness


@contextmanager
def _lock_job(home: str, job_id: str) -> Iterator[None]:
    table = sql.Identifier(parse_qs(urlsplit(home).query)["schema"][0], "job")
    with psycopg.connect(urlsplit(home)._replace(query="").geturl()) as other:
        other.execute(sql.SQL("select from {} where id = %s for update").format(table), [job_id])
        yield


async def test_locked_job_is_settled_when_free_and_others_at_once(app: Holdfast, home: str) -> None:
    events, batches = Recorder(app), list[int]()

    def note_size(event: Event) -> None:
        assert isinstance(event, SettlementsWritten)
        batches.append(event.size)

    app.events.subscribe(note_size, SettlementsWritten)
    all_run, go = asyncio.Barrier(6), asyncio.Event()

    @app.task("work")
    async def work() -> None:
        if not go.is_set():
            await all_run.wait()
            await go.wait()

    async with app, asyncio.timeout(25):
        jobs = [await work.enqueue() for _ in range(5)]
        worker = Worker(app)
        serving = asyncio.create_task(worker.run())
        await all_run.wait()
        with _lock_job(home, jobs[2].id):
            go.set()
            await asyncio.gather(*[job.result() for job in jobs if job is not jobs[2]])
            later = await work.enqueue()
            await later.result()
            assert await jobs[2].state() == JobState.RUNNING
        await jobs[2].result()
        worker.stop()
        await serving
    assert {event.job_id for event in events.of(JobSucceeded)} == {job.id for job in [*jobs, later]}
    assert events.of(LeaseLostEvent) == []
    assert sum(batches) == 6  # of its tries while it was locked none is counted


async def test_lock_is_reported_once_it_has_been_held_for_two_seconds(app: Holdfast, home: str) -> None:
    events = Recorder(app)
    running, go = asyncio.Event(), asyncio.Event()

    @app.task("work")
    async def work() -> None:
        running.set()
        await go.wait()

    async with harness(app) as harnessed:
        job = await work.enqueue()
        await harnessed.start()
        await running.wait()
        with _lock_job(home, job.id):
            go.set()
            await harnessed.advance(1.5)
            assert events.of(StoreTrouble) == []
            await harnessed.advance(5)
            (reported,) = events.of(StoreTrouble)
            assert f"job {job.id} waits to be settled: another transaction has held its row for 2 s" in reported.error
        await harnessed.run_until_idle()
    assert [event.job_id for event in events.of(JobSucceeded)] == [job.id]


async def test_job_whose_row_stays_locked_is_interrupted_before_its_lease_ends(app: Holdfast, home: str) -> None:
    events = Recorder(app)
    ended: list[str] = []

    @app.task("long")
    async def long(name: str) -> None:
        try:
            await forever()
        finally:
            ended.append(name)

    async with harness(app, concurrency=3) as harnessed:
        locked, briefly, free = [await long.enqueue(name) for name in ("locked", "briefly", "free")]
        worker = await harnessed.start()
        with _lock_job(home, locked.id):
            with _lock_job(home, briefly.id):
                await harnessed.advance(11)
            await harnessed.advance(12)
            assert ended == []
            await harnessed.advance(4)
            assert ended == ["locked"]  # at 0.8 of the lease of 30 s
            await harnessed.advance(30)
        assert ended == ["locked"]
        assert {(await job.job()).worker for job in (briefly, free)} == {worker.worker.id}
    assert [event.job_id for event in events.of(LeaseLostEvent)] == [locked.id]


async def test_schedule_whose_unique_key_is_locked_holds_up_no_other(app: Holdfast, home: str) -> None:
    events = Recorder(app)

    @app.task("unique", unique="active")
    async def unique() -> None: ...

    @app.task("plain")
    async def plain() -> None: ...

    async with app, asyncio.timeout(25):
        await app.schedules.add("locked", unique.new_job(), every=1)
        await app.schedules.add("free", plain.new_job(), every=1)
        async with await psycopg.AsyncConnection.connect(urlsplit(home)._replace(query="").geturl()) as other:
            await unique.options(connection=other).enqueue()
            worker = Worker(app)
            serving = asyncio.create_task(worker.run())
            await asyncio.sleep(7)
            free = await app.schedules.get("free")
            await other.rollback()
        await asyncio.sleep(6)
        locked = await app.schedules.get("locked")
        worker.stop()
        await serving
    assert free.runs >= 2
    assert locked.runs >= 1
    assert any("schedule locked cannot be run" in event.error for event in events.of(StoreTrouble))


async def test_locked_job_that_a_tick_supersedes_holds_up_no_schedule(app: Holdfast, home: str) -> None:
    events = Recorder(app)

    @app.task("long")
    async def long() -> None:
        await forever()

    async with app, asyncio.timeout(60):
        await app.schedules.add("other", long.options(queue="unserved").new_job(), every=1)
        await app.schedules.add(
            "superseding", long.options(queue="unserved").new_job(), every=1, overlap="cancel_previous"
        )
        worker = Worker(app, settings=app.settings.replace_values(queues="default"))
        serving = asyncio.create_task(worker.run())
        while (previous := (await app.schedules.get("superseding")).last_job) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        with _lock_job(home, previous):
            before = (await app.schedules.get("other")).runs
            while not events.of(StoreTrouble):  # noqa: ASYNC110 - no event waits here
                await asyncio.sleep(0.05)
            runs = (await app.schedules.get("other")).runs - before
        worker.stop()
        await serving
    assert runs >= 4, "it runs each second, and the lock is reported after several"


async def test_plain_submission_does_not_wait_for_a_locked_unique_key(app: Holdfast, home: str) -> None:
    async with app, asyncio.timeout(25):
        await app.enqueue("work", {})
        async with await psycopg.AsyncConnection.connect(urlsplit(home)._replace(query="").geturl()) as other:
            await app.enqueue("same", {}, unique="active", connection=other)
            waiting = asyncio.create_task(app.enqueue("same", {}, unique="active"))
            await asyncio.sleep(0.3)
            async with asyncio.timeout(3):
                await asyncio.gather(*[app.enqueue("work", {}) for _ in range(3)])
            assert not waiting.done()
            await other.rollback()
        assert (await waiting).created
