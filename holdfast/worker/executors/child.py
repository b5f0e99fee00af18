"""The child's side of the process executor: one job after the other, in the main thread.

Everything that needs the application's classes happens here: binding the payload, encoding the result, telling errors
worth a retry from others. Only text goes back.

Between worker and child go frames of msgpack, never code. A frame is four bytes of length, big-endian, and that many
bytes. The worker begins: the import path as JSON, because it is read before anything of ours can be imported, then
``Setup``, then one ``ChildRequest`` a job. The child answers with an empty frame when it is ready, and with one
``ChildReply`` a request; ``Logged`` frames may come before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.lifecycle import Failed, Outcome, Released, Snoozed, Succeeded
from holdfast.core.models import Job, Lease, Reason
from holdfast.tasks import CURRENT, Context, JobLog, Limits, LogEntry, Registry, Task
from holdfast.telemetry.trace_context import open_traces
from holdfast.worker.executors.outcome import (
    describe_error,
    format_traceback,
    outcome_of,
    payload_refused,
    success_outcome,
)
from holdfast.worker.executors.process_group import resident_bytes

_CHUNK = 256 * 1024
_FAREWELL = 2.0  # seconds for an idle child to end in good order


def serve(connection: socket.socket) -> None:
    """Answer requests until the worker closes the connection or this child has had its share of jobs."""
    inbox = _Inbox(connection)
    first = inbox.next()
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    outbox = _Outbox(connection)
    handlers = _Handlers(setup, outbox)
    threading.Thread(target=_end_with_the_worker, args=(connection.fileno(), handlers), daemon=True).start()
    handlers.import_handlers()
    try:
        outbox.send(b"")
    except BrokenPipeError:
        return  # The worker stopped while this child was starting.
    decoder = msgspec.msgpack.Decoder(ChildRequest)
    served = 0
    while (data := inbox.next()) is not None:
        reply = reply_of(handlers.run(decoder.decode(data)))
        if not outbox.is_ours:
            os._exit(0)  # The handler forked, and this copy has come back from it: it is not the one to answer.
        served += 1
        reply.retiring = _has_had_its_share(setup, served)
        try:
            outbox.send(msgspec.msgpack.encode(reply))
        except OSError as error:
            sys.exit(f"holdfast: a child process has lost its connection to the worker: {error}")
        if reply.retiring:
            return


class _Inbox:
    """Frames from the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def next(self) -> bytes | None:
        """The next frame; None once the worker has closed its end."""
        while (data := decode_frame(self._buffer)) is None:
            received = self._connection.recv(_CHUNK)
            if not received:
                return None
            self._buffer += received
        return data


class _Outbox:
    """Frames to the worker, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_ours(self) -> bool:
        """False in a copy of this process that a handler forked."""
        return os.getpid() == self._owner

    def send(self, data: bytes) -> None:
        """Send a frame; raises OSError if the other end is gone."""
        with self._turn:
            self._connection.sendall(encode_frame(data))

    def send_log(self, logged: Logged) -> None:
        """Send log lines. A worker that is gone stores nothing, and the handler shall not notice."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                self.send(msgspec.msgpack.encode(logged))


class _Handlers:
    """The application's tasks, and how one is run here."""

    def __init__(self, setup: Setup, outbox: _Outbox) -> None:
        self._setup = setup
        self._outbox = outbox
        self._found: dict[tuple[str, str], Task[..., Any]] = {}
        self._loop: asyncio.Runner | None = None
        self._spans = open_traces(False)
        self.busy = False

    def import_handlers(self) -> None:
        """Import the modules that jobs will need. One that fails fails again under the job, and is reported there."""
        for name in [self._setup.app, *self._setup.modules]:
            if name is not None:
                _import(name.partition(":")[0])

    def run(self, request: ChildRequest) -> Outcome:
        """Run one job to its end. Only errors that end the process get past."""
        try:
            task = self._find(request.reference, request.job.task)
        except BaseException as error:  # importing runs the application's code
            return Failed(error=describe_error(error), reason=Reason.NO_HANDLER, traceback=format_traceback(error))
        try:
            arguments = task.bind(request.job.payload)
        except Invalid as error:
            return payload_refused(error)
        except BaseException as error:  # annotations run the application's code
            return outcome_of(error, task)
        self.busy = True
        try:
            value = self._call(task, request, arguments)
        except BaseException as error:  # SystemExit too: the job has failed, this child has not
            return outcome_of(error, task)
        finally:
            self.busy = False
        return success_outcome(task, value, self._setup.result_limit)

    def _find(self, reference: str, name: str) -> Task[..., Any]:
        task = self._found.get((reference, name))
        if task is None:
            task = self._found[reference, name] = _find(reference, name, self._setup.app)
        return task

    def open_log(self, lease: Lease) -> JobLog:
        """A log whose lines go to the worker; whose they are it knows."""
        return JobLog(self._setup.log, lambda _, line: self._outbox.send_log(Logged(line)))

    def _call(self, task: Task[..., Any], request: ChildRequest, arguments: dict[str, Any]) -> Any:
        current = Context(request.job, opener=self)
        context = contextvars.copy_context()
        context.run(CURRENT.set, current)
        if request.carrier:
            self._spans = self._spans or open_traces(True)
            if self._spans is not None:
                context.run(self._spans.attach, request.carrier)
        try:
            return self._called(task, current, context, arguments)
        finally:
            if current.opened_log is not None and (dropped := current.opened_log.close_log()):
                self._outbox.send_log(Logged(dropped=dropped))

    def _called(
        self, task: Task[..., Any], current: Context, context: contextvars.Context, arguments: dict[str, Any]
    ) -> Any:
        before = (current,) if task.needs_context else ()
        value = context.run(task.entry, *before, **arguments)
        if asyncio.iscoroutine(value):
            if self._loop is None:
                self._loop = asyncio.Runner()
            ended: list[tuple[Any, BaseException | None]] = []
            try:
                self._loop.run(_alone(value, ended), context=context)
            except (SystemExit, KeyboardInterrupt):
                self._renew_loop()
                raise
            [(value, error)] = ended
            if error is not None:
                raise error
        return value

    def _renew_loop(self) -> None:
        """Drops the event loop. One of its tasks or callbacks has raised, and the handler may still be suspended."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.close()


async def _alone(handler: Coroutine[Any, Any, Any], ended: list[tuple[Any, BaseException | None]]) -> None:
    """Awaits the handler, then cancels the tasks it left: the loop stands still between jobs, and so would they.

    Adds the value or the exception to ``ended``. asyncio looks at what a task returns or raises, and does not expect
    that to raise.
    """
    try:
        ended.append((await handler, None))
    except BaseException as error:
        ended.append((None, error))
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _find(reference: str, name: str, app: str | None) -> Task[..., Any]:
    """The task of this name: where its function stands, or in the application's registry."""
    module, _, qualname = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    candidates = [found]
    if app is not None:
        module, _, attribute = app.partition(":")
        registry = getattr(getattr(importlib.import_module(module), attribute), "registry", None)
        if isinstance(registry, Registry):
            candidates.append(registry.get(name))
    for candidate in candidates:
        if isinstance(candidate, Task) and candidate.name == name:
            if candidate.dependencies:
                needed = ", ".join(candidate.dependencies)
                raise ConfigError(f"task {name!r}: a child process cannot be given {needed}; build it in the handler")
            return candidate
    raise ConfigError(f"task {name!r}: {reference} is not that task in the child process")


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # an application may even call sys.exit
        sys.stderr.write(f"holdfast: importing {module} in a child process failed: {describe_error(error)}\n")


