"""Killing the process at a named point of the code."""

from __future__ import annotations

from holdfast.core import fault_injection


def kill_at(point: str, nth: int = 1) -> None:
    """Kill this process (SIGKILL) when it comes to ``point`` for the nth time. Call it in a process made to be killed.

    ``holdfast.core.fault_injection.POINTS`` lists the points. For a process that cannot call it, set its environment:
    HOLDFAST_FAULTS="settle.before:kill@3".
    """
    fault_injection.arm_fault(fault_injection.InjectedFault(point, "kill", nth))
