"""Input of the launcher, and the sandbox mechanisms of this host."""

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
_MIN_LANDLOCK = 6  # the first that confines signals and abstract sockets
_PROBE_SECONDS = 60.0


class Mechanism(NamedTuple):
    """A mechanism of the sandbox."""

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
"""Mechanisms, the preferred one first."""
SANDBOX_REMEDY = f"{NAMESPACES.remedy}; or {LANDLOCK.remedy}"


class LaunchSpec(msgspec.Struct, frozen=True):
    """Input of the launcher: a command and its options. ``rlimits``: pairs of resource number and limit."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None = None
    rlimits: Sequence[tuple[int, int]] = ()
    memory: bool = False
    """True if the job has a memory limit."""
    mechanism: Mechanism | None = None
    network: bool = False

    def to_json(self) -> str:
        """Returns the JSON that the launcher reads; lone surrogates represent bytes that are not UTF-8."""
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
        spec = {name: getattr(self, name) for name in ("argv", "environment", "cwd", "rlimits", "memory")}
        return json.dumps({**spec, "sandbox": sandbox})


class LaunchFailure(msgspec.Struct, frozen=True):
    """Error of the launcher. ``stage``: limits, cwd, sandbox or exec."""

    stage: str
    errno: int | None
    text: str


class Launch:
    """A start of the launcher: its command line and its report. A context manager that closes its descriptors."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._file: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._report, self._writer = -1, -1
        try:
            self._file.write(spec.to_json())
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
        """Command line of the launcher. ``-I -S``: ignores environment variables and site packages."""
        return [sys.executable, "-I", "-S", _LAUNCHER, *map(str, self.descriptors)]

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors that the launcher inherits."""
        return self._file.fileno(), self._writer

    def close_inherited(self) -> None:
        """Closes the descriptors that the launcher has inherited."""
        self._file.close()
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def read_failure(self) -> LaunchFailure | None:
        """Returns the error after the launcher has ended; None if the command was started."""
        os.set_blocking(self._report, False)
        with contextlib.suppress(BlockingIOError):
            if given := os.read(self._report, 64 * 1024):
                return msgspec.json.decode(given, type=LaunchFailure)
        return None


class NoSandbox(Exception):
    """Raised if this host has no sandbox mechanism. ``remedy``: how to get one."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        found = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
        super().__init__(f"the sandbox is not available on this host ({found or 'it is not Linux'})")
        self.remedy = SANDBOX_REMEDY


def landlock_version() -> int:
    """Returns the Landlock version of the kernel; 0 without Landlock."""
    if sys.platform != "linux":
        return 0
    answer: int = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    return max(0, answer)


def probe_mechanism(mechanism: Mechanism) -> str | None:
    """Tests a mechanism; returns None if it works, else the cause. Raises OSError if no process starts."""
    if sys.platform != "linux" or not is_supported():
        return f"{platform.system()} on {platform.machine()} is not supported"
    if not mechanism.namespaces and landlock_version() < _MIN_LANDLOCK:
        return f"the kernel has version {landlock_version()} of Landlock, {_MIN_LANDLOCK} is needed"
    folder = os.path.realpath(tempfile.mkdtemp(prefix="holdfast-"))
    try:
        with Launch(LaunchSpec(["true"], {"PATH": os.defpath}, cwd=folder, mechanism=mechanism)) as launch:
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
    """Sandbox mechanisms of this host. Caches the one that works."""

    def __init__(self, mechanisms: Sequence[Mechanism] = MECHANISMS) -> None:
        self._mechanisms = mechanisms
        self._found: Mechanism | None = None

    def find_mechanism(self) -> Mechanism:
        """Returns the best mechanism that works here; raises NoSandbox. Starts processes: call it from a thread."""
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
    """Returns the cause of failure for each mechanism, by name; None if it works."""
    held = {}
    for mechanism in MECHANISMS:
        try:
            held[mechanism.name] = probe_mechanism(mechanism)
        except OSError as error:
            held[mechanism.name] = f"it cannot be tried: {error}"
    return held
