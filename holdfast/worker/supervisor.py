"""Starts several worker processes, restarts dead ones, and stops all of them together.

Each child leads a session of its own, so a terminal's Ctrl-C reaches only the supervisor, which hands a stop signal on
once, and again where one comes more than a second later. The reading end of a pipe that only the supervisor holds open
for writing tells a child when the supervisor is gone, however it went: then it stops as if it had been asked to.
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
"""Exit code of a worker that wants to be replaced by a fresh process at once (``recycle_jobs``, ``recycle_memory``)."""

FINISHED = 85
"""Exit code of a supervised worker that has ended on purpose: stopped, or with nothing left to run. It is not 0: any
handler can exit with that, and one that does has taken its worker down."""

NAME_TAKEN = 86
"""Exit code of a supervised worker whose ``worker_id`` a living worker has. Other reasons for 75 end by themselves."""

SUPERVISOR_PIPE = "_HOLDFAST_SUPERVISOR_PIPE"
"""Environment variable of a child: the pipe's descriptor. The underscore keeps it apart from the settings."""

EXTRA_SECONDS = 12.0
"""Seconds beyond the grace that a child may take to stop before it is killed: five for cancelled handlers to clean up,
five for the last writes."""

_CANNOT_START = 71
"""Stands for the exit code of a child that could not even be started: the system is out of something."""

_LOOK_EVERY = 2.0  # seconds between looks at the settings file, as often as the children look
_LOOKS = 5  # of which a child may still go by any: it follows the file within 5 seconds

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_HEALTHY_SECONDS = 60.0


# ── policy: pure ──────────────────────────────────────────────────────────────────────────────────────────────────
class ChildRun(NamedTuple):
    """A run of a child, and how it ended."""

    code: int
    """As ``Popen.returncode``: negative for a signal."""
    seconds: float
    """How long it ran."""
    starts: int
    """How many times this child has been started, this run included."""
    failures: int
    """How many runs in a row before this one failed."""


class Restart(NamedTuple):
    """Start the child again after ``pause`` seconds; ``failures`` runs in a row have failed."""

    pause: float
    failures: int


def next_restart(run: ChildRun, chance: Callable[[], float] = random.random) -> Restart | None:
    """Whether and when to start a child again that ended without being asked by us; None: it has ended well.

    The pause doubles with each failure in a row, from 0.1 to 30 s, of which ``chance`` takes away up to half; a run
    of at least a minute starts the row anew.
    """
    if run.code == FINISHED:
        return None
    if run.code == RECYCLE:
        return Restart(0.0, 0)
    failures = 1 if run.seconds >= _HEALTHY_SECONDS else run.failures + 1
    doublings = min(failures - 1, math.ceil(math.log2(_LONGEST_PAUSE / _FIRST_PAUSE)))
    pause = min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE)
    return Restart(pause * (1 - chance() / 2), failures)


def is_hopeless(run: ChildRun) -> bool:
    """Returns True if the very first run says that the command or the settings are wrong: no restart helps."""
    return run.starts == 1 and run.code in (ConfigError.exit_code, Invalid.exit_code, NAME_TAKEN)


def exit_code(code: int, *, asked: bool) -> int:
    """Returns the exit code that a child's last ``returncode`` adds, as a shell would say it. ``asked``: after we asked
    it to stop.
    """
    if code in (0, FINISHED, RECYCLE) or (asked and code == -signal.SIGTERM):
        return 0  # A child stopped before it could listen ends by the signal itself: nothing had begun.
    if code == NAME_TAKEN:
        return Unavailable.exit_code
    return code if code > 0 else 128 - code


