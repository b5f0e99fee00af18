"""The API as a client sees it, in this process and on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.clock import ManualClock
from tests.support.stores import CARRIED, MIGRATED, one_of, stores_of
from tests.web.client import Api


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        names = stores_of(metafunc.module.__name__.rpartition(".")[2], older=False)
        metafunc.parametrize("home", one_of(CARRIED, names, metafunc.function.__name__), indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    with MIGRATED[request.param](tmp_path) as url:
        yield url


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def api(home: str, request: pytest.FixtureRequest) -> Iterator[Api]:
    """The API of an application with an empty store; both by the test's ``clock``, if it has one."""
    times: dict[str, Any] = {}
    if "clock" in request.fixturenames:
        clock = request.getfixturevalue("clock")
        times = {"clock": clock, "now": clock}
    with Api(home, **times) as api:
        yield api
