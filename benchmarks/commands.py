"""Command jobs: against the plainest way to run a program; what timeouts and background processes do (target 15)."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Any

import uvloop

from benchmarks.harness import Line, Plan, at_least, at_most, percentile, times_at_most
from holdfast.core.lifecycle import Succeeded
from holdfast.tasks.command_policy import CommandPolicy
from holdfast.worker.executors.command import CommandRunner

TITLE = "Command jobs"
_POLICY = CommandPolicy(mode="shell")
_RUNNER = CommandRunner()
_TRUE: dict[str, object] = {"argv": ["/bin/true"]}
_SLEEPERS: dict[str, object] = {"shell": "sleep 300 & sleep 300"}
_ABANDONED: dict[str, object] = {"shell": "sleep 300 & echo done"}
_TIMEOUT = 0.1


def run(plan: Plan) -> list[Line]:
    """Alternate with ``subprocess.run``."""
    one = Line("one /bin/true, p50", "ms", other="subprocess.run", target=times_at_most(1.6))
    rate = Line("4 callers", "commands/s", target=at_least(1300))
    killed = Line("killed after its timeout, p99", "ms late", target=at_most(20))
    left = Line("a grandchild left behind holds the job for", "ms", target=at_most(100))
    calls = plan.size(200, 5)
    for _ in range(plan.rounds):
        ours, every, late, held = uvloop.run(_measured(plan, calls))
        one.add(ours, percentile([_plain() for _ in range(calls)], 50))
        rate.add(every)
        killed.add(late)
        left.add(held)
    return [one, rate, killed, left]


def _plain() -> float:
    started = time.perf_counter()
    subprocess.run(["/bin/true"], capture_output=True, check=True)
    return (time.perf_counter() - started) * 1000


async def _measured(plan: Plan, calls: int) -> tuple[float, float, float, float]:
    await _milliseconds(_TRUE)
    one = percentile([await _milliseconds(_TRUE) for _ in range(calls)], 50)
    rate = await _rate(plan.size(600, 8))
    late = [await _milliseconds(_SLEEPERS) - _TIMEOUT * 1000 for _ in range(plan.size(15, 1))]
    return one, rate, percentile(late, 99), await _milliseconds(_ABANDONED, timeout=5)


async def _milliseconds(payload: dict[str, Any], timeout: float = _TIMEOUT) -> float:
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            outcome = await _RUNNER.run(payload, _POLICY)
    except TimeoutError:
        outcome = None
    took = (time.perf_counter() - started) * 1000
    if isinstance(outcome, Succeeded) != (payload is not _SLEEPERS):
        raise RuntimeError(f"{payload} came to {outcome}")
    return took


async def _rate(commands: int) -> float:
    left = iter(range(commands))

    async def caller() -> None:
        for _ in left:
            await _RUNNER.run(_TRUE, _POLICY)

    started = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(4)])
    return commands / (time.perf_counter() - started)
