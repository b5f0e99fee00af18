"""Fault points: named places in the code where a test kills, freezes or fails this process. Off unless switched on.

    HOLDFAST_FAULTS="settle.before:kill@3,claim.after:freeze@1"

kills the process (SIGKILL) on the third visit of ``settle.before`` and stops it (SIGSTOP, until SIGCONT)
on the first visit of ``claim.after``. ``fail`` raises Unavailable instead, like an unavailable store. Without ``@n`` a
fault triggers on the first visit; each triggers once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import MappingProxyType

from holdfast.core.errors import ConfigError, Unavailable, quote_value

FAULTS_VARIABLE = "HOLDFAST_FAULTS"

POINTS = frozenset(
    {
        "submit.before",
        "submit.after",
        "announce.before",
        "claim.before",
        "claim.after",
        "handler.before",
        "handler.after",
        "settle.before",
        "step.before",
        "step.after",
        "signal.before",
        "signal.after",
        "children.before",
        "children.after",
        "settle.after",
        "heartbeat.before",
        "sweep.before_settle",
        "sweep.after_settle",
        "tick.before_write",
        "tick.after_write",
        "import.taken",
        "import.submitted",
    }
)
"""All fault points: around the writes that change a job's state, and between two of them."""


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail(name: str) -> None:
    raise Unavailable(f"a fault was injected at {name}")


_ACTIONS = MappingProxyType({"kill": _kill, "freeze": _freeze, "fail": _fail})


class InjectedFault:
    """A fault at one point, and the visit that triggers it."""

    def __init__(self, name: str, action: str, nth: int = 1) -> None:
        """Raises ConfigError for an unknown point or action."""
        if name not in POINTS:
            raise ConfigError(
                f"{FAULTS_VARIABLE}: there is no point {quote_value(name)}; there are {', '.join(sorted(POINTS))}"
            )
        if action not in _ACTIONS or nth < 1:
            raise ConfigError(
                f"{FAULTS_VARIABLE}: {name}:{action}@{nth} is not a fault; write {', '.join(_ACTIONS)} and @1 or more"
            )
        self.name = name
        self._action: Callable[[str], None] = _ACTIONS[action]
        self._left = nth

    def reach_point(self) -> None:
        """Counts a visit of the point; triggers the fault when it is due."""
        self._left -= 1
        if self._left == 0:
            self._action(self.name)


def parse(text: str) -> Iterator[InjectedFault]:
    """Parses the faults of ``HOLDFAST_FAULTS``."""
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, rest = part.partition(":")
        action, at, nth = rest.partition("@")
        if at and not nth.isdecimal():
            raise ConfigError(
                f"{FAULTS_VARIABLE}: {quote_value(part)} is not a fault; write point:action or point:action@number"
            )
        yield InjectedFault(name, action, int(nth) if at else 1)


# Module-level state, although it is no cache: a point must be reachable from everywhere and cost almost nothing.
_armed: dict[str, InjectedFault] = {}


def arm_fault(fault: InjectedFault) -> None:
    """Arms this fault; it replaces another one at its point."""
    _armed[fault.name] = fault


def fault_point(name: str) -> None:
    """Triggers the fault armed at this point, if any. Without faults it is one lookup in an empty dictionary."""
    if _armed and name in _armed:
        _armed[name].reach_point()


def _arm_from_environment() -> ConfigError | None:
    """Arms the faults of ``HOLDFAST_FAULTS``. Returns an error message instead of raising: an import must not fail."""
    try:
        for fault in parse(os.environ.get(FAULTS_VARIABLE, "")):
            arm_fault(fault)
    except ConfigError as error:
        return error
    return None


_mistake = _arm_from_environment()


def check_environment() -> None:
    """Raises ``ConfigError`` if ``HOLDFAST_FAULTS`` had a mistake when this process started."""
    if _mistake is not None:
        raise ConfigError(str(_mistake))


def kill_at(point: str, nth: int = 1) -> None:
    """Kills this process (SIGKILL) on the nth visit of ``point``. Call it in a process that exists to be killed.

    ``POINTS`` lists the points. For a process that cannot call it, set its environment:
    HOLDFAST_FAULTS="settle.before:kill@3".
    """
    arm_fault(InjectedFault(point, "kill", nth))
