"""Command jobs: programs, run without a shell unless settings and payload both ask for one.

Two pipes of our own, read by the event loop, and a pidfd: the end of the command is known the moment it happens, no
matter who still holds its output. Its group is killed then, also after success, so a process left in the background
neither holds the job nor outlives it.

Where there are limits or a sandbox, the launcher (``worker/sandbox``) is started instead, and becomes the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.lifecycle import Failed, Outcome, Released, Succeeded
from holdfast.core.models import Reason
from holdfast.core.resources import ResourceLimits
from holdfast.tasks.command_policy import CommandPayload, CommandPolicy
from holdfast.worker.executors.outcome import UNSTARTABLE_DELAY, payload_refused, storable_text
from holdfast.worker.executors.process_group import (
    MARK,
    describe_exit,
    kill_group,
    kill_marked,
    mark_environment,
    signal_name,
    when_ended,
)
from holdfast.worker.executors.resource_limits import (
    GroupWatch,
    ResourceWatcher,
    kernel_limits,
    limit_behind_exit,
    over_limit,
    unsupported_limits,
)
from holdfast.worker.sandbox import CommandHost, Launch, Mechanism, NoSandbox, Orders
from holdfast.worker.sandbox.plan import LaunchFailure

_CHUNK = 64 * 1024
_CHUNKS_AT_ONCE = 16  # Then the loop serves others: a command that writes without end must not hold it.
_TAIL = 2048
_STRAGGLERS = 0.05  # seconds for the pipes to close after the group is dead; only who left it can still hold them
_DEATH = 5.0  # seconds a killed process may take to end (it may sit in a system call) before the wait ends
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.ENOSYS})


class CommandRunner:
    """Runs the commands of one worker: it knows the host's sandbox, and watches limits."""

    def __init__(self, host: CommandHost | None = None, watcher: ResourceWatcher | None = None) -> None:
        self._host = host or CommandHost()
        self._watcher = watcher or ResourceWatcher()

    async def run(self, payload: str | Mapping[str, object], policy: CommandPolicy) -> Outcome:
        """Run the command in ``payload``. Cancelled, it kills the command with all its processes.

        ``Released`` means that this worker could not run it: out of descriptors, processes or memory.
        """
        started = time.monotonic()
        try:
            command = policy.parse_command(payload)
            limits = policy.limits_for(command)
        except Invalid as error:
            return payload_refused(error)
        if (unsupported := unsupported_limits(limits)) is not None:
            return unsupported
        mechanism = None
        if policy.is_sandboxed(command):
            try:
                mechanism = await asyncio.to_thread(self._host.find_mechanism)
            except NoSandbox as error:
                return _refused(error, error.remedy)
            except OSError as error:
                return _postponed("put up the sandbox of", error.strerror or str(error))
        async with contextlib.AsyncExitStack() as opened:
            try:
                prepared = _Prepared.prepare(command, policy, limits, mechanism, opened)
                running = _Running.start(prepared, policy.output_limit, self._watcher)
            except OSError as error:
                return _unstartable(command, error, policy.environment_for(command)["PATH"])
            try:
                await running.wait()
            except BaseException:
                await running.abort_run()
                raise
            await running.finish()
            return _outcome(prepared, running, time.monotonic() - started)


class _Prepared:
    """A command with its environment, its directory and its launch."""

    def __init__(self, command: CommandPayload, limits: ResourceLimits, environment: dict[str, str]) -> None:
        self.command = command
        self.limits = limits
        self.environment, self.mark = mark_environment(environment)
        self.cwd: str | None = None
        self.launch: Launch | None = None
        self.helpers = 0

    @classmethod
    def prepare(
        cls,
        command: CommandPayload,
        policy: CommandPolicy,
        limits: ResourceLimits,
        mechanism: Mechanism | None,
        opened: contextlib.AsyncExitStack,
    ) -> _Prepared:
        """Prepare ``command``; ``opened`` is closed after its end."""
        prepared = cls(command, limits, policy.environment_for(command))
        if command.cwd is not None:
            prepared.cwd = policy.resolve_directory(command.cwd)
        elif mechanism is not None:
            prepared.cwd = os.path.realpath(tempfile.mkdtemp(prefix="holdfast-"))
            opened.push_async_callback(asyncio.to_thread, _remove_folder, prepared.cwd)
        if mechanism is not None and prepared.cwd is not None:
            prepared.environment.setdefault("TMPDIR", prepared.cwd)
            prepared.helpers = 2 if mechanism.namespaces else 0
        if mechanism is not None or limits.is_set:
            orders = Orders(
                argv=command.words,
                environment=prepared.environment,
                cwd=prepared.cwd,
                rlimits=kernel_limits(limits),
                memory=limits.memory is not None,
                mechanism=mechanism,
                network=command.network,
            )
            prepared.launch = opened.enter_context(Launch(orders))
        return prepared

    def start(self, **streams: Any) -> subprocess.Popen[bytes]:
        """Start the command, or the launcher that becomes it."""
        if self.launch is None:
            return subprocess.Popen(
                self.command.words, env=self.environment, cwd=self.cwd, start_new_session=True, **streams
            )
        environment = {MARK: self.mark}
        descriptors = self.launch.descriptors
        try:
            return subprocess.Popen(
                self.launch.argv, env=environment, pass_fds=descriptors, start_new_session=True, **streams
            )
        finally:
            self.launch.close_inherited()


