"""The child's side of the process executor: one job at a time, in the main thread.

Everything that needs the application's classes happens here: the payload is bound, the result is encoded, and errors
are classified as retryable or not. Replies contain only text.

The protocol is msgpack frames, never pickled code. A frame is its length (four bytes, big-endian) and its data. The
worker sends the import path (as JSON: Holdfast cannot be imported yet), ``Setup``, then one ``ChildRequest`` per job.
The child sends an empty frame once it is ready; for each request any number of ``Logged`` frames, then one
``ChildReply``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import importlib
import inspect
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
from holdfast.core.resources import ResourceLimits
from holdfast.tasks import (
    CURRENT,
    Context,
    JobLog,
    LogEntry,
    LogLimits,
    Registry,
    Task,
    await_in_scopes,
    call_in_scopes,
)
from holdfast.telemetry.trace_context import open_traces
from holdfast.worker.executors.outcome import (
    describe_error,
    format_traceback,
    outcome_of,
    payload_refused,
    success_outcome,
)
from holdfast.worker.executors.process_group import resident_bytes
from holdfast.worker.executors.resource_limits import limit_behind_error, limit_this_process, replace_error

_CHUNK = 256 * 1024
_EXIT_TIMEOUT = 2.0  # seconds an idle child may take to exit


def serve(connection: socket.socket) -> None:
    """Runs jobs until the worker closes the connection, or this child reaches its limit of jobs or memory."""
    inbox = _Inbox(connection)
    first = inbox.next()
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    outbox = _Outbox(connection)
    handlers = _Handlers(setup, outbox)
    threading.Thread(target=_kill_when_orphaned, args=(connection.fileno(), handlers), daemon=True).start()
    handlers.import_handlers()
    gc.freeze()  # No collection need visit the modules, and a child ends sooner.
    try:
        outbox.send(b"")
    except ConnectionError:
        return  # The worker stopped while this child was starting.
    decoder = msgspec.msgpack.Decoder(ChildRequest)
    served = 0
    while (data := inbox.next()) is not None:
        request = decoder.decode(data)
        reply = reply_from_outcome(handlers.run(request))
        if not outbox.is_ours:
            os._exit(0)  # The handler forked, and its copy has returned here: only the original may reply.
        served += 1
        reply.resident = resident_bytes()
        reply.retiring = _should_recycle(setup, served, reply.resident)
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
        """Returns the next frame; None once the worker has closed its end, or was killed before it read a reply."""
        while (data := decode_frame(self._buffer)) is None:
            try:
                received = self._connection.recv(_CHUNK)
            except ConnectionError:
                return None
            if not received:
                return None
            self._buffer += received
        return data


class _Outbox:
    """Frames to the worker, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Returns False in a process that a handler forked."""
        return os.getpid() == self._owner

    def send(self, data: bytes) -> None:
        """Sends a frame; raises OSError if the worker has closed its end."""
        with self._lock:
            self._connection.sendall(encode_frame(data))

    def send_log(self, logged: Logged) -> None:
        """Sends log lines. Ignores a lost connection: a handler must not fail for its log."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                self.send(msgspec.msgpack.encode(logged))


