"""Workflows of Holdfast or DBOS, as a process: ``workflow_worker PRODUCT URL MEASURE COUNT``.

Answers ``go`` with the figures of one measure, or with an error. The process both starts the workflows and runs them,
up to a hundred at once, and a result counts when the caller has it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

import uvloop

from benchmarks.harness import percentile
from benchmarks.telling import say
from holdfast import Context, Holdfast, JobHandle
from holdfast.core.models import JobFilter, JobState
from holdfast.worker import Worker

T = TypeVar("T")
Result = Callable[[], Awaitable[Any]]
"""Waits for the result of a workflow."""

STEPS = 10
"""Steps of a workflow."""
CONCURRENCY = 100
"""Workflows that run at once, and callers at once."""

_WARM_UP = 20
_LOOK = 0.02  # seconds between two looks whether all workflows wait
_MAX_SECONDS = 300


def main() -> None:
    """Runs one measure, and ends without a shutdown: the store is dropped."""
    product, url, measure, count = sys.argv[1:]
    say({"ready": True})
    sys.stdin.readline()
    timer = threading.Timer(_MAX_SECONDS, lambda: _end({"error": f"not done within {_MAX_SECONDS} s"}))
    timer.daemon = True
    timer.start()
    uvloop.run(_serve(product, url, measure, int(count)))


async def _serve(product: str, url: str, measure: str, count: int) -> None:
    try:
        _end(await _MEASURES[measure](_PRODUCTS[product](url), count))
    except Exception as error:
        _end({"error": f"{type(error).__name__}: {error}"})


def _end(answer: dict[str, Any]) -> None:
    say(answer)
    os._exit(0)


# ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Product(ABC):
    """Workflows ``empty``, ``steps`` and ``wait`` on the store of a URL. Each takes a number and returns one."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    async def open(self) -> None:
        """Prepares to submit."""

    @abstractmethod
    async def launch(self) -> None:
        """Begins to run workflows."""

    @abstractmethod
    async def submit(self, number: int) -> None:
        """Stores an ``empty`` workflow for another process. Needs ``open`` only."""

    @abstractmethod
    async def start(self, workflow: str, number: int) -> Result:
        """Starts a workflow. It is stored when this returns."""

    @abstractmethod
    async def signal(self, number: int) -> None:
        """Sends a signal to the ``wait`` workflow of this number."""

    @abstractmethod
    async def count_unstarted(self) -> int:
        """Counts the workflows that wait for a signal."""