def _remove_folder(path: str) -> None:
    """Remove a command's own folder, also where the command has made parts of it unreadable."""
    shutil.rmtree(path, ignore_errors=True)
    for folder, names, _ in os.walk(path):
        for each in (Path(folder, name) for name in names):
            if not each.is_symlink():
                each.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


class _Capture:
    """The first bytes of one output, and its last lines; the rest is read and dropped, else the command would block."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._tail = b""
        self.dropped = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._descriptor, self.writer = os.pipe()  # not inheritable, both
        os.set_blocking(self._descriptor, False)

    def listen(self) -> None:
        """Start reading; the command alone holds the writing end from now on."""
        os.close(self.writer)
        asyncio.get_running_loop().add_reader(self._descriptor, self.read)

    def read(self) -> None:
        """Take the output that is there, but not without end."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            room = self._limit - len(self._kept)
            self._kept += data[:room]
            self.dropped += max(0, len(data) - room)
            self._tail = (self._tail + data)[-_TAIL:]

    def close(self) -> None:
        """Read no more."""
        if not self.closed.done():
            self.closed.set_result(None)
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)

    def close_unused(self) -> None:
        """Close both ends: the command was never started."""
        os.close(self.writer)
        os.close(self._descriptor)

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")

    @property
    def last_lines(self) -> str:
        return storable_text(self._tail.decode("utf-8", "replace").strip(), 4 * _TAIL)[-_TAIL:]


