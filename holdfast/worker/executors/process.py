"""Handlers in processes of their own: a timeout that really kills, and a crash that harms no other job.

Up to ``size`` children work and one more waits, warm. Each is a clean interpreter of its own session, joined by one
socket: no fork of a program that has threads, locks and connections, no pickle, and an import of the main module is
never needed. What a job leaves behind in its child (working directory, signal handlers, caches) the next one finds;
``recycle_jobs=1`` gives each job a fresh child.

Cancelled, the job's child and its whole process group are killed at once, then what has left the group, and the warm
one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.errors import ConfigError
from holdfast.core.events import ChildEnded, Events
from holdfast.core.lifecycle import Failed, Outcome, Released
from holdfast.core.models import Job, Reason
from holdfast.core.resources import UNLIMITED, ResourceLimits
from holdfast.tasks import NOTHING, RESULT_LIMIT, JobLog, LogLimits, Task
from holdfast.worker.executors.child import (
    ChildReply,
    ChildRequest,
    Logged,
    Setup,
    decode_frame,
    encode_frame,
    outcome_in,
)
from holdfast.worker.executors.outcome import UNSTARTABLE_DELAY, describe_error
from holdfast.worker.executors.process_group import describe_exit, kill_group, kill_marked, mark_environment, when_ended
from holdfast.worker.executors.resource_limits import ResourceWatcher, limit_behind_exit, over_limit, unsupported_limits

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_CHUNK = 256 * 1024
_FAREWELL = 3.0  # seconds a child may take to end by itself once its connection is closed
_FULL = 0.75  # share of a job's limit of memory that its child may hold before it begins
_PATIENCE = (0.1, 5.0)  # seconds before a child that ended while starting is replaced: first, at most


class ProcessExecutor:
    """A pool of up to ``size`` children; ``warm`` (or all) and a spare are kept ready. Used from one event loop.

    ``app`` (module:attribute) is imported by each child before its first job. A child ends after ``recycle_jobs`` jobs,
    or once it holds more than ``recycle_memory`` bytes after one. ``result_limit``: bytes a result may take.
    """

    def __init__(
        self,
        size: int,
        *,
        warm: int | None = None,
        app: str | None,
        events: Events,
        recycle_jobs: int | None = None,
        recycle_memory: int | None = None,
        result_limit: int = RESULT_LIMIT,
        log: LogLimits = NOTHING,
        watcher: ResourceWatcher | None = None,
    ) -> None:
        self._watcher = watcher or ResourceWatcher()
        self._warm = size if warm is None else warm
        self._events = events
        self._setup = Setup(app, [], recycle_jobs, recycle_memory, result_limit, log)
        self._places = asyncio.Semaphore(size)
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []  # ready ones at the end, where the next job takes its child
        self._false_starts = 0
        self._refilling: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the children and wait until they are ready; OSError or ConfigError where that fails."""
        self._refill()
        await asyncio.gather(*[child.ready.wait() for child in self._children])
        if not any(child.is_ready for child in self._children):
            raise ConfigError(
                "the children of the process executor end while they start; see what they wrote to stderr"
            )

    async def run(
        self,
        task: Task[..., Any],
        job: Job,
        log: Callable[[], JobLog] | None = None,
        carrier: dict[str, str] | None = None,
        limits: ResourceLimits = UNLIMITED,
    ) -> Outcome:
        """Run ``job`` in a child, as soon as one is free. Cancelled, it kills the child with all its processes.
        ``log``: takes the handler's log lines; ``carrier``: the trace context it is to run in; ``limits``: of the job.

        ``Released`` means that no child could be started: out of descriptors, processes or memory.
        """
        try:
            reference = task.reference
        except ConfigError as error:
            return Failed(error=describe_error(error), reason=Reason.NO_HANDLER)
        if (unsupported := unsupported_limits(limits)) is not None:
            return unsupported
        own = limits if limits.is_set else None
        request = encode_frame(msgspec.msgpack.encode(ChildRequest(reference, job, carrier, own)))
        async with self._places:
            try:
                child = self._take_idle(limits) or self._spawn()
            except OSError as error:
                return Released(f"this worker cannot start a child process: {error}", UNSTARTABLE_DELAY)
            self._remember(reference)
            watch = None
            try:
                if limits.is_set:
                    await child.ready.wait()  # what it takes to start is not the job's
                    watch = self._watcher.watch(child.process, limits)
                reply = await child.request_reply(request, log)
            except BaseException:
                child.kill()
                raise
            finally:
                breach = None if watch is None else watch.close()
            return self._take_back(child, reply, limits, breach)

    async def close(self) -> None:
        """End every child: idle ones in good order, busy ones by SIGKILL."""
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
        children = list(self._children)
        for child in children:
            if child in self._idle:
                child.close_connection()
            else:
                child.kill()
        self._idle.clear()
        if children:
            await asyncio.wait([child.reaped for child in children], timeout=_FAREWELL)
        for child in children:
            child.kill()

    def _take_idle(self, limits: ResourceLimits) -> _Child | None:
        """An idle child; None where there is none. For a job with a limit of memory: one that holds little of it."""
        while self._idle:
            child = self._idle.pop()
            if not self._is_full(child.resident, limits):
                return child
            self._dismiss(child)
        return None

    def _take_back(
        self, child: _Child, reply: ChildReply | None, limits: ResourceLimits, breach: Failed | None
    ) -> Outcome:
        if reply is None:
            if breach is None and (name := limit_behind_exit(child.exit_code, "", limits)) is not None:
                breach = over_limit(name, limits)
            return breach or Failed(error=f"its process died: {child.cause}", reason=Reason.CRASHED)
        if breach is not None:
            child.kill()  # the job had ended a moment before
        elif reply.retiring or self._is_full(reply.resident, limits):
            self._dismiss(child)
        else:
            child.resident = reply.resident
            self._idle.append(child)
        return outcome_in(reply)

    @staticmethod
    def _is_full(resident: int, limits: ResourceLimits) -> bool:
        """Returns True if a child holds so much that a job with these limits would pay for the jobs before it."""
        return limits.memory is not None and resident > _FULL * limits.memory

    @staticmethod
    def _dismiss(child: _Child) -> None:
        child.close_connection()
        asyncio.get_running_loop().call_later(_FAREWELL, child.kill)

    def _remember(self, reference: str) -> None:
        module = reference.partition(":")[0]
        if module not in self._setup.modules:
            self._setup.modules.append(module)

    def _spawn(self) -> _Child:
        child = _Child(self._setup, self._warmed, self._gone)
        self._children.add(child)
        return child

    def _refill(self) -> None:
        """Have ``warm`` children and a spare."""
        self._refilling = None
        while not self._closed and len(self._children) <= self._warm:
            self._idle.insert(0, self._spawn())

    def _warmed(self, child: _Child) -> None:
        self._false_starts = 0
        if child in self._idle:
            self._idle.remove(child)
            self._idle.append(child)

    def _gone(self, child: _Child) -> None:
        """A child has ended. Its place is filled in a moment, or later where children end before they are ready."""
        self._children.discard(child)
        if child in self._idle:
            self._idle.remove(child)
        pause = 0.0
        if not child.is_ready and not child.killed:
            first, most = _PATIENCE
            pause = min(first * 2**self._false_starts, most)
            self._false_starts += 1
        if not child.dismissed and not child.killed:
            self._events.emit(ChildEnded(pid=child.pid, cause=child.cause, restart_in=pause))
        self._refill_in(pause)

    def _refill_in(self, seconds: float) -> None:
        if not self._closed and self._refilling is None:
            self._refilling = asyncio.get_running_loop().call_later(seconds, self._try_refill)

    def _try_refill(self) -> None:
        try:
            self._refill()
        except OSError as error:
            pause = _PATIENCE[1]
            self._events.emit(ChildEnded(pid=0, cause=f"cannot be started: {error.strerror}", restart_in=pause))
            self._refill_in(pause)


