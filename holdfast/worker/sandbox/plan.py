"""The orders of the launcher, and which mechanisms of a sandbox this host has."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import msgspec

from holdfast.worker.sandbox.seccomp import filter_program, is_supported

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_LANDLOCK_CREATE = 444
_LEAST_LANDLOCK = 6  # from it on, signals and sockets without a file stay inside
_PROBE_SECONDS = 60.0


class Mechanism(NamedTuple):
    """A way to put up the sandbox."""

    name: str
    namespaces: bool
    remedy: str
    """Instructions for making it available on a host."""


NAMESPACES = Mechanism(
    "namespaces",
    True,
    "allow user namespaces to the worker's user (sysctl user.max_user_namespaces; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container a profile that permits them and an unmasked /proc)",
)
LANDLOCK = Mechanism("landlock", False, "run Linux 6.12 or newer, with landlock in its list of security modules")
MECHANISMS = (NAMESPACES, LANDLOCK)
"""The best one first."""
SANDBOX_REMEDY = f"{NAMESPACES.remedy}; or {LANDLOCK.remedy}"


class Orders(msgspec.Struct, frozen=True):
    """Orders of the launcher: a command, and how it runs. ``rlimits``: pairs of a resource's number and its limit."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None = None
    rlimits: Sequence[tuple[int, int]] = ()
    memory: bool = False
    """There is a limit of memory."""
    mechanism: Mechanism | None = None
    network: bool = False

    def to_json(self) -> str:
        """The text that the launcher reads; lone surrogates stand for bytes that are no UTF-8."""
        sandbox = None
        if self.mechanism is not None:
            namespaces = self.mechanism.namespaces
            program = filter_program(platform.machine(), network=self.network, namespaces=namespaces)
            sandbox = {
                "namespaces": namespaces,
                "landlock": landlock_version(),
                "network": self.network,
                "filter": program.hex(),
            }
        orders = {name: getattr(self, name) for name in ("argv", "environment", "cwd", "rlimits", "memory")}
        return json.dumps({**orders, "sandbox": sandbox})


class LaunchFailure(msgspec.Struct, frozen=True):
    """Why the launcher could not start the command. ``stage``: limits, cwd, sandbox or exec."""

    stage: str
    errno: int | None
    text: str


class Launch:
    """A use of the launcher: the words that start it, and its report. A context manager, which closes both."""

    def __init__(self, orders: Orders) -> None:
        self._file: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._report, self._writer = -1, -1
        try:
            self._file.write(orders.to_json())
            self._file.flush()
            self._file.seek(0)
            self._report, self._writer = os.pipe()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_inherited()
        os.close(self._report)

    @property
    def argv(self) -> list[str]:
        """Command line of the launcher. ``-I -S``: it ignores the environment and site packages."""
        return [sys.executable, "-I", "-S", _LAUNCHER, *map(str, self.descriptors)]

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors that the launcher inherits."""
        return self._file.fileno(), self._writer

    def close_inherited(self) -> None:
        """Leave the orders and the report's writing end to the launcher."""
        self._file.close()
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def read_failure(self) -> LaunchFailure | None:
        """Why it failed, after its end; None if the command was started."""
        os.set_blocking(self._report, False)
        with contextlib.suppress(BlockingIOError):
            if given := os.read(self._report, 64 * 1024):
                return msgspec.json.decode(given, type=LaunchFailure)
        return None


class NoSandbox(Exception):
    """This host has no mechanism of the sandbox. ``remedy``: what gives it one."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        found = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
        super().__init__(f"the sandbox is not available on this host ({found or 'it is not Linux'})")
        self.remedy = SANDBOX_REMEDY


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0: none."""
    if sys.platform != "linux":
        return 0
    answer: int = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    return max(0, answer)


def probe_mechanism(mechanism: Mechanism) -> str | None:
    """Put the sandbox up once; None if it holds, else why it does not. OSError where no process can be started now."""
    if sys.platform != "linux" or not is_supported():
        return f"{platform.system()} on {platform.machine()} is not supported"
    if not mechanism.namespaces and landlock_version() < _LEAST_LANDLOCK:
        return f"the kernel has version {landlock_version()} of Landlock, {_LEAST_LANDLOCK} is needed"
    folder = os.path.realpath(tempfile.mkdtemp(prefix="holdfast-"))
    try:
        with Launch(Orders(["true"], {"PATH": os.defpath}, cwd=folder, mechanism=mechanism)) as launch:
            ran = subprocess.run(
                launch.argv,
                pass_fds=launch.descriptors,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={},
                start_new_session=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
            failure = launch.read_failure()
    except subprocess.TimeoutExpired as error:
        return f"the launcher does not end: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is None:
        return None if ran.returncode == 0 else f"the launcher ended with {ran.returncode}"
    return None if failure.stage == "exec" else failure.text


class CommandHost:
    """This host as commands find it. Remembers the mechanism that was found to hold."""

    def __init__(self, mechanisms: Sequence[Mechanism] = MECHANISMS) -> None:
        self._mechanisms = mechanisms
        self._found: Mechanism | None = None

    def find_mechanism(self) -> Mechanism:
        """The best mechanism that holds here; raises NoSandbox. Starts processes: call it from a thread."""
        causes: dict[str, str] = {}
        for mechanism in self._mechanisms if self._found is None else ():
            cause = probe_mechanism(mechanism)
            if cause is None:
                self._found = mechanism
                break
            causes[mechanism.name] = cause
        if self._found is None:
            raise NoSandbox(causes)
        return self._found


def describe_host() -> dict[str, str | None]:
    """Each mechanism by name, with the reason why it does not hold here; None if it holds."""
    held = {}
    for mechanism in MECHANISMS:
        try:
            held[mechanism.name] = probe_mechanism(mechanism)
        except OSError as error:
            held[mechanism.name] = f"it cannot be tried: {error}"
    return held