class _Running:
    """A started command."""

    watch: GroupWatch | None = None

    def __init__(self, process: subprocess.Popen[bytes], mark: str, stdout: _Capture, stderr: _Capture) -> None:
        self.process = process
        self.stdout = stdout
        self.stderr = stderr
        self._mark = mark
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def start(cls, prepared: _Prepared, output_limit: int, watcher: ResourceWatcher) -> _Running:
        """Start a command; OSError where that fails."""
        with contextlib.ExitStack() as undo:
            outputs = []
            for _ in range(2):
                outputs.append(_Capture(output_limit))
                undo.callback(outputs[-1].close_unused)
            stdout, stderr = outputs
            with _stdin(prepared.command.stdin) as stdin:
                process = prepared.start(stdin=stdin, stdout=stdout.writer, stderr=stderr.writer)
            running = cls(process, prepared.mark, stdout, stderr)
            try:
                when_ended(process, running._end)
                running.watch = watcher.watch(process, prepared.limits, prepared.helpers)
            except BaseException:
                kill_group(process)
                process.wait()
                raise
            undo.pop_all()
        stdout.listen()
        stderr.listen()
        return running

    async def wait(self) -> None:
        """Return when the command has ended, even if another process still holds its output."""
        if self.process.returncode is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def finish(self) -> None:
        """Take the rest of the output. Bounded: a process that left the session may hold it open; it is killed."""
        outputs = (self.stdout, self.stderr)
        breach = None if self.watch is None else self.watch.close()
        for output in outputs:
            if not output.closed.done():
                output.read()
        held = [output.closed for output in outputs if not output.closed.done()]
        if held:
            try:
                _, held_still = await asyncio.wait(held, timeout=_STRAGGLERS)
            finally:
                self._stop_reading()
        else:
            held_still = set()
        if held_still or breach is not None:
            await self._sweep()

    async def abort_run(self) -> None:
        """Kill the command and all that descends from it."""
        if self.watch is not None:
            self.watch.close()
        kill_group(self.process)
        self._stop_reading()
        try:
            # One that sits in a system call is reaped when it comes back from there; no wait is needed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DEATH):
                    await self.wait()
        finally:
            await self._sweep()

    def _stop_reading(self) -> None:
        self.stdout.close()
        self.stderr.close()

    async def _sweep(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, kill_marked, self._mark)

    def _end(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@contextlib.contextmanager
def _stdin(text: str | None) -> Iterator[int | IO[bytes]]:
    """The command's input, as a file: it needs no feeding, and a command may close it unread."""
    if text is None:
        yield subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def _refused(error: object, remedy: str) -> Outcome:
    """The outcome of a command that has to be sandboxed and cannot be."""
    return Failed(error=storable_text(f"{error}; {remedy}"), reason=Reason.SANDBOX, retryable=False)


def _postponed(work: str, trouble: str) -> Outcome:
    """The outcome of a command that this worker cannot start now: another worker, or a later try, may."""
    return Released(storable_text(f"this worker cannot {work} a command: {trouble}"), UNSTARTABLE_DELAY)


def _not_launched(prepared: _Prepared, failure: LaunchFailure) -> Outcome:
    """The outcome of a command that the launcher could not start."""
    if failure.stage in ("limits", "sandbox") and failure.errno in _OURS:
        return _postponed("launch", failure.text)
    if failure.stage == "sandbox":
        return _refused(f"the sandbox could not be put up: {failure.text}", "run `holdfast doctor` on this host")
    if failure.stage == "limits" or failure.errno is None:
        return _postponed("limit", failure.text)
    name = prepared.command.words[0] if failure.stage == "exec" else prepared.cwd
    error = OSError(failure.errno, os.strerror(failure.errno), name)
    return _unstartable(prepared.command, error, prepared.environment["PATH"])


def _unstartable(command: CommandPayload, error: OSError, path: str) -> Outcome:
    program = command.words[0]
    trouble = error.strerror or type(error).__name__
    if error.errno == errno.E2BIG:
        text = f"{program}: {trouble}; pass large input through stdin"
        return Failed(error=storable_text(text), reason=Reason.PAYLOAD, retryable=False)
    if error.errno in _OURS or error.filename is None:
        return Released(storable_text(f"this worker cannot start {program}: {trouble}"), UNSTARTABLE_DELAY)
    if error.filename != program:
        return Failed(error=storable_text(f"cwd {command.cwd}: {trouble}"))
    words = {errno.ENOENT: "command not found", errno.EACCES: "not executable"}.get(error.errno or 0, trouble)
    # A folder on the path that may not be read is EACCES too, though no program of this name is anywhere.
    if error.errno == errno.EACCES and os.sep not in program and shutil.which(program, os.F_OK, path) is None:
        words = "command not found"
    return Failed(error=storable_text(f"{program}: {words}"))


def _outcome(prepared: _Prepared, running: _Running, seconds: float) -> Outcome:
    failure = None if prepared.launch is None else prepared.launch.read_failure()
    if failure is not None:
        return _not_launched(prepared, failure)
    command, code = prepared.command, running.process.returncode
    if code != 0 and running.watch is not None and running.watch.breach is not None:
        return running.watch.breach
    if code == 0:
        result = {
            "exit_code": 0,
            "stdout": running.stdout.text,
            "stderr": running.stderr.text,
            "truncated": running.stdout.dropped + running.stderr.dropped,
            "seconds": round(seconds, 6),
        }
        return Succeeded(msgspec.json.encode(result).decode())
    last_lines = running.stderr.last_lines or running.stdout.last_lines
    text = storable_text(f"{describe_exit(code)}{_hint(code)}{': ' if last_lines else ''}{last_lines}")
    if (name := limit_behind_exit(code, last_lines, prepared.limits)) is not None:
        return over_limit(name, prepared.limits, detail=text)
    if code < 0:
        return Failed(error=text, reason=Reason.CRASHED)
    retryable = code not in command.dead_codes and (command.retry_codes is None or code in command.retry_codes)
    return Failed(error=text, reason=Reason.ERROR if retryable else Reason.NON_RETRYABLE, retryable=retryable)


def _hint(code: int) -> str:
    """Returns the usual meaning of some exit codes in shells."""
    if code in (126, 127):
        return " (not executable)" if code == 126 else " (command not found)"
    return f" ({signal_name(code - 128)})" if 128 < code <= 128 + signal.NSIG else ""
