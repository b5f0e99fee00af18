"""Resource limits of one running job: kernel limits, and a watcher for sums over its processes.

The kernel ends a process that exceeds its CPU time, and refuses files and descriptors over their limits. Memory, CPU
time and the number of processes are summed up over all processes of a job by a thread of the worker, which kills the
group. RLIMIT_NPROC is not used: it counts all processes of a user, and root is exempt.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.core.lifecycle import Failed
from holdfast.core.models import Reason
from holdfast.core.resources import ResourceLimits, describe_amount
from holdfast.worker.executors.process_group import kill_group

PROCESSES = Path("/proc")
_PERIOD = 0.05  # least seconds between two checks
_IDLE_FACTOR = 10  # the pause is at least ten times the CPU time of a check
_CPU_MARGIN = 1  # whole seconds: the watcher acts first, the kernel limit if it is late
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_HINTS = {
    "open_files": (os.strerror(errno.EMFILE), "Errno 24]", "EMFILE"),
    "file_size": (os.strerror(errno.EFBIG), "Errno 27]", "EFBIG", "File size limit exceeded"),
}
"""Texts in a program's output that show a refused descriptor or write."""
_ERRNOS = {errno.EMFILE: "open_files", errno.EFBIG: "file_size"}
_SIGNALS = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "file_size"}
# Read attributes without the exception's own code, which may raise.
_errno_of = OSError.__dict__["errno"].__get__
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_MAX_LINKED = 20  # linked errors that are examined


def kernel_limits(limits: ResourceLimits, used_cpu: float = 0.0) -> list[tuple[int, int]]:
    """Returns the resources that the kernel limits for one process, with their limits."""
    found = []
    if limits.cpu is not None:
        found.append((resource.RLIMIT_CPU, math.ceil(used_cpu + limits.cpu) + _CPU_MARGIN))
    if limits.open_files is not None:
        found.append((resource.RLIMIT_NOFILE, limits.open_files))
    if limits.file_size is not None:
        found.append((resource.RLIMIT_FSIZE, limits.file_size))
    return found


@contextlib.contextmanager
def limit_this_process(limits: ResourceLimits | None) -> Iterator[None]:
    """Sets soft kernel limits of this process while entered."""
    before = []
    if limits is not None:
        used = time.process_time()
        for kind, maximum in kernel_limits(limits, used):
            before.append((kind, resource.getrlimit(kind)[0]))
            _set_soft_limit(kind, maximum)
    try:
        yield
    finally:
        for kind, soft in before:
            _set_soft_limit(kind, soft)


def _set_soft_limit(kind: int, maximum: int) -> None:
    """Sets a soft limit, at most the hard limit."""
    hard = resource.getrlimit(kind)[1]
    allowed = [each for each in (maximum, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(allowed, default=resource.RLIM_INFINITY), hard))


def unsupported_limits(limits: ResourceLimits) -> Failed | None:
    """Returns the failure of a job whose limits need /proc on a system without it, such as macOS; else None."""
    names = [name for name in ("memory", "processes") if getattr(limits, name) is not None]
    if not names or (PROCESSES / "self" / "stat").exists():
        return None
    text = f"resource limit: {' and '.join(names)} cannot be limited here: there is no /proc; run the worker on Linux"
    return Failed(error=text, reason=Reason.RESOURCE, retryable=False)


def over_limit(name: str, limits: ResourceLimits, used: float | None = None, detail: str = "") -> Failed:
    """Returns the failure of a job that exceeded a limit."""
    allowed = f"{describe_amount(name, getattr(limits, name))} allowed"
    text = allowed if used is None else f"{describe_amount(name, used)} used, {allowed}"
    return Failed(error=f"resource limit: {name}: {text}{': ' if detail else ''}{detail}", reason=Reason.RESOURCE)


def limit_behind_error(error: BaseException, limits: ResourceLimits) -> str | None:
    """Returns the kernel limit that caused an exception or one of its linked exceptions; None if none did."""
    pending: list[BaseException | None] = [error]
    for _ in range(_MAX_LINKED):
        each = pending.pop() if pending else None
        if each is None:
            if not pending:
                return None
            continue
        name = _ERRNOS.get(_errno_of(each) or 0) if issubclass(type(each), OSError) else None
        if name is not None and getattr(limits, name) is not None:
            return name
        pending += [_context_of(each), _cause_of(each)]
    return None


def limit_behind_exit(code: int, text: str, limits: ResourceLimits) -> str | None:
    """Returns the limit that a command's exit code or last lines point to; None if none."""
    number = -code if code < 0 else code - 128
    for each, name in _SIGNALS.items():
        if number == each and getattr(limits, name) is not None:
            return name
    for name, hints in _HINTS.items():
        if code > 0 and getattr(limits, name) is not None and any(hint in text for hint in hints):
            return name
    return None


# ── the watcher ───────────────────────────────────────────────────────────────────────────────────────────────────────
class ProcessEntry(NamedTuple):
    """A process, from /proc/PID/stat."""

    pid: int
    parent: int
    group: int
    session: int
    own_ticks: int
    ended_ticks: int  # of children that have ended
    started: int
    pages: int


class Usage(NamedTuple):
    """Total usage of a job's processes."""

    memory: int
    cpu: float
    processes: int


