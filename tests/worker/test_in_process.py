"""Workers in the process of the application: ``app.worker()`` and ``app.run_worker()``, in real time."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    ConfigError,
    Holdfast,
    HoldfastError,
    Invalid,
    Job,
    JobFailed,
    JobState,
    Retry,
    StoreReplaced,
    Unavailable,
    testing,
)
from holdfast.core.events import HandlersLeft, JobDead
from holdfast.telemetry.logs import configure_logs
from holdfast.worker.worker import Worker
from tests.unit import executor_tasks
from tests.worker.watching import until

WAIT = 60


@pytest.fixture
def app(home: str) -> Holdfast:
    """An application whose workers hear of new jobs by the server's own notifications."""
    return Holdfast(home.replace("&pooled=1", ""))


class Slow:
    """A task whose handler runs until it is let go."""

    def __init__(self, app: Holdfast) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

        @app.task("slow")
        async def slow() -> str:
            self.began.set()
            await self.may_end.wait()
            return "done"

        self.task = slow


def is_given_back(job: Job) -> bool:
    return (job.state, job.attempts, job.reason) == (JobState.QUEUED, 0, "released")


async def test_worker_runs_jobs_of_its_own_process(app: Holdfast) -> None:
    @app.task("double")
    async def double(number: int) -> int:
        return 2 * number

    @app.task("thread")
    def name_thread() -> str:
        return threading.current_thread().name

    async with app.worker(queues="default", concurrency=3, grace="5s") as worker:
        (listed,) = await app.workers()
        heartbeat = listed.heartbeat
        assert (heartbeat.worker, heartbeat.pid, heartbeat.queues, heartbeat.concurrency) == (
            worker.id,
            os.getpid(),
            "default",
            3,
        )
        jobs = [await double.enqueue(number) for number in range(20)]
        assert [await job.result(timeout=WAIT) for job in jobs] == [2 * number for number in range(20)]
        assert await (await name_thread.enqueue()).result(timeout=WAIT) != threading.current_thread().name
        assert worker.is_running
    assert not worker.is_running
    assert await app.workers() == []
    await app.close()


async def test_exit_gives_a_running_job_back_without_an_attempt(app: Holdfast) -> None:
    slow = Slow(app)
    async with app:
        async with app.worker(grace="0s"):
            job = await slow.task.enqueue()
            await slow.began.wait()
        assert is_given_back(await job.job())


async def test_exit_lets_a_job_end_within_the_grace(app: Holdfast) -> None:
    slow = Slow(app)
    async with app:
        async with app.worker(grace="60s"):
            job = await slow.task.enqueue()
            await slow.began.wait()
            asyncio.get_running_loop().call_later(0.05, slow.may_end.set)
        assert await job.result(timeout=0) == "done"


async def test_error_in_the_body_stops_the_worker_and_is_raised(app: Holdfast) -> None:
    slow = Slow(app)
    async with app:
        job = await slow.task.enqueue()

        async def fail() -> None:
            async with app.worker(grace="0s"):
                await slow.began.wait()
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            await fail()
        assert is_given_back(await job.job())
        assert await app.workers() == []


async def test_cancellation_gives_jobs_back_and_is_raised(app: Holdfast) -> None:
    slow = Slow(app)
    async with app:
        running = asyncio.create_task(app.run_worker(grace="0s"))
        job = await slow.task.enqueue()
        await asyncio.wait_for(slow.began.wait(), WAIT)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert is_given_back(await job.job())
        assert await app.workers() == []


async def test_second_cancellation_ends_the_grace(app: Holdfast) -> None:
    slow = Slow(app)
    async with app:
        running = asyncio.create_task(app.run_worker(grace="10m"))
        job = await slow.task.enqueue()
        await asyncio.wait_for(slow.began.wait(), WAIT)
        running.cancel()
        await asyncio.sleep(0.05)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(running), WAIT)
        assert is_given_back(await job.job())


async def test_cancellation_at_the_start_stops_the_worker(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    register, registering = Worker._register, asyncio.Event()

    async def register_slowly(worker: Worker) -> None:
        registering.set()
        await asyncio.sleep(0.05)
        await register(worker)

    monkeypatch.setattr(Worker, "_register", register_slowly)
    async with app:
        running = asyncio.create_task(app.run_worker())
        await registering.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await app.workers() == []
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("holdfast-worker")] == []