class HoldfastProduct(Product):
    """Holdfast, with a worker of a hundred runners."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._app = Holdfast(url, log_level="ERROR", concurrency=CONCURRENCY)
        functions: dict[str, Callable[..., Any]]
        functions = {"empty": _return_number, "steps": _run_steps, "wait": _wait_for_signal}
        self._tasks: dict[str, Any] = {name: self._app.task(name)(each) for name, each in functions.items()}

    async def open(self) -> None:
        await self._app.open_store()

    async def launch(self) -> None:
        await self.open()
        self._worker = asyncio.create_task(Worker(self._app).run())

    async def submit(self, number: int) -> None:
        await self._tasks["empty"].enqueue(number)

    async def start(self, workflow: str, number: int) -> Result:
        handle: JobHandle[int] = await self._tasks[workflow].enqueue(number)
        return handle.result

    async def signal(self, number: int) -> None:
        await self._app.signal(f"number:{number}", number)

    async def count_unstarted(self) -> int:
        if await self._app.count(JobFilter(states=(JobState.FAILED, JobState.DEAD))):
            raise RuntimeError("workflows fail")
        return await self._app.count(JobFilter(states=(JobState.WAITING,)))


async def _return_number(number: int) -> int:
    return number


async def _increment(number: int) -> int:
    return number + 1


async def _run_steps(context: Context, number: int) -> int:
    for _ in range(STEPS):
        number = await context.step("increment", _increment, number)
    return number


async def _wait_for_signal(context: Context, number: int) -> int:
    return int(await context.wait_for(f"number:{number}", timeout="1h"))


class DbosProduct(Product):
    """DBOS, which runs workflows as coroutines of the process that starts them.

    A client that only stores workflows in a queue submits twice as many as ``start_workflow_async``, so ``submit`` does
    that. SQLite has no notifications: it polls ten times a second instead of once. Threads make its store's calls.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        package: Any = import_module("dbos")
        dbos = self._dbos = package.DBOS
        self._new_client = package.DBOSClient
        self._is_sqlite = url.startswith("sqlite")
        self._ids: dict[int, str] = {}
        increment = dbos.step(name="increment")(_increment)

        async def run_steps(number: int) -> int:
            for _ in range(STEPS):
                number = await increment(number)
            return number

        async def wait_for_signal(_number: int) -> int:
            return int(await dbos.recv_async("number", timeout_seconds=3600))

        functions = {"empty": _return_number, "steps": run_steps, "wait": wait_for_signal}
        self._workflows = {name: dbos.workflow(name=name)(function) for name, function in functions.items()}

    async def open(self) -> None:
        await self.launch()  # creates its tables
        self._dbos.destroy()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 if self._is_sqlite else 20))
        self._client = self._new_client(
            system_database_url=self.url, application_name="peer", system_database_pool_size=20
        )

    async def launch(self) -> None:
        self._dbos(
            config={
                "name": "peer",
                "system_database_url": self.url.replace("postgresql://", "postgresql+psycopg://"),
                "application_version": "1",
                "log_level": "ERROR",
                "max_executor_threads": 2 if self._is_sqlite else 10,
                "sys_db_pool_size": 20,
                "notification_listener_polling_interval_sec": 0.1,
            }
        )
        self._dbos.launch()

    async def submit(self, number: int) -> None:
        await self._client.enqueue_async({"workflow_name": "empty", "queue_name": "elsewhere"}, number)

    async def start(self, workflow: str, number: int) -> Result:
        handle = await self._dbos.start_workflow_async(self._workflows[workflow], number)
        self._ids[number] = handle.workflow_id
        result: Result = handle.get_result
        return result

    async def signal(self, number: int) -> None:
        await self._dbos.send_async(self._ids[number], number, "number")

    async def count_unstarted(self) -> int:
        """Counts the recorded ends of their timeouts, the last that is stored before they wait."""
        import sqlalchemy

        table = "operation_outputs" if self._is_sqlite else "dbos.operation_outputs"
        engine = sqlalchemy.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            sql = f"select count(*) from {table} where function_name = 'DBOS.sleep'"  # noqa: S608 - of two names
            return int(connection.execute(sqlalchemy.text(sql)).scalar_one())


_PRODUCTS: dict[str, type[Product]] = {"holdfast": HoldfastProduct, "dbos": DbosProduct}


# ── measures ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _measure_starts(product: Product, count: int) -> dict[str, float]:
    await product.open()
    await _each(range(_WARM_UP), product.submit)
    started = time.perf_counter()
    await _each(range(count), product.submit)
    return {"rate": count / (time.perf_counter() - started)}


async def _measure_steps(product: Product, count: int) -> dict[str, float]:
    await _warm_up(product)
    started = time.perf_counter()
    await _each(range(count), lambda number: _run(product, number))
    return {"rate": count * STEPS / (time.perf_counter() - started)}


async def _measure_signals(product: Product, count: int) -> dict[str, float]:
    await _warm_up(product)
    results = await _each(range(count), lambda number: product.start("wait", number))
    while await product.count_unstarted() < count:  # noqa: ASYNC110 - of a store
        await asyncio.sleep(_LOOK)
    started = time.perf_counter()
    await _each(range(count), product.signal)
    await _each(results, lambda result: result())
    return {"rate": count / (time.perf_counter() - started)}


async def _measure_latency(product: Product, count: int) -> dict[str, float]:
    await _warm_up(product)
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        await _run(product, number)
        seconds.append(time.perf_counter() - started)
    return {"p50": percentile(seconds, 50) * 1000, "p99": percentile(seconds, 99) * 1000}


_MEASURES: dict[str, Callable[[Product, int], Awaitable[dict[str, float]]]] = {
    "starts": _measure_starts,
    "steps": _measure_steps,
    "signals": _measure_signals,
    "latency": _measure_latency,
}


async def _warm_up(product: Product) -> None:
    await product.launch()
    await _each(range(_WARM_UP), lambda number: _run(product, number))


async def _run(product: Product, number: int) -> None:
    result = await product.start("steps", number)
    found = await result()
    if found != number + STEPS:
        raise RuntimeError(f"workflow {number} returned {found}")


async def _each(values: Any, call: Callable[[Any], Awaitable[T]]) -> list[T]:
    """Calls this with each value, a hundred at once."""
    left, results = iter(values), []

    async def call_some() -> None:
        for value in left:
            results.append(await call(value))  # noqa: PERF401 - between awaits, for all callers together

    await asyncio.gather(*[call_some() for _ in range(CONCURRENCY)])
    return results


if __name__ == "__main__":
    main()