def _read_process(pid: int) -> ProcessEntry | None:
    """Reads a process of this host; returns None if it has ended or is a zombie."""
    try:
        with open(f"{PROCESSES}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - many files, ten times a second
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 22 or fields[0] in (b"Z", b"X"):
        return None
    parent, group, session = map(int, fields[1:4])
    own, ended = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return ProcessEntry(pid, parent, group, session, own, ended, int(fields[19]), int(fields[21]))


def _proportional_memory(pid: int) -> int | None:
    """Returns the proportional set size of a process, in bytes; None if it is not readable."""
    with contextlib.suppress(OSError):
        for line in (PROCESSES / str(pid) / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return None


class GroupWatch:
    """Watches one process group, and kills it if it exceeds a limit."""

    def __init__(self, process: subprocess.Popen[bytes], limits: ResourceLimits, helpers: int) -> None:
        self._process = process
        self._limits = limits
        self._helpers = helpers
        self._known: dict[int, int] = {}  # start time by pid
        self._lock = threading.Lock()
        self._closed = False
        self.breach: Failed | None = None
        first = _read_process(process.pid)
        self._spent = 0 if first is None or helpers else first.own_ticks + first.ended_ticks

    def close(self) -> Failed | None:
        """Ends the watch. Returns the failure if a limit was exceeded."""
        with self._lock:
            self._closed = True
        return self.breach

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check_usage(self, processes: Mapping[int, ProcessEntry]) -> set[int]:
        """Kills the group if it exceeds a limit. Returns the pids of its processes."""
        members = self._members(processes)
        usage = self._usage(members)
        for name, used in zip(Usage._fields, usage, strict=True):
            maximum = getattr(self._limits, name)
            if maximum is not None and used > maximum and (name != "memory" or self._exact_memory(members) > maximum):
                self._kill(over_limit(name, self._limits, used), members)
                break
        return set(self._known)

    def _members(self, processes: Mapping[int, ProcessEntry]) -> list[ProcessEntry]:
        """Returns the group's processes and their descendants. Those of the launcher count no usage."""
        root = self._process.pid
        children: dict[int, list[int]] = {}
        for each in processes.values():
            children.setdefault(each.parent, []).append(each.pid)
        pending = [each.pid for each in processes.values() if root in (each.pid, each.group, each.session)]
        pending += [pid for pid, at in self._known.items() if pid in processes and processes[pid].started == at]
        found: dict[int, ProcessEntry] = {}
        while pending:
            pid = pending.pop()
            if pid not in found:
                found[pid] = processes[pid]
                pending += children.get(pid, [])
        self._known = {pid: each.started for pid, each in found.items()}
        helpers = {root} if self._helpers else set()
        if self._helpers > 1:
            helpers.update(children.get(root, ()))
        return [each._replace(own_ticks=0, pages=0) if each.pid in helpers else each for each in found.values()]

    def _usage(self, members: Sequence[ProcessEntry]) -> Usage:
        ticks = sum(each.own_ticks + each.ended_ticks for each in members)
        return Usage(
            memory=_PAGE * sum(each.pages for each in members),
            cpu=max(0, ticks - self._spent) / _TICKS,
            processes=max(0, len(members) - self._helpers),
        )

    @staticmethod
    def _exact_memory(members: Sequence[ProcessEntry]) -> int:
        total = 0
        for each in members:
            if each.pages:
                exact = _proportional_memory(each.pid)
                total += each.pages * _PAGE if exact is None else exact
        return total

    def _kill(self, breach: Failed, members: Sequence[ProcessEntry]) -> None:
        with self._lock:
            if self._closed or self._process.returncode is not None:
                return
            self.breach = self.breach or breach
            kill_group(self._process)
            for each in members:
                if each.group != self._process.pid:
                    with contextlib.suppress(OSError):
                        os.kill(each.pid, signal.SIGKILL)


class ResourceWatcher:
    """A thread that checks all watched groups; it ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[GroupWatch] = []
        self._thread: threading.Thread | None = None
        self._unwatched_pids: set[int] = set()  # of no watched group: a process never joins one later
        self._watch_count = 0  # watches started so far

    def watch(self, process: subprocess.Popen[bytes], limits: ResourceLimits, helpers: int = 0) -> GroupWatch | None:
        """Watches a process group; returns None if it has no limit to watch.

        ``helpers``: number of the launcher's own processes, which are not counted: the group's first, and its child.
        """
        watched = (limits.memory, limits.cpu, limits.processes)
        if all(each is None for each in watched) or not (PROCESSES / "self" / "stat").exists():
            return None
        watch = GroupWatch(process, limits, helpers)
        with self._lock:
            self._watches.append(watch)
            self._unwatched_pids.clear()
            self._watch_count += 1
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-resources", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._watches.remove(watch)
                    raise OSError(errno.EAGAIN, str(error)) from None
                self._thread = thread
        return watch

    def _run(self) -> None:
        while True:
            with self._lock:
                self._watches = [each for each in self._watches if not each.is_closed]
                watches = list(self._watches)
                if not watches:
                    self._thread = None
                    return
                unwatched, count = set(self._unwatched_pids), self._watch_count
            before = time.thread_time()
            try:
                pids = {int(name) for name in os.listdir(PROCESSES) if name.isdigit()}  # noqa: PTH208 - often
            except OSError:  # such as no free descriptor: checked again after the pause
                time.sleep(_PERIOD)
                continue
            found = (_read_process(pid) for pid in pids - unwatched)
            processes = {each.pid: each for each in found if each is not None}
            members = set().union(*[each.check_usage(processes) for each in watches])
            with self._lock:
                if count == self._watch_count:
                    self._unwatched_pids = (unwatched & pids) | (processes.keys() - members)
            time.sleep(max(_PERIOD, _IDLE_FACTOR * (time.thread_time() - before)))


def replace_error(failed: Failed, name: str, limits: ResourceLimits) -> Failed:
    """Returns the failure with the limit that caused it, and the same traceback."""
    limited = over_limit(name, limits, detail=failed.error)
    return msgspec.structs.replace(limited, traceback=failed.traceback)
