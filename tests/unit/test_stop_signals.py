"""Stop signals: when a second one belongs to the first."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from holdfast.core.clock import ManualClock
from holdfast.worker.stop_signals import StopRequest, StopRequests

FIRST, DUPLICATE, REPEATED = StopRequest.FIRST, StopRequest.DUPLICATE, StopRequest.REPEATED


@pytest.mark.parametrize(
    ("instants", "meanings"),
    [
        ([0.0], [FIRST]),
        ([0.0, 0.0], [FIRST, DUPLICATE]),
        ([0.0, 1.0], [FIRST, DUPLICATE]),
        ([0.0, 1.01], [FIRST, REPEATED]),
        ([0.0, 0.6, 0.9, 1.2, 1.3], [FIRST, DUPLICATE, DUPLICATE, REPEATED, REPEATED]),
    ],
)
def test_requests_within_a_second_of_the_first_are_duplicates(
    instants: list[float], meanings: list[StopRequest]
) -> None:
    clock = ManualClock()
    requests = StopRequests(clock.monotonic)
    recorded = []
    now = 0.0
    for instant in instants:
        clock.advance(instant - now)
        now = instant
        recorded.append(requests.record_signal())
    assert recorded == meanings


LATE = """
import signal
from holdfast.worker import stop_signals

stop_signals.BURST_SECONDS = float({seconds})
stop_signals.ignore_rest_of_burst()
signal.raise_signal({number})
print("ignored")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [60, -1], ids=["burst", "later"])
def test_stopped_process_ignores_only_the_rest_of_the_burst(number: signal.Signals, seconds: int) -> None:
    program = LATE.format(number=int(number), seconds=seconds)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == ((0, "ignored\n") if seconds > 0 else (-number, ""))
