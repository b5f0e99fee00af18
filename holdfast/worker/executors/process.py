"""Handlers in child processes: a timeout kills the process, and a crash affects no other job.

Up to ``size`` children run jobs, and one spare child is kept warm. Each is a new interpreter in its own session,
connected by a socket. Nothing is forked from a process with threads, locks and connections; nothing is pickled; the
main module is never imported. State that a job leaves in its child (working directory, signal handlers, caches) is
visible to the next job; ``recycle_jobs=1`` gives each job a new child.

If a job is cancelled, its child and the whole process group are killed at once, then its processes outside the group.
The spare child replaces it.
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
from holdfast.tasks import MAX_RESULT_BYTES, NOTHING, JobLog, LogLimits, Task
from holdfast.worker.executors.child import (
    ChildReply,
    ChildRequest,
    Logged,
    Setup,
    decode_frame,
    encode_frame,
    outcome_from_reply,
)
from holdfast.worker.executors.outcome import UNSTARTABLE_DELAY, describe_error
from holdfast.worker.executors.process_group import describe_exit, kill_group, kill_marked, mark_environment, when_ended
from holdfast.worker.executors.resource_limits import ResourceWatcher, limit_behind_exit, over_limit, unsupported_limits

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_CHUNK = 256 * 1024
_EXIT_TIMEOUT = 3.0  # seconds a child may take to exit after its connection is closed
_MAX_MEMORY_SHARE = 0.75  # share of a job's memory limit that its child may use before the job
_RESTART_PAUSES = (0.1, 5.0)  # seconds before a failed start is repeated: first and longest


class ProcessExecutor:
    """A pool of up to ``size`` children; ``warm`` of them (or all) and a spare are kept ready. For one event loop.

    Each child imports ``app`` (module:attribute) before its first job. A child exits after ``recycle_jobs`` jobs, or
    once it uses more than ``recycle_memory`` bytes after a job. ``result_limit``: bytes of a result.
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
        result_limit: int = MAX_RESULT_BYTES,
        log: LogLimits = NOTHING,
        watcher: ResourceWatcher | None = None,
    ) -> None:
        self._watcher = watcher or ResourceWatcher()
        self._warm = size if warm is None else warm
        self._events = events
        self._setup = Setup(app, [], recycle_jobs, recycle_memory, result_limit, log)
        self._slots = asyncio.Semaphore(size)
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []  # ready children are at the end, from where jobs take them
        self._failed_starts = 0
        self._refilling: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts the children and waits until they are ready; raises OSError or ConfigError if that fails."""
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
        """Runs ``job`` in a child, as soon as one is free. If cancelled, kills the child with all its processes.

        ``log`` receives the handler's log lines; ``carrier`` is the trace context; ``limits`` are the job's.
        ``Released``: no child could be started, as for lack of descriptors, processes or memory.
        """
        try:
            reference = task.reference
        except ConfigError as error:
            return Failed(error=describe_error(error), reason=Reason.NO_HANDLER)
        if (unsupported := unsupported_limits(limits)) is not None:
            return unsupported
        own = limits if limits.is_set else None
        request = encode_frame(msgspec.msgpack.encode(ChildRequest(reference, job, carrier, own)))
        async with self._slots:
            try:
                child = self._take_idle(limits) or self._spawn()
            except OSError as error:
                return Released(f"this worker cannot start a child process: {error}", UNSTARTABLE_DELAY)
            watch = None
            try:
                if limits.is_set:
                    await child.ready.wait()  # the start of the child does not count against the job's limits
                    watch = self._watcher.watch(child.process, limits)
                reply = await child.request_reply(request, log)
            except BaseException:
                child.kill()
                raise
            finally:
                breach = None if watch is None else watch.close()
            if reply is not None:  # a module that ends its process must not end every child that starts
                self._add_module(reference)
            return self._finish_job(child, reply, limits, breach)

    async def close(self) -> None:
        """Ends every child: closes the connection of idle ones, kills busy ones."""
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
        if not children:
            return
        _, slow = await asyncio.wait([child.reaped for child in children], timeout=_EXIT_TIMEOUT)
        for child in children:
            child.kill()
        if slow:
            await asyncio.wait(slow, timeout=_EXIT_TIMEOUT)

    def _take_idle(self, limits: ResourceLimits) -> _Child | None:
        """Returns an idle child, or None. For a job with a memory limit: one that uses little memory."""
        while self._idle:
            child = self._idle.pop()
            if not self._holds_too_much(child.resident, limits):
                return child
            self._retire(child)
        return None

    def _finish_job(
        self, child: _Child, reply: ChildReply | None, limits: ResourceLimits, breach: Failed | None
    ) -> Outcome:
        if reply is None:
            if breach is None and not child.is_ready:
                return Released(f"its child process died while it started: {child.cause}", UNSTARTABLE_DELAY)
            if breach is None and (name := limit_behind_exit(child.exit_code, "", limits)) is not None:
                breach = over_limit(name, limits)
            return breach or Failed(error=f"its process died: {child.cause}", reason=Reason.CRASHED)
        if breach is not None:
            child.kill()  # the job had just ended
        elif reply.retiring or self._holds_too_much(reply.resident, limits):
            self._retire(child)
        else:
            child.resident = reply.resident
            self._idle.append(child)
        return outcome_from_reply(reply)

    @staticmethod
    def _holds_too_much(resident: int, limits: ResourceLimits) -> bool:
        """Returns True if a child uses so much memory that a job with these limits would fail for earlier jobs."""
        return limits.memory is not None and resident > _MAX_MEMORY_SHARE * limits.memory

    @staticmethod
    def _retire(child: _Child) -> None:
        child.close_connection()
        asyncio.get_running_loop().call_later(_EXIT_TIMEOUT, child.kill)

    def _add_module(self, reference: str) -> None:
        module = reference.partition(":")[0]
        if module not in self._setup.modules:
            self._setup.modules.append(module)

    def _spawn(self) -> _Child:
        child = _Child(self._setup, self._child_ready, self._child_ended)
        self._children.add(child)
        return child

    def _refill(self) -> None:
        """Starts children until there are ``warm`` and a spare."""
        self._refilling = None
        while not self._closed and len(self._children) <= self._warm:
            self._idle.insert(0, self._spawn())

    def _child_ready(self, child: _Child) -> None:
        self._failed_starts = 0
        if child in self._idle:
            self._idle.remove(child)
            self._idle.append(child)

    def _child_ended(self, child: _Child) -> None:
        """Handles the end of a child: replaces it at once, or after a backoff if children end while starting."""
        self._children.discard(child)
        if child in self._idle:
            self._idle.remove(child)
        pause = 0.0
        if not child.is_ready and not child.killed:
            first, longest = _RESTART_PAUSES
            pause = min(first * 2 ** min(self._failed_starts, 10), longest)
            self._failed_starts += 1
        if not child.retired and not child.killed:
            self._events.emit(ChildEnded(pid=child.pid, cause=child.cause, restart_in=pause))
        self._refill_in(pause)

    def _refill_in(self, seconds: float) -> None:
        if not self._closed and self._refilling is None:
            self._refilling = asyncio.get_running_loop().call_later(seconds, self._try_refill)

    def _try_refill(self) -> None:
        try:
            self._refill()
        except OSError as error:
            pause = _RESTART_PAUSES[1]
            self._events.emit(ChildEnded(pid=0, cause=f"cannot be started: {error.strerror}", restart_in=pause))
            self._refill_in(pause)


class _Child:
    """A child process and the worker's end of its socket."""

    def __init__(self, setup: Setup, became_ready: Callable[[_Child], None], ended: Callable[[_Child], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._child_ready = became_ready
        self._child_ended = ended
        self._buffer = bytearray()
        self._answer: asyncio.Future[ChildReply | None] | None = None
        self._log: Callable[[], JobLog] | None = None
        self.ready = asyncio.Event()
        self.is_ready = False
        self.killed = False
        self.retired = False
        self.resident = 0  # bytes of resident memory after its last job
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
        preamble = encode_frame(json.dumps(sys.path).encode()) + encode_frame(msgspec.msgpack.encode(setup))
        with contextlib.suppress(ConnectionError):  # It has ended already: reaping it reports that.
            self._socket.sendall(preamble)
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
        """Sends a request and waits for its reply; returns None if the child ended instead."""
        if self.reaped.done():
            return None
        self._log = log
        self._answer = self._loop.create_future()
        with contextlib.suppress(ConnectionError):  # It has ended already: reaping it sets the answer.
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
        """Kills the child and its process group."""
        if not self.reaped.done():
            self.killed = True
            kill_group(self._process)

    def close_connection(self) -> None:
        """Closes the connection: an idle child then exits."""
        self.retired = True
        self._close_socket()

    def _read(self) -> bool:
        """Reads available bytes; returns True if there may be more."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_socket()
            # A child that exits closes its socket just before. A child whose handler has closed every descriptor does
            # not exit, and is killed.
            self._loop.call_later(_RESTART_PAUSES[0], kill_group, self._process)
            return False
        self._buffer += data
        while (message := decode_frame(self._buffer)) is not None:
            self._receive(message)
        return True

    def _receive(self, message: bytes) -> None:
        if not message:
            self.is_ready = True
            self.ready.set()
            self._child_ready(self)
        elif self._answer is not None and not self._answer.done():
            given = msgspec.msgpack.decode(message, type=ChildReply | Logged)
            if isinstance(given, ChildReply):
                self._answer.set_result(given)
            elif self._log is not None:
                _record_log(given, self._log())

    def _close_socket(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _on_reaped(self) -> None:
        """Handles the reaped process. A reply that it sent before its end still counts."""
        while self._socket.fileno() >= 0 and self._read():
            continue
        self._close_socket()
        if not self.retired:  # it did not exit on request: kill its processes outside the group too
            try:
                self._loop.run_in_executor(None, kill_marked, self._mark)
            except RuntimeError:  # no thread can be started
                kill_marked(self._mark)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
        self.reaped.set_result(None)
        self.ready.set()
        self._child_ended(self)


def _record_log(logged: Logged, log: JobLog) -> None:
    if logged.line is not None:
        log.take(logged.line)
    log.count_dropped(logged.dropped)
