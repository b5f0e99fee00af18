"""Process groups: kills all processes of a group when its leader exits.

Each child leads its own session and process group; the number of the group is the pid of the child. Between its exit
and its reaping (``wait``) the system cannot reuse that number, so the group can be killed safely. ``asyncio``
subprocesses are reaped before the caller is notified.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

MARK = "_HOLDFAST_GROUP"
"""Environment variable that marks all descendants of one child, also those that left its session."""

_PASSES, _PAUSE = 100, 0.005  # a killed process may start another until the signal reaches it
_MANY = 1000  # pids; a list of all processes is as fast


def mark_environment(environment: Mapping[str, str], owner: str = "") -> tuple[dict[str, str], str]:
    """Returns ``environment`` with a new mark, and the mark. It begins with the owner and a hyphen."""
    mark = f"{owner}-{secrets.token_hex(8)}"
    return {**environment, MARK: mark}, mark


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group of a child, unless the child has been reaped or may not be killed."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # The group is empty: its last process is gone.
        except PermissionError:
            # On macOS a group of zombies. Elsewhere all its processes have changed their user, the leader too.
            with contextlib.suppress(PermissionError):
                process.kill()


def kill_marked(mark: str, after: int = 0, below: int | None = None, processes: Path = Path("/proc")) -> None:
    """Kills every process whose mark begins with ``mark``, in any session, until none is left or for a bounded time.

    ``after``: a pid of the last second; only what started later is killed. ``below``: only marks that go on with a
    lower number. Linux only. Call it from a thread.
    """
    wanted = re.compile(re.escape(f"\0{MARK}={mark}".encode()) + rb"(\d*)")
    for _ in range(_PASSES):
        found = False
        with contextlib.suppress(OSError):  # no /proc, or no descriptor is free: what has run has its outcome
            for pid in _pids(processes, after):
                with contextlib.suppress(OSError):
                    marked = wanted.search(b"\0" + (processes / str(pid) / "environ").read_bytes())
                    if marked and (below is None or int(marked[1] or below) < below):
                        os.kill(pid, signal.SIGKILL)
                        found = True
        if not found:
            break
        time.sleep(_PAUSE)


def _pids(processes: Path, after: int) -> Iterable[int]:
    """Returns the pids of this host, or those given since ``after``, unless they are many or began anew."""
    last = 0
    if after:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may be hidden
            last = int((processes / "loadavg").read_text(encoding="ascii").split()[-1])
    if 0 < after <= last < after + _MANY:
        return range(after + 1, last + 1)
    return [int(entry.name) for entry in processes.iterdir() if entry.name.isdigit()]


def is_gone(host: str, pid: int) -> bool:
    """Returns True if ``host`` is this host and has no such process."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: it belongs to another user
        return isinstance(error, ProcessLookupError)
    return False


def describe_exit(code: int) -> str:
    """Returns a ``Popen.returncode`` as text."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, SIGKILL for 9; its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def when_ended(process: subprocess.Popen[bytes], ended: Callable[[], None]) -> None:
    """Calls ``ended`` in the running loop after the process has exited, its group was killed, and it was reaped.

    ``process.returncode`` is set then.
    """
    loop = asyncio.get_running_loop()

    def reap_leader() -> None:
        kill_group(process)
        process.wait()  # Returns at once: it is a zombie.
        ended()

    descriptor = _pidfd(process.pid)
    if descriptor is None:
        threading.Thread(target=_wait_in_thread, args=(process.pid, loop, reap_leader), daemon=True).start()
        return

    def leader_ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        reap_leader()

    loop.add_reader(descriptor, leader_ended)


def _pidfd(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when ``pid`` exits; None without pidfd (macOS, seccomp)."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return opener(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def _wait_in_thread(pid: int, loop: asyncio.AbstractEventLoop, on_reaped: Callable[[], None]) -> None:
    """Waits for an exit without pidfd, in a thread. Does not reap: the pid stays taken until the group is killed."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        loop.call_soon_threadsafe(on_reaped)
    except RuntimeError:
        return  # The loop is closed: no callback is needed.


def resident_bytes() -> int:
    """Returns the resident memory of this process now; without /proc, its peak."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
