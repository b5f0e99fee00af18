"""A program that tries to get out of its sandbox, by every way in the table; run as a script, inside.

It writes one line of JSON: the ways that worked, and the error of each other one. ``aims`` (JSON): the folder outside
that it wants to write, processes outside by way, sockets outside by kind.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
aims: dict[str, Any] = {}
ways: dict[str, Callable[[Path], object]] = {}


def way(function: Callable[[Path], object]) -> Callable[[Path], object]:
    """Adds an escape. It gets a file outside, of its own; raising anything means that it has not worked."""
    ways[function.__name__] = function
    return function


def checked(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def in_child(function: Callable[[], object]) -> None:
    """Call in a process of its own, which it may change for good; OSError as there."""
    child = os.fork()
    if not child:
        number = 0
        try:
            function()
        except OSError as error:
            number = error.errno or 1
        os._exit(number)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        raise OSError(number, os.strerror(number))


@way
def absolute_path(target: Path) -> None:
    target.write_text("written")


@way
def truncated_file(target: Path) -> None:
    os.truncate(target, 0)


@way
def symbolic_link(target: Path) -> None:
    Path("link").symlink_to(target.parent)
    (Path("link") / target.name).write_text("written")


@way
def hard_link(target: Path) -> None:
    os.link(target, "hard")
    Path("hard").write_text("written")


@way
def rename_out(target: Path) -> None:
    Path("mine").write_text("written")
    Path("mine").rename(target)


@way
def rename_in(target: Path) -> None:
    target.rename("taken")


@way
def deleted_file(target: Path) -> None:
    target.unlink()


@way
def permissions(target: Path) -> None:
    target.chmod(0o777)


@way
def permissions_by_descriptor(target: Path) -> None:
    descriptor = os.open(target, os.O_RDONLY)
    os.fchmod(descriptor, 0o777)


@way
def permissions_by_folder(target: Path) -> None:
    os.chmod(target.name, 0o777, dir_fd=os.open(target.parent, os.O_RDONLY))  # noqa: S103 - refused, by fchmodat


@way
def owner(target: Path) -> None:
    os.chown(target, os.geteuid(), os.getegid())


@way
def times(target: Path) -> None:
    os.utime(target, (1, 1))


@way
def attributes(target: Path) -> None:
    os.setxattr(target, "user.holdfast", b"x")


@way
def own_proc_root(target: Path) -> None:
    Path(f"/proc/self/root{target}").write_text("written")


@way
def root_of_a_process_outside(target: Path) -> None:
    Path(f"/proc/{aims['victims'][0]}/root{target}").write_text("written")


@way
def environment_of_a_process_outside(target: Path) -> None:
    assert b"SECRET" in Path(f"/proc/{aims['victims'][0]}/environ").read_bytes()


@way
def memory_of_a_process_outside(target: Path) -> None:
    os.close(os.open(f"/proc/{aims['victims'][0]}/mem", os.O_RDWR))


@way
def killed_process_outside(target: Path) -> None:
    os.kill(aims["victims"][1], signal.SIGKILL)


@way
def traced_process_outside(target: Path) -> None:
    checked(libc.ptrace(16, aims["victims"][2], 0, 0))


@way
def limited_process_outside(target: Path) -> None:
    resource.prlimit(aims["victims"][3], resource.RLIMIT_NOFILE, (9, 9))


@way
def slowed_process_outside(target: Path) -> None:
    os.setpriority(os.PRIO_PROCESS, aims["victims"][3], 19)


@way
def tcp_socket(target: Path) -> None:
    socket.create_connection(("127.0.0.1", aims["tcp"]), timeout=30).close()


@way
def udp_socket(target: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"out", ("127.0.0.1", aims["udp"]))


@way
def unix_socket(target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(aims["unix"])


@way
def unix_socket_without_a_file(target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect("\0" + aims["abstract"])


@way
def pipe_with_a_name(target: Path) -> None:
    os.close(os.open(aims["fifo"], os.O_WRONLY | os.O_NONBLOCK))


@way
def inherited_descriptor(target: Path) -> None:
    for number in range(3, 256):
        try:
            os.write(number, b"written")
        except OSError:
            continue
        return
    raise OSError("no descriptor can be written")


@way
def set_user_id_program(target: Path) -> None:
    given = subprocess.run([aims["setuid"], "-u"], capture_output=True, text=True, check=True).stdout
    assert int(given) != os.getuid()


@way
def new_namespaces(target: Path) -> None:
    in_child(lambda: checked(libc.unshare(0x10000000 | 0x00020000)))


@way
def new_namespaces_by_clone(target: Path) -> None:
    child = checked(
        libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    )
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


@way
def mount(target: Path) -> None:
    Path("mounted").mkdir()
    checked(libc.mount(b"tmpfs", b"mounted", b"tmpfs", 0, None))
    libc.umount2(b"mounted", 2)


@way
def change_of_root(target: Path) -> None:
    Path("root").mkdir()
    in_child(lambda: os.chroot("root"))


@way
def device(target: Path) -> None:
    os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(7, 250))


@way
def kernel_setting(target: Path) -> None:
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))


@way
def io_uring(target: Path) -> None:
    checked(libc.syscall(425, 4, ctypes.create_string_buffer(120)))


def main() -> None:
    """Try every way, or those named."""
    aims.update(json.loads(sys.argv[1]))
    worked, failed = [], {}
    for name in sys.argv[2:] or ways:
        try:
            ways[name](Path(aims["outside"]) / name)
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            worked.append(name)
    sys.stdout.write(json.dumps({"worked": worked, "failed": failed}))


if __name__ == "__main__":
    main()