def _has_had_its_share(setup: Setup, served: int) -> bool:
    if setup.recycle_jobs is not None and served >= setup.recycle_jobs:
        return True
    return setup.recycle_memory is not None and resident_bytes() > setup.recycle_memory


def _end_with_the_worker(descriptor: int, handlers: _Handlers) -> None:
    """Kill this process group when the worker has closed its end, or died: no process could settle its jobs."""
    poll = select.poll()
    poll.register(descriptor, 0)  # Asks for nothing: a hang-up is reported anyway.
    poll.poll()
    if not handlers.busy:
        time.sleep(_FAREWELL)  # The main thread has seen it too and is on its way out.
    os.killpg(0, signal.SIGKILL)


HEADER = 4


class Setup(msgspec.Struct, array_like=True):
    """Initial settings of a child."""

    app: str | None  # module:attribute of the application
    modules: list[str]  # worth importing before the first job
    recycle_jobs: int | None
    recycle_memory: int | None  # bytes
    result_limit: int  # bytes a result may take
    log: Limits


class ChildRequest(msgspec.Struct, array_like=True):
    """A job. ``reference`` (module:qualname): where its function stands; ``carrier``: the trace context to run in."""

    reference: str
    job: Job
    carrier: dict[str, str] | None = None


class Logged(msgspec.Struct, array_like=True, tag="logged"):
    """A line that the handler logged, or how many more there were than an attempt may keep."""

    line: LogEntry | None = None
    dropped: int = 0


class ChildReply(msgspec.Struct, array_like=True, tag="reply"):
    """An outcome, flat. ``retiring``: the child ends now and takes no further job."""

    kind: str
    retiring: bool = False
    result: str | None = None
    error: str = ""
    reason: str = ""
    traceback: str | None = None
    retryable: bool = True
    delay: timedelta | None = None
    pause: str | None = None


def encode_frame(data: bytes) -> bytes:
    """``data`` with its length before it."""
    return len(data).to_bytes(HEADER) + data


def decode_frame(buffer: bytearray) -> bytes | None:
    """Take the first frame out of ``buffer``; None while it is incomplete."""
    if len(buffer) < HEADER:
        return None
    end = HEADER + int.from_bytes(buffer[:HEADER])
    if len(buffer) < end:
        return None
    data = bytes(buffer[HEADER:end])
    del buffer[:end]
    return data


def reply_of(outcome: Outcome) -> ChildReply:
    """The reply that says ``outcome``."""
    match outcome:
        case Succeeded(result=result):
            return ChildReply("succeeded", result=result)
        case Failed():
            return ChildReply(
                "failed",
                error=outcome.error,
                reason=outcome.reason,
                traceback=outcome.traceback,
                retryable=outcome.retryable,
                delay=outcome.delay,
                pause=outcome.pause,
            )
        case Snoozed(delay=delay):
            return ChildReply("snoozed", delay=delay)
        case _:
            return ChildReply("released")


def outcome_in(reply: ChildReply) -> Outcome:
    """The outcome that ``reply`` says."""
    match reply.kind:
        case "succeeded":
            return Succeeded(reply.result)
        case "failed":
            return Failed(
                error=reply.error,
                reason=Reason(reply.reason),
                traceback=reply.traceback,
                retryable=reply.retryable,
                delay=reply.delay,
                pause=reply.pause,
            )
        case "snoozed":
            return Snoozed(reply.delay or timedelta(0))
        case _:
            return Released()
