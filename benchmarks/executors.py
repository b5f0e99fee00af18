"""The process executor: a call, a kill, and the next job after it (target 14)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from benchmarks.handlers import echo, hang
from benchmarks.harness import Line, Plan, at_least, at_most, percentile
from holdfast.core.events import Events
from holdfast.core.lifecycle import Succeeded
from holdfast.core.models import Job
from holdfast.tasks import Task
from holdfast.worker.executors.process import ProcessExecutor

TITLE = "Process executor, two processes"
_TIMEOUT = 0.2


def run(plan: Plan) -> list[Line]:
    """Each figure once a round, on a pool of its own."""
    call = Line("one call, p50", "ms", target=at_most(0.15))
    rate = Line("8 callers", "jobs/s", target=at_least(10_000))
    killed = Line("killed after its timeout, p99", "ms late", target=at_most(10))
    after = Line("the next job after that, p99", "ms", target=at_most(5))
    lines = [call, rate, killed, after]
    for _ in range(plan.rounds):
        for line, figure in zip(lines, uvloop.run(_measured(plan)), strict=True):
            line.add(figure)
    return lines


async def _measured(plan: Plan) -> tuple[float, float, float, float]:
    executor = ProcessExecutor(2, app=None, events=Events())
    await executor.start()
    for index in range(10):
        await executor.run(echo, _job(echo, index))
    calls = [await _milliseconds(executor, echo) for _ in range(plan.size(500, 20))]
    rate = await _rate(executor, plan.size(20_000, 100))
    late, after = [], []
    for _ in range(plan.size(15, 2)):
        late.append(await _milliseconds(executor, hang) - _TIMEOUT * 1000)
        after.append(await _milliseconds(executor, echo))
        await asyncio.sleep(plan.size(0.5, 0.1))  # a new spare gets warm
    await executor.close()
    return percentile(calls, 50), rate, percentile(late, 99), percentile(after, 99)


def _job(task: Task[Any, Any], number: int) -> Job:
    return Job("benchmark", task.name, "default", f'{{"n":{number}}}', 1, 1, 5, 0, 0, 0, 0)


async def _milliseconds(executor: ProcessExecutor, task: Task[Any, Any]) -> float:
    started = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT if task is hang else None):
            outcome = await executor.run(task, _job(task, 1))
    except TimeoutError:
        outcome = None
    took = (time.perf_counter() - started) * 1000
    if isinstance(outcome, Succeeded) != (task is echo):
        raise RuntimeError(f"{task.name} came to {outcome}")
    return took


async def _rate(executor: ProcessExecutor, calls: int) -> float:
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await executor.run(echo, _job(echo, number))

    started = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(8)])
    return calls / (time.perf_counter() - started)
