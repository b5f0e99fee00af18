"""A worker as a process: event loop, signals, exit code."""

from __future__ import annotations

import asyncio
import gc

import uvloop

from holdfast.app import Holdfast
from holdfast.core.events import HandlersLeft
from holdfast.settings.settings import Settings
from holdfast.worker.executors.thread import LoopThreads
from holdfast.worker.metrics_server import MetricsServer
from holdfast.worker.stop_signals import handle_stop_signals, ignore_rest_of_burst
from holdfast.worker.supervisor import EXTRA_SECONDS, FINISHED, RECYCLE, is_supervised, watch_parent
from holdfast.worker.worker import Worker

_THREAD_TIMEOUT = 2.0  # seconds for calls in the loop's threads to end, after everything else


def run_worker(app: Holdfast, settings: Settings, *, drain: bool = False) -> int:
    """Runs one worker until it is stopped; returns the process's exit code.

    SIGTERM and SIGINT stop it. A second signal more than a second later ends the grace.
    """
    gc.freeze()  # The modules of the application too: no collection need visit them.
    asyncio_runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    threads, stuck = LoopThreads(), 0
    try:
        worker = _run_to_end(asyncio_runner, app, settings, drain, threads)
        stuck = worker.stuck
        left = threads.wait_calls(_THREAD_TIMEOUT) + worker.stuck_threads
        if left or stuck:
            app.events.emit(HandlersLeft(worker_id=worker.id, threads=left, coroutines=stuck))
    finally:
        ignore_rest_of_burst()
        # Closing the loop waits for every task, and tasks of stuck handlers never end: they end with the process.
        if not stuck:
            asyncio_runner.close()
    if worker.recycled:
        return RECYCLE
    return FINISHED if worker.supervised else 0


def _run_to_end(
    asyncio_runner: asyncio.Runner, app: Holdfast, settings: Settings, drain: bool, threads: LoopThreads
) -> Worker:
    """Runs the worker to its end. A SystemExit or KeyboardInterrupt that a task or callback of a handler raises
    interrupts the event loop only.

    A caller that awaits that task gets it too. Before the worker handles signals, and after its end, it is raised.
    """
    loop = asyncio_runner.get_loop()
    started: asyncio.Future[asyncio.Task[Worker]] = loop.create_future()
    main = _serve(app, settings, drain, threads, started)
    while True:
        try:
            return loop.run_until_complete(started.result()) if started.done() else asyncio_runner.run(main)
        except (SystemExit, KeyboardInterrupt):
            if not started.done() or started.result().done():
                raise


async def _serve(
    app: Holdfast, settings: Settings, drain: bool, threads: LoopThreads, started: asyncio.Future[asyncio.Task[Worker]]
) -> Worker:
    worker = Worker(app, settings=settings, drain=drain, supervised=is_supervised())
    loop = asyncio.get_running_loop()
    loop.set_default_executor(threads)
    watch_parent(
        lambda: loop.call_soon_threadsafe(worker.start_stopping, "orphaned"),
        lambda: worker.shared.settings.grace.total_seconds() + EXTRA_SECONDS,
    )
    # A supervisor forwards every stop as SIGTERM, and reports the original signal itself.
    handle_stop_signals(lambda name: worker.stop("supervisor" if worker.supervised else name))
    current = asyncio.current_task()
    assert current is not None  # noqa: S101 - a coroutine that runs has a task
    started.set_result(current)
    with MetricsServer(worker.shared):
        async with app:
            await worker.run()
    return worker