async def test_drain_ends_when_the_queues_are_empty(app: Holdfast) -> None:
    done: list[int] = []

    @app.task("note")
    async def note(number: int) -> None:
        done.append(number)

    await app.enqueue_many([note.new_job(number) for number in range(30)])
    await note.options(delay=3600).enqueue(99)
    await asyncio.wait_for(app.run_worker(queues={"default": None}, drain=True), WAIT)
    assert sorted(done) == list(range(30))
    await app.close()


async def test_two_workers_of_one_process_share_the_jobs(app: Holdfast) -> None:
    both, may_end = asyncio.Event(), asyncio.Event()
    workers: set[str] = set()

    @app.task("meet")
    async def meet() -> None:
        workers.update(each.worker for each in (await app.find()).jobs if each.worker)
        if len(workers) == 2:
            both.set()
        await may_end.wait()

    async with app.worker(concurrency=1) as one, app.worker(concurrency=1) as two:
        jobs = [await meet.enqueue() for _ in range(2)]
        await asyncio.wait_for(both.wait(), WAIT)
        assert workers == {one.id, two.id}
        may_end.set()
        for job in jobs:
            await job.result(timeout=WAIT)
    await app.close()


async def test_each_worker_serves_its_own_queues(app: Holdfast) -> None:
    @app.task("where", queue="mail")
    async def where() -> str:
        return "ran"

    async with app:
        async with app.worker(queues="reports"):
            job = await where.enqueue()
            await asyncio.sleep(0.2)
            assert await job.state() == "queued"
        async with app.worker(queues="reports"), app.worker(queues="mail"):
            assert await job.result(timeout=WAIT) == "ran"


async def test_order_ends_the_worker_and_the_body_goes_on(app: Holdfast) -> None:
    async with app.worker(heartbeat="1s") as worker:
        assert await app.stop_workers([worker.id]) == [worker.id]
        await asyncio.wait_for(worker.wait(), WAIT)
        assert not worker.is_running
        assert await app.count() == 0
    await app.close()


async def test_stop_ends_run_worker_of_others(app: Holdfast) -> None:
    running = asyncio.create_task(app.run_worker(heartbeat="1s"))
    async with app:
        await until(lambda: app.stop_workers(drain=True))
        await asyncio.wait_for(running, WAIT)


async def test_worker_is_entered_once(app: Holdfast) -> None:
    worker = app.worker()
    with pytest.raises(HoldfastError, match="has not started; enter it first"):
        _ = worker.id
    async with worker:
        worker.stop()
        await worker.wait()
    with pytest.raises(HoldfastError, match=re.escape("call app.worker() again")):
        await worker.__aenter__()
    await app.close()


async def test_two_workers_of_one_name_are_refused(app: Holdfast) -> None:
    async with app.worker(worker_id="mail-1"):
        with pytest.raises(Unavailable, match="worker_id: mail-1 is the name of another worker in this process"):
            await app.run_worker(worker_id="mail-1")
    async with app.worker(worker_id="mail-1") as worker:
        assert worker.id == "mail-1"
    await app.close()


async def test_errors_of_the_start_are_raised_plainly(app: Holdfast) -> None:
    @app.task("broken", executor="process")
    def local() -> None: ...

    with pytest.raises(ConfigError, match="local"):
        async with app.worker():
            pytest.fail("the worker started")
    assert await app.workers() == []
    await app.close()
    away = Holdfast("postgresql://app@127.0.0.1:9/none")
    with pytest.raises(Unavailable, match="cannot be reached"):
        await away.run_worker()