class _Child:
    """A child process and the worker's end of its socket."""

    def __init__(self, setup: Setup, warmed: Callable[[_Child], None], gone: Callable[[_Child], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._warmed = warmed
        self._gone = gone
        self._buffer = bytearray()
        self._answer: asyncio.Future[ChildReply | None] | None = None
        self._log: Callable[[], JobLog] | None = None
        self.ready = asyncio.Event()
        self.is_ready = False
        self.killed = False
        self.dismissed = False
        self.resident = 0  # bytes after its last job
        self.reaped: asyncio.Future[None] = self._loop.create_future()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._start(theirs, setup)
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _start(self, theirs: socket.socket, setup: Setup) -> None:
        descriptor = theirs.fileno()
        environment, self._mark = mark_environment(os.environ)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", _BOOTSTRAP, str(descriptor)],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            raise
        try:
            when_ended(self._process, self._on_reaped)
        except BaseException:
            self._socket.close()
            kill_group(self._process)
            self._process.wait()
            raise
        greeting = encode_frame(json.dumps(sys.path).encode()) + encode_frame(msgspec.msgpack.encode(setup))
        with contextlib.suppress(ConnectionError):  # It has ended already: its reaping sees and reports that.
            self._socket.sendall(greeting)
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._process

    @property
    def exit_code(self) -> int:
        return self._process.returncode

    @property
    def cause(self) -> str:
        """Describes the end of the child."""
        return describe_exit(self._process.returncode)

    async def request_reply(self, request: bytes, log: Callable[[], JobLog] | None) -> ChildReply | None:
        """Send a request and wait for its reply; None where the child ended instead."""
        if self.reaped.done():
            return None
        self._log = log
        self._answer = self._loop.create_future()
        with contextlib.suppress(ConnectionError):  # It has ended already: its reaping is the answer.
            await self._send(request)
        return await self._answer

    async def _send(self, data: bytes) -> None:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            await self._loop.sock_sendall(self._socket, data[sent:])

    def kill(self) -> None:
        """SIGKILL to the child and its group, at once."""
        if not self.reaped.done():
            self.killed = True
            kill_group(self._process)

    def close_connection(self) -> None:
        """Close the connection: an idle child then ends by itself."""
        self.dismissed = True
        self._hang_up()

    def _read(self) -> bool:
        """Take received bytes; whether there may be more."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            # A child that ends closes its socket a moment before. One that only lost it (a handler that closes every
            # descriptor) cannot be used any more and is ended.
            self._loop.call_later(_PATIENCE[0], kill_group, self._process)
            return False
        self._buffer += data
        while (message := decode_frame(self._buffer)) is not None:
            self._receive(message)
        return True

    def _receive(self, message: bytes) -> None:
        if not message:
            self.is_ready = True
            self.ready.set()
            self._warmed(self)
        elif self._answer is not None and not self._answer.done():
            given = msgspec.msgpack.decode(message, type=ChildReply | Logged)
            if isinstance(given, ChildReply):
                self._answer.set_result(given)
            elif self._log is not None:
                _store(given, self._log())

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _on_reaped(self) -> None:
        """The process has ended and is reaped. A reply that it sent before still counts."""
        while self._socket.fileno() >= 0 and self._read():
            continue
        self._hang_up()
        if not self.dismissed:  # it did not end of its own accord: neither may what it started in sessions of their own
            self._loop.run_in_executor(None, kill_marked, self._mark)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
        self.reaped.set_result(None)
        self.ready.set()
        self._gone(self)


def _store(logged: Logged, log: JobLog) -> None:
    if logged.line is not None:
        log.take(logged.line)
    log.count_dropped(logged.dropped)
