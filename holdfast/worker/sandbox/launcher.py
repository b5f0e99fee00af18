"""The launcher: sets limits and the sandbox for itself, then becomes the command. Standard library only.

A new interpreter runs it as a script with two descriptors: its specification (JSON) and a pipe for its report. The
report is empty unless the command could not be started. With namespaces the launcher stays alive, and its child is the
first process of the new process namespace: if either exits, the kernel kills every process in the namespace.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

libc = ctypes.CDLL(None, use_errno=True)

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_NAMESPACES = _NEW_USER | 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x02000000  # mount, pid, ipc, uts, cgroup
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_ALL_MOUNTS = 0x8000  # AT_RECURSIVE
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 1 | 4 | 8  # execute, read a file, read a folder
_READ_FOLDER, _DEVICE = 8, 2 | 4 | 0x4000  # write, read, truncate a file
_MAKE_DEVICES = 0x40 | 0x800  # make a character device, or a block device
_FILE_RIGHTS = 1 | 2 | 4 | 0x4000 | 0x8000
_O_PATH = 0o10000000


class Stage:
    """Current step of the launcher, for its report."""

    name = "limits"


def main() -> None:
    """Runs the command as specified."""
    spec_descriptor, report = map(int, sys.argv[1:3])
    with open(spec_descriptor, encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        spec = json.load(file)
    os.set_inheritable(report, False)
    try:
        if spec["memory"]:
            _offer_to_oom_killer()
        sandbox = spec["sandbox"]
        if sandbox is not None and sandbox["namespaces"]:
            _enter_namespaces(spec, report)
        _become_command(spec)
    except BaseException as error:
        send_report(report, error)
        os._exit(125)


def send_report(report: int, error: BaseException) -> None:
    """Reports why the command could not be started."""
    number = error.errno if isinstance(error, OSError) else None
    text = os.strerror(number) if number else f"{type(error).__name__}: {error}"
    given = {"stage": Stage.name, "errno": number, "text": text}
    if isinstance(error, OSError) and error.filename is not None:
        given["text"] = f"{text}: {error.filename}"
    os.write(report, json.dumps(given).encode())


def _offer_to_oom_killer() -> None:
    """Makes the OOM killer prefer this job, which has a memory limit, if memory runs out before the watcher acts."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs 5 ms
        file.write("500")


def _become_command(spec: dict[str, Any]) -> NoReturn:
    Stage.name = "cwd"
    sandbox = spec["sandbox"]
    if sandbox is not None:
        enter_folder(spec["cwd"])
    elif spec["cwd"] is not None:
        os.chdir(spec["cwd"])
    if sandbox is not None:
        Stage.name = "sandbox"
        drop_privileges()
        if sandbox["landlock"]:
            restrict_files(sandbox["landlock"], network=sandbox["network"], isolated=not sandbox["namespaces"])
    Stage.name = "limits"
    for kind, maximum in spec["rlimits"]:
        limit_resource(kind, maximum)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both
        signal.signal(number, signal.SIG_DFL)
    if sandbox is not None:
        Stage.name = "sandbox"
        filter_calls(bytes.fromhex(sandbox["filter"]))
    Stage.name = "exec"
    os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])  # noqa: S606 - that is its work


def enter_folder(path: str) -> None:
    """Changes to a real path. Raises ELOOP if another job has put a symbolic link into it since it was checked."""
    os.chdir(path)
    if os.getcwd() != path:  # noqa: PTH109 - pathlib costs 5 ms
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def limit_resource(kind: int, maximum: int) -> None:
    """Limits a resource irrevocably. The hard limit of CPU time is higher: there the signal is SIGKILL, not SIGXCPU."""
    hard = resource.getrlimit(kind)[1]
    own = maximum + 5 if kind == resource.RLIMIT_CPU else maximum
    soft, own = (maximum, own) if hard == resource.RLIM_INFINITY else (min(maximum, hard), min(own, hard))
    resource.setrlimit(kind, (soft, own))


