"""Starts several worker processes, restarts dead ones, and stops all of them together.

Each child leads its own session, so Ctrl-C in a terminal reaches only the supervisor. It forwards a stop signal once,
and a second one that comes more than a second later. Each child reads a pipe whose writing end only the supervisor
holds: end of file means that the supervisor has died, and the child stops.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import uvloop

from holdfast.core.errors import ConfigError, Invalid, Unavailable
from holdfast.core.events import ChildEnded, Events, SupervisorStopping
from holdfast.settings.settings import Settings, Watch
from holdfast.worker.executors.process_group import describe_exit, kill_group, when_ended
from holdfast.worker.stop_signals import StopRequest, StopRequests, handle_stop_signals, ignore_rest_of_burst

RECYCLE = 84
"""Exit code of a worker that asks for a new process at once (``recycle_jobs``, ``recycle_memory``)."""

FINISHED = 85
"""Exit code of a supervised worker that has ended as intended: stopped or drained. Not 0: a handler that calls
``exit(0)`` ends its worker with 0, and that worker must be restarted."""

NAME_TAKEN = 86
"""Exit code of a supervised worker whose ``worker_id`` a living worker has. Other causes of 75 are transient."""

SUPERVISOR_PIPE = "_HOLDFAST_SUPERVISOR_PIPE"
"""Environment variable of a child: descriptor of the pipe. The underscore tells it from settings."""

EXTRA_SECONDS = 12.0
"""Seconds beyond the grace before a child that is stopping is killed: five for cancelled handlers to clean up, five for
the last writes, and a margin."""

_CANNOT_START = 71
"""Exit code for a child that could not be started: the system lacks memory, processes or descriptors."""

_SETTINGS_INTERVAL = 2.0  # seconds between checks of the settings file, as in the children
_GRACES_KEPT = 5  # latest graces read: a child may still use any of them

_MIN_PAUSE = 0.1
_MAX_PAUSE = 30.0
_HEALTHY_SECONDS = 60.0


# ── policy: pure ──────────────────────────────────────────────────────────────────────────────────────────────────
class ChildRun(NamedTuple):
    """A run of a child process."""

    code: int
    """As ``Popen.returncode``: negative for a signal."""
    seconds: float
    """Seconds it ran."""
    starts: int
    """Number of starts of this child, this run included."""
    failures: int
    """Number of consecutive failed runs before this one."""


class Restart(NamedTuple):
    """Decision to restart a child after ``pause`` seconds. ``failures``: consecutive failed runs."""

    pause: float
    failures: int


def next_restart(run: ChildRun, chance: Callable[[], float] = random.random) -> Restart | None:
    """Returns when to restart a child that ended without a request to stop; None if it ended as intended.

    The pause doubles with each consecutive failure, from 0.1 to 30 s; ``chance`` shortens it by up to half. A run of
    at least a minute resets the count.
    """
    if run.code == FINISHED:
        return None
    if run.code == RECYCLE:
        return Restart(0.0, 0)
    failures = 1 if run.seconds >= _HEALTHY_SECONDS else run.failures + 1
    doublings = min(failures - 1, math.ceil(math.log2(_MAX_PAUSE / _MIN_PAUSE)))
    pause = min(_MIN_PAUSE * 2**doublings, _MAX_PAUSE)
    return Restart(pause * (1 - chance() / 2), failures)


def is_hopeless(run: ChildRun) -> bool:
    """Returns True if the first run failed for the command or the settings: a restart does not help."""
    return run.starts == 1 and run.code in (ConfigError.exit_code, Invalid.exit_code, NAME_TAKEN)


def exit_code(code: int, *, asked: bool) -> int:
    """Returns the shell's exit code for a child's last ``returncode``. ``asked``: the child was asked to stop."""
    if code in (0, FINISHED, RECYCLE) or (asked and code == -signal.SIGTERM):
        return 0  # A child stopped before it handles signals dies of SIGTERM: no job had begun.
    if code == NAME_TAKEN:
        return Unavailable.exit_code
    return code if code > 0 else 128 - code


# ── the supervisor ────────────────────────────────────────────────────────────────────────────────────────────────
def supervise(arguments: Sequence[str], settings: Settings, events: Events) -> int:
    """Runs ``settings.processes`` workers with these arguments until all have ended.

    Returns 0 if all ended as intended, else the highest exit code.
    """
    command = [sys.executable, "-m", "holdfast", "worker", "start", *arguments, "--processes", "1"]
    supervisor = Supervisor(command, settings.processes, settings, events, metrics_port=settings.metrics_port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as asyncio_runner:
        try:
            return asyncio_runner.run(supervisor.run())
        finally:
            ignore_rest_of_burst()


class Supervisor:
    """Runs ``processes`` children with the same command line until they have ended, or SIGTERM or SIGINT arrives."""

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        settings: Settings,
        events: Events,
        *,
        extra_time: float = EXTRA_SECONDS,
        metrics_port: int | None = None,
    ) -> None:
        """``settings``: their file may change the grace. ``metrics_port``: the first child's; the next ones follow."""
        self._command = list(command)
        self._processes = processes
        self._watch = Watch(settings)
        self._graces = deque([settings.grace.total_seconds()], maxlen=_GRACES_KEPT)
        self._metrics_port = metrics_port
        self._extra = extra_time
        self._events = events
        self._stopping = asyncio.Event()
        self._stop_requests = StopRequests()
        self._running: set[subprocess.Popen[bytes]] = set()

    async def run(self) -> int:
        """Keeps the children running. Returns the exit code once all have ended and none is restarted."""
        handle_stop_signals(self.stop)
        with _pipe() as pipe:
            environment = {**os.environ, SUPERVISOR_PIPE: str(pipe)}
            watching = asyncio.create_task(self._watch_settings())
            try:
                async with asyncio.TaskGroup() as group:
                    children = [
                        group.create_task(self._keep_child(each, environment, pipe)) for each in self._commands()
                    ]
            finally:
                watching.cancel()
        return max(child.result() for child in children)

    def stop(self, reason: str) -> None:
        """Stops every child; kills children that still run after the grace and a margin.

        A second call more than a second later is forwarded too: each worker then releases its jobs at once.
        """
        request = self._stop_requests.record_signal()
        if request is StopRequest.DUPLICATE:
            return
        first = request is StopRequest.FIRST
        if first:
            self._events.emit(SupervisorStopping(reason=reason, processes=len(self._running)))
            self._stopping.set()
        for child in self._running:
            if child.returncode is None:  # Not reaped: the pid is still its own.
                os.kill(child.pid, signal.SIGTERM)
        if first:  # after the signals: a broken settings file must not delay them
            self._read_grace()
            asyncio.get_running_loop().call_later(max(self._graces) + self._extra, self._kill)

    async def _watch_settings(self) -> None:
        """Reads the grace from the settings file at intervals, like the children."""
        while True:
            await asyncio.sleep(_SETTINGS_INTERVAL)
            self._read_grace()

    def _read_grace(self) -> None:
        """Reads the grace from the settings file; keeps the last one if the file is invalid."""
        grace = self._graces[-1]
        with suppress(ConfigError):  # each child reports that
            newer = self._watch.poll_changes()
            grace = grace if newer is None else newer.grace.total_seconds()
        self._graces.append(grace)

    def _kill(self) -> None:
        for child in self._running:
            kill_group(child)

    def _commands(self) -> list[list[str]]:
        """Returns the command line of each child. A restarted child keeps its port."""
        first = self._metrics_port
        if not first:  # no port, or any free one
            return [self._command] * self._processes
        return [[*self._command, "--metrics-port", str(first + number)] for number in range(self._processes)]

    async def _keep_child(self, command: Sequence[str], environment: Mapping[str, str], pipe: int) -> int:
        """Runs one child and restarts it by the policy. Returns the exit code of its last run."""
        starts = failures = 0
        pause = 0.0
        while not await self._stopped_within(pause):
            starts += 1
            began = time.monotonic()
            pid, code, cause = await self._run_once(command, environment, pipe)
            run = ChildRun(code, time.monotonic() - began, starts, failures)
            if self._stopping.is_set() or is_hopeless(run):
                return self._ended_for_good(pid, code, cause)
            restart = next_restart(run)
            if restart is None:
                break
            if code != RECYCLE:
                self._events.emit(ChildEnded(pid=pid, cause=cause, restart_in=round(restart.pause, 3)))
            pause, failures = restart
        return 0

    async def _run_once(
        self, command: Sequence[str], environment: Mapping[str, str], pipe: int
    ) -> tuple[int, int, str]:
        """Runs a child to its end. Returns its pid, its exit code, and a description of the exit."""
        ended = asyncio.Event()
        try:
            child = subprocess.Popen(  # noqa: ASYNC220 - returns as soon as the program is started
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[pipe], start_new_session=True
            )
        except OSError as error:
            return 0, _CANNOT_START, f"cannot be started: {error.strerror}"
        when_ended(child, ended.set)
        self._running.add(child)
        await ended.wait()
        self._running.discard(child)
        return child.pid, child.returncode, describe_exit(child.returncode)

    def _ended_for_good(self, pid: int, code: int, cause: str) -> int:
        asked = self._stopping.is_set()
        worst = exit_code(code, asked=asked)
        if worst:
            self._events.emit(ChildEnded(pid=pid, cause=cause, restart_in=None))
        if not asked:
            self.stop(f"a worker has ended: {cause}")
        return worst

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return self._stopping.is_set()


