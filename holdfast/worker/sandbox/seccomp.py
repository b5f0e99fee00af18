"""The seccomp filter of the sandbox: refuses the listed system calls and allows all others.

Namespaces or Landlock confine file systems and processes. The filter refuses sockets (a read-only mount does not
protect a socket in the file system), tracing, new namespaces, io_uring (seccomp does not see its requests) and
administration of the kernel. Without namespaces it also refuses changes of permissions, owners and times of files,
which Landlock allows, and leaving the process group.
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""By machine: its audit architecture, and its column in the tables below."""

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of classic BPF
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # the bit of x86-64's second numbering of calls
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW…
_INTERNET = (2, 10, 16)  # AF_INET, AF_INET6, and AF_NETLINK, which resolvers ask for addresses

# Numbers of a call on x86-64 and on arm64; None: the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
_REFUSED_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_SOCKET, _CLONE, _CLONE3, _IOCTL = (41, 198), (56, 220), (435, 435), (16, 29)
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into a terminal
_FILE_FLAGS = (0x40086602, 0x401C5820)  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
_ON_OTHER_PROCESSES = (
    ((302, 261), 0),  # prlimit64, of the process that its argument names
    ((142, 118), 0),  # sched_setparam
    ((144, 119), 0),  # sched_setscheduler
    ((203, 122), 0),  # sched_setaffinity
    ((314, 274), 0),  # sched_setattr
    ((141, 140), 1),  # setpriority
    ((251, 30), 1),  # ioprio_set
)
"""Calls that can change other processes of the user, and the argument that is 0 for the caller itself."""


def filter_program(machine: str, *, network: bool, namespaces: bool) -> bytes:
    """Returns the filter for a machine, an array of struct sock_filter. Raises KeyError for an unknown machine."""
    architecture, column = ARCHITECTURES[machine]
    program = _Program()
    program.add(_LOAD, _ARCHITECTURE)
    program.add(_EQUAL, architecture, 1, 0)
    program.add(_RETURN, _KILL)
    program.add(_LOAD, _NUMBER)
    if machine == "x86_64":
        program.add(_GREATER_EQUAL, _X32, 0, 1)
        program.refuse_with(errno.EPERM)
    for numbers in (_REFUSED | ({} if namespaces else _REFUSED_WITHOUT_NAMESPACES)).values():
        if (number := numbers[column]) is not None:
            program.refuse_call(number)
    program.refuse_call(_CLONE3[column], errno.ENOSYS)  # libraries then use clone, whose flags a filter can read
    program.refuse_bits(_CLONE[column], 0, _NEW_NAMESPACES)
    if network:
        program.refuse_unless(_SOCKET[column], 0, _INTERNET)
    else:
        program.refuse_call(_SOCKET[column])
    program.refuse_values(_IOCTL[column], 1, _TERMINAL_INPUT if namespaces else (*_TERMINAL_INPUT, *_FILE_FLAGS))
    if not namespaces:
        for both, argument in _ON_OTHER_PROCESSES:
            program.refuse_unless(both[column], argument, (0,))
    program.add(_RETURN, _ALLOW)
    return bytes(program.code)


def is_supported(machine: str | None = None) -> bool:
    """Returns True if there is a filter for this machine."""
    return (machine or platform.machine()) in ARCHITECTURES


class _Program:
    """A BPF program being built. At the start of each rule the accumulator holds the number of the call."""

    def __init__(self) -> None:
        self.code = bytearray()

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        """Adds an instruction; jumps are numbers of skipped instructions."""
        self.code += struct.pack("=HBBI", operation, if_true, if_false, value)

    def refuse_with(self, number: int) -> None:
        """Adds a return of this error."""
        self.add(_RETURN, _ERROR | number)

    def refuse_call(self, call: int, number: int = errno.EPERM) -> None:
        """Refuses a call with any arguments."""
        self.add(_EQUAL, call, 0, 1)
        self.refuse_with(number)

    def refuse_bits(self, call: int, argument: int, bits: int) -> None:
        """Refuses a call with any of these bits in an argument."""
        self.add(_EQUAL, call, 0, 4)
        self.add(_LOAD, _ARGUMENTS + 8 * argument)
        self.add(_ANY_BIT, bits, 0, 1)
        self.refuse_with(errno.EPERM)
        self.add(_LOAD, _NUMBER)

    def refuse_values(self, call: int, argument: int, values: tuple[int, ...]) -> None:
        """Refuses a call with one of these values as an argument."""
        self.add(_EQUAL, call, 0, 2 + 2 * len(values))
        self.add(_LOAD, _ARGUMENTS + 8 * argument)
        for value in values:
            self.add(_EQUAL, value, 0, 1)
            self.refuse_with(errno.EPERM)
        self.add(_LOAD, _NUMBER)

    def refuse_unless(self, call: int, argument: int, values: tuple[int, ...]) -> None:
        """Refuses a call unless an argument has one of these values."""
        self.add(_EQUAL, call, 0, 3 + len(values))
        self.add(_LOAD, _ARGUMENTS + 8 * argument)
        for passed, value in enumerate(values):
            self.add(_EQUAL, value, len(values) - passed, 0)
        self.refuse_with(errno.EPERM)
        self.add(_LOAD, _NUMBER)
