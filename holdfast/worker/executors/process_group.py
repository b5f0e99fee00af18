"""Process groups: hearing of a leader's end before its number is free again, and killing all that it started.

A child we start leads a session and a process group of its own, whose number is its pid. Between its end and its
reaping (``wait``) that number cannot belong to anybody else: that is the time to kill the group. With ``asyncio``'s own
subprocesses the pid is reaped before one hears of it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

MARK = "_HOLDFAST_GROUP"
"""Environment variable that marks what descends from one child, also after it has left the session."""


def mark_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """``environment`` with a fresh mark, and the mark."""
    mark = secrets.token_hex(8)
    return {**environment, MARK: mark}, mark


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole group of a child that has not been reaped; nothing if it has."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # The group is empty: its last process is gone.
        except PermissionError:
            # macOS answers so for a group of zombies; elsewhere a member has changed its user: the leader is ours.
            process.kill()


def kill_marked(mark: str, processes: Path = Path("/proc")) -> int:
    """SIGKILL to every process that carries ``mark``: also to one that left the session. Linux only; returns how many.

    Reads one file per process of the machine: call it from a thread.
    """
    if not processes.is_dir():
        return 0
    wanted = f"{MARK}={mark}".encode()
    killed = 0
    for entry in processes.iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed += 1
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
                    raise
    return killed


def is_gone(host: str, pid: int) -> bool:
    """Returns True if this very host has no such process. Of other hosts nothing is known."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another process
        return False
    return False


def describe_exit(code: int) -> str:
    """A ``Popen.returncode`` in words."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def when_ended(process: subprocess.Popen[bytes], ended: Callable[[], None]) -> None:
    """Call ``ended`` in the running loop once the process is a zombie: its group is killed then, and it is reaped.

    ``process.returncode`` says how it ended.
    """
    loop = asyncio.get_running_loop()

    def reap_leader() -> None:
        kill_group(process)
        process.wait()  # Returns at once: it is a zombie.
        ended()

    descriptor = _pidfd(process.pid)
    if descriptor is None:
        threading.Thread(target=_report, args=(process.pid, loop, reap_leader), daemon=True).start()
        return

    def leader_ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        reap_leader()

    loop.add_reader(descriptor, leader_ended)


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable at the end of ``pid``; None where the system has none (macOS, seccomp)."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return opener(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def _report(pid: int, loop: asyncio.AbstractEventLoop, on_reaped: Callable[[], None]) -> None:
    """Without pidfd a thread waits, and leaves the zombie: its number stays taken until its group is killed."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        loop.call_soon_threadsafe(on_reaped)
    except RuntimeError:
        return  # The loop is closed: so is everything that wanted to know.


def resident_bytes() -> int:
    """Resident memory now; where the system does not tell, the most there ever was."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