@contextmanager
def _pipe() -> Iterator[int]:
    """Yields the reading end of a pipe; it reaches end of file when this block or this process ends."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


# ── in the child ──────────────────────────────────────────────────────────────────────────────────────────────────
def is_supervised() -> bool:
    """Returns True if a supervisor started this process. Call it before ``watch_parent``."""
    return SUPERVISOR_PIPE in os.environ


def watch_parent(on_orphaned: Callable[[], object], stop_timeout: Callable[[], float]) -> None:
    """In a supervisor's child: calls ``on_orphaned`` in the running loop once the supervisor has died.

    If the process still runs ``stop_timeout()`` seconds later, it kills itself, as the supervisor would have done. Does
    nothing in a process that no supervisor started.
    """
    if is_supervised():
        pipe, loop = int(os.environ.pop(SUPERVISOR_PIPE)), asyncio.get_running_loop()
        os.set_inheritable(pipe, False)
        arguments = (pipe, stop_timeout, loop, on_orphaned)
        threading.Thread(target=_await_orphaned, args=arguments, name="holdfast-parent-watch", daemon=True).start()


def _await_orphaned(
    pipe: int, stop_timeout: Callable[[], float], loop: asyncio.AbstractEventLoop, on_orphaned: Callable[[], object]
) -> None:
    os.read(pipe, 1)  # No writer ever writes: it returns when the last writer has closed the pipe.
    seconds = stop_timeout()
    with suppress(RuntimeError):  # The loop is closed: the worker has ended already.
        loop.call_soon_threadsafe(on_orphaned)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
