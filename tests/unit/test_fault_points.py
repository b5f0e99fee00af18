"""Fault points: parsed strictly, off by default, and deadly in processes made to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import timeit

import pytest

from holdfast import ConfigError, Settings, Unavailable
from holdfast.core import fault_points


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_points, "_armed", {})


@pytest.mark.parametrize(
    "text",
    [
        "settle.befor:kill",
        "settle.before",
        "settle.before:kil",
        "settle.before:kill@0",
        "settle.before:kill@x",
        "@",
        ":",
    ],
)
def test_what_is_not_a_fault_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOLDFAST_FAULTS"):
        list(fault_points.parse(text))


def test_a_fault_strikes_once_at_its_coming() -> None:
    fault_points.arm_fault(*fault_points.parse(" settle.before:fail@3 "))
    fault_points.fault_point("settle.before")
    fault_points.fault_point("settle.after")
    fault_points.fault_point("settle.before")
    with pytest.raises(Unavailable, match=r"settle\.before"):
        fault_points.fault_point("settle.before")
    fault_points.fault_point("settle.before")


def run(program: str, **environment: str) -> int:
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment}, check=False).returncode


def test_the_environment_kills_a_process() -> None:
    program = (
        "from holdfast.core.fault_points import fault_point;"
        "fault_point('claim.after'); fault_point('claim.after'); print('alive')"
    )
    assert run(program, HOLDFAST_FAULTS="claim.after:kill@2") == -signal.SIGKILL
    assert run(program, HOLDFAST_FAULTS="claim.after:kill@3") == 0


def test_kill_at_kills_this_process() -> None:
    program = (
        "from holdfast import testing; from holdfast.core import fault_points;"
        "testing.kill_at('heartbeat.before'); fault_points.fault_point('heartbeat.before')"
    )
    assert run(program) == -signal.SIGKILL


def test_a_point_costs_next_to_nothing_while_off() -> None:
    rounds = 20_000
    spent = min(
        timeit.repeat("point('settle.before')", globals={"point": fault_points.fault_point}, number=rounds, repeat=20)
    )
    assert spent / rounds < 1e-6  # 47 ns where it was measured; here only that nothing is done


def test_the_variable_is_not_unknown() -> None:
    assert Settings.load(environ={"HOLDFAST_FAULTS": "claim.after:kill"}).warnings == ()
    assert Settings.load(environ={"HOLDFAST_FALTS": "claim.after:kill"}).warnings != ()
