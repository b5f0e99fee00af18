"""Whole workers in virtual time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast
from tests.support.load import TEST_SECONDS
from tests.support.stores import MIGRATED, one_carried, stores_of


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=TEST_SECONDS))
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        names = stores_of(metafunc.module.__name__.rpartition(".")[2], older=False)
        metafunc.parametrize("home", one_carried(names, metafunc.function.__name__), indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database. The harness brings the news: what came of the server's own would be luck."""
    with MIGRATED[request.param](tmp_path) as url:
        yield f"{url}&pooled=1" if url.startswith("postgresql:") else url


@pytest.fixture
def app(home: str) -> Holdfast:
    """An application with no task yet and an empty database; its settings file would be in the test's own folder."""
    return Holdfast(home)
