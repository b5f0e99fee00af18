"""Killing the process at a named point of the code."""

from __future__ import annotations

from holdfast import faults


def kill_at(point: str, nth: int = 1) -> None:
    """Kill this process (SIGKILL) when it comes to ``point`` for the nth time. Call it in a process made to be killed.

    The points stand in ``holdfast.faults.POINTS``. A process that cannot call it is told by its environment:
    HOLDFAST_FAULTS="settle.before:kill@3".
    """
    faults.arm(faults.Fault(point, "kill", nth))