class _Handlers:
    """Finds and runs the application's tasks."""

    def __init__(self, setup: Setup, outbox: _Outbox) -> None:
        self._setup = setup
        self._outbox = outbox
        self._found: dict[tuple[str, str], Task[..., Any]] = {}
        self._loop: asyncio.Runner | None = None
        self._spans = open_traces(False)
        self.busy = False

    def import_handlers(self) -> None:
        """Imports the modules that jobs will need. A failing import fails again with the job, and is reported then."""
        for name in [self._setup.app, *self._setup.modules]:
            if name is not None:
                _import(name.partition(":")[0])

    def run(self, request: ChildRequest) -> Outcome:
        """Runs one job and returns its outcome. Raises only errors that end the process."""
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
            with limit_this_process(request.limits):
                value = self._call(task, request, arguments)
        except BaseException as error:  # SystemExit too: it fails the job and does not end the child
            return _with_limit_reason(outcome_of(error, task), error, request.limits)
        finally:
            self.busy = False
        return success_outcome(value, self._setup.result_limit)

    def _find(self, reference: str, name: str) -> Task[..., Any]:
        task = self._found.get((reference, name))
        if task is None:
            task = self._found[reference, name] = _find(reference, name, self._setup.app)
        return task

    def open_log(self, lease: Lease) -> JobLog:
        """Returns a log that sends its lines to the worker, which knows their job."""
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
        handler = functools.partial(task.entry, *before, **arguments)
        if inspect.iscoroutinefunction(task.function):
            value: Any = await_in_scopes(task.scopes, current, handler)
        else:
            value = context.run(call_in_scopes, task.scopes, current, handler)
        if asyncio.iscoroutine(value):
            if self._loop is None:
                self._loop = asyncio.Runner()
            results: list[tuple[Any, BaseException | None]] = []
            try:
                self._loop.run(_run_to_end(value, results), context=context)
            except (SystemExit, KeyboardInterrupt):
                self._renew_loop()
                raise
            [(value, error)] = results
            if error is not None:
                raise error
        return value

    def _renew_loop(self) -> None:
        """Replaces the event loop: a task or callback raised an exit, and the handler may still be suspended in it."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.close()


async def _run_to_end(handler: Coroutine[Any, Any, Any], results: list[tuple[Any, BaseException | None]]) -> None:
    """Awaits the handler, then cancels the tasks it left: the loop does not run between jobs.

    Appends the value and the exception to ``results``: asyncio inspects the result of a task, and an application's
    object may raise then.
    """
    try:
        results.append((await handler, None))
    except BaseException as error:
        results.append((None, error))
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _with_limit_reason(outcome: Outcome, error: BaseException, limits: ResourceLimits | None) -> Outcome:
    """Returns the outcome; with the reason ``resource`` if a resource limit caused the error."""
    name = None if limits is None else limit_behind_error(error, limits)
    if limits is None or name is None or not isinstance(outcome, Failed):
        return outcome
    return replace_error(outcome, name, limits)


def _find(reference: str, name: str, app: str | None) -> Task[..., Any]:
    """Returns the task of this name, from its module or from the application's registry."""
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


def _should_recycle(setup: Setup, served: int, resident: int) -> bool:
    if setup.recycle_jobs is not None and served >= setup.recycle_jobs:
        return True
    return setup.recycle_memory is not None and resident > setup.recycle_memory


def _kill_when_orphaned(descriptor: int, handlers: _Handlers) -> None:
    """Kills this process group when the worker has closed its end or died: no process would settle the job."""
    poll = select.poll()
    poll.register(descriptor, 0)  # No events requested: a hang-up is always reported.
    poll.poll()
    if not handlers.busy:
        time.sleep(_EXIT_TIMEOUT)  # The main thread gets the end of file too and exits.
    os.killpg(0, signal.SIGKILL)


HEADER = 4


class Setup(msgspec.Struct, array_like=True):
    """Initial settings of a child."""

    app: str | None  # module:attribute of the application
    modules: list[str]  # to import before the first job
    recycle_jobs: int | None
    recycle_memory: int | None  # bytes
    result_limit: int  # bytes a result may take
    log: LogLimits


class ChildRequest(msgspec.Struct, array_like=True):
    """A job to run. ``reference``: module:qualname of its function; ``carrier``: its trace context."""

    reference: str
    job: Job
    carrier: dict[str, str] | None = None
    limits: ResourceLimits | None = None


class Logged(msgspec.Struct, array_like=True, tag="logged"):
    """A line that the handler logged, or the number of lines beyond the limit of an attempt."""

    line: LogEntry | None = None
    dropped: int = 0


class ChildReply(msgspec.Struct, array_like=True, tag="reply"):
    """An outcome, flattened. ``retiring``: the child exits now and runs no further job."""

    kind: str
    retiring: bool = False
    result: str | None = None
    error: str = ""
    reason: str = ""
    traceback: str | None = None
    retryable: bool = True
    delay: timedelta | None = None
    pause: str | None = None
    resident: int = 0  # bytes of resident memory after the job


def encode_frame(data: bytes) -> bytes:
    """Returns ``data`` with its length in front."""
    return len(data).to_bytes(HEADER) + data


def decode_frame(buffer: bytearray) -> bytes | None:
    """Removes the first frame from ``buffer`` and returns it; None while it is incomplete."""
    if len(buffer) < HEADER:
        return None
    end = HEADER + int.from_bytes(buffer[:HEADER])
    if len(buffer) < end:
        return None
    data = bytes(buffer[HEADER:end])
    del buffer[:end]
    return data


def reply_from_outcome(outcome: Outcome) -> ChildReply:
    """Returns the reply for an outcome."""
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


def outcome_from_reply(reply: ChildReply) -> Outcome:
    """Returns the outcome of a reply."""
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
