"""One suite for every store, in virtual time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.clock import ManualClock
from holdfast.stores.base import Store
from tests.conformance.support import Opener
from tests.support.keys import Keys
from tests.support.load import TEST_SECONDS
from tests.support.stores import CARRIED, MIGRATED, stores_of


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on the loop its fixtures were opened on."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    runner: asyncio.Runner = pyfuncitem.funcargs["runner"]
    runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=TEST_SECONDS))
    return True


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        metafunc.parametrize("home", stores_of(metafunc.module.__name__.rpartition(".")[2]), indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database. Tests about what opening makes say that theirs has not been opened:
    ``HOMES = STORES``."""
    homes = getattr(request.module, "HOMES", MIGRATED)
    with homes[request.param](tmp_path) as url:
        yield url


@pytest.fixture
def carried(request: pytest.FixtureRequest) -> bool:
    """Whether a transport carries the ready jobs: then they come in the order of their arrival there, one at a time to
    a waiter."""
    return request.node.callspec.params["home"] in CARRIED


@pytest.fixture
def opener(runner: asyncio.Runner, clock: ManualClock, home: str) -> Iterator[Opener]:
    """``await opener()``: one more store object on the test's database."""
    opener = Opener(home, clock)
    yield opener
    runner.run(opener.close())


@pytest.fixture
def keys(home: str) -> Iterator[Keys]:
    """The keys of the test's own namespace in Redis."""
    keys = Keys(home)
    yield keys
    keys.client.close()


@pytest.fixture
def store(runner: asyncio.Runner, opener: Opener) -> Store:
    """A store on an empty database."""
    return runner.run(opener())
