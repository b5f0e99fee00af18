"""Blocking callers in many threads share one application."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import Holdfast, JobFilter, JobState
from holdfast.core.errors import ResultTimeout
from holdfast.stores.sqlite.notifications import SqliteNotifications
from holdfast.worker import Worker

THREADS = 8
ROUNDS = 10


@pytest.fixture(autouse=True)
def _restless() -> Iterator[None]:
    """Threads take turns at nearly every instruction: what two of them may do to each other, they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def application(folder: Path) -> Holdfast:
    app = Holdfast(f"sqlite:///{folder}/jobs.db")

    @app.task("double")
    async def double(number: int) -> int:
        return 2 * number

    return app


@contextmanager
def worker(folder: Path) -> Iterator[None]:
    """A worker on a thread and an application of its own."""
    app, stop, loops = application(folder), threading.Event(), list[asyncio.AbstractEventLoop]()
    workers: list[Worker] = []

    async def run() -> None:
        async with app:
            workers.append(Worker(app))
            loops.append(asyncio.get_running_loop())
            stop.set()
            await workers[0].run()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    stop.wait(60)
    try:
        yield
    finally:
        loops[0].call_soon_threadsafe(workers[0].stop)
        thread.join(60)
        assert not thread.is_alive()


def together(call: Callable[[int], list[int]]) -> list[int]:
    """What all threads answered; the first error of any of them is raised."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> list[int]:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return [answer for answers in pool.map(begin, range(THREADS)) for answer in answers]


def test_they_enqueue_and_read_without_hurting_each_other(tmp_path: Path) -> None:
    app = application(tmp_path)

    def call(thread: int) -> list[int]:
        for number in range(ROUNDS):
            handle = app.sync.enqueue("double", {"number": number}, key=f"{thread}-{number}")
            assert app.sync.get(handle.id).state is JobState.QUEUED
            assert app.sync.get(f"key:{thread}-{number}").id == handle.id
        return [ROUNDS]

    assert sum(together(call)) == app.sync.count() == THREADS * ROUNDS
    app.sync.close()


def test_they_race_for_the_first_call_and_for_a_key(tmp_path: Path) -> None:
    app = application(tmp_path)
    together(lambda _: [app.sync.enqueue("double", {"number": 1}, key="one").created])
    assert app.sync.count() == 1
    app.sync.close()


def test_they_await_results_while_a_worker_works(tmp_path: Path) -> None:
    app = application(tmp_path)

    def call(thread: int) -> list[int]:
        handles = [app.sync.enqueue("double", {"number": number}) for number in range(ROUNDS)]
        return [handle.sync.result(timeout=30) for handle in handles]

    with worker(tmp_path):
        answers = together(call)
    assert sorted(answers) == sorted(2 * number for number in range(ROUNDS) for _ in range(THREADS))
    assert app.sync.count(JobFilter(states=(JobState.SUCCEEDED,))) == THREADS * ROUNDS
    app.sync.close()


def test_waits_begin_and_end_beside_submissions(tmp_path: Path) -> None:
    """Half of them wait for jobs that never run, each a moment at a time, while the others tell of new jobs."""
    app = application(tmp_path)
    idle = app.sync.enqueue("double", {"number": 0}, delay=3600)

    def call(thread: int) -> list[int]:
        for number in range(ROUNDS * 3):
            if thread % 2:
                with pytest.raises(ResultTimeout):
                    idle.sync.result(timeout=0.002)
            else:
                app.sync.enqueue("double", {"number": number})
        return [ROUNDS * 3 * (1 - thread % 2)]

    assert sum(together(call)) == app.sync.count() - 1
    app.sync.close()


def test_notifying_and_registering_threads_do_not_interfere(tmp_path: Path) -> None:
    wakes = SqliteNotifications(str(tmp_path / "jobs.db"), lambda: 0)
    wanted = [f"job:{number}" for number in range(50)]

    def call(thread: int) -> list[int]:
        for number in range(200):
            if thread < 2:
                wakes.notify_committed({"queue:default", f"job:{number}"})
                wakes.has_end_waiters()
            else:
                wakes.wait_in_thread(wanted, 0.0002, lambda: False, lambda: True)
        return []

    assert together(call) == []
    wakes.close()
