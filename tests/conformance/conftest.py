"""One suite for every store, in virtual time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.store import Store
from tests.conformance.support import STORES, Opener


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on the loop its fixtures were opened on."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    runner: asyncio.Runner = pyfuncitem.funcargs["runner"]
    runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=60))
    return True


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=sorted(STORES))
def opener(
    request: pytest.FixtureRequest, runner: asyncio.Runner, clock: ManualClock, tmp_path: Path
) -> Iterator[Opener]:
    """``await opener()``: one more store object on the test's database."""
    opener = Opener(STORES[request.param], tmp_path, clock)
    yield opener
    runner.run(opener.close())


@pytest.fixture
def store(runner: asyncio.Runner, opener: Opener) -> Store:
    """A store on an empty database."""
    return runner.run(opener())