async def test_error_of_the_worker_cancels_the_body_and_is_raised(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = asyncio.Event()

    async def run(worker: Worker) -> None:
        worker.started.set()
        await fails.wait()
        raise StoreReplaced("the files were removed")

    monkeypatch.setattr(Worker, "run", run)
    with pytest.raises(StoreReplaced):
        async with app.worker():
            await asyncio.sleep(fails.set() or WAIT)
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    await app.close()


async def test_thread_that_goes_on_is_reported(app: Holdfast) -> None:
    began, may_end = threading.Event(), threading.Event()
    seen: list[Any] = []
    app.events.subscribe(seen.append, HandlersLeft)

    @app.task("stuck")
    def stuck() -> None:
        began.set()
        may_end.wait(WAIT)

    async with app:
        async with app.worker(grace="0s"):
            job = await stuck.enqueue()
            await asyncio.to_thread(began.wait, WAIT)
        assert is_given_back(await job.job())
    may_end.set()
    assert [each.threads for each in seen] == [1]


async def test_events_go_to_the_logger_once(home: str, caplog: pytest.LogCaptureFixture) -> None:
    app = Holdfast(home, redacted=["payload.card"])

    @app.task("fail", max_attempts=2, retry=Retry.fixed(0))
    async def fail() -> None:
        raise ConnectionError("secret")

    caplog.set_level(logging.INFO)
    async with app:
        async with app.worker(queues="other"):
            job = await fail.enqueue()
            async with app.worker(queues="default"):
                with pytest.raises(JobFailed):
                    await job.result(timeout=WAIT)
        assert not app.events.has_subscriber(JobDead)
    logged = [(each.levelname, each.holdfast_event) for each in caplog.records if each.name == "holdfast"]  # type: ignore[attr-defined]
    assert [each for each in logged if each[1] in ("job_failed", "job_dead")] == [
        ("WARNING", "job_failed"),
        ("ERROR", "job_dead"),
    ]
    assert [name for _, name in logged].count("worker_started") == 2
    assert f"see='holdfast show {job.id}'" in caplog.text
    assert "secret" not in caplog.text


async def test_events_with_log_lines_are_not_sent_to_the_logger(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    lines = io.StringIO()
    stop = configure_logs(app.settings, app.events, stream=lines)
    await app.run_worker(drain=True)
    stop()
    assert lines.getvalue().count("worker_started") == 1
    assert "worker_started" not in caplog.text
    await app.close()


async def test_process_tasks_run_in_children(app: Holdfast) -> None:
    app.registry.register(executor_tasks.add)
    async with app.worker(concurrency=1):
        job = await app.enqueue("add", {"a": 2, "b": 3})
        assert await job.result(timeout=WAIT) == 5
    await app.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"concurrency": 0}, "concurrency: 0 is not valid"),
        ({"queues": ["mail"]}, "queues: ['mail'] is not valid; write"),
        ({"queues": {"mail": 0}}, "queues.mail: 0 is not valid"),
        ({"processes": 4}, "processes: 4 does not go with a worker in your own process; one worker runs here"),
        ({"metrics_port": 9000}, "metrics_port: 9000 does not go"),
        ({"url": "sqlite:///other.db"}, "url: 'sqlite:///other.db' does not go"),
        ({"concurency": 3}, "concurrency"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    with pytest.raises(HoldfastError, match=re.escape(message)):
        app.worker(**given)


async def test_drain_must_be_true_or_false(app: Holdfast) -> None:
    with pytest.raises(Invalid, match="drain: 'no' is not valid; give True"):
        await app.run_worker(drain="no")  # type: ignore[arg-type]


async def test_workers_do_not_start_in_a_test_mode(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")

    @app.task("work")
    async def work() -> None: ...

    with testing.manual(app):
        async with app.worker() as worker:
            job = await work.enqueue()
            await app.run_worker(drain=True)
            assert (worker.is_running, await job.state()) == (False, "queued")


async def test_exit_after_a_stop_leaves_the_grace(app: Holdfast) -> None:
    slow = Slow(app)
    async with app:
        async with app.worker(grace="60s") as worker:
            job = await slow.task.enqueue()
            await slow.began.wait()
            worker.stop()
            await asyncio.sleep(1.2)  # a second stop a second later ends the grace
            asyncio.get_running_loop().call_later(0.2, slow.may_end.set)
        assert await job.result(timeout=WAIT) == "done"


async def test_worker_that_waits_for_ever_at_its_start_can_be_stopped(app: Holdfast) -> None:
    steps: list[str] = []

    @app.lifespan
    @asynccontextmanager
    async def first(_: Holdfast) -> AsyncIterator[None]:
        yield
        steps.append("closed")

    @app.lifespan
    @asynccontextmanager
    async def second(_: Holdfast) -> AsyncIterator[None]:
        steps.append("waits")
        await asyncio.Event().wait()
        yield

    async with app:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), app.worker(grace="60s"):
                pytest.fail("the worker started")
        running = asyncio.create_task(app.run_worker(grace="60s"))
        while steps.count("waits") < 2:  # noqa: ASYNC110 - no event tells of this
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, WAIT)
    assert steps == ["waits", "closed", "waits", "closed"]


async def test_lifespan_that_fails_closes_those_before_it(app: Holdfast) -> None:
    steps: list[str] = []

    @app.lifespan
    @asynccontextmanager
    async def first(_: Holdfast) -> AsyncIterator[None]:
        yield
        steps.append("closed")

    @app.lifespan
    @asynccontextmanager
    async def second(_: Holdfast) -> AsyncIterator[None]:
        raise ValueError("no database")
        yield

    async with app:
        with pytest.raises(ValueError, match="no database"):
            async with app.worker():
                pytest.fail("the worker started")
    assert steps == ["closed"]
