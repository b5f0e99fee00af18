"""Command jobs: programs, run without a shell unless settings and payload both ask for one.

The event loop reads stdout and stderr from two pipes, and waits for a pidfd: the exit of the command is noticed at
once, even if another process holds its output open. The process group is killed then, also after success, so a
background process neither delays the job nor outlives it.

With limits or a sandbox, the launcher (``worker/sandbox``) is started instead, and becomes the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from holdfast.worker.sandbox import CommandHost, Launch, LaunchSpec, Mechanism, NoSandbox
from holdfast.worker.sandbox.plan import LaunchFailure

_CHUNK = 64 * 1024
_CHUNKS_AT_ONCE = 16  # then other callbacks run: endless output must not block the loop
_TAIL_SIZE = 2048
_PIPE_CLOSE_TIMEOUT = 0.05  # seconds for the pipes to close once the process group is dead
_KILL_TIMEOUT = 5.0  # seconds to wait for a killed process, which may be in a system call
_HOST = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.ENOSYS})


class CommandRunner:
    """Runs the commands of one worker, with its sandbox and resource limits."""

    def __init__(
        self, host: CommandHost | None = None, watcher: ResourceWatcher | None = None, *, has_codec: bool = False
    ) -> None:
        """``has_codec``: payloads are encrypted, so errors quote nothing of them."""
        self._has_codec = has_codec
        self._host = host or CommandHost()
        self._watcher = watcher or ResourceWatcher()

    async def run(
        self, payload: str | Mapping[str, object], policy: CommandPolicy, job_id: str = "", claims: int = 1
    ) -> Outcome:
        """Runs the command in ``payload``. If cancelled, kills all processes of the command.

        ``claims`` above 1: first kills what a worker that died has left of the job's earlier run on this host.
        ``Released``: this worker could not start it, for lack of descriptors, processes or memory.
        """
        if job_id and claims > 1:
            await _run_in_thread(kill_marked, f"{job_id}-", 0, claims)
        started = time.monotonic()
        try:
            command = policy.parse_command(payload)
            limits = policy.limits_for(command)
        except Invalid as error:
            return payload_refused(error, is_encrypted=self._has_codec)
        if (unsupported := unsupported_limits(limits)) is not None:
            return unsupported
        mechanism = None
        if policy.is_sandboxed(command):
            try:
                mechanism = await asyncio.to_thread(self._host.find_mechanism)
            except NoSandbox as error:
                return _no_sandbox(error, error.remedy)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                return _release_command("put up the sandbox of", getattr(error, "strerror", None) or str(error))
        async with contextlib.AsyncExitStack() as opened:
            try:
                prepared = _PreparedCommand.prepare(command, policy, limits, mechanism, opened, f"{job_id}-{claims}")
                running = _RunningCommand.start(prepared, policy.output_limit, self._watcher)
            except OSError as error:
                return _unstartable(command, error, policy.environment_for(command)["PATH"])
            try:
                await running.wait()
            except BaseException:
                await running.abort_run()
                raise
            seconds = time.monotonic() - started
            await running.finish(seconds)
            return _outcome(prepared, running, seconds)


class _PreparedCommand:
    """A command with its environment, directory and launcher."""

    def __init__(self, command: CommandPayload, limits: ResourceLimits, environment: dict[str, str]) -> None:
        self.command = command
        self.limits = limits
        self.environment = environment
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
        owner: str,
    ) -> _PreparedCommand:
        """Prepares ``command``; resources are added to ``opened``, which is closed after its end."""
        prepared = cls(command, limits, mark_environment(policy.environment_for(command), owner)[0])
        if command.cwd is not None:
            prepared.cwd = policy.resolve_directory(command.cwd)
        elif mechanism is not None:
            prepared.cwd = os.path.realpath(tempfile.mkdtemp(prefix="holdfast-"))
            opened.push_async_callback(_run_in_thread, _remove_folder, prepared.cwd)
        if mechanism is not None and prepared.cwd is not None:
            prepared.environment.setdefault("TMPDIR", prepared.cwd)
            prepared.helpers = 2 if mechanism.namespaces else 0
        if mechanism is not None or limits.is_set:
            spec = LaunchSpec(
                argv=command.words,
                environment=prepared.environment,
                cwd=prepared.cwd,
                rlimits=kernel_limits(limits),
                memory=limits.memory is not None,
                mechanism=mechanism,
                network=command.network,
            )
            prepared.launch = opened.enter_context(Launch(spec))
        return prepared

    def start(self, **streams: Any) -> subprocess.Popen[bytes]:
        """Starts the command, or the launcher that becomes it."""
        if self.launch is None:
            return subprocess.Popen(
                self.command.words, env=self.environment, cwd=self.cwd, start_new_session=True, **streams
            )
        environment = {MARK: self.environment[MARK]}
        descriptors = self.launch.descriptors
        try:
            return subprocess.Popen(
                self.launch.argv, env=environment, pass_fds=descriptors, start_new_session=True, **streams
            )
        finally:
            self.launch.close_inherited()


async def _run_in_thread(call: Callable[..., object], *arguments: object) -> None:
    """Runs what follows a command in a thread; here if none can be started, for the command has run.

    Handlers may have filled the threads of the loop, and the command's timeout would find it still running.
    """
    try:
        await asyncio.get_running_loop().run_in_executor(_threads(), call, *arguments)
    except RuntimeError:
        call(*arguments)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, "holdfast-commands")


def _remove_folder(path: str) -> None:
    """Removes the temporary directory of a command, as far as possible; the command's outcome stands."""
    with contextlib.suppress(RecursionError):  # of a deep tree
        shutil.rmtree(path, ignore_errors=True)
    for words in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        with contextlib.suppress(OSError):
            Path(path).lstat()  # raises where nothing is left
            subprocess.run([*words, "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


class _Capture:
    """Keeps the first bytes and the last lines of one output; drops the rest, so the command never blocks."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._tail = b""
        self.dropped = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._descriptor, self.writer = os.pipe()  # neither is inheritable
        os.set_blocking(self._descriptor, False)

    def listen(self) -> None:
        """Starts reading and closes the writing end here: only the command holds it now."""
        os.close(self.writer)
        asyncio.get_running_loop().add_reader(self._descriptor, self.read)

    def read(self) -> None:
        """Reads available output, up to a limit per call."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            left = self._max_bytes - len(self._buffer)
            self._buffer += data[:left]
            self.dropped += max(0, len(data) - left)
            self._tail = (self._tail + data)[-_TAIL_SIZE:]

    def close(self) -> None:
        """Stops reading and closes the pipe."""
        if not self.closed.done():
            self.closed.set_result(None)
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)

    def close_unused(self) -> None:
        """Closes both ends of a pipe whose command was never started."""
        os.close(self.writer)
        os.close(self._descriptor)

    @property
    def text(self) -> str:
        return self._buffer.decode("utf-8", "replace")

    @property
    def last_lines(self) -> str:
        return storable_text(self._tail.decode("utf-8", "replace").strip(), 4 * _TAIL_SIZE)[-_TAIL_SIZE:]


class _RunningCommand:
    """A started command."""

    watch: GroupWatch | None = None

    def __init__(self, process: subprocess.Popen[bytes], mark: str, stdout: _Capture, stderr: _Capture) -> None:
        self.process = process
        self.stdout = stdout
        self.stderr = stderr
        self._mark = mark
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def start(cls, prepared: _PreparedCommand, output_limit: int, watcher: ResourceWatcher) -> _RunningCommand:
        """Starts a command; raises OSError if that fails."""
        with contextlib.ExitStack() as undo:
            outputs = []
            for _ in range(2):
                outputs.append(_Capture(output_limit))
                undo.callback(outputs[-1].close_unused)
            stdout, stderr = outputs
            with _stdin(prepared.command.stdin) as stdin:
                process = prepared.start(stdin=stdin, stdout=stdout.writer, stderr=stderr.writer)
            running = cls(process, prepared.environment[MARK], stdout, stderr)
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
        """Waits for the exit of the command, even if another process holds its output open."""
        if self.process.returncode is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def finish(self, seconds: float) -> None:
        """Kills what left the session of a command that took ``seconds``. Reads the rest of its output, for a while."""
        if self.watch is not None:
            self.watch.close()
        try:
            await _run_in_thread(kill_marked, self._mark, self.process.pid if seconds < 1 else 0)
            for output in (self.stdout, self.stderr):
                if not output.closed.done():
                    output.read()
            await asyncio.wait([self.stdout.closed, self.stderr.closed], timeout=_PIPE_CLOSE_TIMEOUT)
        finally:
            self._stop_reading()

    async def abort_run(self) -> None:
        """Kills the command and all its descendants."""
        if self.watch is not None:
            self.watch.close()
        kill_group(self.process)
        self._stop_reading()
        try:
            # A process in a system call is reaped when it returns from there; do not wait for that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_TIMEOUT):
                    await self.wait()
        finally:
            await _run_in_thread(kill_marked, self._mark)

    def _stop_reading(self) -> None:
        self.stdout.close()
        self.stderr.close()

    def _end(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@contextlib.contextmanager
def _stdin(text: str | None) -> Iterator[int | IO[bytes]]:
    """Yields the command's input as a file: it needs no writer, and the command may close it unread."""
    if text is None:
        yield subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def _no_sandbox(error: object, remedy: str) -> Outcome:
    """Returns the outcome of a command whose sandbox is not available."""
    return Failed(error=storable_text(f"{error}; {remedy}"), reason=Reason.SANDBOX, retryable=False)


def _release_command(work: str, trouble: str) -> Outcome:
    """Returns the outcome of a command that another worker or a later try may be able to start."""
    return Released(storable_text(f"this worker cannot {work} a command: {trouble}"), UNSTARTABLE_DELAY)


def _not_launched(prepared: _PreparedCommand, failure: LaunchFailure) -> Outcome:
    """Returns the outcome of a command that the launcher could not start."""
    if failure.stage in ("limits", "sandbox") and failure.errno in _HOST:
        return _release_command("launch", failure.text)
    if failure.stage == "sandbox":
        return _no_sandbox(f"the sandbox could not be put up: {failure.text}", "run `holdfast doctor` on this host")
    if failure.stage == "limits" or failure.errno is None:
        return _release_command("limit", failure.text)
    name = prepared.command.words[0] if failure.stage == "exec" else prepared.cwd
    error = OSError(failure.errno, os.strerror(failure.errno), name)
    return _unstartable(prepared.command, error, prepared.environment["PATH"])


def _unstartable(command: CommandPayload, error: OSError, path: str) -> Outcome:
    program = command.words[0]
    trouble = error.strerror or type(error).__name__
    if error.errno == errno.E2BIG:
        text = f"{program}: {trouble}; pass large input through stdin"
        return Failed(error=storable_text(text), reason=Reason.PAYLOAD, retryable=False)
    if error.errno in _HOST or error.filename is None:
        return Released(storable_text(f"this worker cannot start {program}: {trouble}"), UNSTARTABLE_DELAY)
    if error.filename != program:
        return Failed(error=storable_text(f"cwd {command.cwd}: {trouble}"))
    words = {errno.ENOENT: "command not found", errno.EACCES: "not executable"}.get(error.errno or 0, trouble)
    # EACCES may also mean an unreadable directory on the path, without a program of this name in any.
    if error.errno == errno.EACCES and os.sep not in program and shutil.which(program, os.F_OK, path) is None:
        words = "command not found"
    elif error.errno == errno.ENOENT and os.sep in program and Path(command.cwd or "", program).exists():
        words = "its interpreter is not found"
    return Failed(error=storable_text(f"{program}: {words}"))


def _outcome(prepared: _PreparedCommand, running: _RunningCommand, seconds: float) -> Outcome:
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
    return f" ({signal_name(code - 128)})" if 128 < code < 128 + signal.NSIG else ""