# ── namespaces ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _enter_namespaces(spec: dict[str, Any], report: int) -> None:
    """Enters new namespaces. Returns in the process that will become the command."""
    Stage.name = "cwd"
    enter_folder(spec["cwd"])
    Stage.name = "sandbox"
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(_NAMESPACES | (0 if spec["sandbox"]["network"] else _NEW_NET)), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs 5 ms
            file.write(text)
    ended, end = os.pipe()
    first = os.fork()
    if first:
        os.close(end)
        os.close(report)
        _end_as(_read_status(ended, first))
    os.close(ended)
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    check(libc.prctl(4, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    _arrange_mounts(spec["cwd"])
    command = os.fork()
    if command:
        os.close(report)
        _reap_until(command, end)
    os.setsid()  # its own group: it must not be able to signal the launcher
    check(libc.prctl(4, 1, 0, 0, 0), "PR_SET_DUMPABLE")


def _read_status(ended: int, first: int) -> int:
    os.waitpid(first, 0)
    given = os.read(ended, 4)
    return struct.unpack("i", given)[0] if given else signal.SIGKILL


def _end_as(status: int) -> NoReturn:
    """Ends this process with the exit status of the command."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _reap_until(command: int, end: int) -> NoReturn:
    """As the first process of a namespace: reaps orphans until the command has ended."""
    while True:
        pid, status = os.wait()
        if pid == command:
            os.write(end, struct.pack("i", status))
            os._exit(0)


def _arrange_mounts(folder: str) -> None:
    """Mounts a file system in which only ``folder`` is writable, with its own /proc and few devices."""
    mount_at(None, "/", None, _RECURSIVE | _PRIVATE)
    nodes = {name: os.open(f"/dev/{name}", _O_PATH) for name in _DEVICES}
    mount_at("tmpfs", "/dev", "tmpfs", _NO_SETUID | _NO_PROGRAMS, "mode=755,size=64k")
    for name, descriptor in nodes.items():
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        mount_at(f"/proc/self/fd/{descriptor}", f"/dev/{name}", None, _BIND)
        os.close(descriptor)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")  # noqa: PTH211 - pathlib costs 5 ms
    mount_at("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    before = os.stat(".")  # noqa: PTH116 - pathlib costs 5 ms
    mount_at(".", ".", None, _BIND | _RECURSIVE)
    set_mount("/", _ALL_MOUNTS, _READ_ONLY | _NO_SETUID, 0)
    enter_folder(folder)  # its path leads to the new mount now
    if not os.path.samestat(before, os.stat(".")):  # noqa: PTH116 - as above
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    set_mount(".", 0, _NO_DEVICES, _READ_ONLY)


def mount_at(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    check(libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def set_mount(target: str, how: int, to_set: int, to_clear: int) -> None:
    """mount_setattr(2)."""
    attributes = struct.pack("=QQQQ", to_set, to_clear, 0, 0)
    path = ctypes.c_char_p(os.fsencode(target))
    called = libc.syscall(_MOUNT_SETATTR, -100, path, how, attributes, ctypes.c_size_t(len(attributes)))
    check(called, f"mount_setattr {target}")


# ── privileges, Landlock, seccomp ─────────────────────────────────────────────────────────────────────────────────────
def drop_privileges() -> None:
    """Drops all capabilities for good, also for set-user-id programs and root. Raises OSError if one remains."""
    check(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    libc.prctl(28, 0xEF, 0, 0, 0)  # PR_SET_SECUREBITS: being root gives nothing; refused where there is no capability
    capability = 0
    while libc.prctl(23, capability, 0, 0, 0) >= 0:  # PR_CAPBSET_READ
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, refused in the same way
        capability += 1
    libc.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT: clear all
    check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")
    bounding = any(libc.prctl(23, each, 0, 0, 0) for each in range(capability))
    if os.geteuid() == 0 and (bounding or libc.prctl(27, 0, 0, 0, 0) != 0xEF):
        raise OSError(errno.EPERM, "root keeps capabilities")


def restrict_files(abi: int, *, network: bool, isolated: bool) -> None:
    """Landlock: reads all but devices, writes in its directory; ``isolated``: no signals or sockets to the outside."""
    files = (1 << (16 if abi >= 5 else 15 if abi >= 3 else 14 if abi == 2 else 13)) - 1
    attributes = struct.pack("=Q", files)
    if abi >= 4:
        attributes += struct.pack("=Q", 0 if network else 3)  # bind, connect
    if abi >= 6:
        attributes += struct.pack("=Q", 3 if isolated else 0)  # sockets without a file, signals
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    check(rules, "landlock_create_ruleset")
    _allow(rules, "/", _READ_FOLDER)
    for name in os.listdir("/"):  # noqa: PTH208 - pathlib costs 5 ms
        if name != "dev":
            _allow(rules, f"/{name}", _READ)
    for name in _DEVICES:
        _allow(rules, f"/dev/{name}", _DEVICE & files)
    _allow(rules, ".", files & ~_MAKE_DEVICES)
    check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, _O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a file that cannot be opened stays forbidden
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib costs 5 ms
        rights &= _FILE_RIGHTS
    rule = struct.pack("=Qi", rights, descriptor)
    check(libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule {path}")
    os.close(descriptor)


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def filter_calls(program: bytes) -> None:
    """Installs a seccomp filter."""
    check(libc.prctl(22, 2, ctypes.byref(_Filter(len(program) // 8, program)), 0, 0), "seccomp")


def check(answer: int, call: str) -> None:
    """Raises OSError with the name of a failed call."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)


if __name__ == "__main__":
    main()
