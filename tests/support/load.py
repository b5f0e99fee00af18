"""Bounds in real time on a machine that other programs keep busy."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

TEST_SECONDS = 200.0
"""Seconds that a test with an event loop may take: less than pytest's own limit, which ends it with less to read."""

CPU_SECONDS = 0.05
"""Long enough for several turns of the scheduler."""


def slowness() -> float:
    """How many times longer than on an idle machine CPU work takes now; at least 1. A bound is multiplied by it."""
    began, used = time.perf_counter(), time.thread_time()
    while (spent := time.thread_time() - used) < CPU_SECONDS:
        pass
    return max(1.0, (time.perf_counter() - began) / spent)


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the value that ``share`` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