# ── the supervisor ────────────────────────────────────────────────────────────────────────────────────────────────
def supervise(arguments: Sequence[str], settings: Settings, events: Events) -> int:
    """Run ``settings.processes`` workers, each started with these arguments; returns the exit code for the whole.

    Blocks until every worker has ended. It is 0 if all ended well, else the worst code among them.
    """
    command = [sys.executable, "-m", "holdfast", "worker", "start", *arguments, "--processes", "1"]
    supervisor = Supervisor(command, settings.processes, settings, events, metrics_port=settings.metrics_port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            return loop.run(supervisor.run())
        finally:
            ignore_rest_of_burst()


class Supervisor:
    """Runs ``processes`` children with the same command line until they have ended or SIGTERM or SIGINT comes."""

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        settings: Settings,
        events: Events,
        *,
        extra_seconds: float = EXTRA_SECONDS,
        metrics_port: int | None = None,
    ) -> None:
        """``settings``: their file may change the grace. ``metrics_port``: the first child's; each further one has the
        next."""
        self._command = list(command)
        self._processes = processes
        self._watch = Watch(settings)
        self._graces = deque([settings.grace.total_seconds()], maxlen=_LOOKS)
        self._metrics_port = metrics_port
        self._extra = extra_seconds
        self._events = events
        self._stopping = asyncio.Event()
        self._stop_requests = StopRequests()
        self._running: set[subprocess.Popen[bytes]] = set()

    async def run(self) -> int:
        """Keep the children running; returns the exit code once all of them have ended for good."""
        handle_stop_signals(self.stop)
        with _pipe() as pipe:
            environment = {**os.environ, SUPERVISOR_PIPE: str(pipe)}
            following = asyncio.create_task(self._follow())
            try:
                async with asyncio.TaskGroup() as group:
                    children = [group.create_task(self._keep(each, environment, pipe)) for each in self._commands()]
            finally:
                following.cancel()
        return max(child.result() for child in children)

    def stop(self, reason: str) -> None:
        """Tell every child to stop; those that have not after the grace and a little more are killed.

        A second call more than a second later is handed on too: it makes each worker release its jobs at once.
        """
        request = self._stop_requests.record()
        if request is StopRequest.DUPLICATE:
            return
        first = request is StopRequest.FIRST
        if first:
            self._events.emit(SupervisorStopping(reason=reason, processes=len(self._running)))
            self._stopping.set()
        for child in self._running:
            if child.returncode is None:  # Not reaped yet: the number is still its own.
                os.kill(child.pid, signal.SIGTERM)
        if first:  # after the stop: whatever is wrong with the settings file must not keep a child from hearing
            self._look()
            asyncio.get_running_loop().call_later(max(self._graces) + self._extra, self._kill)

    async def _follow(self) -> None:
        """Look at the settings file as long as this runs, as the children do."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            self._look()

    def _look(self) -> None:
        """Remember the grace that the settings file says; where it is broken now, the last one that it said."""
        grace = self._graces[-1]
        with suppress(ConfigError):  # each child tells of that
            newer = self._watch.poll_changes()
            grace = grace if newer is None else newer.grace.total_seconds()
        self._graces.append(grace)

    def _kill(self) -> None:
        for child in self._running:
            kill_group(child)

    def _commands(self) -> list[list[str]]:
        """Each child's command line. A child that is restarted has the port of the one before it."""
        first = self._metrics_port
        if not first:  # none, or for each any that is free
            return [self._command] * self._processes
        return [[*self._command, "--metrics-port", str(first + number)] for number in range(self._processes)]

    async def _keep(self, command: Sequence[str], environment: Mapping[str, str], pipe: int) -> int:
        """Run one child, again and again as the policy says; returns its last run's part of our exit code."""
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
        """Runs a child from start to end: its pid, its exit code, and that in words."""
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
            return False


@contextmanager
def _pipe() -> Iterator[int]:
    """The reading end of a pipe that ends with this block, or with this process."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


# ── in the child ──────────────────────────────────────────────────────────────────────────────────────────────────
def is_supervised() -> bool:
    """Returns True if a supervisor started this process, asked before it watches its parent."""
    return SUPERVISOR_PIPE in os.environ


def watch_parent(on_orphaned: Callable[[], object], patience: Callable[[], float]) -> None:
    """In a supervisor's child: call ``on_orphaned`` in the running loop once the supervisor is gone.

    If the process is not gone either when its time to stop is over, the seconds that ``patience`` says then, it is
    killed, as the supervisor would have done. Nothing happens in a process that no supervisor started.
    """
    if is_supervised():
        pipe, loop = int(os.environ.pop(SUPERVISOR_PIPE)), asyncio.get_running_loop()
        os.set_inheritable(pipe, False)
        arguments = (pipe, patience, loop, on_orphaned)
        threading.Thread(target=_await_orphaned, args=arguments, name="holdfast-parent-watch", daemon=True).start()


def _await_orphaned(
    pipe: int, patience: Callable[[], float], loop: asyncio.AbstractEventLoop, on_orphaned: Callable[[], object]
) -> None:
    os.read(pipe, 1)  # Without writers: it returns when the last writer is gone.
    seconds = patience()
    with suppress(RuntimeError):  # The loop is closed: what was to be stopped has ended already.
        loop.call_soon_threadsafe(on_orphaned)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
