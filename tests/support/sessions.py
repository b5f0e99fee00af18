"""PostgreSQL sessions that go from the stores of one test to those of the next.

A new session costs the server more than what most tests do in it: it is a process that reads the catalogue and plans
every statement anew. So a store that a test closes leaves its idle connections, reset, to the next store on the same
server. Everything else about opening and closing stays: a connection that failed, is busy or listens is closed.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

import asyncpg
import pytest

from holdfast.stores.postgres.pool import Connection, PostgresPool
from tests.support.load import TEST_SECONDS

T = TypeVar("T")
_MAX = 8
"""Idle connections kept for one URL, at most: as many as one store has."""

_connect, _close = PostgresPool.connect, PostgresPool.close


class TestLoop:
    """An event loop for one test: as asyncio.Runner, but the loop of ``shared`` goes on afterwards."""

    __test__ = False

    def __init__(self, shared: asyncio.Runner) -> None:
        self._shared = shared
        self._context = contextvars.copy_context()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result; all coroutines of the test run in one context."""
        return self._shared.run(work, context=self._context)

    def close(self) -> None:
        """Cancels the tasks that are left, as the end of asyncio.run does."""
        self.run(_end_tasks())
        self._shared.get_loop().set_exception_handler(None)


@pytest.hookimpl(tryfirst=True)
def run_on_test_loop(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test on the loop its fixtures were opened on; a ``pytest_pyfunc_call``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    runner: TestLoop = pyfuncitem.funcargs["runner"]
    runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=TEST_SECONDS))
    return True


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a task failed at the end of the test", "exception": error, "task": task}
            )


class KeptSessions:
    """The idle connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: dict[tuple[object, ...], list[Connection]] = defaultdict(list)
        self._prepared = False

    def use_in(self, patch: pytest.MonkeyPatch, *, prepared: bool = False) -> None:
        """Has every store of this loop take its connections from here and leave them here. ``prepared``: they keep
        their prepared statements even where the URL says that a pooler is in between."""
        kept = self
        self._prepared = prepared

        async def connect(pool: PostgresPool) -> Connection:
            return await kept._connect(pool)

        async def close(pool: PostgresPool) -> None:
            await kept._close(pool)

        patch.setattr(PostgresPool, "connect", connect)
        patch.setattr(PostgresPool, "close", close)

    async def _connect(self, pool: PostgresPool) -> Connection:
        idle = self._of(pool)
        while idle:
            connection = idle.pop()
            if not connection.is_closed():
                return connection
        if self._prepared:
            direct = pool.address._replace(pooled=False)
            pool = PostgresPool(direct, now=None, call_deadline=pool._call_deadline)
        return await _connect(pool)

    async def _close(self, pool: PostgresPool) -> None:
        left, idle = pool._idle, self._of(pool)
        while left and idle is not None and len(idle) < _MAX:
            connection = left.popleft()
            try:
                await connection.reset(timeout=1.0)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()
            else:
                idle.append(connection)
        await _close(pool)

    def _of(self, pool: PostgresPool) -> list[Connection] | None:
        """Returns the idle connections for this pool; None in another loop: blocking callers keep theirs."""
        if asyncio.get_running_loop() is not self._loop:
            return None
        return self._idle[pool.address.dsn, pool.address.pooled and not self._prepared, pool._call_deadline]

    async def close(self) -> None:
        """Closes them all."""
        for idle in self._idle.values():
            for connection in idle:
                connection.terminate()
